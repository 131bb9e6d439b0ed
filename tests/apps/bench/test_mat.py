"""MAT on real text stays above floors: on published data, and on text that every machine has."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest
from shared_data import data_file
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

import hf_refspec as rs
from hf_refspec.apps.bench.records import read_records
from hf_refspec.apps.bench.replay import replay, stand_in_model
from hf_refspec.apps.bench.suites import RecordedAnswer, humaneval, llma_rag, recorded
from hf_refspec.apps.shared.default_model import load_tokenizer

LIBRARY = Path(sysconfig.get_path("stdlib"))
GUARD = Path(__file__).parents[3] / "benchmarks" / "guard.jsonl"
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


def published_answers() -> tuple[list[RecordedAnswer], int]:
    tokenizer = load_tokenizer(str(data_file("llama2-tokenizer")))
    return llma_rag(data_file("llma_rag.jsonl"), tokenizer), len(tokenizer)


def edits() -> tuple[list[RecordedAnswer], int]:
    """Renamed identifiers in pieces of this package."""
    tokenizer = load_tokenizer()
    records = [each for each in read_records(GUARD) if each.text("kind") == "edit"]
    answers = [recorded(each.text("prompt"), each.text("answer"), tokenizer) for each in records]
    return answers, len(tokenizer)


@pytest.fixture(scope="module", params=[published_answers, edits])
def text(request):
    """Answers that repeat much of their prompts."""
    answers, vocab_size = request.param()
    return request.param.__name__, answers, stand_in_model(vocab_size)


@pytest.mark.parametrize(
    ("drafter", "nodes", "verification", "least"),
    [
        (lambda: rs.ReferenceCopy(mode="llma", copy_length=18), 18, "chain", (3.2, 8.9)),
        (rs.ReferenceCopy, 18, "chain", (3.35, 10.8)),
        (rs.ReferenceCopy, 16, "tree", (3.6, 10.7)),
        (rs.ReferenceCopy, 64, "tree", (4.15, 20.0)),
        (lambda: rs.ReferenceCopy() | rs.RetrievalCache(), 64, "tree", (4.55, 19.7)),
        (lambda: rs.ReferenceCopy() | rs.RetrievalCache(top_k=0), 64, "tree", (4.55, 19.7)),
    ],
    ids=["llma", "chain of 18", "tree of 16", "tree of 64", "with a cache", "of equal calls"],
)
def test_answers_that_repeat_their_prompts(text, drafter, nodes, verification, least):
    name, answers, model = text
    mat = replay(answers, drafter(), model, nodes, verification).mat
    assert mat >= least[name == "edits"]


def test_prompt_look_up_scores_as_known(text):
    name, answers, model = text
    look_up = PromptLookupCandidateGenerator(num_output_tokens=10, max_length=2**31)
    low, high = (6.0, 8.0) if name == "edits" else (2.9, 3.15)
    assert low <= replay(answers, look_up, model, 10, "chain").mat <= high


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
        drafter = rs.DatastoreDrafts(store, mode=mode)
        stats = replay(answers, drafter, model, max_draft_tokens=64)
        assert stats.tokens == sum(len(answer.answer_ids) for answer in answers)
        mats[mode] = stats.mat
    assert mats["mixed"] > mats["rest"] >= 1.2
