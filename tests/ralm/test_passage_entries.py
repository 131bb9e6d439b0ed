"""Keys and values of passages are kept: read once by a model, with the same ids as without them."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from hf_refspec.ralm import passage_entries
from hf_refspec.ralm.passage_entries import PassageEntries
from tests.helpers.bag_of_tokens import BagOfTokens
from tests.helpers.iterative_texts import BOS, GREEDY, PROMPT, by_definition, generate

OTHER_PROMPT = torch.tensor([[BOS, 8, 44, 61, 8, 44]])
NEW_TOKENS = 22


@pytest.fixture
def retriever() -> BagOfTokens:
    return BagOfTokens()


def answer(model, retriever, prompt=PROMPT, **options) -> list[int]:
    options = {"max_new_tokens": NEW_TOKENS, "speculation": None, **GREEDY, **options}
    return generate(model, retriever, prompt, **options)[0].tolist()


class ReadPassages:
    """A context in which the passages that a model reads are listed, as tuples of their ids."""

    def __init__(self, model, retriever) -> None:
        self.passages = [(BOS, *passage.tolist()) for passage in retriever.passages]
        self.model = model

    def __enter__(self) -> list[tuple[int, ...]]:
        read = []

        def hook(module, args, kwargs):
            ids = kwargs.get("input_ids", args[0] if args else None)
            if (tokens := tuple(ids[0].tolist())) in self.passages:
                read.append(tokens)

        hook.only_reads = True
        self._handle = self.model.register_forward_pre_hook(hook, with_kwargs=True)
        return read

    def __exit__(self, *error) -> None:
        self._handle.remove()


@pytest.mark.parametrize(
    # Trees, ALiBi, eager attention, windows shorter than most passages, experts, chunks, layers of
    # the cache that the model adds as it runs, no cache.
    "model_type",
    [
        "llama",
        "gpt2",
        "bloom",
        "deepseek_v3",
        "mistral",
        "gemma2",
        "qwen3_moe",
        "llama4_text",
        "dory",
        "openai-gpt",
    ],
)
@pytest.mark.parametrize("speculation", [None, "psa"])
def test_kept_passages_change_no_ids(models_by_type, retriever, model_type, speculation):
    model = copy.deepcopy(models_by_type(model_type))
    for prompt in (PROMPT, PROMPT, OTHER_PROMPT):
        expected = by_definition(model, retriever, prompt, NEW_TOKENS)
        assert answer(model, retriever, prompt, speculation=speculation) == expected
    assert len(PassageEntries.for_model(model)) > 1


@pytest.mark.parametrize("model_type", ["mamba2", "mamba", "rwkv"])
def test_passages_of_running_states_are_not_kept(models_by_type, retriever, model_type):
    model = copy.deepcopy(models_by_type(model_type))
    expected = by_definition(model, retriever, PROMPT, NEW_TOKENS)
    for _ in range(2):
        assert answer(model, retriever) == expected
    assert len(PassageEntries.for_model(model)) == 0


def test_a_passage_is_read_once_whatever_prompt_follows(fresh_llama, retriever):
    with ReadPassages(fresh_llama, retriever) as read:
        first = answer(fresh_llama, retriever)
        assert read and len(read) == len(set(read))
        count = len(read)
        assert answer(fresh_llama, retriever) == first
        assert answer(fresh_llama, retriever, speculation="psa") == first
        assert len(read) == len(set(read))
        answer(fresh_llama, retriever, OTHER_PROMPT, max_new_tokens=40)
        assert len(read) == len(set(read)) > count


def test_changed_passages_of_the_same_ids_are_read_again(fresh_llama, retriever):
    answer(fresh_llama, retriever)
    retriever.passages = [passage[::-1].copy() for passage in retriever.passages]
    expected = by_definition(fresh_llama, retriever, PROMPT, NEW_TOKENS)
    assert answer(fresh_llama, retriever) == expected


def change_in_place(model):
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(-1.5)


def load_state(model):
    weights = {name: value.flip(0) for name, value in model.state_dict().items()}
    model.load_state_dict(weights)


def replace_a_layer(model):
    model.model.layers[0].mlp.down_proj = torch.nn.Linear(48, 32, bias=False)


def hook_a_layer(model):
    model.model.layers[0].register_forward_hook(lambda module, args, output: output * -1.5)


@pytest.mark.parametrize("change", [change_in_place, load_state, replace_a_layer, hook_a_layer])
def test_a_changed_model_reads_its_passages_again(fresh_llama, retriever, change):
    before = answer(fresh_llama, retriever)
    change(fresh_llama)
    expected = by_definition(fresh_llama, retriever, PROMPT, NEW_TOKENS)
    assert answer(fresh_llama, retriever) == expected != before


def test_another_number_format_reads_its_passages_again(fresh_llama, retriever):
    answer(fresh_llama, retriever)
    fresh_llama.to(torch.float64)
    expected = by_definition(fresh_llama, retriever, PROMPT, NEW_TOKENS)
    assert answer(fresh_llama, retriever) == expected


def test_the_passage_used_longest_ago_makes_room(fresh_llama, retriever, monkeypatch):
    answer(fresh_llama, retriever)
    one = PassageEntries.for_model(fresh_llama).bytes // len(PassageEntries.for_model(fresh_llama))
    fresh_llama = copy.deepcopy(fresh_llama)
    weights = sum(parameter.nbytes for parameter in fresh_llama.parameters())
    room = 4 * one
    monkeypatch.setattr(passage_entries, "LEAST_BYTES", 0)
    monkeypatch.setattr(passage_entries, "FRACTION", room / weights)
    retriever = BagOfTokens(passages=60)
    options = {"generation_stride": 1, "query_length": 2, "max_new_tokens": 40}
    expected = answer(copy.deepcopy(fresh_llama), retriever, **options)
    with ReadPassages(fresh_llama, retriever) as read:
        assert answer(fresh_llama, retriever, **options) == expected
        kept = PassageEntries.for_model(fresh_llama)
        assert 0 < kept.bytes <= room
        assert len(kept) < len(set(read))
        latest = read[-1]
        count = len(read)
        answer(fresh_llama, retriever, **options)
        again = read[count:]
    assert latest not in again[: len(kept) - 1]


def test_a_passage_larger_than_the_room_is_not_kept(fresh_llama, retriever, monkeypatch):
    monkeypatch.setattr(passage_entries, "LEAST_BYTES", 0)
    monkeypatch.setattr(passage_entries, "FRACTION", 1e-9)
    expected = by_definition(fresh_llama, retriever, PROMPT, NEW_TOKENS)
    assert answer(fresh_llama, retriever) == expected
    assert PassageEntries.for_model(fresh_llama).bytes == 0


def test_threads_share_the_passages_of_a_model(fresh_llama, retriever):
    prompts = [PROMPT, OTHER_PROMPT, PROMPT[:, :7], PROMPT[:, 2:]]
    expected = [by_definition(fresh_llama, retriever, prompt, NEW_TOKENS) for prompt in prompts]

    def answers(prompt):
        return [answer(fresh_llama, BagOfTokens(), prompt) for _ in range(2)]

    with ThreadPoolExecutor(len(prompts)) as threads:
        for found, ids in zip(threads.map(answers, prompts), expected, strict=True):
            assert found == [ids, ids]
    kept = PassageEntries.for_model(fresh_llama)
    sizes = [size for _, size in kept._kept.values()]
    assert kept.bytes == sum(sizes)


def test_copies_and_pickles_of_a_model_begin_with_no_passage(fresh_llama, retriever):
    answer(fresh_llama, retriever)
    assert len(PassageEntries.for_model(fresh_llama)) > 0
    assert len(PassageEntries.for_model(copy.deepcopy(fresh_llama))) == 0
