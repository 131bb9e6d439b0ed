"""Attention by the package's kernel, beside its twin in plain Python."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from torch.overrides import BaseTorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from hf_refspec import ReferenceCopy
from hf_refspec.kernels import narrow_product, pass_kernels
from hf_refspec.kernels.narrow_attention import BLOCK, PIECE, narrow_attention
from hf_refspec.verification import layouts as packed
from tests.helpers.architectures import small
from tests.helpers.calls import assert_lossless

pytestmark = pytest.mark.skipif(
    not narrow_product.SUPPORTED or pass_kernels._parallel is None, reason="torch attends here"
)

# To short texts too, as in passes that compare.
attend_narrowly = partial(pass_kernels.attend_narrowly, least_slots=0)

# Rows, heads, heads of keys, tokens, slots, dimensions of keys and of values.
SHAPES = [
    (1, 4, 2, 3, 20, 8, 8),
    (1, 8, 8, 1, BLOCK, 16, 16),
    (2, 6, 1, 5, 2 * BLOCK + 1, 12, 20),
    (3, 2, 2, 32, 5, 5, 3),
    (1, 3, 3, 2, 2 * PIECE + 70, 4, 4),
]


@pytest.fixture(autouse=True)
def compiled(monkeypatch):
    narrow_attention.compile()
    monkeypatch.delenv("HF_REFSPEC_NARROW_PRODUCTS", raising=False)
    threads = torch.get_num_threads()
    with torch.no_grad():
        yield
    torch.set_num_threads(threads)


def dot(one, other):
    return sum(a * b for a, b in zip(one, other, strict=True))


def attention(query, keys, values, mask, scale):
    """The twin: attention of the tokens of one head of one row."""
    outputs = []
    for token, sees in zip(query, mask, strict=True):
        seen = [slot for slot, is_seen in enumerate(sees) if is_seen]
        scores = [scale * dot(token, keys[slot]) for slot in seen]
        weights = [math.exp(score - max(scores)) for score in scores]
        columns = zip(*(values[slot] for slot in seen), strict=True)
        outputs.append([dot(weights, column) / sum(weights) for column in columns])
    return outputs


def operands(shape, dtype=torch.float32, seed=0):
    """Queries, keys and values that are parts of longer blocks, and a mask."""
    rows, heads, key_heads, tokens, slots, key_dim, value_dim = shape
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(rows, tokens, heads, key_dim, generator=generator).transpose(1, 2)
    keys = torch.randn(rows, key_heads, slots + 9, key_dim, generator=generator)
    values = torch.randn(rows, key_heads, slots + 9, value_dim, generator=generator)
    mask = torch.rand(rows, tokens, slots, generator=generator) < 0.7
    mask[:, :, -1] = True
    behind = slice(4, 4 + slots)
    return query.to(dtype), keys.to(dtype)[:, :, behind], values.to(dtype)[:, :, behind], mask


def whole(keys):
    return np.array([[0, keys.shape[2]]] * len(keys))


@pytest.mark.parametrize("dtype", pass_kernels.DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("hides", [False, True])
def test_it_is_that_of_plain_python_but_for_rounding(shape, dtype, hides):
    query, keys, values, mask = operands(shape, dtype)
    attended = attend_narrowly(query, keys, values, mask if hides else None, whole(keys), 0.3)
    mask = (mask | (not hides)).tolist()
    groups = shape[1] // shape[2]
    query, keys, values = (
        query.tolist(),
        *(each.repeat_interleave(groups, 1).tolist() for each in (keys, values)),
    )
    wanted = [
        [attention(*of_head, mask[row], 0.3) for of_head in zip(*of_row, strict=True)]
        for row, of_row in enumerate(zip(query, keys, values, strict=True))
    ]
    assert attended.dtype == dtype
    torch.testing.assert_close(attended, torch.tensor(wanted).to(dtype))


def test_the_bits_of_a_query_depend_on_its_row_alone():
    shape = (2, 6, 2, 7, PIECE + 2 * BLOCK + 3, 16, 16)
    query, keys, values, mask = operands(shape)
    slots = shape[4]
    padding = BLOCK // 2 + 1  # which hides the first slots of the second row
    ends = np.array([[0, slots], [padding, slots]])
    mask[1, :, :padding] = False
    together = attend_narrowly(query, keys, values, mask, ends, None)
    for n_threads in (1, 3):
        torch.set_num_threads(n_threads)
        for token in range(shape[3]):
            one = slice(token, token + 1)
            for row, start in ((0, 0), (1, padding)):
                alone = attend_narrowly(
                    query[row : row + 1, :, one],
                    keys[row : row + 1, :, start:],
                    values[row : row + 1, :, start:],
                    mask[row : row + 1, one, start:],
                    np.array([[0, slots - start]]),
                    None,
                )
                assert torch.equal(alone, together[row : row + 1, :, one])


def test_slots_that_are_hidden_or_behind_the_end_do_not_matter():
    query, keys, values, mask = operands((1, 4, 2, 3, 200, 8, 8))
    mask[:, :, 50:60] = False
    ends = np.array([[0, 190]])
    before = attend_narrowly(query, keys, values, mask, ends, None)
    keys[:, :, 50:60], values[:, :, 50:60] = 100, -100
    keys[:, :, 190:], values[:, :, 190:] = torch.nan, torch.nan
    assert torch.equal(attend_narrowly(query, keys, values, mask, ends, None), before)


def test_large_scores_do_not_overflow():
    query, keys, values, _ = operands((1, 1, 1, 2, 100, 8, 8))
    attended = attend_narrowly(100 * query, 100 * keys, values, None, whole(keys), 1.0)
    best = (query @ keys.transpose(2, 3)).argmax(-1)[0, 0]
    torch.testing.assert_close(attended[0, 0], values[0, 0, best])


@pytest.mark.parametrize("number", [1e16, 1e20, math.nan])
def test_a_query_without_a_finite_score_leaves_the_others_alone(number):
    query, keys, values, _ = operands((1, 4, 2, 3, 20, 8, 8))
    query[0, 1, 1] = number
    keys[0, 0] = -1e15 * keys[0, 0].abs()
    attended = attend_narrowly(query, keys, values, None, whole(keys), 1.0)
    repeated = (each.repeat_interleave(2, dim=1) for each in (keys, values))
    wanted = torch.nn.functional.scaled_dot_product_attention(query, *repeated, scale=1.0)
    torch.testing.assert_close(attended, wanted, equal_nan=True)


class Unchanged(TorchDispatchMode):
    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        return operation(*args, **(kwargs or {}))


LEFT_TO_TORCH = {
    "33 tokens": lambda q, k, v: (q.repeat(1, 1, 11, 1), k, v),
    "float64": lambda q, k, v: (q.double(), k.double(), v.double()),
    "float16": lambda q, k, v: (q.half(), k.half(), v.half()),
    "two types": lambda q, k, v: (q, k.bfloat16(), v.bfloat16()),
    "meta": lambda q, k, v: (q.to("meta"), k.to("meta"), v.to("meta")),
    "other strides": lambda q, k, v: (q, k.mT.contiguous().mT, v),
}


def without_mask(query, keys, values):
    return attend_narrowly(query, keys, values, None, whole(keys), None)


@pytest.mark.parametrize("name", LEFT_TO_TORCH)
def test_other_operands_are_left_to_torch(name):
    assert without_mask(*LEFT_TO_TORCH[name](*operands(SHAPES[0])[:3])) is None


@pytest.mark.parametrize(
    "around",
    [
        Unchanged,
        BaseTorchFunctionMode,
        torch.profiler.profile,
        torch.enable_grad,
        lambda: torch.autocast("cpu", torch.bfloat16),
    ],
)
def test_gradients_autocast_and_what_others_must_see_are_left_to_torch(around):
    query, keys, values, _ = operands(SHAPES[0])
    with around():
        assert without_mask(query, keys, values) is None
    assert without_mask(query, keys, values) is not None


def test_one_environment_variable_turns_it_off(monkeypatch):
    monkeypatch.setenv("HF_REFSPEC_NARROW_PRODUCTS", "0")
    assert without_mask(*operands(SHAPES[0])[:3]) is None


def test_until_the_kernel_is_compiled_torch_attends(monkeypatch):
    monkeypatch.setattr(narrow_attention, "_compiled", None)
    assert without_mask(*operands(SHAPES[0])[:3]) is None


@pytest.mark.parametrize(("slots", "attends"), [(511, False), (512, True)])
def test_short_texts_are_left_to_torch(slots, attends):
    query, keys, values, _ = operands((1, 4, 2, 3, slots, 8, 8))
    attended = pass_kernels.attend_narrowly(query, keys, values, None, whole(keys), None)
    assert (attended is not None) == attends


def test_the_first_pass_of_a_call_shows_that_it_suits_the_model(monkeypatch):
    """So do those of its probe."""
    found, real = [], packed.attend_narrowly

    def attend(*operands):
        attended = real(*operands)
        found.append(attended is not None)
        return attended

    monkeypatch.setattr(packed, "attend_narrowly", attend)
    model = small("llama", head_dim=16)
    assert_lossless(model, lambda plain: ReferenceCopy(plain.tolist()), max_draft_tokens=3)
    first = found.index(False)
    assert first >= 2 and not any(found[first:])
