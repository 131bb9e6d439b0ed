"""A `CandidateGenerator` receives what transformers would send it; what transformers drafts from
hidden states joins the other sources, and changes no id."""

import logging
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import cpu_offload
from transformers import CONFIG_MAPPING, LogitsProcessor
from transformers.generation.candidate_generator import (
    CandidateGenerator,
    DFlashTokenCandidateGenerator,
    MTPCandidateGenerator,
    SinglePositionMultiTokenCandidateGenerator,
)

import hf_refspec as rs
from hf_refspec.drafting.calls import drafter_call
from hf_refspec.drafting.candidates import CandidateChain, HiddenStateDrafts
from hf_refspec.drafting.contract import Call, Observation, States
from hf_refspec.transformers_names import CACHE_NAME, hidden_state_generator
from tests.helpers.architectures import Architecture, small
from tests.helpers.byte_model import byte_tokenizer
from tests.helpers.calls import (
    GREEDY,
    PROMPT,
    Alternating,
    ListStreamer,
    StopAtCall,
    assert_lossless,
    padded_prompts,
    random_ids,
)
from tests.helpers.drafters import Prophet
from tests.helpers.heads import (
    MTP_TYPES,
    ReadsStates,
    block_drafter,
    gemma_with_assistant,
    with_mtp,
)
from tests.helpers.passes import passes_of
from tests.helpers.running_texts import finish

LAYERS = [
    (kind, layers) for kind in MTP_TYPES for layers in (1, 3) if (kind, layers) != ("mellum", 3)
]
SAMPLED = {"do_sample": True, "temperature": 0.7, "top_k": 20}
BY_LAYERS = {"use_mtp": True}


@pytest.fixture(scope="session")
def with_layers(models_by_type, tmp_path_factory):
    """A llama with three layers that have learned its greedy text."""
    model = models_by_type("llama")
    text = model.generate(PROMPT, **{**GREEDY, "max_new_tokens": 60})
    return with_mtp(model, 3, tmp_path_factory.mktemp("learned"), text)


def assert_drafts_change_no_id(model, **reading):
    """Greedy and sampled, with the arguments by which transformers drafts from hidden states."""
    for sampling in ({}, SAMPLED):
        for drafter in ("auto", 0.7):
            assert_lossless(model, drafter, max_draft_tokens=12, drafting=reading, **sampling)


@pytest.mark.parametrize(
    ("kind", "layers", "dtype"),
    [*((*case, torch.float32) for case in LAYERS), ("llama", 1, torch.float64)],
)
def test_layers_of_each_type_change_no_id(models_by_type, tmp_path, kind, layers, dtype):
    """They follow a model into another dtype."""
    model = with_mtp(models_by_type(kind), layers, tmp_path).to(dtype)
    assert_drafts_change_no_id(model, use_mtp=True)


def configures_layers(config_class) -> bool:
    name = "num_mtp_layers"
    return hasattr(config_class, name) or name in getattr(config_class, "attribute_map", ())


def test_every_type_that_configures_layers_is_among_these(models_by_type):
    configured = {kind for kind in CONFIG_MAPPING if configures_layers(CONFIG_MAPPING[kind])}
    tried = {models_by_type(kind).config.get_text_config().model_type for kind in MTP_TYPES}
    assert configured == tried - {"llama"}


class TwoRightTokens(Prophet):
    """Drafts the next two tokens of a known text."""

    def __init__(self, text):
        super().__init__(text, accuracy=1.0, branches=0)

    def draft(self, budget, call):
        return super().draft(min(budget, call.depth, 2), call)


