"""What a call of `generate` has returned, to be compared with another call's."""

from __future__ import annotations

from dataclasses import dataclass, field

# Two logits so near, relative to their size, are a tie: a pass over several tokens may round it
# either way, transformers' own look-up as well as ours.
ROUNDING = 1e-5


def tied(one: float, other: float) -> bool:
    """Whether two logits are equal but for rounding, in float32."""
    return abs(one - other) <= ROUNDING * max(abs(one), abs(other))


@dataclass(frozen=True)
class Output:
    """The new tokens of a call.

    Where a text was forced these say nothing: then they are those that the model would have chosen
    at each place by itself, after the forced text so far.

    Attributes:
        tokens (`list[int]`): See above.
        logits (`list[float]`, *optional*): Theirs, where a text was forced.
        passages (`list[int]`): What was retrieved, step by step.
    """

    tokens: list[int]
    logits: list[float] | None = None
    passages: list[int] = field(default_factory=list)

    def differences(self, plain: Output) -> list[int]:
        """The places at which these are other tokens than those of plain decoding.

        Where a text was forced each place stands for itself; else all after the first differ.
        """
        shorter, longer = sorted((len(self.tokens), len(plain.tokens)))
        pairs = enumerate(zip(self.tokens, plain.tokens, strict=False))
        places = [i for i, (one, other) in pairs if one != other]
        return [*places, *range(shorter, longer)]

    def beyond_rounding(self, plain: Output) -> list[int]:
        """Those of the differences that no tie explains; all where logits are not known."""
        places = self.differences(plain)
        if self.logits is None or plain.logits is None or len(self.tokens) != len(plain.tokens):
            return places
        return [i for i in places if not tied(self.logits[i], plain.logits[i])]
