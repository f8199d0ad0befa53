"""A process that has imported vLLM, from which the engine's processes are forked, so that they do not import it again.

Guarantees: it is forked before this process has other threads, connections or an event loop, so what is forked from it inherits
none; it ends with this process, however that ends. Without it vLLM's processes are spawned, as is its default on CPUs.

multiprocessing's fork server does the rest: it waits for requests, forks, and reports how a process ended. It is started by a
fork instead of a new interpreter.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import sys
from collections.abc import Callable
from multiprocessing import connection, forkserver, util
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

MODULES = (
    "vllm", "vllm.v1.engine.async_llm", "vllm.v1.engine.core", "vllm.v1.executor.uniproc_executor", "vllm.v1.worker.cpu_worker",
    "services.weights.receivers.gloo",
)  # fmt: skip
"""What an engine's process on a CPU imports before it loads a model."""
TITLE = "VLLM::Template"
"""Name of the process, beside vLLM's own `VLLM::EngineCore`."""
AUTHENTICATED = (3, 14)
"""Version of Python from which the fork server wants a key."""


class TemplateProcess(ForkServerProcess):
    """A process forked from the template, with the environment of the process that starts it."""

    _environ: dict[str, str]

    def start(self) -> None:
        """Start with the current environment."""
        self._environ = dict(os.environ)
        super().start()

    def run(self) -> None:
        """Run in that environment."""
        os.environ.update(self._environ)
        super().run()


class TemplateContext(ForkServerContext):
    """multiprocessing's context for such processes."""

    Process = TemplateProcess  # pyright: ignore[reportAssignmentType] - as in the class above it


def start(environment: Callable[[], None]) -> None:
    """Import what the engine needs, fork the template, and have vLLM start its processes from it.

    `environment` sets the variables that vLLM reads on import. Forks nothing in a process that has more than one thread.
    """
    importlib.import_module("setproctitle")  # which finds no space for titles once the environment has changed
    environment()
    for name in MODULES:
        importlib.import_module(name)
    if sys.version_info >= AUTHENTICATED or len(os.listdir("/proc/self/task")) > 1:
        return
    _fork()
    from vllm.v1.engine import utils

    utils.get_mp_context = TemplateContext  # pyright: ignore[reportPrivateImportUsage]


def _fork() -> None:
    """Become the parent of a fork server, which multiprocessing then takes for one that it started."""
    server: Any = forkserver._forkserver  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
    with socket.socket(socket.AF_UNIX) as listener:
        address: Any = connection.arbitrary_address("AF_UNIX")  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
        listener.bind(address)
        if not util.is_abstract_socket_namespace(address):  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
            os.chmod(address, 0o600)
        listener.listen()
        alive, ours = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.close(ours)
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                importlib.import_module("setproctitle").setproctitle(TITLE)
                forkserver.main(listener.fileno(), alive, [])
            finally:
                os._exit(0)
        os.close(alive)
    server._forkserver_address, server._forkserver_alive_fd, server._forkserver_pid = address, ours, pid
