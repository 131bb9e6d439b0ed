"""With a transformers that the package is not tested with, calls decode plainly and say why."""

import logging
import re

import pytest
import transformers

import hf_refspec as rs
from hf_refspec import hook
from hf_refspec.version import NEWEST_TRANSFORMERS, OLDEST_TRANSFORMERS
from tests.helpers.calls import GREEDY, PROMPT

SENTENCE = re.escape(
    f"hf_refspec {rs.__version__} is tested with transformers "
    f"{OLDEST_TRANSFORMERS[0]}.{OLDEST_TRANSFORMERS[1]} to "
    f"{NEWEST_TRANSFORMERS[0]}.{NEWEST_TRANSFORMERS[1]}; this is "
)


@pytest.fixture(params=["5.19.0", "5.99.0.dev0", "6.0.0"])
def version(request, monkeypatch):
    monkeypatch.setattr(transformers, "__version__", request.param)
    hook._log_once.cache_clear()
    return request.param


def test_a_named_drafter_leaves_the_text_as_it_is(llama, version, caplog):
    drafter = rs.ReferenceCopy()
    plain = llama.generate(PROMPT, **GREEDY)
    by_name = llama.generate(PROMPT, **GREEDY, custom_generate=rs.speculate)
    assert by_name.tolist() == plain.tolist()
    for _ in range(2):
        drafted = llama.generate(PROMPT, **GREEDY, candidate_generator=drafter, max_draft_tokens=4)
        assert drafted.tolist() == plain.tolist()
    assert drafter.stats.drafted == 0
    assert re.match(SENTENCE + version, drafter.stats.reason)
    [record] = [each for each in caplog.records if each.name == "hf_refspec"]
    assert record.levelno == logging.WARNING
    assert re.search("decodes plainly.*" + SENTENCE + version, record.getMessage())


def test_an_attached_drafter_leaves_the_text_as_it_is(llama, version, caplog):
    plain = llama.generate(PROMPT, **GREEDY)
    with rs.attach(llama, rs.ReferenceCopy(), max_draft_tokens=4) as attachment:
        assert llama.generate(PROMPT, **GREEDY).tolist() == plain.tolist()
    assert attachment.stats.drafted == 0
    assert re.search(SENTENCE + version, caplog.text)


def test_what_cannot_be_decoded_plainly_is_refused(llama, version):
    for option in ({"custom_generate": rs.iterative_ralm}, {"verification": "reproducible"}):
        with pytest.raises(RuntimeError, match=SENTENCE + version):
            llama.generate(PROMPT, **GREEDY, **option)
    with pytest.raises(RuntimeError, match=SENTENCE + version):
        rs.RunningBatch(llama)


def test_the_installed_version_is_one_that_was_tried():
    minor = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    assert OLDEST_TRANSFORMERS <= minor <= NEWEST_TRANSFORMERS
