"""`stats.copied`: where runs of new tokens stand, whatever was drafted."""

import pickle
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hf_refspec as rs
from hf_refspec.drafting.calls import drafter_call, remember_outputs
from hf_refspec.drafting.stats import DraftStats
from hf_refspec.index.suffix_array import DEPTH
from tests.helpers.calls import GREEDY, PROMPT, Call
from tests.helpers.datastores import write_store
from tests.helpers.drafters import Prophet

SHORTEST, END = 5, 2**16 - 1
tokens = st.lists(st.integers(0, 2), min_size=1, max_size=24)


def copied(drafter, output, prompt=(0,), vocab_size=300):
    """The spans of a call that has written an output, as (start, end, source, document, offset)."""
    stats = DraftStats()
    with drafter_call(drafter, [np.array(prompt)], vocab_size) as rows:
        remember_outputs(stats, rows, [output])
    return [(s.start, s.end, s.source, s.document, s.offset) for s in stats.copied]


def assert_true(spans, output, documents: dict[str, list]) -> None:
    for start, end, source, document, offset in spans:
        text = list(documents[source][document])
        assert end - start >= SHORTEST
        assert text[offset : offset + end - start] == list(output[start:end])
    assert all(one[1] <= other[0] for one, other in pairwise(spans))


def longest(output, texts) -> int:
    """The length of the longest run of an output that stands in one of several texts."""
    runs = {tuple(text[i:j]) for text in texts for i in range(len(text)) for j in range(i + 1, 25)}
    found = [j - i for i in range(len(output)) for j in range(i + 1, len(output) + 1)
             if tuple(output[i:j]) in runs]  # fmt: skip
    return max(found, default=0)


@given(st.lists(tokens, min_size=1, max_size=3), tokens, tokens)
def test_the_longest_runs_are_found_the_first_place_of_the_first_source_and_none_is_left(
    references, prompt, output
):
    spans = copied(rs.ReferenceCopy(references), output, prompt)
    documents = {"references": references, "prompt": [prompt]}
    assert_true(spans, output, documents)
    texts = [*references, prompt]
    best = longest(output, texts)
    assert max((end - start for start, end, *_ in spans), default=0) == best * (best >= SHORTEST)
    bounds = [0, *(place for start, end, *_ in spans for place in (start, end)), len(output)]
    left = [output[begin:end] for begin, end in zip(bounds[::2], bounds[1::2], strict=True)]
    assert max(longest(piece, texts) for piece in left) < SHORTEST
    for start, end, source, document, offset in spans[:1] if len(spans) == 1 else []:
        places = [
            (name, number, place)
            for name, some in documents.items()
            for number, text in enumerate(some)
            for place in range(len(text))
            if text[place : place + end - start] == output[start:end]
        ]
        assert (source, document, offset) == places[0]


def test_each_row_is_traced_without_padding_and_plain_calls_too(llama):
    call = Call(llama, 2, eos_token_id=3)
    outputs = [row[call.prompt_length :].tolist() for row in call.plain]
    drafter = rs.ReferenceCopy(outputs, include_prompt=False)
    for nodes in (8, 0):
        call.generate(candidate_generator=drafter, max_draft_tokens=nodes)
        spans = {span.row: (span.start, span.end, span.document) for span in drafter.stats.copied}
        lengths = [(*row, 3).index(3) + (3 in row) for row in outputs]
        assert spans == {row: (0, length, row) for row, length in enumerate(lengths)}


def test_statistics_tell_of_their_own_call_whenever_they_are_read(llama):
    plain = llama.generate(PROMPT, **GREEDY)[0, PROMPT.shape[1] :].tolist()
    prompt = torch.tensor([[*PROMPT[0].tolist(), *plain]])
    drafter = rs.ReferenceCopy([[50, 51]]) | Prophet(prompt, 0.5)
    batch = rs.RunningBatch(llama)
    text = batch.add(input_ids=prompt, candidate_generator=drafter, **GREEDY)
    while not text.finished:
        batch.step()
    output = text.sequences[0, prompt.shape[1] :].tolist()
    expected = copied(rs.ReferenceCopy(), output, prompt[0].tolist())
    llama.generate(torch.full((1, 60), 7), candidate_generator=drafter, **GREEDY)
    for stats in (pickle.loads(pickle.dumps(text.stats)), text.stats):
        assert not stats.outputs  # no text goes along
        assert [(s.start, s.end, s.source, s.document, s.offset) for s in stats.copied] == expected
        assert expected or longest(output, [prompt[0].tolist()]) < SHORTEST


def test_a_datastores_documents_are_numbered_over_cuts_and_no_separator_is_a_token(tmp_path):
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 250, n).tolist() for n in (40, 3, 0, 3 * DEPTH, 60, 20)]
    documents[4][:10] = documents[0][:10]
    store = write_store(tmp_path / "s", documents, 300, (20, 30, 120, 480))
    drafter, name = rs.DatastoreDrafts(store), str(store.path)
    long = documents[3][30:360]  # begins in one part and goes on in the next
    output = [*documents[0][-8:], END, *documents[1], 299, *long, *documents[5], *documents[4][:12]]
    spans = copied(drafter, output, vocab_size=2**17)
    assert_true(spans, output, {name: [ids.tolist() for ids in store.iter_documents()]})
    found = {(document, offset): end - start for start, end, _, document, offset in spans}
    assert found[0, 32] == 8 and found[5, 0] == 20 and found[4, 0] == 12
    assert sum(length for (document, _), length in found.items() if document == 3) == len(long)
    assert max(found.values()) > DEPTH
    assert copied(rs.DatastoreDrafts(store.compact(tmp_path / "c", progress=False)), output) == []


@pytest.mark.parametrize("damage", ["shuffled", "zeros", "negative"])
def test_a_damaged_index_yields_no_wrong_span(tmp_path, damage):
    documents = np.random.default_rng(1).integers(0, 4, (6, 40)).tolist()
    store = write_store(tmp_path / "s", documents, 300, ())
    drafter, output = rs.DatastoreDrafts(store), [*documents[3][5:25], *documents[1][:9]]
    assert sum(end - start for start, end, *_ in copied(drafter, output)) == 29
    suffixes = store.shards[0].suffixes.copy()
    broken = {"shuffled": np.random.default_rng(2).permutation(suffixes), "zeros": 0 * suffixes}
    broken["negative"] = np.where(suffixes % 3 == 0, -suffixes, suffixes)
    store.shards[0] = store.shards[0]._replace(suffixes=broken[damage])
    try:
        spans = copied(drafter, output)
    except ValueError as error:
        assert damage == "negative" and "damaged" in str(error)
    else:
        assert_true(spans, output, {str(store.path): documents})


def test_a_call_keeps_the_sessions_that_it_began_with():
    cache = rs.SessionDrafts(max_tokens=30)
    for first in (0, 20, 40):
        cache.add([first], range(first + 1, first + 10))
    cache.add([60], range(61, 62))  # the oldest is forgotten, though the text still has it
    stats, output = DraftStats(), [*range(3, 9), *range(22, 29), *range(40, 50)]
    with drafter_call(cache, [np.array([0])], 300) as rows:
        other = cache.fork()
        other.add([70], range(71, 90))
        remember_outputs(stats, rows, [output])
    found = [(span.start, span.end, span.document, span.offset) for span in stats.copied]
    assert found == [(6, 13, 0, 2), (13, 23, 1, 0)]
