"""Kills a process at the Nth of its file operations, whatever library or thread does it (Linux).

A child is traced as by a debugger: it waits before every system call. Those that change files below
a folder are counted. Before the Nth, or when half of what it wrote is there, the child is killed.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

# Of <sys/ptrace.h>.
_TRACEME, _SYSCALL, _SETOPTIONS, _GET_SYSCALL_INFO = 0, 24, 0x4200, 0x420E
_GOOD, _FORK, _VFORK, _CLONE, _EXITKILL = 1, 2, 4, 8, 0x100000
_ALL_THREADS = 0x40000000
_ENTRY, _EXIT = 1, 2
_AT_CALL = signal.SIGTRAP | 0x80
_CREATES = os.O_CREAT | os.O_TRUNC

# By machine, the numbers of the system calls that change files. What follows a name is where it
# says which file: "0" the descriptor, "p0" the path, "d0" a folder's descriptor, a path after it.
_NUMBERS = {
    "x86_64": {
        1: "write 0", 18: "pwrite 0", 20: "writev 0", 296: "pwritev 0", 328: "pwritev 0",
        40: "sendfile 0", 326: "copy_file_range 2", 77: "ftruncate 0", 285: "fallocate 0",
        74: "fsync 0", 75: "fsync 0", 91: "chmod 0", 76: "truncate p0", 2: "open p0",
        85: "create p0", 257: "open d0", 82: "rename p1", 264: "rename d2", 316: "rename d2",
        87: "unlink p0", 263: "unlink d0", 83: "mkdir p0", 258: "mkdir d0", 84: "rmdir p0",
        86: "link p1", 265: "link d2", 88: "symlink p1", 266: "symlink d1", 90: "chmod p0",
        268: "chmod d0",
    },
    "aarch64": {
        64: "write 0", 68: "pwrite 0", 66: "writev 0", 70: "pwritev 0", 287: "pwritev 0",
        71: "sendfile 0", 285: "copy_file_range 2", 46: "ftruncate 0", 47: "fallocate 0",
        82: "fsync 0", 83: "fsync 0", 52: "chmod 0", 45: "truncate p0", 56: "open d0",
        38: "rename d2", 276: "rename d2", 35: "unlink d0", 34: "mkdir d0", 37: "link d2",
        36: "symlink d1", 53: "chmod d0",
    },
}  # fmt: skip
CALLS = _NUMBERS.get(platform.machine(), {}) if platform.system() == "Linux" else {}
WRITES = ("write", "pwrite", "writev", "pwritev", "sendfile", "copy_file_range")


class _Info(ctypes.Structure):
    """`struct ptrace_syscall_info`, of an entry."""

    _fields_ = (
        ("op", ctypes.c_uint8),
        ("arch", ctypes.c_uint32),
        ("instruction", ctypes.c_uint64),
        ("stack", ctypes.c_uint64),
        ("number", ctypes.c_int64),  # at an exit what was returned
        ("arguments", ctypes.c_uint64 * 6),
    )


_ptrace = ctypes.CDLL(None, use_errno=True).ptrace if CALLS else None
if _ptrace is not None:
    _ptrace.restype, _ptrace.argtypes = ctypes.c_long, [ctypes.c_long, *[ctypes.c_void_p] * 3]


class Traced(NamedTuple):
    """How a child went: its file operations, each with the name of the file, and whether it was
    killed over one, or else the status that it ended with: 0 if all was well."""

    operations: list[str]
    killed: bool
    status: int


def trace(
    work: Callable[[], object], below: Path, stop: int | None = None, torn: bool = False
) -> Traced:
    """Runs `work` in a child, and kills it before the operation on files below a folder that has
    the number `stop`, from 0 on. If that is a write and is to be `torn`, it kills the child after
    it, and takes away the second half of what was written."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setpgid(0, 0)
            if _ptrace(_TRACEME, None, None, None) == 0:
                os.kill(os.getpid(), signal.SIGSTOP)
                work()
                status = 0
        finally:
            os._exit(status)
    return _Tracer(child, below, stop, torn).run()


