"""What a grammar forces, prunes and constrains."""

import copy
import json
import pickle

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import BaseModel, Field
from transformers import AutoTokenizer, LogitsProcessorList, MinPLogitsWarper

import hf_refspec as rs
from hf_refspec import DraftTree, Observation
from hf_refspec.drafting.calls import drafter_call
from hf_refspec.drafting.contract import Call
from hf_refspec.drafting.grammar.grammar_drafts import _warn_unconstrained
from hf_refspec.drafting.grammar.processor import unpacked_mask
from hf_refspec.drafting.grammar.schemas import call_schema
from tests.helpers import byte_model
from tests.helpers.calls import Alternating, assert_lossless
from tests.helpers.drafters import Fixed, Noise
from tests.helpers.trees import nodes_of

pytest.importorskip("llguidance", reason="the extra `grammar` is not installed")

SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["cat", "dog", "parrot"]},
        "tame": {"type": "boolean"},
        "name": {"type": "string", "maxLength": 6},
    },
    "required": ["kind", "tame", "name"],
    "additionalProperties": False,
}
PLACE = {
    "type": "object",
    "properties": {"place": {"$ref": "#/$defs/place"}},
    "required": ["place"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "string", "maxLength": 4}},
}


def tool(parameters, name: str = "f") -> dict:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


class Pet(BaseModel, extra="forbid"):
    kind: str = Field(max_length=5)
    legs: int = Field(ge=0, le=8)


@pytest.fixture(scope="module")
def trained_tokenizer():
    """Tokens of several bytes, and a choice of how a text is cut into them."""
    return AutoTokenizer.from_pretrained(rs.default_model())


@pytest.fixture
def grammar(tokenizer):
    return rs.GrammarDrafts(tokenizer, json_schema=SCHEMA)


def inputs_of(tokenizer, *texts: str) -> dict[str, torch.Tensor]:
    encoded = tokenizer(list(texts), return_tensors="pt", padding=True, padding_side="left")
    return {name: encoded[name] for name in ("input_ids", "attention_mask")}


def default(grammar: rs.GrammarDrafts) -> rs.Drafter:
    return grammar | rs.ReferenceCopy() | rs.TokenRecycling(top_k=8)


SAMPLED = {"do_sample": True, "temperature": 1.3, "top_k": 0}


ROWS = ("Rex is", "The parrot of our neighbours", "A")


@pytest.mark.parametrize("texts", [ROWS[:1], ROWS], ids=["one row", "padded rows"])
@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("blended", [False, True])
@pytest.mark.parametrize("verification", ["tree", "chain"])
def test_ids_are_those_of_the_constrained_plain_call(
    byte_llama, tokenizer, grammar, texts, options, blended, verification
):
    drafter = default(grammar) if blended else grammar
    options = {**options, "max_new_tokens": 80, "eos_token_id": 2, "pad_token_id": 0}
    options["logits_processor"] = [grammar.processor()]
    inputs = inputs_of(tokenizer, *texts)
    assert assert_lossless(byte_llama, drafter, inputs, verification, **options).mat > 2


def test_drafts_without_the_constraint_are_guesses_and_warn_once(
    byte_llama, tokenizer, grammar, caplog
):
    _warn_unconstrained.cache_clear()
    own, inputs = LogitsProcessorList([MinPLogitsWarper(0.1)]), inputs_of(tokenizer, "Rex is")
    assert_lossless(byte_llama, grammar, inputs, logits_processor=[grammar.processor()])
    assert_lossless(byte_llama, grammar, inputs, logits_processor=[Alternating()])
    assert not caplog.messages
    for drafter in (grammar, default(grammar)):
        assert_lossless(byte_llama, drafter, inputs, logits_processor=own)
    assert len(caplog.messages) == 1 and "[grammar.processor()]" in caplog.text
    tree = DraftTree.chain([7, 8])
    with drafter_call(grammar, [np.array([5])], len(tokenizer)):
        assert len(grammar.prune(tree)) == 0
        assert len(grammar.draft(8, Call())) == 8
        grammar.observe(Observation(np.array(tokenizer("other words")["input_ids"])))
        assert len(grammar.prune(tree)) == 2
        assert len(grammar.draft(8, Call())) == 0


