"""Wall clock: plain decoding, transformers' prompt look-up and ours, interleaved in one process.

The target model is a Llama of some size with random weights, made to say recorded answers: its
speed is that of a trained one. Each prompt is answered by all three in turn, so that whatever else
the machine does meets all of them; what counts are the ratios.

    python -m hf_refspec.bench.wallclock llma_rag.jsonl --tokenizer path/or/hub-id
"""

from __future__ import annotations

import argparse
from time import perf_counter
from typing import Any

import torch
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessorList,
    PreTrainedModel,
)
from transformers.generation.streamers import BaseStreamer

from ..drafting.reference_copy import ReferenceCopy
from ..hook import install
from .replay import ForcedText
from .suites import RecordedAnswer, llma_rag


class Stopwatch(BaseStreamer):
    """Notes when the first and the last new token come."""

    def __init__(self) -> None:
        self.puts: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.puts.append(perf_counter())

    def end(self) -> None:
        pass

    @property
    def prefill_seconds(self) -> float:
        """From the prompt, which is put first, to the first new token."""
        return self.puts[1] - self.puts[0]

    @property
    def decoding_seconds(self) -> float:
        """From the first new token to the last."""
        return self.puts[-1] - self.puts[1]


def llama_of_half_a_billion(vocab_size: int, device: str) -> LlamaForCausalLM:
    """A Llama of 495M parameters (at 32,000 tokens) in bfloat16 with random weights."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=1536,
        intermediate_size=4096,
        num_hidden_layers=14,
        num_attention_heads=12,
        max_position_embeddings=4096,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to(device, torch.bfloat16).eval()


def time_answer(model: PreTrainedModel, answer: RecordedAnswer, **kwargs: Any) -> Stopwatch:
    """Makes the model say the answer, with any further arguments of `generate`."""
    ids = torch.tensor([answer.prompt_ids + answer.answer_ids], device=model.device)
    watch = Stopwatch()
    output = model.generate(
        ids[:, : len(answer.prompt_ids)],
        max_new_tokens=len(answer.answer_ids),
        do_sample=False,
        eos_token_id=None,
        logits_processor=LogitsProcessorList([ForcedText(ids[0])]),
        streamer=watch,
        **kwargs,
    )
    assert torch.equal(output, ids), "the model did not say the recorded answer"
    return watch


def main(arguments: list[str] | None = None) -> None:
    """Prints seconds for all prompts and their ratios."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("data", help="the LLMA paper's rag.jsonl")
    parser.add_argument("--tokenizer", required=True, help="a folder or a Hub id")
    parser.add_argument("--prompts", type=int, default=10, help="how many, default 10")
    parser.add_argument("--max-draft-tokens", type=int, help="default: that of generate")
    parser.add_argument("--device", default="cpu", help="default: cpu")
    options = parser.parse_args(arguments)

    install()
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    answers = llma_rag(options.data, tokenizer)[: options.prompts]
    model = llama_of_half_a_billion(len(tokenizer), options.device)
    ways: dict[str, dict[str, Any]] = {
        "plain": {},
        "prompt look-up": {"prompt_lookup_num_tokens": 10},
        "ReferenceCopy": {
            "candidate_generator": ReferenceCopy(),
            "max_draft_tokens": options.max_draft_tokens,
        },
    }
    for way in ways.values():  # the first call of each pays for compiling and probing
        time_answer(model, RecordedAnswer(answers[0].prompt_ids, answers[0].answer_ids[:8]), **way)

    prefill, decoding = dict.fromkeys(ways, 0.0), dict.fromkeys(ways, 0.0)
    for answer in answers:
        for name, way in ways.items():
            watch = time_answer(model, answer, **way)
            prefill[name] += watch.prefill_seconds
            decoding[name] += watch.decoding_seconds

    tokens = sum(len(answer.answer_ids) for answer in answers) - len(answers)
    print(f"{len(answers)} prompts, {tokens} tokens after the first, {options.device}, bfloat16")
    print(f"{'':16} {'prefill':>9} {'decoding':>9} {'tokens/s':>9} {'speed-up':>9}")
    for name in ways:
        print(
            f"{name:16} {prefill[name]:7.1f} s {decoding[name]:7.1f} s "
            f"{tokens / decoding[name]:9.1f} {decoding['plain'] / decoding[name]:8.2f}x"
        )


if __name__ == "__main__":
    main()
