"""The ranks of a model: processes that hold parts of it and run every forward pass together.

With tensor parallelism all ranks decode the same text, and a pass that one of them runs alone waits
for the others forever. The first rank decides all that depends on a process: drafts and their
number, by its own tables and clock; the verifier; sampled tokens; stops. It tells the others by a
sum over all ranks, to which each of them adds whether it has failed.

With `synced_gpus` (ZeRO-3, FSDP) processes decode texts of their own with weights that are split
over them: each forward pass collects the weights of every layer from all processes, so that none
may run one pass more than the others. Before each pass (prefill, probe, draft) a process
announces it; one whose call has ended runs passes with the others and drops the result, until
all have ended.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
from torch import distributed
from transformers import PreTrainedModel

from ..transformers_names import any_rank_unfinished, device_mesh

_Value = TypeVar("_Value")

# The bytes of an exchange: the drafts of a few rows. A longer message takes a second one.
_SIZE = 4096
_LENGTH = np.dtype(np.int64)
# A rank that has failed tells the others at their next exchange. If it failed inside of a forward
# pass, they never reach one, and it ends alone after this time.
_PATIENCE = timedelta(seconds=30)


class FailedRankError(RuntimeError):
    """Another rank of the model has raised an exception."""


class Ranks:
    """The processes that decode one text together, by default this one alone.

    Attributes:
        is_first (`bool`): True if this is the rank that decides.
        alone (`bool`): True if there is no other.
    """

    def __init__(self, group: Any = None, device: str = "cpu") -> None:
        self._group = group
        self._device = device
        self._count: int = 1 if group is None else group.size()
        self._index: int = 0 if group is None else group.rank()
        self.is_first = self._index == 0
        self.alone = group is None

    @classmethod
    def of(cls, model: PreTrainedModel) -> Ranks:
        """The processes that transformers has split a model over."""
        if (mesh := device_mesh(model)) is None:
            return cls()
        return cls(mesh.get_group("tp" if mesh.ndim > 1 else 0), mesh.device_type)

    def agree(self, value: _Value) -> _Value:
        """The value that the first rank passes. All ranks must call it at the same point."""
        if self.alone:
            return value
        failed, message = self._exchange(pickle.dumps(value) if self.is_first else b"")
        if failed:
            raise FailedRankError(
                f"generate() raised an exception at rank {failed[0]} of this model's "
                f"{self._count}, so that none can go on: see the traceback of that process."
            )
        return value if self.is_first else pickle.loads(message)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Around a call: an exception at one rank ends it at all of them."""
        if self.alone:
            yield
            return
        try:
            yield
            self.agree(None)
        except FailedRankError:
            raise
        except BaseException:
            with suppress(RuntimeError):  # the others are gone, or wait inside of a forward pass
                self._exchange(b"", failed=True)
            raise

    def _exchange(self, message: bytes, failed: bool = False) -> tuple[list[int], bytes]:
        """The ranks that have failed, and the first one's message."""
        head = self._count + _LENGTH.itemsize
        packet = np.zeros(max(_SIZE, head), dtype=np.uint8)
        packet[self._index] = failed
        packet[self._count : head] = np.array([len(message)], dtype=_LENGTH).view(np.uint8)
        sent = message[: len(packet) - head]
        packet[head : head + len(sent)] = np.frombuffer(sent, dtype=np.uint8)
        packet = self._sum(packet, _PATIENCE if failed else None)
        failures = np.flatnonzero(packet[: self._count]).tolist()
        length = int(packet[self._count : head].view(_LENGTH)[0])
        received = packet[head : head + length].tobytes()
        if len(received) == length or failures:
            return failures, received
        rest = np.zeros(length - len(received), dtype=np.uint8)
        if message:
            rest[:] = np.frombuffer(message[len(sent) :], dtype=np.uint8)
        return failures, received + self._sum(rest).tobytes()

    def _sum(self, own: np.ndarray, timeout: timedelta | None = None) -> np.ndarray:
        summed = torch.from_numpy(own).to(self._device)
        work = distributed.all_reduce(summed, group=self._group, async_op=True)
        work.wait() if timeout is None else work.wait(timeout)
        return summed.numpy(force=True)


@contextmanager
def kept_in_step(model: PreTrainedModel, input_ids: torch.Tensor) -> Iterator[None]:
    """Around a call, in every process at the same time."""

    def run_one(*_: Any) -> None:
        any_rank_unfinished(model, False, input_ids.device)

    vars(run_one)["only_reads"] = True  # so that findings about the model stay valid
    # Before the hook of FSDP, which begins to collect weights.
    hook = model.register_forward_pre_hook(run_one, prepend=True)
    try:
        yield
    finally:
        hook.remove()
        while any_rank_unfinished(model, True, input_ids.device):
            model(input_ids=input_ids[:1, -1:], use_cache=False)