@pytest.mark.parametrize(
    ("given", "valid"),
    [
        ({"json_schema": Pet}, lambda text: Pet.model_validate_json(text)),
        ({"regex": "(ab|cd){2}[0-9]"}, lambda text: len(text) == 5),
        ({"lark": 'start: "yes" | "no"'}, lambda text: text in ("yes", "no")),
        (
            {"tools": [tool(PLACE, "weather"), tool(PLACE, "route")]},
            lambda text: json.loads(text)["arguments"]["place"] is not None,
        ),
    ],
)
def test_texts_are_of_the_grammar(byte_llama, tokenizer, given, valid):
    grammar = rs.GrammarDrafts(tokenizer, **given)
    inputs = inputs_of(tokenizer, "Rex is")
    processor = grammar.processor()
    for seed in range(3):  # the processor serves one call after another
        torch.manual_seed(seed)
        options = {"max_new_tokens": 200, "do_sample": True, "top_k": 0}
        ids = byte_llama.generate(**inputs, **options, logits_processor=[processor])
        ended = ids[0, -1] == tokenizer.eos_token_id
        text = tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        assert not ended or valid(text) is not False
    assert ended


def an_object(properties: dict, count: int) -> dict:
    """Of whose properties the first few are required."""
    kind = {"type": "object", "additionalProperties": False}
    return {**kind, "properties": properties, "required": list(properties)[:count]}


def an_array(items: dict, most: int) -> dict:
    return {"type": "array", "items": items, "maxItems": most}


names, counts = st.text('abé"\\ ', min_size=1, max_size=4), st.integers(0, 3)
json_schemas = st.recursive(
    st.sampled_from(["string", "integer", "boolean", "null"]).map(lambda kind: {"type": kind})
    | st.lists(names, min_size=1, max_size=3, unique=True).map(lambda words: {"enum": words}),
    lambda inner: (
        st.builds(an_object, st.dictionaries(names, inner, max_size=3), counts)
        | st.builds(an_array, inner, counts)
    ),
    max_leaves=5,
)


PAIRS = {"type": "array", "maxItems": 2, "items": {"type": "boolean"}}


# Going back with `LLMatcher.rollback`, not to a copy, leaves a wrong mask here.
@example(schema={"type": "array", "maxItems": 2, "items": PAIRS}, seed=19314469)
@given(schema=json_schemas, seed=st.integers(0, 2**32 - 1))
def test_drafts_and_what_is_pruned_are_those_of_the_masks(trained_tokenizer, schema, seed):
    """Along a random text of a random grammar, at each token."""
    grammar = rs.GrammarDrafts(trained_tokenizer, json_schema=schema)
    rng, eos = np.random.default_rng(seed), trained_tokenizer.eos_token_id
    masks: dict[tuple[int, ...], np.ndarray] = {}

    def mask(path: tuple[int, ...]) -> np.ndarray:
        if path not in masks:
            state = grammar._grammar.start()
            assert state.try_consume_tokens(list(path)) == len(path)
            masks[path] = unpacked_mask(state)
        return masks[path]

    text: tuple[int, ...] = ()
    with drafter_call(grammar, [np.array([5])], len(trained_tokenizer)):
        for _ in range(12):
            draft = grammar.draft(16, Call()).checked(len(trained_tokenizer))
            for node, parent in enumerate(draft.parents):
                before = (*text, *draft.path(parent).tolist())
                assert mask(before)[draft.tokens[node]]
                if draft.probs[node] == 1:
                    assert mask(before).sum() == 1
            tree = random_tree(rng, draft, np.flatnonzero(mask(text)), len(trained_tokenizer))
            kept = nodes_of(grammar.prune(tree))
            for node, parent in enumerate(tree.parents):
                before, token = tree.path(parent).tolist(), tree.tokens[node]
                goes_on = parent < 0 or (tuple(before) in kept and before[-1] != eos)
                allowed = goes_on and mask((*text, *before))[token]
                assert ((*before, token) in kept) == allowed
            token = int(rng.choice(np.flatnonzero(mask(text))))
            if token == eos:
                break
            grammar.observe(Observation(np.array([token])))
            text += (token,)


