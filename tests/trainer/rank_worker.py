"""One trainer rank as a process of its own, for tests: `launch` starts them, `main` is what they run.

A job is a name out of `JOBS` and its arguments; a process runs several jobs one after the other, since importing torch and
DeepSpeed takes longer than any of them.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

Job = tuple[str, dict[str, Any]]
TIMEOUT_S = 170


def launch(size: int, jobs: Sequence[Job], folder: Path) -> list[list[Any]]:
    """Run the jobs on `size` ranks and return what each returned, [job][rank]."""
    folder.mkdir(parents=True)
    torch.save(list(jobs), folder / "jobs.pt")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = []
    for rank in range(size):
        environ = os.environ | {
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONWARNINGS": "ignore",  # torch's own deprecations, a line per collective
            "PATH": "/nowhere",  # training compiles nothing
        }
        log = (folder / f"rank-{rank}.log").open("w")
        command = [sys.executable, "-m", "tests.trainer.rank_worker", str(folder), str(rank)]
        processes.append((subprocess.Popen(command, env=environ, stdout=log, stderr=subprocess.STDOUT), log))
    try:
        for process, _ in processes:
            process.wait(TIMEOUT_S)
    finally:
        for process, log in processes:
            process.kill()
            process.wait()
            log.close()
    for rank, (process, _) in enumerate(processes):
        assert process.returncode == 0, f"rank {rank}:\n{(folder / f'rank-{rank}.log').read_text()[-4000:]}"
    results = [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in range(size)]
    return [list(of_job) for of_job in zip(*results, strict=True)]


def main() -> None:
    """Run the jobs of the folder given as the first argument, as the rank given as the second."""
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    results = []
    for name, arguments in torch.load(folder / "jobs.pt", weights_only=False):
        started = time.perf_counter()
        results.append(JOBS[name](**arguments))
        print(f"job {name} {arguments.get('sections')} took {time.perf_counter() - started:.1f} s", flush=True)
    torch.save(results, folder / f"rank-{rank}.pt")


def _policy(model: Path, sections: dict[str, Any]) -> Any:
    from services.trainer.policy import Policy
    from services.trainer.ranks import World
    from tests.trainer.tiny import make_config

    class Recording(Policy):
        """Keeps the whole gradient of every optimizer step, before clipping."""

        gradients: list[dict[str, torch.Tensor]]

        def _optimizer_step(self, step: int) -> float:
            from deepspeed.utils import safe_get_full_grad

            plain = self.config.trainer.zero_stage == 0 and self.config.model.dtype == "float32"
            gradients = {}
            for name, parameter in self.module.named_parameters():
                gradient = parameter.grad if plain else safe_get_full_grad(parameter)
                assert gradient is not None
                gradients[name] = gradient.detach().float().cpu().clone()
            self.gradients.append(gradients)
            return super()._optimizer_step(step)

    world = World.from_environment()
    trainer = {"ranks": world.size} | sections.get("trainer", {})
    policy = Recording(make_config(model, **(sections | {"trainer": trainer})), world)
    policy.gradients = []
    return policy


def _train(policy: Any, payloads: Any, samples: Any, layout: Any, step: int, drop: int = 0) -> dict[str, float]:
    from services.trainer import batches
    from tests.trainer.tiny import VOCABULARY, plan_of

    plan, ranks = plan_of(layout, samples, step)
    rows = batches.build(ranks[policy.world.rank], payloads, vocabulary=VOCABULARY, row_tokens=policy.config.trainer.row_tokens)
    return policy.train(rows[drop:], plan)


def whole_weights(policy: Any) -> dict[str, torch.Tensor]:
    """Every parameter, gathered."""
    from services.trainer.export import whole_state

    return whole_state(policy.module, policy.zero_stage, keep=True)


def train(model: Path, sections: Any, payloads: Any, samples: Any, layouts: Any) -> dict[str, Any]:
    """Train one step per layout; returns gradients, metrics of each step, and the weights at the end."""
    policy = _policy(model, sections)
    metrics = [_train(policy, payloads, samples, layout, step) for step, layout in enumerate(layouts)]
    return {"gradients": policy.gradients, "metrics": metrics, "weights": whole_weights(policy)}


def resume(model: Path, sections: Any, payloads: Any, samples: Any, layouts: Any, root: Path) -> dict[str, Any]:
    """Train, checkpoint before the last layout, train on; then the last again from the checkpoint, on a fresh policy."""
    from services.trainer import engine
    from services.trainer.checkpoint import Checkpoints

    checkpoints = Checkpoints(root, keep=2)
    policy = _policy(model, sections)
    assert checkpoints.restore(policy) is None
    for step, layout in enumerate(layouts[:-1]):
        _train(policy, payloads, samples, layout, step)
    saved = checkpoints.save(policy, len(layouts) - 2, {"snapshot": b"of dataprep"})
    metrics = _train(policy, payloads, samples, layouts[-1], len(layouts) - 1)
    uninterrupted = whole_weights(policy), torch.rand(3), engine.random_state()["python"][1][:3]

    fresh = _policy(model, sections)
    found = checkpoints.restore(fresh)
    assert found is not None
    again = _train(fresh, payloads, samples, layouts[-1], found.step + 1)
    return {
        "uninterrupted": uninterrupted,
        "resumed": (whole_weights(fresh), torch.rand(3), engine.random_state()["python"][1][:3]),
        "metrics": (metrics, again),
        "saved": saved,
        "found": found,
    }


def non_finite(model: Path, payloads: Any, samples: Any) -> list[str]:
    """Train with a reference policy, then with a policy, whose logprobs are no numbers; returns what is raised."""
    from services.trainer.policy import NonFinite

    messages = []
    for broken in ("_reference", "engine"):
        policy = _policy(model, {"loss": {"kl_beta": 0.1}})
        getattr(policy, broken).model.lm_head.weight.data.fill_(float("nan"))
        try:
            _train(policy, payloads, samples, [[[[0, 1]], [[2]]]], 0)
        except NonFinite as error:
            messages.append(str(error))
    return messages


def export(model: Path, sections: Any, folder: Path) -> dict[str, torch.Tensor]:
    """Export untrained weights; returns them."""
    policy = _policy(model, sections)
    policy.export_hf(folder)
    return whole_weights(policy)


def failures(model: Path, root: Path) -> dict[str, str]:
    """Every way saving and restoring can fail; returns the messages."""
    import resource
    import signal

    from services.protocol.config import ConfigError
    from services.trainer.batches import PlanMismatch
    from services.trainer.checkpoint import CheckpointError, Checkpoints

    messages: dict[str, str] = {}
    policy = _policy(model, {})
    rank = policy.world.rank

    def attempt(name: str, action: Callable[[], Any]) -> None:
        try:
            action()
        except (CheckpointError, ConfigError, PlanMismatch) as error:
            messages[name] = str(error)

    good = Checkpoints(root / "good", keep=2)
    for step in (1, 2, 3):
        good.save(policy, step, {})
    if rank == 0:
        (root / "file").write_text("")
    attempt("not a folder", lambda: Checkpoints(root / "file", keep=1).save(policy, 1, {}))
    if rank == policy.world.size - 1:  # one rank's disk is full, in the midst of DeepSpeed's collective save
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    attempt("disk full", lambda: good.save(policy, 4, {}))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    messages["left"] = ",".join(sorted(path.name for path in (root / "good").iterdir() if not path.name.endswith(".partial")))
    attempt("other stage", lambda: good.restore(_policy(model, {"trainer": {"zero_stage": 2}})))
    attempt("other ranks", lambda: _policy(model, {"trainer": {"ranks": policy.world.size + 1}}))
    attempt("unequal rows", lambda: _train(policy, {}, [], [[[[]], [[]]]], 0, drop=rank))
    return messages


JOBS: dict[str, Callable[..., Any]] = {
    "train": train,
    "resume": resume,
    "export": export,
    "non_finite": non_finite,
    "failures": failures,
}

if __name__ == "__main__":
    main()
