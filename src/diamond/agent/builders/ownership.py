"""Runs a program that believes it may give files away: the kernel answers yes to `chown` and does nothing.

    python -m diamond.agent.builders.ownership PROGRAM ARGUMENT…

An ordinary account can become root of a user namespace that knows one account only. Package managers work there, but
for the moment in which they give a file to another account. A seccomp filter answers those calls (and the making of
device files) with success, for the program and all its children. It needs nothing installed, in the base or on the
endpoint, and no entry in /etc/subuid; in an image every file belongs to root anyhow. The program ends when whoever
started it does.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

CANNOT_START = 127

# Instructions of the kernel's packet filter (linux/bpf_common.h), actions and fields of linux/seccomp.h.
_LOAD, _JUMP_EQUAL, _AND, _RETURN = 0x20, 0x15, 0x54, 0x06
_ALLOW, _SUCCEED = 0x7FFF0000, 0x00050000
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16
_S_IFMT, _S_IFCHR, _S_IFBLK = 0o170000, 0o020000, 0o060000
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _SECCOMP_MODE_FILTER = 1, 22, 38, 2


@dataclass(frozen=True)
class _Calls:
    """Numbers of system calls of one architecture. `ignored`: chown's family, setgroups. `devices`: those of mknod's
    family, with the position of the argument that says what kind of file is wanted."""

    audit: int
    ignored: tuple[int, ...]
    devices: dict[int, int] = field(default_factory=dict)


_CALLS = {
    "x86_64": _Calls(0xC000003E, (92, 93, 94, 260, 116), {133: 1, 259: 2}),
    "aarch64": _Calls(0xC00000B7, (54, 55, 159), {33: 2}),
    "ppc64le": _Calls(0xC0000015, (16, 95, 181, 289, 81), {14: 1, 288: 2}),
}


def is_supported() -> bool:
    return platform.machine() in _CALLS and sys.byteorder == "little"


def program(machine: str) -> bytes:
    """The filter for an architecture. Pure."""
    calls = _CALLS[machine]
    steps = [
        _step(_LOAD, _ARCHITECTURE_AT),
        _step(_JUMP_EQUAL, calls.audit, 1, 0),
        _step(_RETURN, _ALLOW),  # 32-bit programs number their calls differently
        _step(_LOAD, _NUMBER_AT),
    ]
    for number in calls.ignored:
        steps += [_step(_JUMP_EQUAL, number, 0, 1), _step(_RETURN, _SUCCEED)]
    for number, argument in calls.devices.items():
        steps += [
            _step(_JUMP_EQUAL, number, 0, 6),
            _step(_LOAD, _ARGUMENTS_AT + 8 * argument),
            _step(_AND, _S_IFMT),
            _step(_JUMP_EQUAL, _S_IFCHR, 1, 0),
            _step(_JUMP_EQUAL, _S_IFBLK, 0, 1),
            _step(_RETURN, _SUCCEED),
            _step(_RETURN, _ALLOW),
        ]
    return b"".join([*steps, _step(_RETURN, _ALLOW)])


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, value)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.c_void_p))


def install() -> None:
    """Put the filter over this process and all it will start. There is no way back.

    Raises:
        OSError: the kernel has no such filters, or refuses them.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    code = program(platform.machine())
    steps = ctypes.create_string_buffer(code, len(code))
    wanted = _Program(len(code) // 8, ctypes.addressof(steps))
    zero = ctypes.c_ulong(0)
    for option, *arguments in (
        (_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), zero),
        (_PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), zero),
        (_PR_SET_SECCOMP, ctypes.c_ulong(_SECCOMP_MODE_FILTER), ctypes.byref(wanted)),
    ):
        if libc.prctl(option, *arguments, zero, zero):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))


def main(argv: Sequence[str]) -> int:
    try:
        install()
        os.execvp(argv[0], list(argv))  # noqa: S606 - no shell: an argv list
    except OSError as error:
        print(f"{argv[0]}: {error.strerror}", file=sys.stderr)
    return CANNOT_START


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