def test_layers_that_run_ahead_leave_the_models_rotary_frequencies(tmp_path):
    """They draft past the length at which dynamic frequencies change, before the text is there."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    model = small("llama", max_position_embeddings=32, rope_parameters=rope)
    model = with_mtp(model, 4, tmp_path)
    options = {"drafting": BY_LAYERS, "max_draft_tokens": 6}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    for seed in range(2):
        assert_lossless(model, TwoRightTokens, random_ids(20, seed), **options)


def test_block_drafters_leave_the_models_embeddings_as_they_are(monkeypatch):
    """Another thread may run the model while they draft."""
    model = small("inkling_text")
    embeddings = model.get_input_embeddings()
    changed = []

    def recorded(module, name, value):
        changed.append(module)
        torch.nn.Module.__setattr__(module, name, value)

    monkeypatch.setattr(type(embeddings), "__setattr__", recorded)
    reading = {"assistant_model": block_drafter(model), "speculation_type": "dflash"}
    assert_lossless(model, "auto", drafting=reading)
    assert changed
    assert all(module is not embeddings for module in changed)


def with_blocks():
    model = small("llama")
    return model, {"assistant_model": block_drafter(model), "speculation_type": "dflash"}


@pytest.fixture(scope="module", params=["layers", "shared keys", "blocks"])
def reading(request):
    """A model, and the arguments by which transformers drafts from its hidden states."""
    if request.param == "layers":
        return request.getfixturevalue("with_layers"), BY_LAYERS
    if request.param == "blocks":
        return with_blocks()
    model, assistant = gemma_with_assistant()
    return model, {"assistant_model": assistant}


def test_each_way_to_read_states_changes_no_id(reading):
    model, arguments = reading
    assert_drafts_change_no_id(model, **arguments)


def assert_same_drafts(monkeypatch, model, arguments, kind):
    """A kind of generators drafts the same after the same text beside another source as alone."""
    drafts: dict[str, list[int]] = {}
    get_candidates = kind.get_candidates

    def recorded(self, input_ids, **kwargs):
        candidates, logits = get_candidates(self, input_ids, **kwargs)
        if candidates.shape[1] > input_ids.shape[1]:
            drafts[str(input_ids.tolist())] = candidates[0, input_ids.shape[1] :].tolist()
        return candidates, logits

    monkeypatch.setattr(kind, "get_candidates", recorded)
    model.generate(PROMPT, **GREEDY, **arguments)
    alone = drafts.copy()
    for accuracy in (0.0, 0.7):
        drafts.clear()
        assert_lossless(model, accuracy, max_draft_tokens=12, drafting=arguments)
        shared = drafts.keys() & alone.keys()
        assert len(shared) > 3
        assert all(drafts[text] == alone[text] for text in shared)


@pytest.mark.parametrize("layers", [1, 3])
def test_layers_draft_what_they_draft_in_transformers_own_loop(
    monkeypatch, models_by_type, tmp_path, layers
):
    model = with_mtp(models_by_type("llama"), layers, tmp_path)
    assert_same_drafts(monkeypatch, model, BY_LAYERS, MTPCandidateGenerator)


def test_block_drafters_draft_what_they_draft_in_transformers_own_loop(monkeypatch):
    assert_same_drafts(monkeypatch, *with_blocks(), DFlashTokenCandidateGenerator)


@pytest.mark.parametrize(("sharing", "verification"), [(0, "tree"), (0, "chain"), (2, "chain")])
def test_assistants_that_share_keys_see_those_of_accepted_tokens_alone(
    monkeypatch, sharing, verification
):
    """transformers itself lets them see one of a rejected token."""
    model, assistant = gemma_with_assistant(sharing)
    plain = model.generate(PROMPT, **GREEDY)
    kind = SinglePositionMultiTokenCandidateGenerator
    get_candidates = kind.get_candidates
    seen = []

    def recorded(self, input_ids, **given):
        if not given["is_first_iteration"]:
            seen.append(given["model_outputs"].shared_kv_states)
        return get_candidates(self, input_ids, **given)

    monkeypatch.setattr(kind, "get_candidates", recorded)
    assert_lossless(model, 0.7, PROMPT, verification, drafting={"assistant_model": assistant})
    assert len(seen) > 3
    for shared in seen:
        length, in_window = (
            shared[kind][0].shape[2] for kind in ("full_attention", "sliding_attention")
        )
        assert in_window == min(length, model.config.sliding_window - 1)
        expected = model(plain[:, :length], return_shared_kv_states=True).shared_kv_states
        for name, states in shared.items():
            for own, right in zip(states, expected[name], strict=True):
                right = right[:, :, -own.shape[2] :]
                torch.testing.assert_close(own, right, rtol=1e-4, atol=1e-4)


MANY = {**GREEDY, "max_new_tokens": 60, "use_mtp": True}


def passes_with_look_up(model, drafter, **options) -> int:
    """The passes of a call in which look-up and layers draft."""
    drafting = {"candidate_generator": drafter, "max_draft_tokens": 16}
    model.generate(PROMPT, **drafting, **MANY, **options)
    return drafter.stats.forward_passes


@pytest.mark.parametrize("verification", ["tree", "chain"])
def test_it_takes_no_more_passes_than_transformers_own_use(with_layers, verification):
    with passes_of(with_layers) as own:
        with_layers.generate(PROMPT, **MANY)
    both = passes_with_look_up(with_layers, rs.ReferenceCopy(), verification=verification)
    assert both <= len(own) < 40


@pytest.mark.parametrize("kind", sorted({*MTP_TYPES} - {"llama"}))
def test_layers_of_no_type_take_more_passes_than_alone(models_by_type, tmp_path, kind):
    """Where one path is verified, from the second call on, which knows whose is the right one."""
    model = models_by_type(kind)
    text = model.generate(PROMPT, **{**GREEDY, "max_new_tokens": 60})
    model = with_mtp(model, 1 if kind == "mellum" else 2, tmp_path, text)
    drafter = rs.ReferenceCopy()
    first, second = (passes_with_look_up(model, drafter) for _ in range(2))
    assert max(first, second) < 40
    if kind == "bailing_hybrid":  # with its running state transformers itself drafts nothing
        return
    with passes_of(model) as own:
        model.generate(PROMPT, **MANY)
    by_chains = Architecture(model.config.get_text_config().model_type).verification == "chain"
    assert (second if by_chains else max(first, second)) <= len(own)


@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "temperature": 0.5}])
def test_stop_strings_end_a_text_inside_of_a_heads_chain(reading, sampling):
    model, arguments = reading
    tokenizer = byte_tokenizer(map(chr, range(33, 127)))  # a character for each id but three
    options = {**GREEDY, **sampling, "tokenizer": tokenizer}
    torch.manual_seed(0)
    whole = model.generate(PROMPT, **options)
    stop = tokenizer.decode(whole[0, PROMPT.shape[1] + 8 : PROMPT.shape[1] + 10])
    options["stop_strings"] = [stop]
    assert_lossless(model, "auto", max_draft_tokens=12, drafting=arguments, **options)
    torch.manual_seed(0)
    assert model.generate(PROMPT, **options).shape[1] < whole.shape[1]


@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "temperature": 0.5}])
def test_processors_criteria_streamers_and_records_see_plain_decoding(with_layers, sampling):
    outputs, scores = [], []
    for further in ({}, {"candidate_generator": "auto", "use_mtp": True, "max_draft_tokens": 12}):
        torch.manual_seed(0)
        processor, streamer = Alternating(), ListStreamer()
        output = with_layers.generate(
            PROMPT,
            **{**GREEDY, **sampling},
            logits_processor=[processor],
            stopping_criteria=[StopAtCall(20)],
            streamer=streamer,
            return_dict_in_generate=True,
            output_scores=True,
            **further,
        )
        ids, cached = output.sequences.tolist(), output[CACHE_NAME].get_seq_length()
        outputs.append((ids, cached, processor.seen, streamer.puts, streamer.ended))
        scores.append(torch.stack(output.scores))
    assert outputs[0] == outputs[1] and len(ids[0]) == PROMPT.shape[1] + 20
    torch.testing.assert_close(*scores, rtol=1e-4, atol=1e-4)


class Clairvoyant(ReadsStates):
    """Drafts three tokens by the target itself."""

    logits_processor = None

    def __init__(self, model):
        self.model = model

    def get_candidates(self, input_ids, is_first_iteration, **kwargs):
        logits = []
        for _ in range(0 if is_first_iteration else 3):
            scores = self.model(input_ids).logits[:, -1]
            if self.logits_processor is not None:
                scores = self.logits_processor(input_ids, scores)
            logits.append(scores)
            input_ids = torch.cat((input_ids, scores.argmax(-1, keepdim=True)), dim=1)
        return input_ids, torch.stack(logits, dim=1) if logits else None


@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "temperature": 1.5, "top_k": 30}])
def test_sampled_drafts_are_chosen_by_the_calls_random_numbers(fresh_llama, sampling):
    source = HiddenStateDrafts(Clairvoyant(fresh_llama))
    stats = assert_lossless(fresh_llama, source, verification="chain", **sampling)
    assert stats.accepted == stats.drafted > 12


def test_generators_of_transformers_draw_with_the_calls_random_numbers(reading):
    """So hot that all tokens are equally likely, the random numbers alone choose."""
    model, arguments = reading
    options = {"do_sample": True, "temperature": 1e6, "top_k": 0, "max_draft_tokens": 16}
    assert assert_lossless(model, rs.ReferenceCopy(), drafting=arguments, **options).mat > 3


def test_a_given_cache_goes_on(with_layers):
    plain, drafted = (
        with_layers.generate(PROMPT, **GREEDY, return_dict_in_generate=True) for _ in range(2)
    )
    ids = torch.cat((plain.sequences, PROMPT), dim=1)
    drafting = {**BY_LAYERS, CACHE_NAME: drafted[CACHE_NAME]}
    assert_lossless(with_layers, "auto", ids, drafting=drafting, **{CACHE_NAME: plain[CACHE_NAME]})


class Recorder(ReadsStates):
    """Drafts nothing, and keeps what it is given."""

    def __init__(self, seen):
        self.seen = seen

    def __deepcopy__(self, memo):
        return self

    def get_candidates(self, input_ids, model_outputs, is_first_iteration, **given):
        if not is_first_iteration:
            states = torch.stack(model_outputs.hidden_states)  # (layers, 1, n, hidden_size)
            positions = given["model_kwargs"]["position_ids"]
            self.seen.append((input_ids.tolist(), positions, states, given["n_last_matches"]))
        return input_ids, None


@pytest.mark.parametrize("verification", ["tree", "chain"])
@pytest.mark.parametrize("padding", [0, 4])
def test_it_is_given_the_states_of_accepted_tokens_once_in_order(
    fresh_llama, verification, padding
):
    ids = torch.nn.functional.pad(PROMPT, (padding, 0))
    mask = torch.ones_like(ids)
    mask[:, :padding] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    text = fresh_llama.generate(**inputs, **GREEDY)[:, padding:]
    seen = []
    assert_lossless(fresh_llama, Prophet(text, 0.6) | Recorder(seen), inputs, verification)
    expected = torch.stack(fresh_llama(text, output_hidden_states=True).hidden_states)
    length = 0
    for ids, positions, states, matches in seen:
        assert ids == text[:, : len(ids[0])].tolist()
        assert positions.tolist() == [[*range(len(ids[0]))]]
        assert matches == states.shape[2] - 1
        end = length + states.shape[2]
        torch.testing.assert_close(states, expected[:, :, length:end], rtol=1e-4, atol=1e-4)
        length = end
        assert length == len(ids[0]) - 1
    assert 2 < len(seen) < 23
    assert max(states.shape[2] for *_, states, _ in seen[1:]) > 2


@pytest.mark.parametrize("layers", [1, 3])
def test_the_cache_of_its_layers_is_that_of_the_text_alone(models_by_type, tmp_path, layers):
    model = with_mtp(models_by_type("llama"), layers, tmp_path)
    plain = model.generate(PROMPT, **GREEDY)
    sources = []

    class Kept(HiddenStateDrafts):
        def end(self):
            sources.append((self._running, self._columns))
            super().end()

    source = Kept(hidden_state_generator(model, use_mtp=True))
    assert_lossless(model, Prophet(plain, 0.6) | source)
    [(generator, columns)] = sources
    assert columns > 20
    whole = HiddenStateDrafts(hidden_state_generator(model, use_mtp=True)).generator
    states = model(plain[:, :columns], output_hidden_states=True).hidden_states
    whole.get_candidates(
        plain[:, : columns + 1],
        model_kwargs={"position_ids": torch.arange(columns + 1)[None]},
        model_outputs=SimpleNamespace(hidden_states=[states[-1]]),
        is_first_iteration=False,
        n_last_matches=0,
    )
    for layer, expected in zip(generator.mtp_cache.layers, whole.mtp_cache.layers, strict=True):
        torch.testing.assert_close(layer.keys, expected.keys, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(layer.values, expected.values, rtol=1e-4, atol=1e-4)


def test_where_it_cannot_follow_the_others_draft_and_it_says_so_once(with_layers, caplog):
    caplog.set_level(logging.WARNING, logger="hf_refspec")
    for _ in range(2):
        assert_lossless(with_layers, "auto", padded_prompts(2), drafting=BY_LAYERS)
    assert_lossless(with_layers, "auto", drafting=BY_LAYERS, cache_implementation="static")
    said = [record.message for record in caplog.records if "hidden states" in record.message]
    assert len(said) == 2 and "several rows" in said[0] and "static cache" in said[1]


def test_of_an_offloaded_model_no_states_are_read(fresh_llama, caplog):
    caplog.set_level(logging.WARNING, logger="hf_refspec")
    model = cpu_offload(fresh_llama, execution_device=torch.device("cpu"))
    seen = []
    stats = assert_lossless(
        model, lambda plain: Prophet(plain, 0.9) | Recorder(seen), verification="chain"
    )
    assert stats.accepted > 5 and not seen
    assert "nothing is drafted from hidden states: some layers are offloaded" in caplog.text


def test_an_attached_drafter_takes_the_layers_along(with_layers):
    plain = with_layers.generate(PROMPT, **GREEDY)
    with rs.attach(with_layers, rs.ReferenceCopy(), max_draft_tokens=8) as attached:
        drafted = with_layers.generate(PROMPT, use_mtp=True, **GREEDY)
    assert drafted.tolist() == plain.tolist()
    assert [source.name for source in attached.stats.sources][1:] == ["HiddenStateDrafts"]
    assert attached.stats.sources[1].accepted > 10


def test_what_is_attached_may_read_the_states_of_every_call(reading):
    model, arguments = reading
    plain = model.generate(PROMPT, **GREEDY)
    with rs.attach(model, max_draft_tokens=8, **arguments) as attached:
        assert model.generate(PROMPT, **GREEDY).tolist() == plain.tolist()
    names = [source.name for source in attached.stats.sources if source.drafted]
    assert "HiddenStateDrafts" in names


class Unsure(TwoRightTokens):
    """Drafts right tokens, with estimates that fall short of a head's."""

    def draft(self, budget, call):
        tree = super().draft(budget, call)
        return rs.DraftTree(tree.tokens, tree.parents, np.array([0.05, 0.02])[: len(tree)])


