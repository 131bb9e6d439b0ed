"""Cached sessions and second turns: the MAT of answers after earlier questions of their kind.

    python benchmarks/sessions.py answers.jsonl --data DATA

A model answers real questions of several kinds greedily; answers.jsonl keeps its answers. A replay
asks the questions of each kind one after another and remembers each as a session; the second half
counts. LLMA copies from the answers to the four earlier questions that are most similar (arXiv
2304.04487, section 2.3) or from the prompt. Of two turns the second one counts, whose prompt has
the first one and its answer. Of `edits`, an agent that writes a function and changes it, all turns
are sessions. SuffixDecoding (arXiv 2411.04975) takes part if `arctic-inference` is installed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path

import numpy as np
from gpu_bench import batch_of
from replay import look_up
from suites import RecordedAnswer, chat_ids, json_lines, recorded_turns, spec_bench, table

import hf_refspec as rs
from hf_refspec.apps.bench.measure import Chat, read_chats, replay
from hf_refspec.apps.cli.arguments import positive
from hf_refspec.apps.shared.loading import load_model, load_tokenizer
from hf_refspec.drafting.contract import Observation
from hf_refspec.drafting.session_drafts import Memory

ROWS, SIMILAR = 32, 4  # questions answered at a time, sessions that LLMA copies from
EDITS = "edits"
CHANGES = (
    "Rename the function to `solve` and write the whole function again.",
    "Add type hints and a comment to each line, and write the whole function again.",
)
LLMA = partial(rs.ReferenceCopy, published=True, copy_length=18)


class SuffixDecoding(rs.Drafter):
    """ArcticInference's suffix decoding, which drafts from the present text or from all earlier
    answers. `factor` is the most draft tokens for each token that matches."""

    def __init__(self, factor: float = 1.0) -> None:
        from arctic_inference.suffix_decoding import SuffixDecodingCache

        self.cache = SuffixDecodingCache()
        self.factor = factor
        self.call_number = 0

    def begin(self, prompt_ids: np.ndarray, vocab_size: int) -> None:
        self.call_number += 1
        self.text = prompt_ids.astype(np.int32)
        self.cache.start_request(self.call_number, self.text)

    def observe(self, observation: Observation) -> None:
        tokens = observation.tokens.astype(np.int32)
        self.text = np.concatenate((self.text, tokens))
        self.cache.add_active_response(self.call_number, tokens)

    def draft(self, budget: int, call) -> rs.DraftTree:
        draft = self.cache.speculate(
            self.call_number, self.text, max_spec_tokens=budget, max_spec_factor=self.factor
        )
        return rs.DraftTree.chain(draft.token_ids, draft.probs)

    def end(self) -> None:
        self.cache.stop_request(self.call_number)


KEPT: dict[str, Callable[[], rs.Drafter]] = {
    "ReferenceCopy": rs.ReferenceCopy,
    "with cache": lambda: rs.ReferenceCopy() | rs.SessionDrafts(),
}
if find_spec("arctic_inference"):
    KEPT |= {"SuffixDecoding": SuffixDecoding, "factor 4": partial(SuffixDecoding, 4.0)}
COLUMNS = ["look-up, 10", "LLMA, prompt", "LLMA, sessions"]
COLUMNS += [f"{name}, {nodes}" for nodes in (18, 64) for name in KEPT]


def asked(data: Path) -> list[Chat]:
    """The questions, with their kind as category."""
    queries = [row["query"] for row in json_lines(data / "llma_rag.jsonl")]
    problems = [row["prompt"] for row in json_lines(data / "HumanEval.jsonl.gz")]
    turns = [("LLMA's queries", [each]) for each in queries]
    turns += [("HumanEval", [f"Complete this function:\n{each}"]) for each in problems]
    chats = spec_bench(data / "spec_bench_questions.jsonl")
    turns += [(c.category, c.turns) for c in chats if c.category in ("math_reasoning", "qa")]
    turns += [("two turns", each.turns) for each in chats if each.turns[1:]]
    write = "Complete this function. Answer with the code alone.\n\n"
    turns += [(EDITS, [f"{write}{each}", *CHANGES]) for each in problems[::10]]
    return [Chat(each, [], category=kind) for kind, each in turns]


def answer(chats: list[Chat], path: Path, name: str | None, new_tokens: int) -> None:
    """Has the model answer all turns; `hf-refspec bench --replay` reads the file too."""
    model, tokenizer = load_model(name), load_tokenizer(name)
    for turn in range(max(len(chat.turns) for chat in chats)):
        left = [chat for chat in chats if turn < len(chat.turns)]
        for batch in (left[start : start + ROWS] for start in range(0, len(left), ROWS)):
            prompts = [chat_ids(chat.until(turn, chat.answers), tokenizer) for chat in batch]
            inputs, _ = batch_of(model, [RecordedAnswer(ids, []) for ids in prompts])
            output = model.generate(**inputs, do_sample=False, max_new_tokens=new_tokens)
            new = output[:, inputs["input_ids"].shape[1] :]
            for chat, text in zip(batch, tokenizer.batch_decode(new, True), strict=True):
                chat.answers.append(text)
    rows = ({"category": c.category, "turns": c.turns, "answer": c.answers} for c in chats)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


def mats(answers: list[RecordedAnswer], vocab_size: int) -> list[str]:
    """The MAT of each column over the second half of the answers."""
    counted, memory = [rs.DraftStats() for _ in COLUMNS], Memory(10_000_000, None)
    kept = [(new(), nodes) for nodes in (18, 64) for new in KEPT.values()]
    for number, each in enumerate(answers):
        prompt, pair = np.array(each.prompt_ids), (each.prompt_ids, each.answer_ids)
        similar = memory.view.similar_outputs(prompt, SIMILAR)[::-1]  # the most similar first
        drafters = [(look_up(each), 10), (LLMA(), 18), (LLMA(similar or None), 18), *kept]
        for stats, (drafter, nodes) in zip(counted, drafters, strict=True):
            found = replay([pair], drafter, vocab_size, nodes)
            if number >= len(answers) // 2:
                stats += found
        memory.add(prompt, np.array(each.answer_ids))
    return [f"{stats.mat:.2f}" for stats in counted]


def main(arguments: list[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("answers", type=Path, help="the model's answers; written if there is no such file")
    add("--data", type=Path, required=True, help="the data files")
    add("--model", help="a folder or a Hub id; default: SmolLM2-135M-Instruct")
    add("--limit", type=positive, help="only the first questions of each kind")
    add("--max-new-tokens", type=positive, default=128, help="of an answer; default: 128")
    args = parser.parse_args(arguments)
    if not args.answers.exists():
        kinds = groupby(asked(args.data), lambda chat: chat.category)
        chats = [chat for _, of_kind in kinds for chat in list(of_kind)[: args.limit]]
        answer(chats, args.answers, args.model, args.max_new_tokens)
    rs.warmup()
    tokenizer, rows = load_tokenizer(args.model), []
    for kind, of_kind in groupby(read_chats(args.answers), lambda chat: chat.category):
        first = 0 if kind == EDITS else -1
        answers = [each for chat in of_kind for each in recorded_turns(chat, tokenizer)[first:]]
        rows.append([kind, len(answers) - len(answers) // 2, *mats(answers, len(tokenizer))])
    print(table(["kind", "questions", *COLUMNS], rows))


if __name__ == "__main__":
    main()
