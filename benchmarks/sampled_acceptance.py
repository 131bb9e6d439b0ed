"""How often a sampled token would be one that a draft model drafts, by three rules.

    python benchmarks/sampled_acceptance.py --data DATA [--assistants NAME ...] [--limit N]

The target samples an answer to each prompt. At each token, with the target's distribution p and the
assistant's q at that temperature, it takes the probability that a draft of one step is accepted: of
the assistant's best token, and of its four best, where the target's own choice decides; and by
rejection sampling of a token that the assistant samples. It prints the means.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from draft_models import ASSISTANTS, assistant_of

from hf_refspec.apps.bench.registry import questions
from hf_refspec.apps.bench.report import table
from hf_refspec.apps.bench.suites import chat_prompt
from hf_refspec.apps.cli.arguments import positive
from hf_refspec.apps.shared.loading import load_model, load_tokenizer
from hf_refspec.smollm2 import default_model


@torch.no_grad()
def acceptance(target: Any, assistant: Any, ids: list[int], begin: int, temperature: float) -> Any:
    """The probabilities of each rule, `(tokens, 3)`, for the tokens from `begin` on."""
    inputs = torch.tensor([ids])
    p, q = (
        (each(inputs).logits[0, begin - 1 : -1].float() / temperature).softmax(dim=-1)
        for each in (target, assistant)
    )
    best = p.gather(1, q.topk(4, dim=-1).indices)
    columns = best[:, 0], best.sum(dim=-1), torch.minimum(p, q).sum(dim=-1)
    return torch.stack(columns, dim=-1).numpy()


def main(arguments: list[str] | None = None) -> int:
    """Prints a row for each assistant and temperature."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--data", type=Path, required=True, help="the folder with spec_bench_questions.jsonl")
    add("--model", help="a folder or a Hub id; default: SmolLM2-135M-Instruct")
    add("--assistants", nargs="+", default=ASSISTANTS, metavar="NAME", help="see draft_models.py")
    add("--temperatures", nargs="+", type=float, default=[0.7, 1.0], metavar="T")
    add("--limit", type=positive, default=13, metavar="N", help="so many questions of Spec-Bench")
    add("--max-new-tokens", type=positive, default=96, metavar="N")
    args = parser.parse_args(arguments)
    args.replay = False
    name = args.model or default_model()
    target, tokenizer = load_model(name, "cpu", torch.float32), load_tokenizer(name)
    assistants = {each: assistant_of(target, each) for each in args.assistants}
    prompts = [chat_prompt(each.turns[:1], tokenizer) for each in questions(args)[: args.limit]]
    rows = []
    for temperature in args.temperatures:
        torch.manual_seed(0)
        options = {"do_sample": True, "temperature": temperature, "top_k": 0}
        texts = [
            target.generate(torch.tensor([ids]), max_new_tokens=args.max_new_tokens, **options)
            for ids in prompts
        ]
        for label, assistant in assistants.items():
            pairs = zip(texts, prompts, strict=True)
            each = [
                acceptance(target, assistant, text[0].tolist(), len(ids), temperature)
                for text, ids in pairs
            ]
            means = np.concatenate(each).mean(axis=0)
            rows.append([label, temperature, *(f"{mean:.2f}" for mean in means)])
    names = ["assistant", "temperature", "choice, best", "choice, four best", "rejection"]
    print(table(names, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
