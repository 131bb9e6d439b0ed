"""What a probe has found, in this process and on disk.

A new process need not probe a model that an earlier one has found exact. A file keeps the findings
about a model in one state on one machine. Its name is a digest of all that they depend on: versions
of packages, the processor and its threads, torch's settings, the model's modules with their
attributes and configuration, and its weights, a few values of each. The file holds only findings
that drafts are exact, of models without third-party code. All others are probed in each process, as
is a model whose file is damaged or cannot be written.
"""

from __future__ import annotations

import json
import marshal
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from itertools import chain
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch
import transformers
from huggingface_hub import constants
from llvmlite import binding
from torch import nn
from transformers import PreTrainedModel

from ..corpus.untrusted import read_small
from ..foreign_code import foreign_code, package_of
from ..kernels.pass_kernels import narrow_dtype
from ..store.files import replacing

_PACKAGES = {"torch", "transformers", "peft"}
_SAMPLED = 4  # values of each weight
_LARGEST = 1 << 16  # a few findings have a few hundred bytes


@dataclass(frozen=True)
class Finding:
    """The result of a probe, as distances relative to the spread of the logits."""

    exact: bool  # true if the verifier may be used
    error: float = 0.0  # the distance of its logits from single steps'
    # The distance of a single pass over all tokens without a cache, where it was in question.
    rounding: float | None = None
    leak: float | None = None  # the effect of other branches' content, where measured
    # True if a library's kernels round each product of a float32 model as bfloat16 would.
    rounds_products: bool = False
    same_bits: bool = True  # true if drafts change no bit of logits, where it promises that
    failure: str | None = None  # the exception of the model, or its dropout
    lacked_memory: bool = False  # which says nothing about the model
    passes: int = 0  # the forward passes that it took

    def __str__(self) -> str:
        if self.failure is not None:
            return self.failure
        if not self.same_bits:
            return "bits of logits depend on what else is in a pass"
        text = f"logits are {self.error:.1e} off those of single steps"
        if self.rounding is not None:
            text += f", where rounding alone makes {self.rounding:.1e}"
        if self.leak is not None:
            text += f", and other branches change them by {self.leak:.1e}"
        return text


class FindingsFile:
    """Keeps the findings about a model in its present state for other processes."""

    def __init__(self, model: nn.Module, settings: list[Any]) -> None:
        """`settings` are the values of its configuration and of its modules' attributes."""
        self._path: Path | None = None  # of findings that hold for this process alone
        kinds = dict.fromkeys(map(type, model.modules()))
        is_known = {package_of(kind) for kind in kinds} <= _PACKAGES
        if is_known and isinstance(model, PreTrainedModel) and foreign_code(model) is None:
            weights = map(_weight, (*model.named_parameters(), *model.named_buffers()))
            parts = [*_machine(), torch.get_num_threads(), narrow_dtype(model), settings, *weights]
            digest = sha256(repr(parts).encode() + _code(kinds)).hexdigest()
            self._path = findings_folder() / f"{digest}.json"

    def read(self) -> dict[str, Finding]:
        """The findings, each with what it is about; none from a damaged file."""
        if self._path is None:
            return {}
        with suppress(OSError, ValueError, AttributeError, RecursionError):
            kept = json.loads(read_small(self._path, _LARGEST))
            return {
                about: Finding(True, rounds_products=rounds_products)
                for about, rounds_products in kept.items()
                if type(rounds_products) is bool
            }
        return {}

    def add(self, about: str, finding: Finding) -> None:
        """Adds a finding that drafts are exact, if the file can be written."""
        if self._path is not None:
            kept = {name: known.rounds_products for name, known in self.read().items()}
            kept[about] = finding.rounds_products
            with suppress(OSError):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                with replacing(self._path) as file:
                    file.write(json.dumps(kept).encode())


def findings_folder() -> Path:
    """The folder of all findings."""
    return Path(constants.HF_HOME, "hf_refspec", "findings")


@cache
def _machine() -> list[Any]:
    """The code that verifies, the packages that compute logits, and the processor."""
    package = Path(__file__).parents[1]
    sources = [(path.name, path.stat()) for path in sorted(package.rglob("*.py"))]
    written = [(name, status.st_mtime_ns, status.st_size) for name, status in sources]
    processor = binding.get_host_cpu_name(), torch.backends.cpu.get_cpu_capability()
    environment = os.environ.get("HF_REFSPEC_NARROW_PRODUCTS")
    return [written, torch.__version__, transformers.__version__, processor, environment]


def _code(kinds: Iterable[type]) -> bytes:
    """The functions of classes and their bases, of the modules that define these, and of the
    modules from which those have imported functions: where one is replaced, logits may differ."""
    bases = dict.fromkeys(base for kind in kinds for base in kind.__mro__)
    modules = _modules(bases)
    modules |= _modules(_functions(modules))
    # No byte of this version depends on what else the process has loaded.
    codes = [marshal.dumps(each.__code__, 2) for each in _functions((*bases, *modules))]
    return b"".join(codes)


def _modules(parts: Iterable[Any]) -> dict[ModuleType, None]:
    """The modules of transformers and PEFT that have defined these classes or functions."""
    names = {part.__module__: None for part in parts if package_of(part) in _PACKAGES - {"torch"}}
    return {sys.modules[name]: None for name in names if name in sys.modules}


def _functions(owners: Iterable[Any]) -> Iterator[FunctionType]:
    """The functions that are attributes of classes or modules."""
    values = chain.from_iterable(vars(owner).values() for owner in owners)
    return (value for value in [*values] if type(value) is FunctionType)


def _weight(named: tuple[str, torch.Tensor]) -> tuple[Any, ...]:
    """A weight's name, form and device, and a few of its values."""
    name, weight = named
    gpu = torch.cuda.get_device_name(weight.device) if weight.is_cuda else None
    form = (name, type(weight), weight.shape, weight.dtype, weight.device, gpu)
    is_usual = type(weight) in (torch.Tensor, nn.Parameter) and not weight.is_meta
    if not (is_usual and weight.numel() and weight.layout is torch.strided):
        return form
    first_row = weight.detach()[(0,) * (weight.ndim - 1)] if weight.ndim else weight[None]
    return (*form, first_row[:_SAMPLED].tolist())
