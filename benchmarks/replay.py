"""Replay: the MAT of drafters on recorded answers, without a model.

MAT depends on the texts alone, so that the figure holds for any target model that would have
written them. LLMA's paper measures in the same way (arXiv 2304.04487).

    python benchmarks/replay.py llma_rag.jsonl --tokenizer path/or/hub-id [--size 7B --device cuda]

takes rag.jsonl or cnndm.jsonl of the paper's authors. LLMA copies from the documents of each
question (its section 3.1), `ReferenceCopy` from the whole prompt. Triggers (drafts that were
verified), accepted tokens and steps are means over the prompts; the second table has them by match
length n and copy length k. With --size, a Llama with random weights is forced to write the answers,
which takes as long as with trained ones, and whole calls are timed; then `stats.copied` names the
places that answers were copied from, each of which is compared with its document.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import chain, product
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, TypeAlias

import torch
from gpu_bench import ForcedLlama, batch_of
from suites import SIZES, RecordedAnswer, llma_rag, random_model, table
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

import hf_refspec as rs
from hf_refspec.apps.bench.measure import replay
from hf_refspec.apps.cli.arguments import positive
from hf_refspec.apps.shared.comparison import decode
from hf_refspec.apps.shared.loading import load_tokenizer
from hf_refspec.drafting.candidates import CandidateChain
from hf_refspec.drafting.contract import Drafter
from hf_refspec.drafting.datastore_drafts import DatastoreDrafts
from hf_refspec.drafting.reference_copy import ReferenceCopy
from hf_refspec.store.datastore import Datastore

MATCH_LENGTHS, COPY_LENGTHS = (1, 2, 3, 4), (2, 6, 10, 14, 18, 22, 26, 30)
FIGURES = ["MAT", "triggers", "accepted", "steps"]

# For one question.
NewDrafter: TypeAlias = Callable[[RecordedAnswer], rs.Drafter]


def look_up(_: RecordedAnswer) -> rs.Drafter:
    """Transformers' prompt look-up."""
    return CandidateChain(PromptLookupCandidateGenerator(num_output_tokens=10, max_length=2**31))


def llma(n: int = 1, k: int = 18) -> NewDrafter:
    """LLMA's algorithm, on the documents of the question."""
    return lambda answer: rs.ReferenceCopy(
        answer.references, match_length=n, copy_length=k, published=True
    )


def ours(n: int = 1, k: int | None = None) -> NewDrafter:
    """`ReferenceCopy()`, on the prompt."""
    return lambda _: rs.ReferenceCopy(match_length=n, copy_length=k)


# The rows of the first table: a name, the drafter, and the number of draft nodes.
CONTENDERS: tuple[tuple[str, NewDrafter, int], ...] = (
    ("transformers' prompt look-up", look_up, 10),
    ("LLMA (n=1, k=18)", llma(), 18),
    *(("ReferenceCopy", ours(), nodes) for nodes in (16, 64)),
)


def figures(
    answers: list[RecordedAnswer], new_drafter: NewDrafter, nodes: int, vocab_size: int
) -> list[str]:
    """The [`FIGURES`] of a drafter, which is a new one for each answer."""
    stats = rs.DraftStats()
    for each in answers:
        stats += replay([(each.prompt_ids, each.answer_ids)], new_drafter(each), vocab_size, nodes)
    counts = stats.drafts, stats.accepted, stats.forward_passes
    return [f"{stats.mat:.2f}", *(f"{count / len(answers):.1f}" for count in counts)]


def seconds(model: Any, answers: list[RecordedAnswer], new: NewDrafter | None, nodes: int) -> float:
    """The seconds of calls of a `ForcedLlama` that writes the answers; without `new` plainly."""
    total = 0.0
    for each in answers:
        options = {"candidate_generator": new(each), "max_draft_tokens": nodes} if new else {}
        options |= {"max_new_tokens": len(each.answer_ids), "eos_token_id": None}
        call = decode(model, batch_of(model, [each])[0], do_sample=False, pad_token_id=0, **options)
        assert call.ids == each.answer_ids
        total += call.seconds
    return total


def copied(model: Any, answers: list[RecordedAnswer], store: Datastore | None) -> list[str]:
    """In how many spans answers stand in a datastore, or by default in each question's references,
    which part of their tokens, and what `stats.copied` takes beside whole calls. Compares spans."""
    stored = [] if store is None else [ids.tolist() for ids in store.iter_documents()]
    covered, spans, calls, search = 0, 0, 0.0, 0.0
    for each in answers:
        documents: list[list[int]] = stored or each.references or []
        drafter: Drafter = ReferenceCopy(documents, include_prompt=False)
        drafter = drafter if store is None else DatastoreDrafts(store)
        calls += seconds(model, [each], lambda _: drafter, 64)  # noqa: B023
        began = perf_counter()
        found = drafter.stats.copied
        search += perf_counter() - began
        for span in found:
            text = documents[span.document][span.offset :]
            length = span.end - span.start
            assert text[:length] == each.answer_ids[span.start : span.end], span
            covered, spans = covered + length, spans + 1
    share = covered / sum(len(each.answer_ids) for each in answers)
    milliseconds = f"{1e3 * search / len(answers):.2f}"
    return [f"{spans}", f"{100 * share:.1f} %", milliseconds, f"{100 * search / calls:.2f} %"]


def main(arguments: list[str] | None = None) -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("data", type=Path, help="the LLMA paper's rag.jsonl or cnndm.jsonl")
    add("--tokenizer", required=True, help="a folder or a Hub id")
    add("--limit", type=positive, help="only the first prompts")
    add("--size", choices=SIZES, help="time a Llama of this size, instead of n and k")
    add("--device", default="cpu")
    add("--dtype", default="float16", help="of that Llama; default: float16")
    options = parser.parse_args(arguments)
    tokenizer = load_tokenizer(options.tokenizer)
    answers, vocab_size = llma_rag(options.data, tokenizer)[: options.limit], len(tokenizer)
    rows = [[name, n, *figures(answers, new, n, vocab_size)] for name, new, n in CONTENDERS]
    print(table(["drafts", "nodes", *FIGURES], rows))
    if options.size:
        dtype = getattr(torch, options.dtype)
        model = random_model(options.size, vocab_size, options.device, dtype, ForcedLlama)
        seconds(model, answers[:1], llma(), 18)  # a first call probes
        plain = seconds(model, answers, None, 0)
        for name, new, nodes in CONTENDERS[1:]:
            print(f"{name}, {nodes}: {plain / seconds(model, answers, new, nodes):.2f}x")
        with TemporaryDirectory() as folder:
            documents = [text for each in answers for text in each.references or []]
            store = Datastore.build(documents, tokenizer, Path(folder, "store"), progress=False)
            sources = {"references": None, "datastore": store}
            rows = [[name, *copied(model, answers, each)] for name, each in sources.items()]
        print(table(["copied from", "spans", "of the tokens", "ms a call", "of a call"], rows))
        return
    rows = []
    for n, k in product(MATCH_LENGTHS, COPY_LENGTHS):
        methods = (llma(n, k), k), (ours(n, k), 64)
        rows.append([n, k, *chain(*(figures(answers, *each, vocab_size) for each in methods))])
    print(table(["n", "k", *(f"{name}: {of}" for name in ("LLMA", "64") for of in FIGURES)], rows))


if __name__ == "__main__":
    main()
