"""Random calls of `generate`: drawn as plain data, and made of one side or the other."""

import itertools
import random
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from transformers import DynamicCache, LogitsProcessor, StaticCache
from transformers.cache_utils import Cache, DynamicLayer
from transformers.generation import stopping_criteria

import hf_refspec as rs
from hf_refspec.kernels.narrow_attention import PIECE
from hf_refspec.transformers_names import CACHE_NAME, cache_name
from tests.helpers.calls import Alternating, ListStreamer, StopAtCall, compiled_anywhere

from .decoding_models import VOCAB_SIZE, Last, Side, drafter_of, tokenizer


@dataclass
class Call:
    """What one call is, as plain data. With `drafter` None it is plain on both sides."""

    prompt: torch.Tensor  # ids (rows, n), which follow the last call's if it goes on
    mask: torch.Tensor | None
    # From the last call's cache: with "all" ids, with the "new" ones, or after a "crop" of it.
    goes_on: str | None
    cache: str | None  # what is given instead
    options: dict[str, Any]
    objects: list[str]  # that keep state, of which each side has its own
    drafter: str | None
    reads: bool  # what transformers drafts from hidden states joins it
    drafting: dict[str, Any]  # the options beside it
    attached: str | None  # to what the drafter is attached: the "model", or "all"
    context: str | None  # it runs under "autocast" to bfloat16, or in "inference" mode
    seed: int

    @property
    def rows(self) -> int:
        return len(self.prompt) * self.options.get("num_return_sequences", 1)

    def __str__(self) -> str:
        mask = None if self.mask is None else self.mask.tolist()
        values = {**vars(self), "prompt": self.prompt.tolist(), "mask": mask}
        return ", ".join(f"{name}={value!r}" for name, value in values.items() if value)


@dataclass
class Answer:
    """What came of a call on one side, as far as a caller can see it."""

    error: Exception | None = None
    output: Any = None
    ids: torch.Tensor | None = None
    prompt_length: int = 0
    streamed: list[Any] = field(default_factory=list)
    seen: list[Any] = field(default_factory=list)
    scores: list[torch.Tensor] = field(default_factory=list)
    random_state: torch.Tensor | None = None
    cache: Any = None
    accepted: int = 0


# Drawing

