"""How often the host waits for the device in a pass, and what crosses between them.

It runs on the pretended device, which counts (see `test_pretended_device.py`). In `tests`,

    python test_traffic_with_a_gpu.py [--places]

prints the table, and with `--places` the lines behind each count.
"""

import argparse
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
import transformers

import hf_refspec as rs
from tests.helpers.architectures import small
from tests.helpers.devices import DEVICE
from tests.helpers.drafters import Prophet, Prophets

pytestmark = pytest.mark.skipif(
    DEVICE != "pretended", reason="test_pretended_device.py runs it on a device that counts"
)
VOCABULARY = 16_000  # one byte for each of its tokens is more than all else that crosses at once
NODES = 8
PLAIN, PROPHET, LOOK_UP = "plain", "prophet", "look-up"
# Of a short call and a long one, which differ by passes alone.
NEW_TOKENS = {PLAIN: (20, 100), PROPHET: (20, 100), LOOK_UP: (20, 60)}


@dataclass(frozen=True, eq=False)
class Case:
    """A kind of call, with the most waits and uploads that one of its passes may take."""

    name: str
    rows: int = 1
    waits: int = 1
    uploads: int = 2
    model_type: str = "llama"
    attention: str = "sdpa"
    verification: str = "auto"
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    @property
    def verified(self) -> str:
        """How its drafts should be verified."""
        static = "cache_implementation" in self.options
        return "static" if static else self.verification.replace("auto", "tree")

    def inputs(self) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(3, 97, (self.rows, 12), generator=generator)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


GREEDY = {"do_sample": False, "eos_token_id": None}
STATIC = {"cache_implementation": "static", "disable_compile": True}
SAMPLED = {"do_sample": True, "top_k": 0, "temperature": 0.3}
PROCESSED = {"do_sample": True, "top_k": 50, "top_p": 0.9}
CASES = [
    Case("one row"),
    Case("three rows", rows=3),
    Case("chain", verification="chain"),
    Case("static", options=STATIC),
    Case("static, three rows", rows=3, options=STATIC),
    Case("sampled", waits=2, options=SAMPLED),
    Case("sampled, three rows", rows=3, waits=2, options=SAMPLED),
    Case("processors, sampled", waits=2, options=PROCESSED),
    Case("eager attention", attention="eager"),
    Case("eager attention, three rows", rows=3, attention="eager"),
    Case("gpt2", model_type="gpt2"),
    Case("mistral, three rows", rows=3, model_type="mistral"),
    Case("gemma2, three rows", rows=3, model_type="gemma2", attention="eager"),
    Case("deepseek_v3, three rows", rows=3, model_type="deepseek_v3"),
]
RARE = 0.1  # blocks that grow, rows that leave


@dataclass(frozen=True)
class PerPass:
    """Averages over passes, without what a call does once.

    Attributes:
        largest (`int`): The bytes of the largest copy of a whole call, in either direction.
        places (`dict[tuple[str, str], float]`): The lines behind the counts.
    """

    waits: float
    uploads: float
    bytes_up: float
    bytes_down: float
    largest: int
    places: dict[tuple[str, str], float]


@cache
def model_of(model_type: str, attention: str) -> transformers.PreTrainedModel:
    size = {"vocab_size": VOCABULARY} if model_type == "llama" else {}
    model = small(model_type, **size).to(DEVICE)
    model.set_attn_implementation(attention)
    return model


def new_drafter(kind: str, case: Case, plain: torch.Tensor) -> rs.Drafter:
    if kind == LOOK_UP:
        return rs.ReferenceCopy() | rs.TokenRecycling()
    if case.rows > 1:
        return Prophets(case.inputs(), plain, 0.9)
    return Prophet(plain, 0.9)


def generate(case: Case, new_tokens: int, **drafting: Any) -> torch.Tensor:
    model = model_of(case.model_type, case.attention)
    given = {name: value.to(DEVICE) for name, value in case.inputs().items()}
    torch.manual_seed(0)
    options = {**GREEDY, **case.options, "max_new_tokens": new_tokens}
    return model.generate(**given, **options, **drafting)


