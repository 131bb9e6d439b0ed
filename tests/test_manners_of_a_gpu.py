"""The pretended device treats the host as a GPU does: it refuses what CUDA refuses, and waits where
CUDA waits."""

import pytest
import torch

from tests.helpers.devices import DEVICE

pytestmark = pytest.mark.skipif(
    DEVICE != "pretended", reason="test_pretended_device.py runs it on that device"
)
MIXED = "same device|on either cpu|either on cpu|device type for generator"


@pytest.fixture
def traffic():
    from tests.helpers.pretended_device import traffic

    return traffic


@pytest.fixture
def there() -> torch.Tensor:
    return torch.arange(12.0).reshape(3, 4).to(DEVICE)


HERE = torch.arange(12.0).reshape(3, 4)
ROW, MASK = torch.tensor([0, 2]), HERE > 5


@pytest.mark.parametrize(
    "mix",
    {
        "a sum": lambda there: there + HERE,
        "the other sum": lambda there: HERE + there,
        "a product": lambda there: there @ HERE.T,
        "cat": lambda there: torch.cat([there, HERE]),
        "where": lambda there: torch.where(MASK, there, there),
        "a mask to fill": lambda there: there.masked_fill(MASK, 0.0),
        "index_select": lambda there: there.index_select(0, ROW),
        "gather": lambda there: there.gather(1, torch.zeros(3, 1, dtype=torch.int64)),
        "index_copy": lambda there: there.index_copy_(0, ROW, there[:2].clone()),
        "embedding": lambda there: torch.nn.functional.embedding(ROW, there),
        "an index of the device": lambda there: HERE[ROW.to(DEVICE)],
        "values of the host": lambda there: there.__setitem__(ROW.to(DEVICE), HERE[:2]),
        "attention": lambda there: torch.nn.functional.scaled_dot_product_attention(
            there[None], there[None], there[None], attn_mask=torch.ones(3, 3, dtype=torch.bool)
        ),
        "a convolution": lambda there: torch.nn.functional.conv1d(there, HERE[:, None], groups=3),
        "numbers of the host": lambda there: there.exponential_(generator=torch.Generator()),
    }.items(),
    ids=lambda mix: mix[0],
)
def test_tensors_of_the_host_are_refused(there, mix):
    with pytest.raises(RuntimeError, match=MIXED):
        mix[1](there)


def test_numbers_without_dimensions_may_be_on_the_host(there, traffic):
    with traffic() as seen:
        result = torch.where(there > 5, there * torch.tensor(2.0), torch.tensor(0.0))
    assert (seen.waits, seen.uploads) == (0, 0)
    assert result.tolist() == torch.where(HERE > 5, HERE * 2, 0.0).tolist()


@pytest.mark.parametrize(
    ("act", "waits", "uploads", "bytes_up", "bytes_down"),
    [
        (lambda there: there.mean(dim=0, keepdim=True)[:, 1:].contiguous().topk(2), 0, 0, 0, 0),
        (lambda there: there.sum().item(), 1, 0, 0, 4),
        (lambda there: bool((there > 5).any()), 1, 0, 0, 1),
        (lambda there: there.tolist(), 1, 0, 0, 48),
        (lambda there: there.to("cpu", non_blocking=True), 1, 0, 0, 48),
        (lambda there: there.nonzero(), 1, 0, 0, 0),
        (lambda there: there[there > 5], 1, 0, 0, 0),
        (lambda there: torch.equal(there, there + 1), 1, 0, 0, 0),
        (lambda there: HERE.to(DEVICE, non_blocking=True), 0, 1, 48, 0),
        (lambda there: HERE.to(DEVICE), 1, 1, 48, 0),
        (lambda there: torch.tensor([1, 2], device=DEVICE), 1, 1, 16, 0),
        (lambda there: torch.full((2, 3), 7, device=DEVICE), 0, 0, 0, 0),
        (lambda there: there[ROW], 1, 1, 16, 0),
        (lambda there: there[[0, 2]], 1, 1, 16, 0),
        (lambda there: there.__setitem__(ROW, 1.0), 1, 1, 16, 0),
        (lambda there: there[1:, ::2].clone(), 0, 0, 0, 0),
        (lambda there: torch.pretended.synchronize(), 1, 0, 0, 0),
    ],
)
def test_waits_and_copies_are_counted(there, traffic, act, waits, uploads, bytes_up, bytes_down):
    with traffic() as seen:
        act(there)
    assert (seen.waits, seen.uploads) == (waits, uploads)
    assert (seen.bytes_up, seen.bytes_down) == (bytes_up, bytes_down)


def test_views_share_their_memory_and_outputs_may_grow(there):
    there.view(-1)[3:5].zero_()
    there.T.select(0, 1).fill_(9)
    there[:, 2:].unfold(1, 2, 1).add_(1)
    here = HERE.clone()
    here.view(-1)[3:5].zero_()
    here.T.select(0, 1).fill_(9)
    here[:, 2:].unfold(1, 2, 1).add_(1)
    assert there.tolist() == here.tolist()
    out = torch.empty(0, device=DEVICE)
    torch.cat([there, there], out=out)
    assert out.shape == (6, 4)


def test_random_numbers_are_the_device_s_own(there):
    torch.manual_seed(3)
    drawn = torch.rand(4, device=DEVICE).tolist()
    state = torch.pretended.get_rng_state()
    torch.manual_seed(3)
    torch.rand(9)  # of the host
    assert torch.rand(4, device=DEVICE).tolist() == drawn
    assert torch.equal(torch.pretended.get_rng_state(), state)
    own = torch.Generator(DEVICE).manual_seed(3)
    assert own.device.type == DEVICE
    assert torch.rand(4, device=DEVICE, generator=own).tolist() == drawn
    assert torch.equal(torch.pretended.get_rng_state(), state)


def test_integers_are_counted_in_bins_as_on_cuda():
    counts = torch.tensor([0, 2, 2, 3], device=DEVICE, dtype=torch.int32).histc(4, 0, 3)
    assert counts.tolist() == [1, 0, 2, 1] and counts.dtype == torch.int32


def test_pinned_memory_must_not_be_written_before_a_wait(there):
    staging = torch.zeros(4, pin_memory=True)
    assert staging.is_pinned() and not torch.zeros(4).is_pinned()
    staging.to(DEVICE, non_blocking=True)
    there.sum().item()  # by now it is through
    staging += 1
    staging[:2].to(DEVICE, non_blocking=True)
    staging += 1
    with pytest.raises(RuntimeError, match="pinned memory was written"):
        there.sum().item()
