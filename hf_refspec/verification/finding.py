"""What a probe has found, in this process and on disk.

A new process need not probe a model that an earlier one has found exact. A file keeps the findings
about a model in one state on one machine. Its name is a digest of all that they depend on: versions
of packages, the processor and its threads, torch's settings, the model's modules with their
attributes and configurations, the functions that its passes may run, and its weights, a few values
of each. Only findings that drafts are exact are kept, and only of models that run libraries' code
on ordinary weights. All others are probed in each process, as is a model whose file is damaged or
cannot be written.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from itertools import chain
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import ModuleType
from typing import Any

import torch
import transformers
from huggingface_hub import constants
from llvmlite import binding
from torch import nn
from transformers import PreTrainedModel

from ..foreign_code import TRUSTED, foreign_code, package_of, parts_of
from ..kernels.pass_kernels import ORDINARY, active_modes
from ..transformers_names import attention_functions, is_quantised

_OF_MODELS = {"transformers", "peft"}  # packages that define models
_LIBRARIES = {
    *(*TRUSTED, "huggingface_hub", "safetensors", "tqdm", "typing_extensions"),
    *sys.stdlib_module_names,
}
_VERSIONED = ("accelerate", "peft", "flash_attn", "fla", "kernels")  # packages that may compute
_SAMPLED = 4  # values of each weight
_LARGEST = 1 << 16  # bytes; a few findings have a few hundred
_MOST_FILES = 256


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
    failure: str | None = None  # the exception that the model raised, or that dropout is at work
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


def findings_path(model: nn.Module, settings: list[Any]) -> Path | None:
    """The file of the findings about a model whose configurations, modules and hooks have these
    `settings`; `None` if they hold for this process alone."""
    if not isinstance(model, PreTrainedModel) or is_quantised(model):
        return None
    try:
        weights = [*map(weight_summary, (*model.named_parameters(), *model.named_buffers()))]
        functions = _functions(model)
        if None in weights or functions is None or foreign_code(model) is not None:
            return None
        versions = [getattr(sys.modules.get(name), "__version__", None) for name in _VERSIONED]
        products = os.environ.get("HF_REFSPEC_NARROW_PRODUCTS")  # "0" turns them off
        parts = [*_machine(), *versions, products, settings, weights, functions]
    except Exception:  # what third parties put into modules can raise anything
        return None
    return findings_folder() / f"{sha256(repr(parts).encode()).hexdigest()}.json"


def findings_folder() -> Path:
    """The folder of all findings."""
    return Path(constants.HF_HOME, "hf_refspec", "findings")


def read_findings(path: Path | None) -> dict[str, Finding]:
    """Findings by what they are about, a tuple in text; none from a damaged file."""
    with suppress(OSError, ValueError, AttributeError, RecursionError):
        if path is not None and path.is_file() and path.stat().st_size <= _LARGEST:
            return {
                about: Finding(True, rounds_products=rounds_products)
                for about, rounds_products in json.loads(path.read_bytes()).items()
                if about.startswith("(") and type(rounds_products) is bool
            }
    return {}


def add_finding(path: Path, about: str, finding: Finding) -> None:
    """Adds a finding that drafts are exact, if the file can be written."""
    kept = {name: known.rounds_products for name, known in read_findings(path).items()}
    kept[about] = finding.rounds_products
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile("w", dir=path.parent, delete=False) as new:
            json.dump(kept, new)
        os.replace(new.name, path)
        files = sorted(path.parent.iterdir(), key=lambda file: file.stat().st_mtime_ns)
        for oldest in files[:-_MOST_FILES]:
            oldest.unlink()


@cache
def _machine() -> list[Any]:
    """The code that verifies, and the processor."""
    package = Path(__file__).parents[1]
    written = [_written(path) for path in sorted(package.rglob("*.py"))]
    processor = binding.get_host_cpu_name(), torch.backends.cpu.get_cpu_capability()
    return [written, processor, torch.__version__, transformers.__version__]


def _written(path: Path) -> tuple[str, int, int]:
    """A file's name, when it was written, in ns, and its size."""
    status = path.stat()
    return path.name, status.st_mtime_ns, status.st_size


def _functions(model: PreTrainedModel) -> list[Any] | None:
    """The names of all functions that the model's passes may run, and the files of their modules;
    `None` if one is not a library's.

    They are attributes of the model's modules and their classes, of the modules that define these,
    of the classes and modules from which those import, and of torch."""
    modules = [*model.modules()]
    kinds = dict.fromkeys(map(type, modules))
    bases = dict.fromkeys(base for kind in kinds for base in kind.__mro__)
    if any(package_of(base) not in _LIBRARIES for base in bases):
        return None
    sources = _sources(bases)
    sources |= _sources(chain.from_iterable(vars(source).values() for source in sources))
    classes = [
        value
        for source in sources
        for value in vars(source).values()
        if isinstance(value, type) and package_of(value) in _OF_MODELS
    ]
    called = [*_called((*sources, *bases, *classes, *modules))]
    for module in modules:
        if isinstance(module, PreTrainedModel):
            called += [("attention", function) for function in attention_functions(module)]
    of_torch = _called((torch, nn.functional, torch.Tensor))
    others = [*of_torch, *(("mode", mode) for mode in active_modes())]
    packages = {package_of(part) for _, part in chain(called, others)}
    if any(name not in _LIBRARIES and not name.startswith("namedtuple_") for name in packages):
        return None
    names = [(name, getattr(part, "__qualname__", None)) for name, part in called]
    return [*names, *(_written(Path(str(source.__file__))) for source in sources)]


def _sources(parts: Iterable[Any]) -> dict[ModuleType, None]:
    """The modules of models' packages that have defined these classes and functions, without those
    of decoding loops, which no pass runs and which import much else."""
    names = {part.__module__: None for part in parts if package_of(part) in _OF_MODELS}
    return {
        sys.modules[name]: None
        for name in names
        if name in sys.modules and not name.startswith("transformers.generation.")
    }


def _called(owners: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """The functions, and objects that can be called like one, that are attributes of owners."""
    for owner in owners:
        for name, value in [*vars(owner).items()]:
            if name.startswith("__compiled_fn_"):  # of `torch.compile`, for what it has compiled
                continue
            if isinstance(value, (staticmethod, classmethod)):
                value = value.__func__
            elif isinstance(value, property):
                value = value.fget
            if callable(value) and not isinstance(value, (type, nn.Module)):
                yield from ((name, part) for part in parts_of(value))


def weight_summary(named: tuple[str, torch.Tensor]) -> tuple[Any, ...] | None:
    """A weight's name, form and device, and a few of its values; `None` if it is not ordinary."""
    name, weight = named
    if type(weight) not in ORDINARY or weight.is_meta or weight.layout is not torch.strided:
        return None
    gpu = torch.cuda.get_device_name(weight.device) if weight.is_cuda else None
    values = weight.detach()
    while values.ndim > 1 and len(values):
        values = values[len(values) // 2]  # the first row may be of padding, and 0
    first = values.reshape(-1)[:_SAMPLED].tolist()
    return name, weight.shape, weight.dtype, weight.device, gpu, first
