"""The random numbers of several sampled rows, as plain decoding draws them.

`torch.multinomial` chooses the argmax of `probs / noise`; the noise is exponential and has nothing
to do with the probabilities. Plain decoding draws it once for each column of new tokens, for all
rows at once, those that have ended too. With drafts rows come to a column in different passes: each
takes its own part of the column's noise then, so that the same seed gives the same text. Drafters
may know the noise of columns to come, see [`~row.Row.noise_ahead`].
"""

from __future__ import annotations

import torch

from ..verification.random_state import random_numbers

# The size of the noise that is kept. A row that is far behind the others draws its columns again.
_KEPT_BYTES = 1 << 26


class ColumnNoise:
    """The noise of several rows, from a generator's state on, by default the device's own."""

    def __init__(
        self, rows: int, device: torch.device, generator: torch.Generator | None = None
    ) -> None:
        self._rows = rows
        self._device = device
        self._generator = torch.Generator(device)
        state = random_numbers(device).get_rng_state if generator is None else generator.get_state
        self._states = [state()]  # before each column
        self._kept: dict[int, torch.Tensor] = {}
        self._vocab_size = 0  # of the logits, which may be more than a drafter knows of

    def of(self, row: int, column: int, vocab_size: int) -> torch.Tensor:
        """A row's noise `(vocab_size,)`, float32, for its new token number `column`. The first call
        decides the size of all."""
        self._vocab_size = self._vocab_size or vocab_size
        for missing in range(len(self._states) - 1, column):
            self._draw(missing)
        if column not in self._kept:
            self._draw(column)
        return self._kept[column][row]

    def _draw(self, column: int) -> None:
        noise = torch.empty((self._rows, self._vocab_size), device=self._device)
        if len(self._kept) >= max(1, _KEPT_BYTES // noise.nbytes):
            del self._kept[min(self._kept)]
        self._generator.set_state(self._states[column])
        self._kept[column] = noise.exponential_(generator=self._generator)
        if column == len(self._states) - 1:
            self._states.append(self._generator.get_state())

    def end(self, columns: int) -> None:
        """Leaves the device's generator where plain decoding of this number of columns does."""
        random_numbers(self._device).set_rng_state(self._states[columns])
