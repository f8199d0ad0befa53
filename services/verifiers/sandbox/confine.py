"""Irrevocably drops what a process does not need: the network, further processes, files outside one folder, memory, descriptors.

Guarantees: every thread is confined, and so is anything the process starts. If the kernel does not support a measure, the others
still hold, and `confine` returns which do. Works on Linux on x86-64 and AArch64; elsewhere only resource limits apply.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import struct
from pathlib import Path

FILE_BYTES = 16 << 20  # size of a scratch file; no verifier needs a larger one
OPEN_FILES = 256

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # linux/audit.h
_FORBIDDEN = {  # asm/unistd_64.h, asm-generic/unistd.h: new programs, other processes, namespaces, kernel interfaces
    "x86_64": (
        *(57, 58, 59, 322), *(62, 101, 200, 234, 310, 311, 424, 434, 438), *(165, 272, 308),
        *(250, 321, 323, 425, 426, 427),
    ),
    "aarch64": (
        *(221, 281), *(117, 129, 130, 131, 270, 271, 424, 434, 438), *(40, 97, 268),
        *(219, 280, 282, 425, 426, 427),
    ),
}  # fmt: skip
_SOCKETS = {"x86_64": (41, 42, 43, 49, 50, 53, 288), "aarch64": (198, 199, 200, 201, 202, 203, 242)}
_CLONE, _CLONE3 = {"x86_64": 56, "aarch64": 220}, 435
_CLONE_THREAD = 0x10000  # linux/sched.h: without it, clone makes a process
_PR_SET_NO_NEW_PRIVS = 38  # linux/prctl.h
_SECCOMP = {"x86_64": 317, "aarch64": 277}
_SECCOMP_SET_MODE_FILTER, _SECCOMP_FILTER_FLAG_TSYNC = 1, 1  # linux/seccomp.h
_LOAD, _EQUALS, _AT_LEAST, _HAS, _RETURN = (
    0x20,
    0x15,
    0x35,
    0x45,
    0x06,
)  # linux/bpf_common.h: LD|W|ABS, JMP|{JEQ,JGE,JSET}|K, RET|K
_ALLOW, _REFUSE, _ABSENT, _KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000  # linux/seccomp.h; EPERM, ENOSYS
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # struct seccomp_data
_X32 = 0x40000000  # bit that marks numbers of the x32 system call table
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_LANDLOCK_RULE_PATH_BENEATH = 1
_WRITING = 0b1_1111_1111_0010  # linux/landlock.h, first version: everything except execute, read_file and read_dir
_O_PATH = 0o10000000

_libc = ctypes.CDLL(None, use_errno=True)


def limit_resources(memory_bytes: int) -> None:
    """Limit memory (0: do not), open files and file size, and disable core dumps."""
    if memory_bytes:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, OPEN_FILES))


def confine(scratch: Path, network: bool = False) -> list[str]:
    """Permanently allow only reading, and writing in `scratch`; return the measures in effect: `files`, `calls`.

    `network`: sockets stay allowed.
    """
    machine = platform.machine()
    if machine not in _ARCHITECTURES or _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        return []
    held = ["files"] if _write_only_in(scratch) else []  # first, while the system calls it needs are surely allowed
    return [*held, "calls"] if _filter_calls(machine, network) else held


def _filter_calls(machine: str, network: bool) -> bool:
    """Refuse system calls in all threads (seccomp). New threads are allowed, new processes are not."""
    program = [
        (_LOAD, 0, 0, _ARCHITECTURE), (_EQUALS, 1, 0, _ARCHITECTURES[machine]), (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER), (_EQUALS, 0, 1, _CLONE3), (_RETURN, 0, 0, _ABSENT),  # glibc then uses clone
        (_EQUALS, 0, 4, _CLONE[machine]), (_LOAD, 0, 0, _FIRST_ARGUMENT), (_HAS, 1, 0, _CLONE_THREAD),
        (_RETURN, 0, 0, _REFUSE), (_RETURN, 0, 0, _ALLOW),
    ]  # fmt: skip
    forbidden = _FORBIDDEN[machine] if network else (*_FORBIDDEN[machine], *_SOCKETS[machine])
    checks = [(_AT_LEAST, _X32), *((_EQUALS, number) for number in forbidden)]
    for i, (test, number) in enumerate(checks):
        program.append((test, len(checks) - i, 0, number))  # jump past the other checks and the permission
    program += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _REFUSE)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    described = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program), ctypes.addressof(code)))
    done = _libc.syscall(_SECCOMP[machine], _SECCOMP_SET_MODE_FILTER, _SECCOMP_FILTER_FLAG_TSYNC, described)
    return done == 0


def _write_only_in(folder: Path) -> bool:
    """Refuse to write, create or delete files outside `folder` (landlock)."""
    attributes = ctypes.create_string_buffer(struct.pack("Q", _WRITING), 8)
    rules = _libc.syscall(_LANDLOCK_CREATE, attributes, 8, 0)
    if rules < 0:
        return False
    place = os.open(folder, _O_PATH | os.O_CLOEXEC)
    try:
        beneath = ctypes.create_string_buffer(struct.pack("<Qi", _WRITING, place), 12)
        added = _libc.syscall(_LANDLOCK_ADD, rules, _LANDLOCK_RULE_PATH_BENEATH, beneath, 0)
        return added == 0 and _libc.syscall(_LANDLOCK_RESTRICT, rules, 0) == 0
    finally:
        os.close(place)
        os.close(rules)
