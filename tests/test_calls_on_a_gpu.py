"""Calls of every kind have the ids of plain decoding on a GPU, or on a pretended one."""

import copy
from collections.abc import Iterable

import numpy as np
import pytest
import torch
from accelerate import dispatch_model
from torch.backends import cuda
from transformers import DynamicCache

import hf_refspec as rs
from tests.helpers.architectures import VOCAB_SIZE, small
from tests.helpers.bag_of_tokens import BagOfTokens
from tests.helpers.calls import RANDOM_PROMPT as PROMPT
from tests.helpers.calls import Alternating, ListStreamer, padded_prompts
from tests.helpers.datastores import write_store
from tests.helpers.devices import DEVICE, needs_device
from tests.helpers.drafters import Noise, Prophet, Prophets
from tests.helpers.knn_texts import CORPUS
from tests.helpers.knn_texts import generate as knn_generate

pytestmark = needs_device
SPECULATIONS = ["", "ps", "psa"]
# What decides whether tokens are chosen for all rows at once, or with random numbers of their own.
SAMPLED = {
    "all tokens": {"top_k": 0},
    "processors": {"top_k": 20, "top_p": 0.9, "temperature": 0.7},
    "processors that read the text": {"top_k": 0, "repetition_penalty": 1.3},
}


@pytest.fixture(scope="module")
def llama():
    return small("llama").to(DEVICE)


@pytest.fixture(scope="module")
def byte_model(byte_llama):
    return copy.deepcopy(byte_llama).to(DEVICE)


def inputs(rows: int = 1) -> dict[str, torch.Tensor]:
    given = {"input_ids": PROMPT} if rows == 1 else padded_prompts(rows)
    return {name: value.to(DEVICE) for name, value in given.items()}


def generate(model, given: dict[str, torch.Tensor], **options):
    options = {"max_new_tokens": 32, "do_sample": False, "eos_token_id": None, **options}
    torch.manual_seed(7)
    return model.generate(**given, **options)


def prophet(given: dict[str, torch.Tensor], plain: torch.Tensor, accuracy: float = 0.8):
    if len(plain) == 1:
        return Prophet(plain.cpu(), accuracy)
    on_host = {name: value.cpu() for name, value in given.items()}
    return Prophets(on_host, plain.cpu(), accuracy)


def assert_same(
    model, given, drafter=None, nodes: int = 12, verification: str = "auto", **options
) -> rs.DraftStats:
    """Asserts that a drafter changes no id; returns its stats."""
    plain = generate(model, given, **options)
    drafter = prophet(given, plain) if drafter is None else drafter
    drafting = {"candidate_generator": drafter, "max_draft_tokens": nodes}
    drafted = generate(model, given, **options, **drafting, verification=verification)
    assert drafted.device == plain.device and drafted.device.type == DEVICE
    assert drafted.tolist() == plain.tolist()
    return drafter.stats


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("options", SAMPLED.values(), ids=SAMPLED)
def test_sampled_rows_use_up_the_same_random_numbers(llama, rows, options):
    options = {"do_sample": True, **options}
    plain = generate(llama, inputs(rows), **options)
    after_plain = torch.rand(1, device=DEVICE)
    generate(llama, inputs(rows), **options, candidate_generator=prophet(inputs(rows), plain))
    assert torch.equal(torch.rand(1, device=DEVICE), after_plain)
    assert assert_same(llama, inputs(rows), **options).mat > 1.5


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("do_sample", [False, True])
def test_a_default_device_moves_no_tensor_that_belongs_on_the_host(llama, rows, do_sample):
    given = inputs(rows)
    with torch.device(DEVICE):
        assert assert_same(llama, given, do_sample=do_sample, top_k=0).accepted > 0


@pytest.mark.parametrize("rows", [1, 3])
def test_processors_and_criteria_and_streamers_that_read_the_text(llama, rows):
    options = {"logits_processor": [Alternating()], "repetition_penalty": 1.2}
    options |= {"max_new_tokens": 40, "eos_token_id": [5, 6, 7, 8], "pad_token_id": 0}
    assert_same(llama, inputs(rows), **options)
    plain = ListStreamer()
    generate(llama, inputs(), streamer=plain)
    drafted, drafter = ListStreamer(), rs.ReferenceCopy() | rs.TokenRecycling()
    generate(llama, inputs(), streamer=drafted, candidate_generator=drafter)
    assert drafted.__dict__ == plain.__dict__


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("nodes", [16, "auto"])
def test_the_usual_drafters(byte_model, tokenizer, rows, nodes):
    references = "".join(CORPUS)
    drafters = rs.ReferenceCopy(references=[references], tokenizer=tokenizer) | rs.TokenRecycling()
    given = encoded(tokenizer, "for i in range", *["def f(x):", "y"][: rows - 1])
    assert_same(byte_model, given, drafters, nodes, max_new_tokens=48, pad_token_id=0)


