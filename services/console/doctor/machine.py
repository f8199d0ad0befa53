"""Checks of this machine that take seconds or only give notes: shared memory, GPUs and their driver, the network."""

from __future__ import annotations

import errno
import json
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from services.config import RunConfig
from services.console.doctor import Finding, fault, note, ok
from services.console.gpus import visible_gpus
from services.runtime.process_tools import CONFIG_ENV

GIBIBYTE = 2**30
SHARED_BYTES = 64 * 2**20  # for vLLM's and torch's processes on a CPU; Docker's default
SHARED_GPU_BYTES = GIBIBYTE  # for NCCL's buffers between the GPUs of one machine
LOCKED_BYTES = GIBIBYTE  # a fraction of what NCCL's buffers and connections take; 8 MiB is a common default
INFINIBAND = Path("/dev/infiniband")
TORCH_LIMIT_S = 120.0
CONNECT_LIMIT_S = 5.0
_ASK_TORCH = """
import json, torch
from importlib.metadata import distributions
every = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
gpus, hopper = [torch.cuda.get_device_name(i) for i in every], any(torch.cuda.get_device_capability(i) == (9, 0) for i in every)
slow = hopper and not any(each.metadata["Name"] == "flash-attn-4" for each in distributions())
print(json.dumps({"torch": torch.__version__, "cuda": torch.version.cuda, "gpus": gpus, "slow": slow}))
"""


def shared_memory(config: RunConfig, gpus: int) -> Iterator[Finding]:
    """Check that /dev/shm is large enough for the processes of one engine or trainer."""
    path = Path("/dev/shm")
    if not path.is_dir():
        yield fault("shared memory", "/dev/shm does not exist", "mount a tmpfs there")
        return
    together = max(config.trainer.ranks, config.generator.tensor_parallel) > 1
    needed = SHARED_GPU_BYTES if gpus > 1 and together else SHARED_BYTES
    size = shutil.disk_usage(path).free
    detail = f"{size / GIBIBYTE:.2f} GiB free in /dev/shm, {needed / GIBIBYTE:.2f} GiB needed"
    if size < needed:
        yield fault("shared memory", detail, "increase it: --shm-size for a container, an emptyDir of medium Memory for a pod")
    else:
        yield ok("shared memory", detail)


def gpus(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Check that torch sees the GPUs that the driver reports."""
    shown = visible_gpus(environ)
    seen = ask_torch()
    if "error" in seen:
        yield fault("torch", seen["error"], "install it: pip install 'grpo[trainer]'")
    elif len(seen["gpus"]) < len(shown):
        yield fault(
            "GPUs",
            f"the driver reports {len(shown)}, torch {seen['torch']} (CUDA {seen['cuda']}) sees {len(seen['gpus'])}",
            "install a torch build for this driver's CUDA, or set CUDA_VISIBLE_DEVICES to the GPUs that work",
        )
    elif shown:
        yield ok("GPUs", f"{', '.join(seen['gpus'])}; torch {seen['torch']}, CUDA {seen['cuda']}")
        if seen["slow"]:
            yield note(
                "attention",
                "FlashAttention 4 is not installed: without it, attention takes about 1.7 times as long on this GPU",
                "install it for the trainer: pip install 'flash-attn-4>=4.0.0b36'",
            )
    else:
        yield note("GPUs", f"none: the run uses the CPU (torch {seen['torch']})")


def network(config: RunConfig, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Check that members of a collective can reach this machine at the address that they are given."""
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        wanted = [part.lstrip("^=") for part in environ.get(name, "").split(",") if part and not part.startswith("^")]
        there = [interface for _, interface in socket.if_nameindex()]
        missing = [part for part in wanted if not any(interface.startswith(part) for interface in there)]
        if missing:
            detail = f"{name} names {', '.join(missing)}, but the interfaces are {', '.join(there)}"
            yield fault("network", detail, f"set or unset {name}")
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if INFINIBAND.is_dir() and limit != resource.RLIM_INFINITY and limit < LOCKED_BYTES:
        detail = f"this process may lock {limit / 2**20:.0f} MiB of memory, which is too little for NCCL over InfiniBand"
        remedy = "raise ulimit -l or, for pods, set LimitMEMLOCK=infinity for the node's container runtime (IPC_LOCK needs root)"
        yield fault("network", detail, remedy)
    host = config.sync.host or ("127.0.0.1" if not config.redis.url else socket.gethostname())
    address = ""
    try:
        address = str(socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][4][0])
        with (
            socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET) as listener,
            socket.create_connection((address, listener.getsockname()[1]), CONNECT_LIMIT_S),
        ):
            yield ok("network", f"weight-sync groups meet at {host} ({address}), reachable from here")
    except OSError as error:
        if CONFIG_ENV in environ and address and error.errno == errno.EADDRNOTAVAIL:
            yield ok("network", f"weight-sync groups meet at {host} ({address}), another pod")
        else:
            remedy = "set sync.host to an address of this machine that the generators can reach"
            yield fault("network", f"weight-sync groups cannot meet at {host}: {error}", remedy)


def ask_torch() -> dict[str, Any]:
    """Ask torch for its version and GPUs in a separate process: importing it takes seconds, and a broken driver may crash it."""
    try:
        asked = subprocess.run(
            [sys.executable, "-c", _ASK_TORCH], capture_output=True, text=True, timeout=TORCH_LIMIT_S, check=False
        )
        lines = asked.stdout.strip().splitlines()
        return json.loads(lines[-1]) if lines else {"error": (asked.stderr.strip().splitlines() or ["no output"])[-1]}
    except subprocess.TimeoutExpired:
        return {"error": f"import torch did not finish within {TORCH_LIMIT_S:g} s"}