def random_tree(rng, draft: DraftTree, allowed: np.ndarray, vocab_size: int) -> DraftTree:
    """A draft with other tokens beside and behind its nodes."""
    edges = dict.fromkeys(zip(draft.parents.tolist(), draft.tokens.tolist(), strict=True))
    for _ in range(12):
        token = int(rng.choice(allowed) if rng.random() < 0.5 else rng.integers(vocab_size))
        edges[int(rng.integers(-1, len(edges))), token] = None
    parents, tokens = zip(*edges, strict=True)
    return DraftTree(tokens, parents, np.zeros(len(tokens))).checked(vocab_size)


def test_a_path_leaves_the_text_as_it_was(grammar, tokenizer):
    path = np.array(tokenizer('{"kind": "d')["input_ids"])
    with drafter_call(grammar, [np.array([5])], len(tokenizer)):
        before = grammar.draft(16, Call())
        continued = grammar.continue_path(path, 16, Call())
        pruned = grammar.prune(DraftTree.chain(tokenizer("og")["input_ids"]), path)
        wrong = grammar.continue_path(path[::-1], 16, Call())
        assert grammar.draft(16, Call()).tokens.tolist() == before.tokens.tolist()
    assert tokenizer.decode(continued.best_chain().tokens).startswith('og", "tame": ')
    assert len(continued) == 16
    assert len(pruned) == 2
    assert len(wrong) == 0


def test_a_blend_drafts_nothing_that_is_forbidden(grammar, tokenizer):
    """Noise drafts anything, at first tokens that nobody writes."""
    blend = grammar | Noise()
    with drafter_call(blend, [np.array([5])], len(tokenizer)):
        drafts = [blend.draft(64, Call(chain=chain)) for chain in (False, True)]
        allowed = [len(grammar.prune(draft)) for draft in drafts]
    assert allowed == [len(draft) for draft in drafts]
    assert min(allowed) > 0


def paths_of(tree: DraftTree, tokenizer) -> list[str]:
    return [tokenizer.decode(tree.path(node).tolist()) for node in range(len(tree))]


def test_inside_a_string_or_a_number_its_end_is_drafted_with_what_that_forces(tokenizer):
    grammar = rs.GrammarDrafts(tokenizer, json_schema=Pet)
    with drafter_call(grammar, [np.array([5])], len(tokenizer)):
        text = tokenizer('{"kind": "', return_tensors="np")["input_ids"][0]
        grammar.observe(Observation(text))
        assert len(grammar.draft(24, Call())) == 0  # a string has just begun
        grammar.observe(Observation(np.array(tokenizer("ca")["input_ids"])))
        assert '", "legs":' in paths_of(grammar.draft(24, Call()), tokenizer)
        ahead = np.array(tokenizer("t")["input_ids"])
        assert '", "legs":' in paths_of(grammar.continue_path(ahead, 24, Call()), tokenizer)
        grammar.observe(Observation(np.array(tokenizer('t", "legs": 4')["input_ids"])))
        assert "}" in paths_of(grammar.draft(24, Call()), tokenizer)