@pytest.mark.parametrize("do_sample", [False, True])
def test_a_draft_model(llama, do_sample):
    options = {"do_sample": do_sample, "top_k": 0}
    assert assert_same(llama, inputs(), rs.DraftModel(llama), **options).mat > 2
    assert assert_same(llama, inputs(), rs.DraftModel(llama), 4, "chain", **options).mat > 3
    other = copy.deepcopy(llama)
    with torch.no_grad():
        other.lm_head.weight += 0.02 * torch.randn_like(other.lm_head.weight)
    assert_same(llama, inputs(), rs.DraftModel(other) | rs.TokenRecycling(), **options)
    assert_same(llama, inputs(), rs.DraftModel(copy.deepcopy(other).cpu()), **options)


def encoded(tokenizer, *texts: str) -> dict[str, torch.Tensor]:
    found = tokenizer(list(texts), return_tensors="pt", padding=True, padding_side="left")
    return {name: found[name].to(DEVICE) for name in ("input_ids", "attention_mask")}


@pytest.mark.parametrize("texts", [["A "], ["A ", "Rex is"]], ids=["one row", "two rows"])
@pytest.mark.parametrize("do_sample", [False, True])
def test_a_grammar(byte_model, tokenizer, texts, do_sample):
    pytest.importorskip("llguidance", reason="the extra `grammar` is not installed")
    schema = {"type": "object", "properties": {"tame": {"type": "boolean"}}, "required": ["tame"]}
    grammar = rs.GrammarDrafts(tokenizer, json_schema=schema)
    options = {"logits_processor": [grammar.processor()], "eos_token_id": 2, "pad_token_id": 0}
    options |= {"do_sample": do_sample, "top_k": 0, "max_new_tokens": 40}
    assert assert_same(byte_model, encoded(tokenizer, *texts), grammar, **options).mat > 1.2


def test_a_datastore(byte_model, tokenizer, tmp_path):
    given = encoded(tokenizer, "for i in ran")
    plain = generate(byte_model, given, max_new_tokens=60)
    documents = [plain[0].tolist(), *tokenizer(CORPUS)["input_ids"]]
    store = write_store(tmp_path / "store", documents, vocab_size=len(tokenizer), cuts=())
    drafter = rs.DatastoreDrafts(store)
    assert assert_same(byte_model, given, drafter, max_new_tokens=60).mat > 1.5


def test_sessions_are_drafted_in_later_calls(llama):
    sessions = rs.SessionDrafts()
    assert_same(llama, inputs(), sessions)
    assert assert_same(llama, inputs(), sessions).mat > 3
    assert_same(llama, inputs(3), sessions)


@pytest.mark.parametrize("room", [None, 160], ids=["dynamic", "static"])
@pytest.mark.parametrize("rows", [1, 3])
def test_turns_go_on_from_a_cache_that_is_given_and_returned(llama, rows, room):
    texts = []
    for drafts in (False, True):
        given = inputs(rows)
        text, mask = given["input_ids"], given.get("attention_mask", torch.ones_like(PROMPT))
        turns, cache = [], DynamicCache(config=llama.config)
        options = {"past_key_values": cache, "return_dict_in_generate": True}
        if room is not None:
            options = {"cache_implementation": "static", "max_cache_len": room}
            options |= {"return_dict_in_generate": True, "disable_compile": True}
        for turn in range(3):
            given = {"input_ids": text, "attention_mask": mask.to(DEVICE)}
            drafter = {}
            if drafts:
                known = {name: value.cpu() for name, value in given.items()}
                drafter = {"candidate_generator": Prophets(known, texts[0][turn].cpu(), 0.8)}
            output = generate(llama, given, **options, **drafter, max_new_tokens=20)
            turns.append(output.sequences)
            further = torch.full((rows, 3), 5 + turn, device=DEVICE)
            text = torch.cat([output.sequences, further], dim=-1)
            added = text.shape[1] - mask.shape[1]
            mask = torch.nn.functional.pad(mask, (0, added), value=1)
            options["past_key_values"] = output.past_key_values
            options.pop("cache_implementation", None), options.pop("max_cache_len", None)
        texts.append(turns)
    for plain, drafted in zip(*texts, strict=True):
        assert drafted.tolist() == plain.tolist()


