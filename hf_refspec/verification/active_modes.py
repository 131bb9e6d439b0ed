"""Code of others around the operations of a pass: torch's function modes and dispatch modes."""

from __future__ import annotations

from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack


def active_modes() -> list[type]:
    """The kinds of this thread's modes, the outermost of each sort first. `torch.device` and
    `torch.set_default_device`, which only place new tensors, are left out."""
    modes = [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]
    return [type(mode) for mode in modes if not isinstance(mode, DeviceContext)]
