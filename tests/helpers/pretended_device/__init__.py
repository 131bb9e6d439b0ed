"""A pretended accelerator, torch's device "pretended", which shows on any CPU what holds on a GPU.

Its tensors lie in the host's memory and are computed by the CPU's kernels, see `device.cpp`;
towards the host it behaves as a GPU does. Importing this module registers the device for the whole
process, so only processes that run tests on it should. It needs a C++ compiler and ninja.
"""

import hashlib
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import torch
from filelock import FileLock
from torch.utils import cpp_extension

NAME = "pretended"
_SOURCE = Path(__file__).with_name("device.cpp")
# Places are looked for in the code of these packages, the first one outside of torch.
_PACKAGES = ("hf_refspec", "transformers", "accelerate", "peft")


class _DeviceModule:
    """`torch.pretended`, as torch and transformers ask it."""

    def __init__(self, device) -> None:
        self._device = device

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def _lazy_init(self) -> None:
        pass

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, device) -> None:
        pass

    def synchronize(self, device=None) -> None:
        self._device.synchronize()

    def empty_cache(self) -> None:
        pass

    def mem_get_info(self, device=None) -> tuple[int, int]:
        return 1 << 30, 1 << 30

    def memory_allocated(self, device=None) -> int:
        return 0

    def manual_seed(self, seed: int) -> None:
        self._device.default_generator().manual_seed(seed)

    manual_seed_all = manual_seed

    def get_rng_state(self, device=None) -> torch.Tensor:
        return self._device.default_generator().get_state()

    def set_rng_state(self, state: torch.Tensor, device=None) -> None:
        self._device.default_generator().set_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


def _built():
    """The compiled device, which is built where this source and this torch have not been before."""
    # With the path: ninja builds again what another checkout has built, maybe while that runs.
    built_from = f"{torch.__version__} {_SOURCE}".encode() + _SOURCE.read_bytes()
    version = hashlib.sha256(built_from).hexdigest()[:16]
    name = f"pretended_device_{version}"
    folder = Path(cpp_extension._get_build_directory(name, verbose=False))
    # Of several processes one builds. torch's own lock would stay locked for ever where a process
    # was killed that built.
    with FileLock(f"{folder}.lock"):
        (folder / "lock").unlink(missing_ok=True)
        return cpp_extension.load(name, [str(_SOURCE)], extra_cflags=["-O1"])


torch.utils.rename_privateuse1_backend(NAME)
_device = _built()
torch._register_device_module(NAME, _DeviceModule(_device))
torch.utils.generate_methods_for_privateuse1_backend()


@dataclass
class Traffic:
    """What went on between the host and the device.

    Attributes:
        waits (`int`): How often the host waited for the device.
        uploads, downloads (`int`): Copies to the device and to the host.
        bytes_up, bytes_down (`int`): Their bytes.
        largest_up, largest_down (`int`): The bytes of the largest one.
        places (`Counter[tuple[str, str]]`): What happened, and the line that asked for it.
    """

    waits: int = 0
    uploads: int = 0
    downloads: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    largest_up: int = 0
    largest_down: int = 0
    places: Counter[tuple[str, str]] = field(default_factory=Counter)

    def hear(self, event: str, operation: str, size: int) -> None:
        if event == "wait":
            self.waits += 1
        elif event == "upload":
            self.uploads += 1
            self.bytes_up += size
            self.largest_up = max(self.largest_up, size)
        else:
            self.downloads += 1
            self.bytes_down += size
            self.largest_down = max(self.largest_down, size)
        self.places[event, f"{_line(sys._getframe(1))}: {operation}"] += 1


def _line(frame: FrameType | None) -> str:
    """The innermost line of code of some package."""
    while frame is not None:
        parts = Path(frame.f_code.co_filename).parts
        for package in _PACKAGES:
            if package in parts[:-1]:
                start = len(parts) - 1 - parts[::-1].index(package)
                return f"{'/'.join(parts[start:])}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"


@contextmanager
def traffic() -> Iterator[Traffic]:
    """Counts what goes on between the host and the device meanwhile, in all threads."""
    seen = Traffic()
    _device.listen(seen.hear)
    try:
        yield seen
    finally:
        _device.listen(None)
