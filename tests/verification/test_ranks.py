"""A model that is split over several processes: all of them return what plain decoding does.

The processes are real ones, on gloo; each of them runs `rank.py`.
"""

import json
import multiprocessing

import pytest

from tests.helpers import rank

pytestmark = pytest.mark.slow

EQUAL = [
    f"{kind} {case}"
    for kind, cases in {
        "tensor": "clocks drafted facts sampled rows rows_stop stop attached static_cache "
        "returned_cache one_drafter one_chain long_draft boundary unread_states",
        "sharded": "plainly drafted default attached returned_cache rollouts static_cache",
    }.items()
    for case in cases.split()
]
REFUSED = {
    "tensor speculative_retrieval": "split over several processes cannot be combined with `knn_lm`",
    "tensor pipeline": "`candidate_generator` cannot be combined with pipeline parallelism",
}
OTHERS = ["no_draft", "no_observation", "after_exceptions", "tables"]
CASES = [*EQUAL, *(f"tensor {case}" for case in OTHERS), *REFUSED, "sharded one_fails"]
RANKS = 3
SECONDS = 1800  # of all cases, which take one or two minutes on a machine with nothing else to do


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What each rank has written, and its output."""
    folder = tmp_path_factory.mktemp("ranks")
    rank.save_models(folder)
    fork = multiprocessing.get_context("fork")  # which has all modules already
    arguments = [(i, RANKS, folder, CASES) for i in range(RANKS)]
    processes = [fork.Process(target=rank.run, args=each) for each in arguments]
    for process in processes:
        process.start()
    for process in processes:
        process.join(SECONDS)
        process.kill()  # one that hangs, and has not written all of its results
    texts = [(folder / f"{i}.log").read_text()[-2000:] for i in range(RANKS)]
    files = [folder / f"{i}.json" for i in range(RANKS)]
    return [json.loads(each.read_text()) if each.exists() else {} for each in files], texts


@pytest.mark.parametrize("case", [*EQUAL, "tensor after_exceptions"])
def test_each_rank_returns_what_plain_decoding_does(results, case):
    """Tensor parallel ranks have one text; those with sharded weights have texts of their own."""
    for own, text in zip(*results, strict=True):
        assert case in own, text
        plain, drafted = own[case]
        assert drafted == plain


@pytest.mark.parametrize(("case", "at"), [("no_draft", 0), ("no_observation", 1)])
def test_an_exception_at_one_rank_ends_the_call_at_all(results, case, at):
    for i, (own, text) in enumerate(zip(*results, strict=True)):
        expected = "LookupError" if i == at else f"at rank {at} of this model's {RANKS}"
        assert expected in own.get(f"tensor {case}", text)


def test_token_recycling_learns_the_same_at_every_rank(results):
    written, texts = results
    assert "tensor tables" in written[0], texts[0]
    assert all(own["tensor tables"] == written[0]["tensor tables"] for own in written)


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_keep_ranks_in_step_is_refused_at_each_of_them(results, case):
    for own, text in zip(*results, strict=True):
        assert REFUSED[case] in own.get(case, text)


def test_ranks_of_sharded_weights_go_on_when_the_call_of_one_fails(results):
    for i, (own, text) in enumerate(zip(*results, strict=True)):
        assert "sharded one_fails" in own, text
        if i == 1:
            assert "LookupError" in own["sharded one_fails"]
        else:
            plain, drafted = own["sharded one_fails"]
            assert drafted == plain