def test_what_is_forced_behind_a_long_sure_draft_is_drafted_once(tokenizer):
    grammar = rs.GrammarDrafts(tokenizer, json_schema=Pet)
    sure = tokenizer('cat"')["input_ids"]
    blend = grammar | Fixed.chain(sure, 0.99 ** np.arange(1, 1 + len(sure)))
    text = tokenizer('{"kind": "', return_tensors="np")["input_ids"][0]
    with drafter_call(blend, [np.array([5])], len(tokenizer)):
        first = blend.draft(48, Call())  # the grammar's own, and nothing behind it
        assert blend.stats.sources[0].drafted == 0  # counted when they have an outcome
        blend.observe(Observation(text))
        assert blend.stats.sources[0].drafted <= len(first)
        assert 'cat", "legs":' in paths_of(blend.draft(48, Call()), tokenizer)


def test_what_ended_the_free_parts_of_earlier_texts_may_end_this_one(tokenizer):
    grammar = rs.GrammarDrafts(tokenizer, regex=r"[a-z]+;end")
    drafted = []
    for _ in range(2):
        with drafter_call(grammar, [np.array([5])], len(tokenizer)):
            grammar.observe(Observation(np.array(tokenizer("abc")["input_ids"])))
            drafted.append(paths_of(grammar.draft(24, Call()), tokenizer))
            grammar.observe(Observation(np.array(tokenizer(";end")["input_ids"])))
    assert drafted[0] == []
    assert ";end" in drafted[1]


def test_a_small_choice_is_drafted_whole_though_one_of_it_is_a_known_end(tokenizer):
    grammar = rs.GrammarDrafts(tokenizer, regex="[ab]+(;end|,more)")
    for _ in range(2):
        with drafter_call(grammar, [np.array([5])], len(tokenizer)):
            grammar.observe(Observation(np.array(tokenizer("ab")["input_ids"])))
            drafted = paths_of(grammar.draft(24, Call()), tokenizer)
            assert {";end", ",more"} <= {*drafted}
            grammar.observe(Observation(np.array(tokenizer(";end")["input_ids"])))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_copies(grammar, tokenizer, copied):
    with drafter_call(grammar, [np.array([5])], len(tokenizer)):
        expected = grammar.draft(8, Call()).tokens.tolist()
        other = copied(grammar)  # also while a call has it
    with drafter_call(other, [np.array([5])], len(tokenizer)):
        assert other.draft(8, Call()).tokens.tolist() == expected


BEAMS = {"num_beams": 3, "max_new_tokens": 40, "do_sample": False}
LOOK_UP = {"prompt_lookup_num_tokens": 4, "max_new_tokens": 60, "do_sample": False}


@pytest.mark.parametrize("options", [BEAMS, LOOK_UP], ids=["beams", "look-up"])
def test_the_processor_goes_by_the_ids(byte_llama, tokenizer, grammar, options):
    """Beam search exchanges rows, and transformers' assisted decoding goes back."""
    inputs = inputs_of(tokenizer, 'Rex: {"kind": "dog", "tame": true')

    class Anew(type(grammar.processor())):
        """Reads the whole text each time."""

        def __call__(self, input_ids, scores):
            length, self._texts = inputs["input_ids"].shape[1], []
            for end in range(length, input_ids.shape[1] + 1):
                processed = super().__call__(input_ids[:, :end], scores)
            return processed

    expected = byte_llama.generate(**inputs, **options, logits_processor=[Anew(grammar._grammar)])
    given = byte_llama.generate(**inputs, **options, logits_processor=[grammar.processor()])
    assert given.tolist() == expected.tolist()
    # A text that was never accepted is not gone on with.
    assert tokenizer.decode(given[0]).startswith('Rex: {"kind": "dog", "tame": true{"kind": "')


