"""The random numbers of tokens to come are known before they are drawn."""

import pytest
import torch

from hf_refspec.generation.row import ColumnNoise


@pytest.mark.parametrize("vocab_size", [5, 97, 49_152])
@pytest.mark.parametrize("own", [False, True])
def test_multinomial_draws_the_argmax_by_noise_that_is_drawn_ahead(vocab_size, own):
    generator = torch.Generator().manual_seed(3) if own else None
    torch.manual_seed(4)
    probs = torch.randn(16, vocab_size).mul(2).softmax(dim=-1)
    ahead = ColumnNoise(1, probs.device, generator)
    foreseen = [int((probs[i] / ahead.of(0, i, vocab_size)).argmax()) for i in range(16)]
    drawn = [int(torch.multinomial(each[None], 1, generator=generator)) for each in probs]
    assert drawn == foreseen
