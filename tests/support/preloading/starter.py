"""Make `subprocess` fork this repository's Python programs from a zygote: `start`.

Everything else starts in the usual way, as do programs with `PLAIN` in their environment and those started by a process without
its own zygote.
"""

from __future__ import annotations

import contextlib
import multiprocessing.util
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.support.preloading import fork
from tests.support.preloading.request import Request, send

PLAIN = "TESTS_PLAIN_PROCESSES"
"""Environment variable that makes processes and their children start in the usual way."""
ROOT = Path(__file__).parent.parent.parent.parent
ROOM = " " * 16000  # space for the command line and environment of forked processes
USUAL = ("tests.support.preloading",)
"""Modules that start in the usual way."""
WORKER = "import sys;exec(eval(sys.stdin.readline()))"  # started by execnet for pytest-xdist
STARTERS = (
    "services.console.commands",
    "services.environment",
    "services.generator",
    "services.trainer.node",
    "tests.console.run.launch",
    "tests.faults",
    "tests.gpu",
    "tests.sync_faults",
)
"""Modules that start processes themselves."""
SPAWN = "from multiprocessing.spawn import spawn_main"  # started by multiprocessing for vLLM, whose engine starts its workers
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_LOGGING_CONFIG_PATH": str(ROOT / "services/generator/engines/vllm_logging.json"),
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCH_COMPILE_DISABLE": "1", "CUDA_VISIBLE_DEVICES": "", "MPLBACKEND": "agg",
    "TQDM_DISABLE": "1",
}  # fmt: skip
"""Variables that libraries read on import, as set by the services."""

_usual = subprocess.Popen._execute_child  # type: ignore[attr-defined]
_usual_spawn = multiprocessing.util.spawnv_passfds
_asking = threading.Lock()
_connection: socket.socket | None = None
_owner = 0  # the process that owns `_connection`
_zygote = 0  # process id of the zygote


def start(preloaded: str) -> None:
    """Start this process's zygote, which imports in the background. Must be called from the main thread."""
    if not fork.SUPPORTED or _connection is not None or os.environ.get(PLAIN):
        return
    assert threading.current_thread() is threading.main_thread(), "forked processes have this thread as their parent"
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-m", "tests.support.preloading.zygote", str(theirs.fileno()), preloaded, ROOM]
    environ = os.environ | ENVIRONMENT | {"PYTHONPATH": str(ROOT), "ROOM": ROOM}
    nothing = subprocess.DEVNULL
    process = subprocess.Popen(
        command, env=environ, cwd=ROOT, stdin=nothing, stdout=nothing, stderr=None, pass_fds=[theirs.fileno()]
    )
    theirs.close()
    _install(ours, process.pid)
    process.returncode = 0  # `stop` waits for it


def stop() -> None:
    """Stop this process's zygote; processes forked from it continue."""
    global _connection
    if _connection is None or _owner != os.getpid():
        return
    _connection.close()
    _connection = None
    os.kill(_zygote, signal.SIGKILL)
    os.waitpid(_zygote, 0)


def adopt(serve: Callable[[socket.socket], None]) -> int:
    """Fork a zygote from this forked process and use that one; return the descriptor of the socket to it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if (zygote := os.fork()) == 0:
        ours.close()
        serve(theirs)
    theirs.close()
    _install(ours, zygote)
    return ours.fileno()


def starts_others(argv: Sequence[str]) -> bool:
    """Return whether a program starts processes itself."""
    if argv[1] == "-m":
        return argv[2].startswith(STARTERS)
    return argv[1].endswith(".py") or any(word.strip() == WORKER or word.startswith(SPAWN) for word in argv)


def _install(connection: socket.socket, zygote: int) -> None:
    global _connection, _owner, _zygote
    _connection, _owner, _zygote = connection, os.getpid(), zygote
    subprocess.Popen._execute_child = _execute_child  # type: ignore[attr-defined]
    multiprocessing.util.spawnv_passfds = _spawn


def _execute_child(self: Any, args: Any, executable: Any, preexec_fn: Any, *others: Any) -> None:
    (
        close_fds, pass_fds, cwd, env, _, _, shell, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, _, gid, gids, uid,
        umask, session, group,
    ) = others  # fmt: skip
    environ = dict(os.environ if env is None else env)
    folder = os.fspath(cwd or os.getcwd())
    plain = shell or executable or not close_fds or not os.path.isdir(folder) or {gid, gids, uid} != {None}
    if plain or not _ours(args, environ) or not _carried(preexec_fn):
        _usual(self, args, executable, preexec_fn, *others)
        return
    streams = [number if number >= 0 else usual for usual, number in enumerate((p2cread, c2pwrite, errwrite))]
    kept = sorted(set(pass_fds) - {0, 1, 2})
    request = Request(
        argv=tuple(os.fspath(word) for word in args),
        environ={os.fsdecode(name): os.fsdecode(value) for name, value in environ.items()},
        cwd=os.fsdecode(folder),
        umask=_umask() if umask < 0 else umask,
        files=(0, 1, 2, *kept),
        session=session,
        group=os.getpgrp() if group < 0 else group,
        before=preexec_fn,
    )
    self.pid = _ask(request, [*streams, *kept])
    self._child_created = True
    self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)


def _spawn(path: bytes, args: Sequence[str | bytes], passfds: Sequence[int]) -> int:
    """Start a process for multiprocessing: fork it if it is one of its workers, otherwise spawn it as usual."""
    words = tuple(os.fsdecode(word) for word in args)
    if not _ready(dict(os.environ)) or not any(word.startswith(SPAWN) for word in words):
        return _usual_spawn(path, args, passfds)
    files = (0, 1, 2, *passfds)
    request = Request(words, dict(os.environ), os.getcwd(), _umask(), files, False, os.getpgrp(), None)
    return _ask(request, list(files))


def _ready(environ: dict[str, str]) -> bool:
    """Return whether there is a zygote, and whether it has imported this copy of the code."""
    if _connection is None or _owner != os.getpid() or environ.get(PLAIN):
        return False
    return environ.get("PYTHONPATH", str(ROOT)).split(os.pathsep)[0] == str(ROOT)


def _ours(args: Any, environ: dict[str, str]) -> bool:
    """Return whether the command is a Python program of this repository that may be forked."""
    if not _ready(environ) or not isinstance(args, list | tuple) or os.fspath(args[0]) != sys.executable:
        return False
    words = [os.fspath(word) for word in args[1:]]
    match words:
        case ["-m", name, *_]:
            return name.startswith(("services.", "tests.")) and not name.startswith(USUAL)
        case ["-u", "-c", code]:
            return code.strip() == WORKER
        case ["-c", code, *_]:
            return "sys.modules" not in code  # otherwise it inspects imports
        case [path, *_]:
            return path.endswith(".py")
    return False


def _carried(before: Any) -> bool:
    """Return whether `preexec_fn` can be sent to another process."""
    with contextlib.suppress(pickle.PicklingError, AttributeError, TypeError):
        return before is None or bool(pickle.dumps(before))
    return False


def _umask() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("Umask:"):
            return int(line.split()[1], 8)
    raise RuntimeError("/proc does not tell the umask")


def _ask(request: Request, files: list[int]) -> int:
    assert _connection is not None
    with _asking:
        send(_connection, request, files)
        told = _connection.recv(64)
    if not told:
        raise RuntimeError("the zygote has died; what it printed says why")
    return int(told)