NO_NUMBER = {"type": "integer", "minimum": 5, "maximum": 3}
ENDLESS = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
ANCHOR = {"$anchor": "named", "type": "integer"}
TEXT_TOOL = tool({"type": "string"})


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({}, TypeError, "exactly one of json_schema, regex, lark and tools, but none"),
        ({"regex": "a", "lark": "b"}, TypeError, "but regex and lark"),
        ({"regex": "(a"}, ValueError, "(?s)regex cannot be compiled: .*unclosed group"),
        ({"regex": r"[^\s\S]"}, ValueError, "regex matches no text"),
        ({"lark": "start: b"}, ValueError, '(?s)lark cannot be compiled: .*unknown name: "b"'),
        ({"lark": 'start: "a" start'}, ValueError, "lark forces a text that"),
        ({"json_schema": {"type": "whole"}}, ValueError, "json_schema cannot be .*whole"),
        ({"json_schema": {"not": {}}}, ValueError, 'json_schema cannot be .*"not"'),
        ({"json_schema": NO_NUMBER}, ValueError, "json_schema cannot be .*: Unsatisfiable"),
        ({"json_schema": ENDLESS}, ValueError, "json_schema forces .* too long, or never ends"),
        ({"tools": []}, ValueError, "tools is empty"),
        ({"tools": [{"name": "route"}]}, TypeError, r"tools\[0\] must be a dict like"),
        ({"tools": [TEXT_TOOL]}, ValueError, "tools cannot be .*'arguments' is unsatisfiable"),
    ],
)
def test_bad_grammars_are_refused(tokenizer, given, error, message):
    with pytest.raises(error, match=message):
        rs.GrammarDrafts(tokenizer, **given)


NESTED = [{"type": "null"}, {"type": "array", "items": {"$ref": "#"}, "minItems": 1}]


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "object", "properties": {"a": {"$ref": "#"}}}, '{"a": {"a": {}}}'),
        ({"type": "array", "items": {"$ref": "#"}}, "[[], [[]]]"),
        ({"anyOf": NESTED}, "[null, [null]]"),
        ({**ENDLESS, "properties": {"a": {"$ref": "#named"}}, "$defs": {"x": ANCHOR}}, '{"a": 1}'),
    ],
)
def test_schemas_that_contain_themselves_and_end(tokenizer, schema, text):
    grammar = rs.GrammarDrafts(tokenizer, json_schema=schema)
    ids = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
    with drafter_call(grammar, [np.array([5])], len(tokenizer)):
        assert len(grammar.prune(DraftTree.chain(ids))) == len(ids)
        assert len(grammar.prune(DraftTree.chain(ids[:-2] + ids[-1:]))) == len(ids) - 2


CALL = 'start: "<tool_call>\\n" %json {"const": 1} "\\n</tool_call>"'
NAMES = 'start: <think> "a<tool_call>" </think> // <tool_call> is none'
FORCED = [
    ({"regex": "<think>a</think>b"}, "<think>a</think>b"),
    ({"lark": CALL}, "<tool_call>\n1\n</tool_call>"),
    ({"lark": NAMES}, "<think>a<tool_call></think>"),
    ({"json_schema": {"const": "<tool_call> a </tool_call>"}}, '"<tool_call> a </tool_call>"'),
]
FREE = [
    ({"lark": 'start: "<think" /<think>|b/'}, "<think<think>"),
    ({"json_schema": {"enum": ["<think>", "<tool_call>"]}}, '"<tool_call>"'),
    ({"regex": "(.|\n)*</think>yes"}, "no\n</think>yes"),
]


@pytest.mark.parametrize(("given", "text"), FORCED + FREE)
def test_added_tokens_that_are_text_may_be_written(given, text):
    tokenizer = byte_model.qwen_tokenizer()
    processor = rs.GrammarDrafts(tokenizer, **given).processor()
    ids = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
    for end, token in enumerate(ids):
        scores = processor(torch.tensor([[0, *ids[:end]]]), torch.zeros(1, len(tokenizer)))
        assert scores[0, token] == 0
    assert set(ids) & set(tokenizer("<think></think><tool_call></tool_call>")["input_ids"])


