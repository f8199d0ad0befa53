"""Irrevocably drops everything that a process does not need: the network, further processes, files outside one folder, memory,
descriptors.

Guarantees: every thread is confined, and so is anything the process starts. If the kernel does not support a measure, the others
still hold, and `confine` returns which do. Works on Linux on x86-64 and AArch64; elsewhere only resource limits apply.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import resource
import struct
from collections.abc import Sequence
from pathlib import Path

FILE_BYTES = 16 << 20  # size of a scratch file; no verifier needs a larger one
OPEN_FILES = 256
OPEN_FILES_ALONE = 32
"""Open files of code that a model wrote. Those that it has deleted take space that its folder does not show."""

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # linux/audit.h
_FORBIDDEN = {  # asm/unistd_64.h, asm-generic/unistd.h: new programs, other processes, what they run with, namespaces, the kernel
    "x86_64": (
        *(57, 58, 59, 322), *(62, 101, 129, 200, 234, 297, 310, 311, 424, 434, 438), *(76, 165, 272, 308),
        *(141, 142, 144, 203, 251, 256, 279, 314, 440, 448), *(250, 321, 323, 425, 426, 427),
    ),
    "aarch64": (
        *(221, 281), *(117, 129, 130, 131, 138, 240, 270, 271, 424, 434, 438), *(40, 45, 97, 268),
        *(30, 118, 119, 122, 140, 238, 239, 274, 440, 448), *(219, 280, 282, 425, 426, 427),
    ),
}  # fmt: skip
_ALONE = {  # besides: prctl; modes, owners, times and attributes of files; memory that no limit counts; sessions
    "x86_64": (
        157, *(90, 91, 92, 93, 94, 132, 188, 189, 190, 197, 198, 199, 235, 260, 261, 268, 280, 452, 463, 466),
        *(29, 64, 68, 240, 319, 447), *(109, 112, 298), *(155, 161, 304),
        *(248, 249, 428, 429, 430, 431, 432, 433, 437, 442),
    ),
    "aarch64": (
        167, *(5, 6, 7, 14, 15, 16, 52, 53, 54, 55, 88, 452, 463, 466),
        *(180, 186, 190, 194, 279, 447), *(154, 157, 241), *(41, 51, 265),
        *(217, 218, 428, 429, 430, 431, 432, 433, 437, 442),
    ),
}  # fmt: skip
_PRLIMIT, _FCNTL = {"x86_64": 302, "aarch64": 261}, {"x86_64": 72, "aarch64": 25}
_OPEN = {"x86_64": ((2, 24), (257, 32)), "aarch64": ((56, 32),)}  # number, where its flags are
_OWNER_COMMANDS = (8, 10, 15)  # F_SETOWN, F_SETSIG, F_SETOWN_EX: signals to others
_SECOND_ARGUMENT = 24
_O_ACCMODE, _O_TRUNC = 3, 0o1000
_CAPSET = {"x86_64": 126, "aarch64": 91}
_READING = 0b1100  # read_file, read_dir
_FILE_RIGHTS = 0b0110  # of a rule for a file: read_file, write_file
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


def confine_alone(folder: Path, readable: Sequence[Path], memory_bytes: int, cpu_s: int) -> bool:
    """Do the same for code that a model wrote: it may read only `readable` and `folder`, has no threads and no privileges, and
    ends after `cpu_s` of processor time. Return whether all measures are in effect."""
    machine = platform.machine()
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    if machine not in _ARCHITECTURES or _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        return False
    limit_resources(memory_bytes)
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES_ALONE, OPEN_FILES_ALONE))
    os.nice(10)
    header = ctypes.create_string_buffer(struct.pack("Ii", 0x20080522, 0), 8)  # version 3, this process
    dropped = _libc.syscall(_CAPSET[machine], header, ctypes.create_string_buffer(24)) == 0
    return dropped and _write_only_in(folder, readable) and _filter_calls(machine, False, alone=True)


def _filter_calls(machine: str, network: bool, alone: bool = False) -> bool:
    """Refuse system calls in all threads (seccomp). New threads are allowed unless `alone`, new processes are not."""
    program = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUALS, 1, 0, _ARCHITECTURES[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_EQUALS, 0, 1, _CLONE3),
        (_RETURN, 0, 0, _ABSENT),  # glibc then uses clone
    ]
    program += _of_this_process(machine)
    if alone:
        program += _not_truncating(machine)
    else:
        program += [
            (_EQUALS, 0, 4, _CLONE[machine]),
            (_LOAD, 0, 0, _FIRST_ARGUMENT),
            (_HAS, 1, 0, _CLONE_THREAD),
            (_RETURN, 0, 0, _REFUSE),
            (_RETURN, 0, 0, _ALLOW),
        ]
    forbidden = _FORBIDDEN[machine] if network else (*_FORBIDDEN[machine], *_SOCKETS[machine])
    if alone:
        forbidden = (*forbidden, *_ALONE[machine], _CLONE[machine])
    checks = [(_AT_LEAST, _X32), *((_EQUALS, number) for number in forbidden)]
    for i, (test, number) in enumerate(checks):
        program.append((test, len(checks) - i, 0, number))  # jump past the other checks and the permission
    program += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _REFUSE)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    described = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program), ctypes.addressof(code)))
    done = _libc.syscall(_SECCOMP[machine], _SECCOMP_SET_MODE_FILTER, _SECCOMP_FILTER_FLAG_TSYNC, described)
    return done == 0


def _of_this_process(machine: str) -> list[tuple[int, int, int, int]]:
    """Return checks of arguments: limits of this process only, no signals by descriptors."""
    return [
        (_EQUALS, 0, 4, _PRLIMIT[machine]),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_EQUALS, 1, 0, 0),
        (_RETURN, 0, 0, _REFUSE),
        (_RETURN, 0, 0, _ALLOW),
        (_EQUALS, 0, 6, _FCNTL[machine]),
        (_LOAD, 0, 0, _SECOND_ARGUMENT),
        *((_EQUALS, 3 - i, 0, command) for i, command in enumerate(_OWNER_COMMANDS)),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _REFUSE),
    ]


def _not_truncating(machine: str) -> list[tuple[int, int, int, int]]:
    """Return checks of arguments: no file is truncated by opening it to read."""
    program = list[tuple[int, int, int, int]]()
    for number, flags in _OPEN[machine]:
        program += [
            (_EQUALS, 0, 6, number),
            (_LOAD, 0, 0, flags),
            (_HAS, 0, 3, _O_TRUNC),
            (_HAS, 1, 0, _O_ACCMODE),
            (_RETURN, 0, 0, _REFUSE),
            (_RETURN, 0, 0, _ALLOW),
            (_RETURN, 0, 0, _ALLOW),
        ]
    return program


def _write_only_in(folder: Path, readable: Sequence[Path] | None = None) -> bool:
    """Refuse to write, create or delete files outside `folder`, and to read files outside `readable` (landlock)."""
    handled = _WRITING if readable is None else _WRITING | _READING
    attributes = ctypes.create_string_buffer(struct.pack("Q", handled), 8)
    rules = _libc.syscall(_LANDLOCK_CREATE, attributes, 8, 0)
    if rules < 0:
        return False
    allowed = [(folder, handled), *((path, _READING if path.is_dir() else _READING & _FILE_RIGHTS) for path in readable or ())]
    try:
        added = all(_allow(rules, path, rights) for path, rights in allowed)
        return added and _libc.syscall(_LANDLOCK_RESTRICT, rules, 0) == 0
    finally:
        os.close(rules)


def _allow(rules: int, path: Path, rights: int) -> bool:
    place = os.open(path, _O_PATH | os.O_CLOEXEC)
    try:
        beneath = ctypes.create_string_buffer(struct.pack("<Qi", rights, place), 12)
        return _libc.syscall(_LANDLOCK_ADD, rules, _LANDLOCK_RULE_PATH_BENEATH, beneath, 0) == 0
    finally:
        os.close(place)
