"""The default model, which has learned to write: in float32 no draft changes an id.

The texts are of the kinds that people generate; each is decoded plainly once.
"""

import inspect
import textwrap
from copy import deepcopy
from functools import cache

import pytest
import torch

import hf_refspec as rs
from tests.helpers.calls import Call, assert_lossless
from tests.helpers.drafters import Noise, Prophet

NEW_TOKENS = 16
DOCUMENT = """\
The Harbour Museum stands at the end of the old pier. It was built in 1894 as a customs house and
has been a museum since 1962. From April to October it is open every day from ten in the morning to
six in the evening; from November to March it is open on Saturdays and Sundays only, from eleven to
four. Tickets cost 9 euros for adults and 4 euros for children under fourteen. The lighthouse beside
it can be climbed with a guide at noon, and groups must book a week ahead by telephone.
"""
FUNCTION = """\
def compute(items, tax):
    amount = 0
    for item in items:
        amount += item.price * item.count
    return amount * (1 + tax)
"""


@pytest.fixture(scope="module")
def model(loaded):
    return loaded[0]


@pytest.fixture(scope="module")
def tokenizer(loaded):
    return loaded[1]


@pytest.fixture(scope="module")
def prompts(tokenizer) -> dict[str, torch.Tensor]:
    """By name, ids of shape `(1, length)`."""

    def chat(*turns: str) -> str:
        roles = ("user", "assistant")
        messages = [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    texts = {
        "chat": chat("Why is the sky blue? Answer in three sentences."),
        "short answer": chat("What is the capital of France?"),
        "code": "def area(width, height):\n    return width * height\n\n\ndef volume(",
        "edit": chat(f"Repeat this code, but call the function total_price:\n\n{FUNCTION}"),
        "rag": chat(f"{DOCUMENT}\nWhen is the museum open? Quote the text."),
        "third turn": chat(
            "Name three colours.", "Red, green and blue.", "Name them again, and three more."
        ),
    }
    ids = {name: tokenizer(text, return_tensors="pt").input_ids for name, text in texts.items()}
    source = inspect.getsource(textwrap)
    ids["long code"] = tokenizer(source, return_tensors="pt").input_ids[:, 1000:1530]
    return ids


@pytest.fixture(scope="module")
def call_of(model, prompts):
    """The call that writes a text, which is decoded plainly once."""
    options = {"max_new_tokens": NEW_TOKENS, "eos_token_id": model.generation_config.eos_token_id}
    return cache(lambda name: Call(model, inputs={"input_ids": prompts[name]}, **options))


DRAFTERS = {
    "LLMA": lambda tokenizer: rs.ReferenceCopy([DOCUMENT, FUNCTION], tokenizer, published=True),
    "a blend": lambda tokenizer: (
        rs.ReferenceCopy([DOCUMENT, FUNCTION], tokenizer) | rs.SessionDrafts(tokenizer)
    ),
    "the model's own logits": lambda _: rs.TokenRecycling(),
    "noise": lambda _: Noise(),
}
WITH = {"chat": list(DRAFTERS), "code": ["LLMA"], "edit": ["a blend"], "rag": ["LLMA", "a blend"]}


def test_the_model_answers(call_of, prompts, tokenizer):
    answer = tokenizer.decode(call_of("short answer").plain[0, prompts["short answer"].shape[1] :])
    assert "Paris" in answer and answer.endswith("<|im_end|>")


@pytest.mark.parametrize(
    ("text", "drafter"), [(text, drafter) for text in WITH for drafter in WITH[text]]
)
def test_no_drafter_changes_a_text(call_of, tokenizer, text, drafter):
    stats = call_of(text).assert_lossless(DRAFTERS[drafter](tokenizer), max_draft_tokens=16)
    assert stats.mat > 1.1 or text not in ("edit", "rag")


@pytest.mark.parametrize("max_draft_tokens", ["auto", 64])
def test_the_default_drafter_changes_no_text(call_of, prompts, max_draft_tokens):
    for text in prompts if max_draft_tokens == "auto" else WITH:
        call_of(text).assert_lossless("auto", max_draft_tokens=max_draft_tokens)


@pytest.mark.parametrize("verification", ["tree", "chain"])
def test_the_largest_budget_changes_no_text(call_of, verification):
    drafter = rs.ReferenceCopy() | rs.TokenRecycling()
    stats = call_of("edit").assert_lossless(drafter, verification, max_draft_tokens=1024)
    assert stats.tokens == NEW_TOKENS and stats.mat > 1.5


def test_reproducible_text_has_the_same_bits_in_a_short_type(model, prompts):
    short, inputs = deepcopy(model).to(torch.bfloat16), {"input_ids": prompts["chat"]}
    drafter = rs.ReferenceCopy() | rs.TokenRecycling()
    options = {"verification": "reproducible", "max_new_tokens": NEW_TOKENS}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    call = Call(short, inputs=inputs, **options)
    for _ in range(2):  # the second time the table knows the text
        drafted = call.generate(candidate_generator=drafter, max_draft_tokens=16)
        assert drafted.sequences.tolist() == call.plain_ids.tolist()
        assert all(map(torch.equal, drafted.logits, call.plain.logits))
    assert drafter.stats.mat > 1.5


def test_a_session_cache_drafts_what_it_has_seen(call_of, tokenizer):
    cache = rs.SessionDrafts(tokenizer)
    for time in range(2):
        for text in ("chat", "third turn"):
            assert call_of(text).assert_lossless(cache, max_draft_tokens=16).mat > 3 * time


# Several rows


def test_no_row_of_a_padded_batch_changes(model, tokenizer, prompts):
    texts = [{"input_ids": prompts[name][0]} for name in ("edit", "chat", "rag")]
    inputs = tokenizer.pad(texts, padding_side="left", return_tensors="pt")
    options = {"max_new_tokens": NEW_TOKENS, "max_draft_tokens": 16}
    assert assert_lossless(model, rs.ReferenceCopy(), {**inputs}, **options).mat > 1.1


# What changes the choice of a token, or ends a text

CHOICES = [
    {"do_sample": True, "top_p": 0.9, "top_k": 0, "temperature": 0.7},
    {"do_sample": True, "top_k": 20, "temperature": 1.3},
    {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_new_tokens": NEW_TOKENS},
]


@pytest.mark.parametrize("options", CHOICES)
def test_samples_and_processed_logits_choose_the_same_tokens(call_of, options):
    def knowing(plain):
        return Prophet(plain, accuracy=0.7) | rs.ReferenceCopy()

    assert call_of("chat").assert_lossless(knowing, max_draft_tokens=16, **options).mat > 1.3