@pytest.mark.parametrize("attached", [True, False])
def test_later_calls_know_what_its_drafts_are_worth(reading, models_by_type, tmp_path, attached):
    """Random heads, which are sure and wrong, first displace what the other source drafts."""
    model, arguments = reading
    if arguments == BY_LAYERS:  # those have learned the text
        model = with_mtp(models_by_type("llama"), 3, tmp_path)
    plain = model.generate(PROMPT, **GREEDY)
    drafter = Unsure(plain)
    drafting = {"max_draft_tokens": 2, **arguments}
    named = {} if attached else {"candidate_generator": drafter, **drafting}
    passes = []
    with rs.attach(model, drafter, **drafting) if attached else nullcontext():
        for _ in range(3):
            assert model.generate(PROMPT, **named, **GREEDY).tolist() == plain.tolist()
            passes.append(drafter.stats.forward_passes)
    assert passes[2] <= passes[1] < passes[0]


def test_later_calls_draft_by_the_assistants_present_settings():
    model, assistant = gemma_with_assistant()

    def drafted(drafter: rs.Drafter) -> int:
        drafting = {"candidate_generator": drafter, "assistant_model": assistant}
        model.generate(PROMPT, max_draft_tokens=12, **drafting, **GREEDY)
        return drafter.stats.drafted

    drafter = rs.ReferenceCopy()
    assistant.generation_config.num_assistant_tokens = 2
    few = drafted(drafter)
    assistant.generation_config.num_assistant_tokens = 6
    assert few < drafted(drafter)