class _Tracer:
    def __init__(self, child: int, below: Path, stop: int | None, torn: bool) -> None:
        self.child, self.below, self.stop, self.torn = child, f"{below}/", stop, torn
        self.operations: list[str] = []
        # By thread, the file of a write that has begun, its content before, and where it writes.
        self.tearing: dict[int, tuple[Path, bytes, int]] = {}

    def run(self) -> Traced:
        _, status = os.waitpid(self.child, 0)
        if not os.WIFSTOPPED(status):
            raise OSError("no child can be traced here: the system forbids ptrace")
        options = _GOOD | _FORK | _VFORK | _CLONE | _EXITKILL
        _ptrace(_SETOPTIONS, self.child, None, options)
        _ptrace(_SYSCALL, self.child, None, None)
        killed = False
        while True:
            # The children of its own are in its process group too, and its threads.
            thread, status = os.waitpid(-self.child, _ALL_THREADS)
            if os.WIFEXITED(status) or os.WIFSIGNALED(status):
                if thread == self.child:
                    return Traced(self.operations, killed, 0 if killed else status)
                continue
            passed = os.WSTOPSIG(status)
            if passed == _AT_CALL and not killed and self._at_call(thread):
                os.kill(self.child, signal.SIGKILL)
                killed = True
            if passed in (_AT_CALL, signal.SIGTRAP, signal.SIGSTOP):  # a call, or a new thread
                passed = 0
            _ptrace(_SYSCALL, thread, None, passed)

    def _at_call(self, thread: int) -> bool:
        """Whether the child is to be killed at this stop of one of its threads."""
        info = _Info()
        _ptrace(_GET_SYSCALL_INFO, thread, ctypes.sizeof(info), ctypes.addressof(info))
        if info.op == _EXIT:
            if thread in self.tearing:
                _tear(*self.tearing.pop(thread), info.number)
                return True
            return False
        call, _, where = CALLS.get(info.number, "").partition(" ")
        if not call:
            return False
        path = _path(thread, where, info.arguments)
        creates = call != "open" or info.arguments[2 if where == "d0" else 1] & _CREATES
        if not path.startswith(self.below) or not creates:
            return False
        self.operations.append(f"{call} {path.removeprefix(self.below)}")
        if len(self.operations) - 1 != self.stop:
            return False
        if self.torn and call in WRITES:
            before = Path(path).read_bytes()
            begin = info.arguments[3] if call == "pwrite" else len(before)
            self.tearing[thread] = Path(path), before, begin
            return False
        return True


def _tear(path: Path, before: bytes, begin: int, written: int) -> None:
    """Takes away the second half of what was written into a file from `begin` on."""
    half = begin + written // 2
    with open(path, "r+b") as file:
        file.truncate(max(half, len(before)))
        file.seek(half)
        file.write(before[half : begin + written])


def _path(thread: int, where: str, arguments: ctypes.Array[ctypes.c_uint64]) -> str:
    """The file that a system call is about."""
    place = int(where[-1])
    if where.startswith("p"):
        return _text(thread, arguments[place])
    descriptor = ctypes.c_int32(arguments[place]).value
    text = _text(thread, arguments[place + 1]) if where.startswith("d") else ""
    if text.startswith("/") or descriptor < 0:
        return text
    try:
        folder = os.readlink(f"/proc/{thread}/fd/{descriptor}")
    except OSError:
        return ""
    return f"{folder}/{text}" if text else folder


def _text(thread: int, address: int) -> str:
    """A string in the memory of a thread."""
    with open(f"/proc/{thread}/mem", "rb", buffering=0) as memory:
        memory.seek(address)
        # Page by page: what follows it need not be mapped.
        text = b""
        while b"\0" not in text and len(text) < 1 << 13:
            text += memory.read(4096 - (address + len(text)) % 4096)
    return os.fsdecode(text.split(b"\0")[0])