@pytest.mark.parametrize(("given", "text"), FORCED)
def test_added_tokens_that_are_text_are_drafted_and_the_end_after_them(given, text):
    tokenizer = byte_model.qwen_tokenizer()
    grammar = rs.GrammarDrafts(tokenizer, **given)
    with drafter_call(grammar, [np.array([0])], len(tokenizer)):
        drafted = grammar.draft(64, Call()).tokens.tolist()
    assert drafted == [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]


def test_thoughts_between_added_tokens_are_those_of_the_constrained_plain_call():
    tokenizer = byte_model.qwen_tokenizer()
    model = byte_model.byte_llama(len(tokenizer))
    grammar = rs.GrammarDrafts(tokenizer, regex='<think>[a-z]{9}</think>\\{"name": "f"\\}')
    options = {"max_new_tokens": 40, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": 0}
    options["logits_processor"] = [grammar.processor()]
    inputs = inputs_of(tokenizer, "Rex is")
    assert assert_lossless(model, default(grammar), inputs, **options).mat > 1.5
    ids = model.generate(**inputs, **options)[0]
    tags = tokenizer.convert_tokens_to_ids(["<think>", "</think>"])
    assert [token for token in ids if token in tags] == tags


def test_a_forced_text_of_a_special_token_is_spelled_out():
    tokenizer = byte_model.qwen_tokenizer()
    grammar = rs.GrammarDrafts(tokenizer, json_schema={"const": "a<|im_end|><|im_start|>"})
    with drafter_call(grammar, [np.array([0])], len(tokenizer)):
        *tokens, last = grammar.draft(64, Call()).tokens.tolist()
    assert tokenizer.decode(tokens, skip_special_tokens=True) == '"a<|im_end|><|im_start|>"'
    assert last == tokenizer.eos_token_id


def test_bad_tokenizers_are_refused(tokenizer):
    endless = copy.deepcopy(tokenizer)
    endless.eos_token = None
    with pytest.raises(ValueError, match="without an `eos_token`"):
        rs.GrammarDrafts(endless, regex="a")


CITY = {"properties": {"city": {"type": "string"}}, "required": ["city"]}


@pytest.mark.parametrize(
    "parameters",
    [
        CITY,
        {**CITY, "type": ["object", "null"]},
        {"$ref": "#/$defs/city", "$defs": {"city": CITY}},
        {"anyOf": [CITY, {"type": "string"}]},
        {"enum": [{"city": "x"}, 5]},
    ],
)
def test_arguments_are_an_object_whatever_the_parameters_allow(tokenizer, parameters):
    grammar = rs.GrammarDrafts(tokenizer, tools=[tool(parameters)])

    def accepted(arguments: str) -> bool:
        ids = tokenizer(f'{{"name": "f", "arguments": {arguments}}}')["input_ids"]
        with drafter_call(grammar, [np.array([5])], len(tokenizer)):
            return len(grammar.prune(DraftTree.chain(ids))) == len(ids)

    assert accepted('{"city": "x"}')
    assert not any(accepted(other) for other in ("5", '"x"', "[1]", "null"))


REFERENCE = {"$ref": "#/$defs/word"}


@pytest.mark.parametrize(
    "inner",
    [
        {"const": REFERENCE},
        {"enum": [REFERENCE, {"a": REFERENCE}]},
        {"type": "integer", "default": REFERENCE, "examples": [REFERENCE]},
    ],
)
def test_references_of_tools_are_moved_and_equal_values_are_not(inner):
    names = {"$ref": REFERENCE, "const": REFERENCE, "inner": inner, "all": {"allOf": [REFERENCE]}}
    parameters = {
        "properties": names,
        "$defs": {"word": {"type": "string"}},
        "items": {"$ref": "#"},
    }
    schema = call_schema([tool(parameters)])
    moved = {"$ref": "#/$defs/0/$defs/word"}
    assert schema["$defs"]["0"] == {
        **parameters,
        "type": "object",
        "properties": {**names, "$ref": moved, "const": moved, "all": {"allOf": [moved]}},
        "items": {"$ref": "#/$defs/0"},
    }