COMPILED = compiled_anywhere(backend="eager")
_OPTIONS: list[tuple[float, Any]] = [
    (0.15, lambda r: {"repetition_penalty": r.choice([0.8, 1.3])}),
    (0.1, lambda r: {"no_repeat_ngram_size": r.choice([1, 2, 3])}),
    (0.04, lambda r: {"encoder_repetition_penalty": 1.4}),
    (0.04, lambda r: {"encoder_no_repeat_ngram_size": 2}),
    (0.05, lambda r: {"bad_words_ids": [[r.randrange(3, 97)], [r.randrange(97), 7]]}),
    (0.05, lambda r: {"suppress_tokens": r.sample(range(10, 97), 30)}),
    (0.03, lambda r: {"begin_suppress_tokens": r.sample(range(10, 97), 60)}),
    (0.03, lambda r: {"sequence_bias": [[[r.randrange(97), r.randrange(97)], 5.0]]}),
    (0.04, lambda r: {"forced_eos_token_id": 2}),
    (0.03, lambda r: {"forced_bos_token_id": 5}),
    (0.05, lambda r: {"min_new_tokens": r.randrange(12)}),
    (0.03, lambda r: {"exponential_decay_length_penalty": (3, 1.5), "eos_token_id": 2}),
    (0.03, lambda r: {"guidance_scale": 1.5}),
    (0.03, lambda r: {"renormalize_logits": True}),
    (0.03, lambda r: {"remove_invalid_values": True}),
    (0.04, lambda r: {"prefill_chunk_size": r.randrange(1, 12)}),
    (0.15, lambda r: {"return_dict_in_generate": True, "output_scores": r.random() < 0.7}),
    (0.1, lambda r: {"return_dict_in_generate": True, "output_logits": True}),
    (0.03, lambda r: {"output_hidden_states": True}),
    (0.03, lambda r: {"output_attentions": True}),
    (0.02, lambda r: {"use_cache": False}),
    (0.01, lambda r: {"num_beams": 2}),
    (0.03, lambda r: {"disable_compile": True}),
    (0.01, lambda r: {"cache_implementation": "static", "compile_config": COMPILED}),
]
_SAMPLING: list[tuple[float, Any]] = [
    (0.4, lambda r: {"temperature": r.choice([0.3, 0.8, 1.7])}),
    (0.3, lambda r: {"top_k": r.choice([0, 2, 10])}),
    (0.3, lambda r: {"top_p": r.choice([0.4, 0.9])}),
    (0.2, lambda r: {"min_p": 0.05}),
    (0.1, lambda r: {"typical_p": 0.7}),
    (0.1, lambda r: {"eta_cutoff": 3e-3}),
    (0.1, lambda r: {"num_return_sequences": 2}),
]
_OBJECTS = {"stateful": 0.1, "counting": 0.05, "together": 0.04, "prefix": 0.06}
_OBJECTS |= {"streamer": 0.1, "positions": 0.04}
_CACHES = {None: 10, "cache_implementation=static": 3, "StaticCache": 2, "DynamicCache": 0.5}
_CACHES |= {"DynamicCache(config)": 3, "cache_implementation=offloaded": 0.05}
_CACHES |= {"cache_implementation=dynamic": 0.3, "cache_implementation=quantized": 0.05}
_CACHES |= {"cache_implementation=offloaded_static": 0.1}
_DRAFTERS = {"auto": 4, "prophet": 10, "noise": 2, "copy": 1, "recycling": 2}
_DRAFTERS |= {"store": 0.7, "sessions": 1, "lookup": 1, "blend": 1.5, "model": 1.5}
_VERIFICATIONS = {"auto": 10, "tree": 1, "chain": 2, "reproducible": 1}


def draw_drafter(rng: random.Random) -> str:
    return _one_of(rng, _DRAFTERS)


def draw_call(rng: random.Random, side: Side, drafter: str | None) -> Call:
    """A call that suits what this side has come to, mostly with a drafter that is given."""
    config = side.inner.config.get_text_config(decoder=True)
    short = side.inner.dtype in (torch.bfloat16, torch.float16)
    options = {"eos_token_id": rng.choice([None, 2, rng.sample(range(97), 8)])}
    options |= _drawn(rng, _OPTIONS)
    options["do_sample"] = rng.random() < 0.3
    if options["do_sample"]:
        options |= _drawn(rng, _SAMPLING)
    goes_on = cache_name = None
    rows = rng.choice([1, 1, 1, 2, 3, 4])
    if side.last is not None and rng.random() < 0.7:
        goes_on, rows = rng.choice(["all", "all", "new", "crop"]), len(side.last.ids)
    else:
        cache_name = _one_of(rng, _CACHES)
    new_tokens = rng.choice([1, 2, *[rng.randrange(1, 32)] * 3])
    objects = [name for name, chance in _OBJECTS.items() if rng.random() < chance]
    if rng.random() < 0.1:
        objects.append("stop strings")
    if rows > 1 and "streamer" in objects and rng.random() < 0.8:
        objects.remove("streamer")  # refused
    words = rng.sample(range(3, VOCAB_SIZE), rng.choice([3, 10, 60]))
    length = rng.randrange(1, 4 if goes_on else 41)
    if not goes_on and rng.random() < 0.06:  # around the pieces of a long text
        length = rng.choice([1, 1, 2]) * PIECE - rng.randrange(30)
    before = side.last.ids.shape[1] if goes_on else 0
    table = getattr(config, "max_position_embeddings", None) or 512
    if table < 100 and rng.random() < 0.3:  # up to the end of the table, or past it
        new_tokens = max(table - before - length + rng.choice([0, 1, 1, 2]), 1)
    prompt = torch.tensor([rng.choices(words, k=length) for _ in range(rows)])
    mask = _draw_mask(rng, prompt) if goes_on is None else None
    if rng.random() < 0.2:
        options["max_length"] = new_tokens + length + before
    elif rng.random() < 0.95:
        options["max_new_tokens"] = new_tokens
    if (cache_name and "=" not in cache_name) or rng.random() < 0.1:
        options["return_dict_in_generate"] = True
    if rng.random() < 0.3:
        drafter = rng.choice([None, draw_drafter(rng)])
    drafting = {
        "max_draft_tokens": rng.choice(["auto", 0, 1, 3, 8, 8, 17, 64, 64]),
        "verification": _one_of(rng, _VERIFICATIONS),
    }
    if short and rng.random() < 0.6:
        drafting["verification"] = "reproducible"
    attached = _one_of(rng, {None: 8, "model": 1.5, "all": 0.5})
    context = _one_of(rng, {None: 90, "autocast": 3, "inference": 5})
    reads = bool(side.reading) and rng.random() < 0.8
    what = prompt, mask, goes_on, cache_name, options, objects, drafter, reads, drafting
    call = Call(*what, attached, context, seed=rng.getrandbits(32))
    if call.rows == 1 and call.seed % 16 == 0:  # its clock counts how often it is asked
        options["max_time"] = call.seed // 16 % 12
    return call


