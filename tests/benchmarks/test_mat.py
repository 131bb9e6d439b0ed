"""MAT on published data and on Python's own library stays above floors."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest
from replay import replay, stand_in_model
from shared_data import data_file
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

import hf_refspec as rs
from hf_refspec.apps.bench.suites import RecordedAnswer, humaneval, llma_rag
from hf_refspec.apps.shared.default_model import load_tokenizer

LIBRARY = Path(sysconfig.get_path("stdlib"))
# 60 modules that all supported Pythons have, and some to be written.
MODULES = """
    abc argparse ast base64 bdb bisect bz2 calendar cmd code codecs collections/__init__ colorsys
    configparser contextlib copy csv dataclasses datetime difflib dis doctest enum filecmp
    fileinput fnmatch fractions ftplib functools getopt gettext glob graphlib gzip heapq hmac
    inspect io json/decoder json/encoder keyword linecache locale mailbox mimetypes numbers
    operator optparse pdb pickle pickletools platform plistlib pprint profile queue random
    reprlib sched secrets
"""
WRITTEN = ("shelve", "shlex", "smtplib", "statistics", "string", "tarfile", "textwrap", "threading")


@pytest.fixture(scope="module")
def published():
    """Answers that repeat much of their prompts."""
    tokenizer = load_tokenizer(str(data_file("llama2-tokenizer")))
    answers = llma_rag(data_file("llma_rag.jsonl"), tokenizer)[:30]
    return answers, stand_in_model(len(tokenizer))


def look_up() -> PromptLookupCandidateGenerator:
    return PromptLookupCandidateGenerator(num_output_tokens=10, max_length=2**31)


@pytest.mark.parametrize(
    ("drafter", "nodes", "verification", "least", "most"),
    [
        (look_up, 10, "chain", 2.83, 2.94),
        (lambda: rs.ReferenceCopy(mode="llma", copy_length=18), 18, "chain", 3.05, 3.5),
        (rs.ReferenceCopy, 18, "chain", 3.18, 3.5),
        (rs.ReferenceCopy, 16, "tree", 3.49, 4.0),
        (rs.ReferenceCopy, 64, "tree", 4.07, 4.5),
        (lambda: rs.ReferenceCopy() | rs.RetrievalCache(), 64, "tree", 4.21, 4.5),
        (lambda: rs.ReferenceCopy() | rs.RetrievalCache(top_k=0), 64, "tree", 4.21, 4.5),
    ],
    ids=["look-up", "llma", "chain of 18", "tree of 16", "tree of 64", "cache", "equal calls"],
)
def test_answers_that_repeat_their_prompts(published, drafter, nodes, verification, least, most):
    answers, model = published
    assert least <= replay(answers, drafter(), model, nodes, verification).mat <= most


@pytest.mark.parametrize("written", ["HumanEval", "Python"])
def test_a_datastore_s_mixed_drafts_are_accepted_more_often_than_rests(tmp_path, written):
    if written == "HumanEval":
        tokenizer = load_tokenizer(str(data_file("llama2-tokenizer")))
        answers = humaneval(data_file("HumanEval.jsonl.gz"), tokenizer)[:20]
    else:
        tokenizer = load_tokenizer()
        texts = ((LIBRARY / f"{module}.py").read_text(encoding="utf-8") for module in WRITTEN)
        written_ids = [tokenizer(text)["input_ids"] for text in texts]
        answers = [RecordedAnswer(ids[:300], ids[300:500]) for ids in written_ids]
    files = [LIBRARY / f"{module}.py" for module in MODULES.split()]
    store = rs.Datastore.build(files, tokenizer, tmp_path / "store", progress=False, num_proc=1)
    model = stand_in_model(len(tokenizer))
    mats = {}
    for mode in ("rest", "mixed"):
        stats = replay(answers, rs.DatastoreDrafts(store, mode=mode), model, max_draft_tokens=64)
        assert stats.tokens == sum(len(answer.answer_ids) for answer in answers)
        mats[mode] = stats.mat
    assert mats["mixed"] > mats["rest"] >= 1.2