def test_states_that_wait_hold_the_shared_keys_of_the_last_pass_alone():
    """They may be copies of the whole text."""
    model, assistant = gemma_with_assistant()
    source = HiddenStateDrafts(hidden_state_generator(model, assistant_model=assistant))
    source.begin(PROMPT[0].numpy(), model.config.vocab_size)
    alive = []
    for length in range(PROMPT.shape[1], PROMPT.shape[1] + 4):
        keys = torch.zeros(1, 2, length, 8)
        alive.append(weakref.ref(keys))
        states = torch.zeros(1, length if length == PROMPT.shape[1] else 1, 32)
        shared = {"full_attention": (keys, keys)}
        source.observe(Observation(np.array([5]), states=States((states,), length - 1, shared)))
    del keys, shared
    assert [each() is None for each in alive] == [True] * 3 + [False]


class Raises(LogitsProcessor):
    """Raises an exception at the fourth token."""

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] == PROMPT.shape[1] + 3:
            raise LookupError
        return scores


@pytest.mark.parametrize("new_tokens", [1, 2, 24])
def test_calls_of_any_length_are_right_after_one_that_raised(reading, new_tokens):
    model, arguments = reading
    raising = {"candidate_generator": "auto", "logits_processor": [Raises()], **arguments}
    with pytest.raises(LookupError):
        model.generate(PROMPT, max_draft_tokens=12, **raising, **GREEDY)
    for prompt in (PROMPT, PROMPT[:, :1]):
        options = {"max_draft_tokens": 12, "max_new_tokens": new_tokens}
        assert_lossless(model, "auto", prompt, drafting=arguments, **options)