def _drawn(rng: random.Random, table: list[tuple[float, Any]]) -> dict[str, Any]:
    drawn = [option(rng) for chance, option in table if rng.random() < chance]
    return {name: value for each in drawn for name, value in each.items()}


def _one_of(rng: random.Random, weights: dict[Any, float]) -> Any:
    return rng.choices(list(weights), list(weights.values()))[0]


def _draw_mask(rng: random.Random, prompt: torch.Tensor) -> torch.Tensor | None:
    """None, ones, padding on the left, or holes; padding is written into the prompt."""
    mask, kind = torch.ones_like(prompt), rng.choice(["none", "ones", "left", "left", "holes"])
    if kind == "none":
        return None
    rows, length = prompt.shape
    for row in range(rows):
        if kind == "left":
            mask[row, : rng.randrange(length) if rng.random() < 0.7 else 0] = 0
        elif kind == "holes":
            mask[row, rng.sample(range(length), length // 4)] = 0
            mask[row, -1] = 1
    prompt[mask == 0] = 0
    return mask


# Calling


class Recorder(LogitsProcessor):
    """Records what the others have made of the logits."""

    def __init__(self) -> None:
        self.scores: list[torch.Tensor] = []

    def __call__(self, input_ids, scores):
        self.scores.append(scores.clone())
        return scores


def all_have_even(input_ids, scores, **kwargs):
    """Ends a call as soon as each row ends with an even token."""
    return torch.full((len(input_ids),), bool((input_ids[:, -1] % 2 == 0).all()))


def allowed_tokens(row, ids):
    return [token for token in range(3, VOCAB_SIZE) if (token + row + len(ids)) % 3]


CONTEXTS: dict[str | None, Any] = {None: nullcontext, "inference": torch.inference_mode}
CONTEXTS["autocast"] = lambda: torch.autocast("cpu", torch.bfloat16)


def make(side: Side, call: Call, plain: Answer | None = None) -> Answer:
    """Makes the call; with drafts where it is given what plain decoding answered."""
    answer, drafts = Answer(), plain is not None and call.drafter is not None
    recorder, stateful, streamer = Recorder(), Alternating(), ListStreamer()
    criteria = {"counting": StopAtCall(7), "together": all_have_even}
    extras: dict[str, Any] = {
        "stateful": {"logits_processor": [stateful]},
        "prefix": {"prefix_allowed_tokens_fn": allowed_tokens},
        "streamer": {"streamer": streamer},
        "stop strings": {"stop_strings": ["a", "9C", "Q"], "tokenizer": tokenizer()},
    }
    kwargs = {**call.options, "logits_processor": []}
    for name in call.objects:
        kwargs |= extras.get(name, {})
    kwargs["stopping_criteria"] = [criteria[name] for name in criteria if name in call.objects]
    if plain is None:
        kwargs["logits_processor"] = [*kwargs["logits_processor"], recorder]
    if "positions" in call.objects and call.mask is not None:
        kwargs["position_ids"] = (call.mask.cumsum(dim=-1) - 1).clamp(min=0)
    drafter = drafter_of(side, call, plain) if drafts else None
    if drafts and not call.attached:
        kwargs |= {"candidate_generator": drafter, **call.drafting}
        kwargs |= side.reading if call.reads else {}
    elif not drafts and call.drafting["verification"] == "reproducible":
        kwargs["verification"] = "reproducible"  # what drafts are compared with
    try:
        kwargs |= _inputs(side, call) | _cache(side, call)
        torch.manual_seed(call.seed)
        answer.prompt_length = kwargs["input_ids"].shape[1]
        attached: Any = nullcontext()
        if call.attached and drafts:
            model = side.model if call.attached == "model" else None
            drafter = attached = rs.attach(model, drafter, **call.drafting)
        clock = SimpleNamespace(time=itertools.count().__next__)
        counted = mock.patch.object(stopping_criteria, "time", clock)
        with attached, CONTEXTS[call.context](), counted:
            answer.output = side.model.generate(**kwargs)
        answer.accepted = getattr(getattr(drafter, "stats", None), "accepted", 0)
    except Exception as error:
        answer.error = error
    answer.random_state = torch.get_rng_state()
    answer.seen, answer.scores, answer.streamed = stateful.seen, recorder.scores, streamer.puts
    last, side.last = side.last, None
    if answer.error is None:
        tensor = isinstance(answer.output, torch.Tensor)
        answer.ids = answer.output if tensor else answer.output.sequences
        values = kwargs if tensor else answer.output
        answer.cache = values.get(cache_name(values))
        # Without `use_cache` each pass adds all tokens to a given cache once more.
        uses = side.inner.generation_config.use_cache is not False
        if isinstance(answer.cache, Cache) and uses and call.options.get("use_cache", True):
            ids, mask = answer.ids, kwargs.get("attention_mask")
            if call.goes_on == "new" and last:  # it returned the new ids alone
                ids = torch.cat([last.ids[:, :-1], ids], dim=1)
            if mask is not None:  # that of the prompt, for each row that came of it
                mask = mask.repeat_interleave(call.rows // len(mask), dim=0)
            side.last = Last(answer.cache, ids, mask)
    return answer


def _inputs(side: Side, call: Call) -> dict[str, Any]:
    if call.goes_on is None:
        mask = {} if call.mask is None else {"attention_mask": call.mask}
        return {"input_ids": call.prompt.clone(), **mask}
    ids, mask = side.last.ids, side.last.mask
    whole = torch.cat([ids, call.prompt], dim=1)
    if mask is not None or call.goes_on == "new":
        before = torch.ones_like(ids) if mask is None else mask
        mask = torch.ones_like(whole)
        mask[:, : before.shape[1]] = before
    if call.goes_on == "new":
        whole = whole[:, ids.shape[1] - 1 :]  # the last one is not cached
    return {"input_ids": whole} | ({} if mask is None else {"attention_mask": mask})


def _cache(side: Side, call: Call) -> dict[str, Any]:
    is_older_mamba = CACHE_NAME != "cache" and "Mamba" in type(side.inner).__name__
    name = "cache_params" if is_older_mamba else CACHE_NAME
    if call.goes_on is not None:
        cache = side.last.cache
        if call.goes_on == "crop" and all(type(layer) is DynamicLayer for layer in cache.layers):
            cache.crop(min(side.last.ids.shape[1] - 3 - cache.get_seq_length(), 0))
        return {name: cache}
    if call.cache is None:
        return {}
    if call.cache.startswith("cache_implementation="):
        return {"cache_implementation": call.cache.partition("=")[2]}
    config = side.inner.config.get_text_config(decoder=True)
    if call.cache == "StaticCache":
        return {name: StaticCache(config=config, max_cache_len=call.prompt.shape[1] + 48)}
    config = {"config": config} if call.cache == "DynamicCache(config)" else {}
    return {name: DynamicCache(**config)}