@pytest.mark.parametrize("do_sample", [False, True])
def test_a_running_batch(llama, do_sample):
    batch = rs.RunningBatch(llama, max_rows=2, max_draft_tokens=12, prefill_tokens=8)
    options = {"eos_token_id": None, "pad_token_id": 0, "do_sample": do_sample}
    options |= {"max_new_tokens": 24}
    texts, plain = [], []
    for seed in range(4):  # the last two join when others have left
        ids = torch.randint(
            3, VOCAB_SIZE, (1, 9 + seed), generator=torch.Generator().manual_seed(seed)
        )
        torch.manual_seed(seed)
        plain.append(llama.generate(ids.to(DEVICE), **options))
        drafter = Prophet(plain[-1].cpu(), 0.8, seed=seed)
        given = {"input_ids": ids.to(DEVICE), "candidate_generator": drafter, **options}
        texts.append(batch.add(seed=seed if do_sample else None, **given))
    while len(batch):
        batch.step()
    assert [text.sequences.tolist() for text in texts] == [ids.tolist() for ids in plain]


@pytest.mark.parametrize("speculation", SPECULATIONS)
def test_iterative_retrieval(llama, speculation):
    call = {"custom_generate": rs.iterative_ralm, "retriever": BagOfTokens(), "query_length": 8}
    plain = generate(llama, inputs(), **call, speculation=None)
    assert generate(llama, inputs(), **call, speculation=speculation).tolist() == plain.tolist()


@pytest.mark.parametrize("do_sample", [False, True])
def test_nearest_neighbours(byte_model, tokenizer, tmp_path, do_sample):
    store = rs.KnnDatastore.build(CORPUS, tokenizer, byte_model, tmp_path / "s")
    given, options = encoded(tokenizer, "for k in ran"), {"do_sample": do_sample}
    plain = knn_generate(byte_model, given, store, speculation=None, **options)
    for speculation in SPECULATIONS:
        ids = knn_generate(byte_model, given, store, speculation=speculation, **options)
        assert ids.tolist() == plain.tolist(), speculation


def test_an_adapter_switched_on_and_off():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(small("llama"), config).to(DEVICE).eval()
    texts = []
    for _ in range(2):
        assert assert_same(model, inputs()).mat > 2
        texts.append(generate(model, inputs()).tolist())
        with model.disable_adapter():
            assert assert_same(model, inputs()).mat > 2
            texts.append(generate(model, inputs()).tolist())
    assert texts[:2] == texts[2:] and texts[0] != texts[1]


PARTS = ("model.embed_tokens", "model.rotary_emb", "model.layers.0", "model.layers.1")
PARTS = (*PARTS, "model.norm", "lm_head")


def placed(parts_on_host: Iterable[str]) -> dict[str, object]:
    first = 0 if DEVICE == "cuda" else DEVICE
    return {part: "cpu" if part in parts_on_host else first for part in PARTS}


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("on_host", [PARTS[3:5], PARTS[:3]], ids=["the last", "the first"])
def test_layers_offloaded_to_the_host(llama, rows, on_host):
    plain = generate(llama, inputs(rows))
    main_device = 0 if DEVICE == "cuda" else DEVICE
    model = dispatch_model(small("llama"), placed(on_host), main_device, force_hooks=True)
    for options in ({}, {"do_sample": True, "top_k": 0}):
        assert assert_same(model, inputs(rows), **options).mat > 2
    assert generate(model, inputs(rows)).tolist() == plain.tolist()


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("verification", ["tree", "chain"])
def test_passes_attend_without_cudnn_which_builds_a_plan_for_each_of_their_shapes(verification):
    model = small("llama").to(DEVICE)
    enabled = []
    model.register_forward_pre_hook(lambda *_: enabled.append(cuda.cudnn_sdp_enabled()))  # trusted
    for _ in range(2):  # the first call probes the model
        enabled.clear()
        generate(model, inputs(), candidate_generator=Noise(), verification=verification)
    prompt, *passes = enabled
    assert prompt and len(passes) > 2 and not any(passes)
    assert cuda.cudnn_sdp_enabled()


def test_weights_in_bfloat16_take_drafts_of_every_kind(byte_model, tokenizer):
    model = copy.deepcopy(byte_model).to(torch.bfloat16)
    given = encoded(tokenizer, "for i in range")
    plain = generate(model, given, max_new_tokens=40)
    for drafter in (prophet(given, plain), rs.ReferenceCopy() | rs.TokenRecycling()):
        for verification in ("tree", "chain"):
            drafting = {"candidate_generator": drafter, "verification": verification}
            drafted = generate(model, given, max_new_tokens=40, **drafting)
            assert drafted.shape == plain.shape  # near-ties may differ
            assert np.mean(drafted[0].tolist() == np.array(plain[0].tolist())) > 0.3
