"""One of the two processes of `grpo doctor --listen` and `--reach`, which run a real collective between two machines.

Guarantees: it uses the same rendezvous store and gloo group as weight-sync rounds (services/weights/collective.py), then NCCL
if both machines have a GPU. It prints one line of JSON per part and stops after the first part that fails. NCCL may wait
forever, so the parent process kills this one at its time limit. Torch is imported at run time.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

ELEMENTS = 4 * 2**20  # float32, 16 MiB: enough to tell a fast network from a slow one
POLL_S = 0.1


def main(role: str, host: str, port: str, wait_s: str, limit_s: str) -> int:
    """Listen at `host`, or connect to the listener there. Return exit code 1 when a part failed."""
    from services.weights.collective import absent, arrive, join_store, make_group, open_store

    rank, limit = int(role == "reach"), float(limit_s)
    try:
        if rank:
            store, place = join_store(host, int(port), limit), int(port)
            arrive(store, rank)
        else:
            store = open_store(host, limit)
            place = store.port
            tell("listening", f"{host}:{place}")
            until = time.monotonic() + float(wait_s)
            while absent(store, [1]):
                if time.monotonic() > until:
                    raise TimeoutError(f"no machine connected within {wait_s} s")
                time.sleep(POLL_S)
        other = _meet(store, rank)
    except Exception as error:  # torch raises many types for network failures; any of them is the result of this check
        return tell("meeting", error)
    tell("meeting", f"{socket.gethostname()} and {other['host']} met at {host}:{place}")
    parts: dict[str, Callable[[], Any]] = {"gloo": lambda: _summed(make_group(store, rank, 2, host, place, limit), "cpu")}
    if other["gpus"] and _gpus():
        parts["nccl"] = lambda: _summed(_nccl(store, rank, limit), "cuda")
    for name, try_it in parts.items():
        try:
            tell(name, try_it())
        except Exception as error:  # as above
            return tell(name, error)
    return 0


def tell(part: str, came: str | Exception) -> int:
    """Print the result of a part. Return 1 if it failed, else 0."""
    failed = isinstance(came, Exception)
    text = f"{type(came).__name__}: {came}" if failed else came
    print(json.dumps({"part": part, "ok": not failed, "detail": " ".join(text.split())[:600]}), flush=True)
    return int(failed)


def _meet(store: Any, rank: int) -> dict[str, Any]:
    """Exchange host name and number of GPUs with the other machine; return the other's."""
    store.set(f"who/{rank}", json.dumps({"host": socket.gethostname(), "gpus": _gpus()}))
    return json.loads(store.get(f"who/{1 - rank}"))


def _gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _nccl(store: Any, rank: int, limit_s: float) -> Any:
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore

    torch.cuda.set_device(0)
    own = PrefixStore("nccl", store)
    dist.init_process_group("nccl", store=own, rank=rank, world_size=2, timeout=timedelta(seconds=limit_s))
    return dist.group.WORLD


def _summed(group: Any, device: str) -> str:
    """All-reduce a small and a large tensor over both machines, and check the sums."""
    import torch

    seconds = 0.0
    for size in (1, ELEMENTS):
        tensor = torch.full((size,), 1.0 + group.rank(), device=device)
        began = time.perf_counter()
        group.allreduce([tensor]).wait()
        wrong = int((tensor != 3.0).sum())  # also waits for a GPU
        seconds = time.perf_counter() - began
        if wrong:
            raise RuntimeError(f"{wrong} of {size} sums are wrong: the network or a driver corrupts data")
    return f"all-reduce of {ELEMENTS * 4 >> 20} MiB in {1000 * seconds:.0f} ms, {ELEMENTS * 4 / seconds / 1e9:.2f} GB/s"


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
