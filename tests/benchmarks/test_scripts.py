"""Scripts of benchmarks/ with tiny models."""

import json
import math
from pathlib import Path

import ablation
import batches
import grammar
import knn_perplexity
import pytest
import torch
from ablation import BLEND, COMPACT, CREST_NAME, MIXED, REST

from hf_refspec.ralm.knn_datastore import KnnDatastore, recorded
from hf_refspec.ralm.knn_lm import Mixture
from hf_refspec.store.datastore import Datastore
from tests.helpers.knn_texts import CORPUS

TEXT = "for k in range(3):\n    f(k)\n"


def test_ablation_has_mat_of_both_forms_at_each_size(
    model, data, tokenizer, printed_rows, monkeypatch
):
    texts = [f"def f{i}(width, height):\n    return width * height + {i}\n" * 3 for i in range(12)]
    Datastore.build(texts, tokenizer, "store")
    monkeypatch.setattr(ablation, "FRACTIONS", (1 / 2, 1))
    monkeypatch.setattr(ablation, "MEGABYTES", (0.006, 0.03))
    monkeypatch.setattr(ablation, "LONGEST", (2,))
    monkeypatch.setattr(ablation, "MOST", (20,))
    problems = str(data / "HumanEval.jsonl.gz")
    ablation.main(["store", "--data", problems, "--tokenizer", "model"])
    cells = printed_rows()[1:]
    assert [row[0] for row in cells] == [REST, MIXED] * 2 + [BLEND, CREST_NAME] + [COMPACT] * 2
    rest, mixed, compact = (
        [float(row[2]) for row in cells if row[0] == form] for form in (REST, MIXED, COMPACT)
    )
    assert rest == mixed and 1.5 < rest[1] / rest[0] < 2.5
    assert compact[0] <= 0.006 < compact[1] <= 0.03
    assert all(float(row[3]) > 1.2 for row in cells)


def test_batches_have_speeds_by_category_and_a_table(model, tmp_path, capsys):
    questions = [
        {"question_id": i, "category": category, "turns": [f"{category} question {i}"]}
        for i, category in enumerate(["writing", "qa", "writing", "qa", "qa"])
    ]
    lines = "".join(f"{json.dumps(each)}\n" for each in questions)
    (tmp_path / "spec_bench_questions.jsonl").write_text(lines)
    options = ["--data", str(tmp_path), "--rows", "2", "--nodes", "auto", "3"]
    assert batches.main([*model, *options, "--max-new-tokens", "12"]) == 0
    printed = capsys.readouterr().out
    for category in ("writing", "qa"):
        assert f"2 rows, {category}: plain 1.00x, auto draft tokens " in printed
    assert printed.count("2 of 2") == 3


def test_grammar_has_a_row_for_every_method(model, printed_rows):
    pytest.importorskip("llguidance", reason="the extra `grammar` is not installed")
    chosen = ["--schemas", "enums", "tools", "--dtype", "float32", "--limit", "1", "--nodes", "8"]
    assert grammar.main(["--model", "model", *chosen, "--max-new-tokens", "40"]) == 0
    rows = printed_rows()[1:]
    methods = [grammar.UNDRAFTED, grammar.LOOKUP, grammar.DEFAULT, grammar.GRAMMAR]
    assert [row[1] for row in rows] == 2 * methods
    assert {row[4] for row in rows} == {"1 of 1"}


def test_perplexity_is_that_of_the_models_loss_and_of_the_mixture(
    model, byte_llama, tokenizer, printed_rows
):
    store = KnnDatastore.build(CORPUS, tokenizer, byte_llama, "knn")
    reading = knn_perplexity.read(byte_llama, tokenizer, store, [TEXT], k=8, most=999)
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"]
    with torch.no_grad(), recorded(byte_llama, "last_mlp") as hidden:
        output = byte_llama(ids, labels=ids)
    assert reading.perplexity(0) == pytest.approx(math.exp(output.loss), rel=1e-4)
    mixture, total = Mixture(store, 8, 0.4, 3.0), 0.0
    for position, token in enumerate(ids[0, 1:].tolist()):
        (found,) = store.search([hidden.states[0, position].numpy()], 8)
        total += float(mixture.log_probs(output.logits[0, position], found)[token])
    expected = math.exp(-total / (ids.shape[1] - 1))
    assert reading.perplexity(0.4, 3.0) == pytest.approx(expected, rel=1e-4)
    with pytest.raises(ValueError, match="two tokens"):
        knn_perplexity.read(byte_llama, tokenizer, store, ["x"], k=1, most=9)
    Path("text.txt").write_text(TEXT)
    knn_perplexity.main(["knn", "text.txt", "--model", "model", "--tokens", "20"])
    rows = printed_rows()[1:]
    assert [float(row[0]) for row in rows] == list(knn_perplexity.LAMBDAS)
    assert {len(row) for row in rows} == {1 + len(knn_perplexity.TEMPERATURES)}