def test_a_string_is_joined_with_a_generator(fresh_llama):
    assert assert_lossless(fresh_llama, "auto" | Clairvoyant(fresh_llama)).mat > 2


def test_what_does_not_fit_the_model_is_refused_by_its_argument(fresh_llama):
    options = {"candidate_generator": "auto", **GREEDY}
    with pytest.raises(ValueError, match="`use_mtp=True` does not fit a LlamaForCausalLM; leave"):
        fresh_llama.generate(PROMPT, use_mtp=True, **options)
    options |= {"assistant_model": fresh_llama, "speculation_type": "dflash"}
    with pytest.raises(ValueError, match="`assistant_model` does not fit a LlamaForCausalLM"):
        fresh_llama.generate(PROMPT, **options)


def test_in_a_running_batch_it_reads_the_states_of_a_text_that_is_alone(fresh_llama, caplog):
    """While another shares its passes the other sources draft, which a warning says once."""
    caplog.set_level(logging.WARNING, logger="hf_refspec")
    batch = rs.RunningBatch(fresh_llama, max_draft_tokens=3)

    def added(ids, max_new_tokens):
        options = {**GREEDY, "max_new_tokens": max_new_tokens}
        plain = fresh_llama.generate(ids, **options)
        seen = []
        blend = Prophet(plain, 0.6) | Recorder(seen)
        return plain, batch.add(inputs=ids, candidate_generator=blend, **options), seen

    plain, text, seen = added(PROMPT, 60)
    for _ in range(6):
        batch.step()
    other_plain, other_text, _ = added(PROMPT.flip(1), 12)
    finish(batch)
    assert text.sequences.tolist() == plain.tolist()
    assert other_text.sequences.tolist() == other_plain.tolist()
    expected = torch.stack(fresh_llama(plain, output_hidden_states=True).hidden_states)
    end, gaps = 0, []
    for ids, positions, states, _ in seen:
        assert ids[0] == plain[0, positions[0]].tolist()
        last = positions[0, -1].item()
        begin = last - states.shape[2]
        gaps.append(begin - end)
        end = last
        torch.testing.assert_close(states, expected[:, :, begin:end], rtol=1e-4, atol=1e-4)
    assert len([gap for gap in gaps if gap]) == 1 and min(gaps) == 0 and end > 60
    assert caplog.text.count("nothing is drafted from hidden states: several texts") == 1


