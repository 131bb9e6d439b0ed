"""What holds with and without numba's compiler: these tests run twice, the second time in a process
with `NUMBA_DISABLE_JIT`, which debuggers and measurements of coverage need."""

import os
import subprocess
import sys

import numpy as np
import pytest
from numba import config

import hf_refspec as rs
from hf_refspec.apps.cli.main import main
from hf_refspec.retrieval.vector_index import FlatIndex, squared_lengths
from tests.helpers.architectures import VOCAB_SIZE
from tests.helpers.calls import PROMPT, assert_lossless
from tests.helpers.datastores import write_store

DISABLED = bool(config.DISABLE_JIT)


@pytest.mark.skipif(DISABLED, reason="this is that process")
def test_all_this_holds_where_numba_compiles_nothing_with_one_warning():
    command = [sys.executable, "-m", "pytest", "-n0", "-s", "-p", "no:logging", __file__]
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout
    assert run.stderr.count("decodes plainly") == run.stderr.count("`NUMBA_DISABLE_JIT`") == 1


TEXT = PROMPT[0].tolist() * 2
DRAFTERS = {
    "auto": lambda folder: rs.ReferenceCopy() | rs.TokenRecycling(),
    "references": lambda folder: rs.ReferenceCopy([TEXT]),
    "datastore": lambda folder: rs.DatastoreDrafts(write_store(folder, [TEXT], VOCAB_SIZE, ())),
    "sessions": lambda folder: rs.SessionDrafts(),
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_calls_return_the_same_ids_and_say_what_kept_them_from_drafting(llama, name, tmp_path):
    rs.warmup()
    drafter = DRAFTERS[name](tmp_path / "store")
    for _ in range(2):  # a session drafts from the first
        stats = assert_lossless(llama, drafter)
    assert (stats.drafted == 0) == DISABLED
    assert ("`NUMBA_DISABLE_JIT` is set" in str(stats.reason)) == DISABLED


def test_a_datastore_is_built_compacted_and_searched(tmp_path, capsys):
    text, store = tmp_path / "text.txt", str(tmp_path / "store")
    text.write_text("The moon pulls the sea. The moon pulls the sea again.")
    assert main(["store", "build", str(text), "--out", store]) == 0
    assert main(["store", "compact", store]) == 0
    capsys.readouterr()
    assert main(["store", "search", store, "The moon pulls"]) == 0
    assert " the sea" in capsys.readouterr().out


def test_vectors_are_found_by_their_scores():
    vectors = np.random.default_rng(0).standard_normal((40, 5), dtype=np.float32)
    index = FlatIndex(vectors, squared_lengths(vectors), "l2")
    (found,) = index.search(vectors[:1], 3)
    distances = np.linalg.norm(vectors - vectors[0], axis=1)
    assert found.ids.tolist() == distances.argsort()[:3].tolist()


@pytest.mark.skipif(not DISABLED, reason="numba compiles")
def test_the_command_that_compiles_says_that_it_cannot(capsys):
    assert main(["warmup"]) == 2
    assert "`NUMBA_DISABLE_JIT` is set" in capsys.readouterr().err
