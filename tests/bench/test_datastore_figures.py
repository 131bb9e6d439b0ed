"""MAT of datastore drafts on real code: HumanEval, from a part of the standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest
from shared_data import data_file
from transformers import AutoTokenizer

from hf_refspec import Datastore, DatastoreDrafts
from hf_refspec.bench.replay import replay, stand_in_model
from hf_refspec.bench.suites import humaneval

# 60 modules that all supported Pythons have.
MODULES = """
    abc argparse ast base64 bdb bisect bz2 calendar cmd code codecs collections/__init__ colorsys
    configparser contextlib copy csv dataclasses datetime difflib dis doctest enum filecmp
    fileinput fnmatch fractions ftplib functools getopt gettext glob graphlib gzip heapq hmac
    inspect io json/decoder json/encoder keyword linecache locale mailbox mimetypes numbers
    operator optparse pdb pickle pickletools platform plistlib pprint profile queue random
    reprlib sched secrets
"""


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(data_file("llama2-tokenizer"))


@pytest.fixture(scope="module")
def store(tokenizer, tmp_path_factory) -> Datastore:
    library = Path(sysconfig.get_path("stdlib"))
    files = [library / f"{module}.py" for module in MODULES.split()]
    assert len(files) == 60
    folder = tmp_path_factory.mktemp("stores") / "store"
    return Datastore.build(files, tokenizer, folder, progress=False, num_proc=1)


def test_mixed_drafts_are_accepted_more_often_than_rests(store, tokenizer):
    answers = humaneval(data_file("HumanEval.jsonl.gz"), tokenizer)[:20]
    model = stand_in_model(len(tokenizer))
    mats = {}
    for mode in ("rest", "mixed"):
        drafter = DatastoreDrafts(store, mode=mode)
        stats = replay(answers, drafter, model, max_draft_tokens=64)
        assert stats.tokens == sum(len(answer.answer_ids) for answer in answers)
        mats[mode] = stats.mat
    assert mats["mixed"] > mats["rest"] >= 1.2