@cache
def decoded_plainly(case: Case, new_tokens: int):
    """The ids of plain decoding and what crossed meanwhile."""
    from tests.helpers.pretended_device import traffic

    generate(case, 2)  # the first call of a model also uploads what later ones find there
    with traffic() as seen:
        return generate(case, new_tokens), seen


@cache
def measured(case: Case, kind: str) -> PerPass:
    """Counts two calls, and compares their ids with plain decoding."""
    from tests.helpers.pretended_device import traffic

    counts, passes = [], []
    for new_tokens in NEW_TOKENS[kind]:
        plain, seen = decoded_plainly(case, new_tokens)
        number = new_tokens
        if kind != PLAIN:
            drafter = new_drafter(kind, case, plain.cpu())
            drafting = {"max_draft_tokens": NODES, "verification": case.verification}
            drafting["candidate_generator"] = drafter
            if not counts:
                generate(case, new_tokens, **drafting)  # which probes the model
            with traffic() as seen:
                ids = generate(case, new_tokens, **drafting)
            assert torch.equal(ids, plain)
            # A pass that raises is decoded plainly, with the same ids.
            assert drafter.stats.verification == case.verified
            number = drafter.stats.forward_passes
        counts.append(seen)
        passes.append(number)
    short, long = counts
    more = passes[1] - passes[0]
    names = "waits", "uploads", "bytes_up", "bytes_down"
    differences = (getattr(long, name) - getattr(short, name) for name in names)
    return PerPass(
        *(difference / more for difference in differences),
        largest=max(long.largest_up, long.largest_down),
        places={
            place: (count - short.places[place]) / more for place, count in long.places.items()
        },
    )


@pytest.mark.parametrize("kind", [PLAIN, PROPHET, LOOK_UP])
@pytest.mark.parametrize("case", [case for case in CASES if case.model_type == "llama"], ids=str)
def test_nothing_of_the_size_of_the_vocabulary_crosses(case, kind):
    assert measured(case, kind).largest < VOCABULARY


# With GPT-2 transformers looks for padding in the input ids of each step.
@pytest.mark.parametrize("case", [case for case in CASES if case.model_type != "gpt2"], ids=str)
def test_plain_decoding_waits_once_a_token_and_uploads_nothing(case):
    plain = measured(case, PLAIN)
    assert (plain.waits, plain.uploads) == (1, 0)


@pytest.mark.parametrize("kind", [PROPHET, LOOK_UP])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_pass_waits_once_and_once_more_to_sample_and_uploads_its_arguments_together(case, kind):
    seen = measured(case, kind)
    assert seen.waits <= case.waits + RARE, seen.places
    assert seen.uploads <= case.uploads + RARE, seen.places


def main() -> None:
    parser = argparse.ArgumentParser(description="Prints what a pass takes on a pretended device.")
    parser.add_argument("cases", nargs="*", help="their names; default: all")
    parser.add_argument("--places", action="store_true", help="prints the lines behind each count")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    print("| call | drafts | waits | uploads | bytes up | bytes down | largest copy |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for case in CASES:
        for kind in (PLAIN, PROPHET, LOOK_UP):
            if args.cases and case.name not in args.cases:
                continue
            seen = measured(case, kind)
            counts = f"{seen.waits:.2f} | {seen.uploads:.2f}"
            sizes = f"{seen.bytes_up:.0f} | {seen.bytes_down:.0f} | {seen.largest}"
            print(f"| {case} | {kind} | {counts} | {sizes} |", flush=True)
            for (event, line), count in sorted(seen.places.items()) if args.places else ():
                if count > 0:
                    print(f"    {count:5.2f} {event:8} {line}")


if __name__ == "__main__":
    DEVICE = "pretended"
    main()
