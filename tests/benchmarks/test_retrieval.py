"""Speculative retrieval is measured with all retrievers and both indexes, against the baseline."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import numpy as np
import pytest
import retrieval
import torch
from retrieval import BATCHES, METHODS, OURS, as_long_as, main, retrievers

from hf_refspec.ralm.iterative import iterative_ralm
from hf_refspec.ralm.stats import RalmStats
from hf_refspec.retrieval.retriever import Retrieved
from tests.helpers.texts import bag_of_words

DENSE = ["--encoder", "words"]
SIZES = ["--vectors", "100", "--graph", "60"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, model_folder, data) -> Iterator[str]:
    """What `build` makes of a few files, with names looked up nowhere."""
    path = str(tmp_path_factory.mktemp("retrieval") / "built")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        patch.setattr(retrieval, "load_encoder", lambda _: bag_of_words)
        patch.setattr(retrieval, "python_files", lambda: retrieval.python_stdlib()[:2])
        patch.setattr(retrieval, "FILES", 1)
        patch.setattr(retrieval, "ENTRIES", 40)
        options = ["--model", str(model_folder), "--device", "cpu", "--data", str(data)]
        assert main(["build", path, *options, *DENSE, "--vectors", "200"]) == 0
        yield path


@pytest.fixture
def tables(printed_rows):
    """The cells of each table that was printed since the last call, by its first heading."""

    def found() -> dict[str, list[list[str]]]:
        by_heading: dict[str, list[list[str]]] = {}
        for cells in printed_rows():
            if cells[1] in ("searches", "1"):
                rows = by_heading.setdefault(cells[0], [])
            else:
                rows.append(cells)
        return by_heading

    return found


@pytest.mark.nightly
def test_questions_are_answered_by_each_method_and_a_second_start_makes_no_call(
    model, folder, data, tables, monkeypatch
):
    options = [*model, *DENSE, *SIZES, "--data", str(data), "--limit", "2", "--out", "calls.jsonl"]
    options += ["--max-new-tokens", "9", "--methods", *METHODS]
    assert main(["ralm", folder, *options]) == 0
    printed = tables()
    assert [name.split(", 9 tokens")[0] for name in printed][:2] == ["flat, 100", "hnsw, 60"]
    for rows in printed.values():
        assert [row[0] for row in rows] == list(METHODS)
        assert float(rows[0][1]) > 1 and rows[0][-1] == "1.00x"
    calls = Path("calls.jsonl").read_text().splitlines()
    assert len(calls) == 3 * 2 * len(METHODS)
    Path("calls.jsonl").write_text("\n".join(calls[:-1]) + "\n")
    assert main(["ralm", folder, *options]) == 0
    assert Path("calls.jsonl").read_text().splitlines()[:-1] == calls[:-1]
    assert list(tables()) == list(printed)
    monkeypatch.setattr(retrieval, "decode", None)
    assert main(["ralm", folder, *options]) == 0 and list(tables()) == list(printed)
    last = json.loads(calls[-1])
    last["passages"][-1] += 1
    Path("calls.jsonl").write_text("\n".join([*calls[:-1], json.dumps(last)]) + "\n")
    with pytest.raises(SystemExit, match="other passages than the baseline"):
        main(["ralm", folder, *options])


def test_texts_are_continued_with_both_indexes_by_several_seeds(model, folder, tables):
    options = [*model, *SIZES, "--limit", "1", "--max-new-tokens", "6", "--k", "1", "8"]
    assert main(["knn", folder, *options, "--seeds", "2", "--methods", "s=3", "S", OURS]) == 0
    printed = tables()
    assert len(printed) == 4 and "kNN-LM, flat, 100, k=1, 6 tokens, sampled" in printed
    assert all(" ± " in rows[-1][-1] for rows in printed.values())


@pytest.mark.parametrize("measured", ["ralm", "knn"])
def test_searches_take_as_long_as_is_asked(measured, model, folder, data, tables, monkeypatch):
    slept = []
    monkeypatch.setattr(retrieval, "sleep", slept.append)
    monkeypatch.setattr(retrieval, "perf_counter", lambda: 7.0)  # a search itself takes no time
    options = [*model, *DENSE, *SIZES, "--data", str(data), "--index", "flat", "--limit", "1"]
    options += ["--search-seconds", "0.05", "llama-hnsw", "--methods", "s=3", OURS, "--k", "1"]
    assert main([measured, folder, *options, "--max-new-tokens", "9"]) == 0
    printed = tables()
    names = [name.removeprefix("kNN-LM, ") for name in printed]
    assert [name.replace(", k=1", "") for name in names] == [
        "flat, 100, 0.05 s, 9 tokens, greedy",
        "flat, 100, llama-hnsw R:G 0.12, 9 tokens, greedy",
    ]
    seconds, by_ratio = printed.values()
    for rows in (seconds, by_ratio):
        assert [row[0] for row in rows] == ["B", "s=3", OURS]
    assert slept[0] == 0.05 and 0 < slept[-1] != 0.05
    assert slept.count(0.05) >= float(seconds[0][1])


def test_a_search_is_timed_for_each_number_of_queries(model, folder, tables):
    sizes = ["--vectors", "100", "6000", "--graph", "60", "--passages", "20000"]
    assert main(["latency", folder, *model, *DENSE, *sizes]) == 0
    [rows] = tables().values()
    names = [row[0] for row in rows]
    assert names == ["flat, 100", "flat, 6,000", "hnsw, 60", "bm25, 20,000"]
    assert all(len(row) == 1 + len(BATCHES) for row in rows)


def test_more_vectors_than_there_are_take_more_searches():
    made = []
    retriever = as_long_as(SimpleNamespace(search=lambda *args: made.append(args) or args), 30)
    assert retriever.search("queries", 1) == ("queries", 1)
    assert len(made) == 30


def test_without_an_encoder_the_models_token_embeddings_find_passages(model, folder, data, tables):
    options = [*model, "--data", str(data), "--limit", "1", "--max-new-tokens", "9"]
    assert main(["build", "tokens", *options, "--vectors", "50"]) == 0
    assert main(["ralm", "tokens", *options, "--index", "flat", "--vectors", "50"]) == 0
    [rows] = tables().values()
    assert [row[0] for row in rows] == ["B", "PSA", OURS]


def authors_loop(model, ids, retriever, bos, new_tokens, wide=False, keeps_all=True):
    """The loop of JackFram/ralm-sys (eval_rag_serve.py), written anew, with `--stride 4
    --spec_step 3 --cache --cache_update_width 20`, and `--retrieval_always_wide` if it is `wide`.

    Returns the new tokens, the number of searches and the number of generated steps: one with a
    verified passage, then two with guesses, and one search for the queries behind all three. Its
    cache takes the passages up to the first wrong guess; in the paper and here (`keeps_all`) it
    takes all."""
    begin = int(ids[0] == bos)
    longest = len(ids) + new_tokens
    text = list(ids)
    ends = np.atleast_1d(model.generation_config.eos_token_id).tolist()
    steps = 0
    (truth,) = retriever.search([retriever.encode(np.array(text[-32:]))], 20)
    cached = set(truth.ids.tolist())
    best = int(truth.ids[0])
    searches = 1
    while len(text) < longest and text[-1] not in ends:
        start = len(text)
        queries = []
        guesses = []
        for _ in range(3):
            seen = torch.tensor([[*ids[:begin], *retriever.passage(best).tolist(), *text[begin:]]])
            output = model.generate(
                input_ids=seen,
                attention_mask=torch.ones_like(seen),
                max_new_tokens=min(4, longest - len(text)),
                do_sample=False,
            )
            steps += 1
            text += output[0, seen.shape[1] :].tolist()
            if len(text) >= longest or text[-1] in ends:
                break
            queries.append(retriever.encode(np.array(text[-32:])))
            held = np.array(sorted(cached))
            best = int(Retrieved.best(held, retriever.score(queries[-1], held), 1).ids[0])
            guesses.append(best)
        searches += bool(queries)
        truths = retriever.search(queries, 20 if wide else 1) if queries else []
        for i, truth in enumerate(truths):
            for found in truths if keeps_all else [truth]:
                cached.update(found.ids.tolist())
            best = int(truth.ids[0])
            if not np.array_equal(retriever.passage(best), retriever.passage(guesses[i])):
                del text[start + 4 * (i + 1) :]
                break
    return text[len(ids) :], searches, steps


@pytest.mark.parametrize("wide", [False, True])
def test_the_published_loop_makes_the_searches_and_the_steps_of_the_authors_loop(
    wide, model, folder, byte_llama, tokenizer
):
    arguments = SimpleNamespace(folder=Path(folder), index=["flat", "bm25"], encoder="words")
    arguments.vectors = [200]
    arguments.passages = None
    published = METHODS["P"]
    mismatched = 0
    if wide:
        published = replace(published, prefetch_searches="all")
    for new_retriever in retrievers(arguments, tokenizer).values():
        retriever = new_retriever()
        for text in ("who is Tom?", "import sys", "cats and dogs"):
            ids = tokenizer(text)["input_ids"]
            stats = RalmStats()
            output = byte_llama.generate(
                torch.tensor([ids]),
                custom_generate=iterative_ralm,
                retriever=retriever,
                tokenizer=tokenizer,
                speculation=published,
                ralm_stats=stats,
                max_new_tokens=50,
                do_sample=False,
            )
            answer = output[0, len(ids) :].tolist()
            generated = stats.steps + stats.mismatched + stats.discarded
            bos = tokenizer.bos_token_id
            authors = authors_loop(byte_llama, ids, retriever, bos, 50, wide=wide)
            assert authors == (answer, stats.searches, generated)
            few = authors_loop(byte_llama, ids, retriever, bos, 50, wide=wide, keeps_all=False)
            assert few[0] == answer
            assert stats.searches < stats.steps
            mismatched += stats.mismatched
    assert mismatched > 0
