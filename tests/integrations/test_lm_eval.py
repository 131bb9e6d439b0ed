"""lm-eval's HFLM: a generation task over a local file."""

import json

import pytest

pytest.importorskip("lm_eval", reason="the extra `integrations` is not installed")

from lm_eval.api.task import ConfigurableTask
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM

ANSWERS = ["harbour", "museum", "ticket"]


@pytest.mark.parametrize("batch_size", [1, 3])
def test_scores_are_the_same(
    trained_model, trained_tokenizer, tmp_path, drafted_as_plain, batch_size
):
    path = tmp_path / "answers.jsonl"
    path.write_text("".join(json.dumps({"answer": answer}) + "\n" for answer in ANSWERS))
    config = {
        "task": "museum",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(path)}, "cache_dir": str(tmp_path / "cache")},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": " ".join(["{{answer}}"] * 5),
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n", "."], "max_gen_toks": 8, "do_sample": False},
        "filter_list": [
            {"name": "word", "filter": [{"function": "regex", "regex_pattern": "([a-z]+)"}]}
        ],
        "metric_list": [{"metric": "exact_match"}],
    }
    evaluated = HFLM(pretrained=trained_model, tokenizer=trained_tokenizer, batch_size=batch_size)

    def evaluation():
        tasks = {"museum": ConfigurableTask(config=dict(config))}  # a task keeps its requests
        found = evaluate(evaluated, tasks, bootstrap_iters=0, log_samples=True)
        return found["results"], [sample["resps"] for sample in found["samples"]["museum"]]

    results, _ = drafted_as_plain(evaluation)
    assert results["museum"]["exact_match,word"] > 0.5
