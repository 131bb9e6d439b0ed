"""A model that is split over several processes: all of them return what plain decoding does.

The processes are real ones, on gloo; each of them runs `rank.py`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import rank

import hf_refspec

TENSOR = (
    "clocks",
    "drafters",
    "facts",
    "sampled",
    "rows",
    "rows_stop",
    "stop",
    "attached",
    "static_cache",
    "returned_cache",
    "one_drafter",
    "one_chain",
    "long_draft",
    "boundary",
)
SHARDED = (
    "plainly",
    "drafted",
    "default",
    "attached",
    "returned_cache",
    "rollouts",
    "static_cache",
)
REFUSED = {
    "speculative_retrieval": "split over several processes cannot be combined with `knn_lm`",
    "pipeline": "`candidate_generator` cannot be combined with pipeline parallelism",
}
SECONDS = 300  # of all cases of a group of ranks


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    rank.save_models(folder)
    return folder


def run(models: Path, folder: Path, kind: str, ranks: int, cases: tuple[str, ...]):
    """What each rank has written, and its output."""
    for name in ("llama", "mistral"):
        (folder / name).symlink_to(models / name)
    env = {
        **os.environ,
        "PYTHONPATH": str(Path(hf_refspec.__file__).parents[1]),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    said = [(folder / f"{i}.log").open("w+") for i in range(ranks)]
    processes = [
        subprocess.Popen(
            [sys.executable, rank.__file__, kind, str(i), str(ranks), str(folder), *cases],
            env={**env, "RANK": str(i), "LOCAL_RANK": str(i), "WORLD_SIZE": str(ranks)},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        for i, log in enumerate(said)
    ]
    try:
        for process in processes:
            process.wait(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        pass  # a rank that hangs has not written all of its results
    finally:
        for process in processes:
            process.kill()
            process.wait()
    texts = []
    for log in said:
        log.seek(0)
        texts.append(log.read()[-2000:])
        log.close()
    files = [folder / f"{i}.json" for i in range(ranks)]
    return [json.loads(each.read_text()) if each.exists() else {} for each in files], texts


@pytest.fixture(scope="module")
def tensor(models, tmp_path_factory):
    """The results of each of three ranks of a tensor parallel model."""
    others = ("no_draft", "no_observation", "after_exceptions", "tables")
    folder = tmp_path_factory.mktemp("tensor")
    return run(models, folder, "tensor", 3, (*TENSOR, *others, *REFUSED))


@pytest.fixture(scope="module")
def sharded(models, tmp_path_factory):
    """The results of each of three ranks of a model whose weights are sharded."""
    folder = tmp_path_factory.mktemp("sharded")
    return run(models, folder, "sharded", 3, (*SHARDED, "one_fails"))


def check_equal(results, case):
    written, said = results
    for own, text in zip(written, said, strict=True):
        assert case in own, text
        plain, drafted = own[case]
        assert drafted == plain


@pytest.mark.parametrize("case", TENSOR)
def test_tensor_parallel_ranks_return_what_plain_decoding_does(tensor, case):
    check_equal(tensor, case)


@pytest.mark.parametrize(("case", "at"), [("no_draft", 0), ("no_observation", 1)])
def test_an_exception_at_one_rank_ends_the_call_at_all(tensor, case, at):
    written, said = tensor
    for i, own in enumerate(written):
        expected = "LookupError" if i == at else f"at rank {at} of this model's {len(written)}"
        assert expected in own.get(case, said[i])


def test_token_recycling_learns_the_same_at_every_rank(tensor):
    written, said = tensor
    assert "tables" in written[0], said[0]
    assert all(own["tables"] == written[0]["tables"] for own in written)


def test_the_call_after_an_exception_is_right(tensor):
    check_equal(tensor, "after_exceptions")


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_keep_ranks_in_step_is_refused_at_each_of_them(tensor, case):
    for own, text in zip(*tensor, strict=True):
        assert REFUSED[case] in own.get(case, text)


@pytest.mark.parametrize("case", SHARDED)
def test_ranks_with_sharded_weights_and_texts_of_their_own_keep_in_step(sharded, case):
    check_equal(sharded, case)


def test_the_others_go_on_when_the_call_of_one_fails(sharded):
    written, said = sharded
    assert "LookupError" in written[1].get("one_fails", said[1])
    check_equal(([written[0], *written[2:]], [said[0], *said[2:]]), "one_fails")
