"""Stages that move weights: deltas of versions, a collective of two processes, shared memory."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch.multiprocessing.spawn import spawn

from services.runtime.process_tools import free_port
from services.weights.versions import pieces
from tests.gpu.bench import Bench, Figures

LIMIT_S = 60.0
JOIN_S = 45.0  # for processes to start, meet and broadcast; NCCL, which rejects two ranks on one GPU, could wait forever


def deltas(bench: Bench) -> Figures:
    """Encode the bits that a step at a rate of 1e-6 changes: bytes, speed of encoding (host) and comparing (device)."""
    count = bench.size(200_000_000, 200_000)
    torch.manual_seed(3)
    wide = torch.randn(count, device=bench.device) * 0.02
    old = wide.to(torch.bfloat16)
    new = (wide + 1e-6 * torch.randn_like(wide).sign()).to(torch.bfloat16)
    on_device = bench.timed(lambda: torch.nonzero(old.view(torch.int16) != new.view(torch.int16)))
    before, after = (each.view(torch.int16).cpu().numpy().view(np.uint16) for each in (old, new))
    started = time.perf_counter()
    encoded = pieces.encode(after, before)
    seconds = time.perf_counter() - started
    changed = int((before != after).sum())
    return {
        "changed_share": changed / count, "delta_share": encoded.nbytes / (2 * count), "encode_gb_per_s": 2e-9 * count / seconds,
        "compare_gb_per_s": 2e-9 * count / on_device,
    }  # fmt: skip


def collective(bench: Bench) -> Figures:
    """Broadcast between two processes on this device, or within a group of one if NCCL rejects that."""
    figures: Figures = {"ranks": 2}
    try:
        figures["gb_per_s"] = _broadcast(bench, 2)
    except Exception as error:  # NCCL rejects two ranks on one GPU with an error that depends on its version
        if bench.dry:
            raise
        figures |= {"ranks": 1, "two_ranks": str(error).splitlines()[-1][:300], "gb_per_s": _broadcast(bench, 1)}
    return figures | {"nccl": None if bench.dry else figures["ranks"]}


def _broadcast(bench: Bench, ranks: int) -> float:
    context = processes.get_context("spawn")
    answers: Any = context.Queue()
    arguments = (ranks, free_port(), bench.dry, bench.size(2**30, 2**16), answers)
    started: Any = spawn(_rank, args=arguments, nprocs=ranks, join=False)
    deadline = time.monotonic() + JOIN_S
    try:
        while not started.join(max(0.0, deadline - time.monotonic()), grace_period=5):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{ranks} ranks did not broadcast within {JOIN_S:g} s")
    finally:
        for process in started.processes:
            process.kill()
    return answers.get(timeout=LIMIT_S)


def _rank(rank: int, ranks: int, port: int, dry: bool, nbytes: int, answers: Any) -> None:
    """Time a broadcast from rank 0, and check the received values."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo" if dry else "nccl", rank=rank, world_size=ranks)
    device = torch.device("cpu") if dry else torch.device("cuda", 0)
    data = torch.full((nbytes,), 7 if rank == 0 else 0, dtype=torch.uint8, device=device)
    dist.broadcast(data, 0)
    assert bool((data == 7).all())
    started = time.perf_counter()
    dist.broadcast(data, 0)
    if not dry:
        torch.cuda.synchronize()
    if rank == 0:
        answers.put(1e-9 * nbytes / (time.perf_counter() - started))
    dist.destroy_process_group()


def shared_memory(bench: Bench) -> Figures:
    """Pass a tensor without a copy (CUDA IPC, or shared memory on a CPU) to another process, which writes into it."""
    context = processes.get_context("spawn")
    given: Any = context.Queue()
    taken: Any = context.Queue()
    data = torch.zeros(bench.size(2**28, 2**12), dtype=torch.uint8, device=bench.device)
    other = context.Process(target=_fill, args=(given, taken))
    other.start()
    started = time.perf_counter()
    given.put(data)
    assert taken.get(timeout=LIMIT_S) == "filled"
    seconds = time.perf_counter() - started
    bench.wait()
    filled = bool((data == 9).all())
    other.join(LIMIT_S)
    assert filled, "the other process wrote elsewhere"
    return {"seconds_to_share": round(seconds, 3), "same_memory": filled}


def _fill(given: Any, taken: Any) -> None:
    data = given.get(timeout=LIMIT_S)
    data.fill_(9)
    if data.is_cuda:
        torch.cuda.synchronize()
    taken.put("filled")