def test_of_a_prompt_that_is_read_in_pieces_it_reads_the_states_of_the_last(fresh_llama):
    batch = rs.RunningBatch(fresh_llama, prefill_tokens=4, max_draft_tokens=3)
    plain = fresh_llama.generate(PROMPT, **GREEDY)
    seen = []
    text = batch.add(inputs=PROMPT, candidate_generator=Recorder(seen), **GREEDY)
    finish(batch)
    assert text.sequences.tolist() == plain.tolist()
    ids, _, states, _ = seen[0]
    first = PROMPT.shape[1] - 1  # eight tokens in two pieces, and then the last one
    assert states.shape[2] == 1 and ids == plain[:, first : first + 2].tolist()


class Scripted(CandidateGenerator):
    """Drafts three tokens of the target text, the third of them wrong at every other step."""

    def __init__(self, target_ids):
        self.target_ids = target_ids
        self.asked = []
        self.updates = []

    def get_candidates(self, input_ids, **kwargs):
        self.asked.append(input_ids[0].tolist())
        length = input_ids.shape[1]
        draft = self.target_ids[:, length : length + 3].clone()
        if len(self.asked) % 2 and draft.shape[1] == 3:
            draft[0, 2] = (draft[0, 2] + 1) % 97
        return torch.cat([input_ids, draft], dim=-1), None

    def update_candidate_strategy(self, input_ids, scores, num_matches):
        self.updates.append((input_ids[0].tolist(), scores.clone(), num_matches))


def test_it_receives_the_text_the_matches_and_the_scores_of_its_candidates(llama):
    plain = llama.generate(PROMPT, **GREEDY)
    generator = Scripted(plain)
    assert_lossless(llama, generator)
    ids = plain[0].tolist()
    length = PROMPT.shape[1] + 1
    for step, (asked, update) in enumerate(zip(generator.asked, generator.updates, strict=True)):
        assert asked == ids[:length]
        new_ids, scores, matches = update
        length = min(length + (3 if step % 2 == 0 else 4), len(ids))
        assert new_ids == ids[:length]
        assert matches == len(new_ids) - len(asked) - 1
        with torch.no_grad():
            expected = llama(torch.tensor([new_ids[:-1]])).logits[:, -matches - 1 :]
        torch.testing.assert_close(scores[:, : matches + 1], expected, rtol=1e-3, atol=1e-4)
        assert scores.shape[1] == 1 + min(3, len(ids) - len(asked) - 1) or length == len(ids)


def test_its_drafts_are_cut_to_the_budget(llama):
    generator = Scripted(llama.generate(PROMPT, **GREEDY))
    assert_lossless(llama, generator, max_draft_tokens=1)
    assert max(scores.shape[1] for _, scores, _ in generator.updates) == 2


class Sure(Scripted):
    """Drafts a wrong third token, and gives the logits of its tokens along."""

    def get_candidates(self, input_ids, **kwargs):
        self.asked.append(0)
        candidate_ids, _ = super().get_candidates(input_ids)
        draft = candidate_ids[0, input_ids.shape[1] :]
        logits = torch.zeros(1, len(draft), 97)
        logits[0, torch.arange(len(draft)), draft] = 5.0
        return candidate_ids, logits


def test_its_logits_are_its_estimates(llama):
    chain = CandidateChain(Sure(llama.generate(PROMPT, **GREEDY)))
    with drafter_call(chain, [PROMPT[0].numpy()], 97):
        probs = chain.draft(8, Call()).probs
    each = np.exp(5.0) / (np.exp(5.0) + 96)
    np.testing.assert_allclose(probs, [each, each**2, each**3], rtol=1e-5)


def test_in_a_blend_it_is_told_of_its_own_candidates_alone(llama):
    plain = llama.generate(PROMPT, **GREEDY)
    generator = Scripted(plain)
    assert_lossless(llama, Prophet(plain, accuracy=1.0) | generator, max_draft_tokens=16)
    for step, (ids, scores, matches) in enumerate(generator.updates):
        left = plain.shape[1] - len(ids)
        assert scores.shape[1] == 4 or left == 0
        assert matches == (3 if step % 2 else 2) or left == 0
    assert len(generator.updates) > 1
