"""One trainer rank as a separate process, for tests: `launch` starts the ranks, `main` is their program.

A job is a name in `JOBS` and its arguments. A process runs several jobs in turn, since importing torch and DeepSpeed takes longer
than any of them.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from services.protocol.payloads import Payload
from services.runtime.process_tools import free_port
from services.store import Store
from services.store.connection import Connection

if TYPE_CHECKING:
    from services.trainer.step.prefetch import Fetched
    from services.trainer.worker import Worker

Job = tuple[str, dict[str, Any]]
TIMEOUT_S = 170


def launch(size: int, jobs: Sequence[Job], folder: Path) -> list[list[Any]]:
    """Run the jobs on `size` ranks; return what each job returned on each rank, [job][rank]."""
    folder.mkdir(parents=True)
    torch.save(list(jobs), folder / "jobs.pt")
    port = free_port()
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
            "PYTHONWARNINGS": "ignore",  # torch's own deprecations, one line per collective
            "PATH": "/nowhere",  # training must not need a compiler
        }
        log = (folder / f"rank-{rank}.log").open("w")
        command = [sys.executable, "-m", "tests.support.models.rank_worker", str(folder), str(rank)]
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
    """Run the jobs in the folder given as the first argument, as the rank given as the second."""
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    results = []
    for name, arguments in torch.load(folder / "jobs.pt", weights_only=False):
        started = time.perf_counter()
        results.append(JOBS[name](**arguments))
        print(f"job {name} {arguments.get('sections')} took {time.perf_counter() - started:.1f} s", flush=True)
    torch.save(results, folder / f"rank-{rank}.pt")


def _policy(model: Path, sections: dict[str, Any]) -> Any:
    from services.trainer.ranks import World
    from services.trainer.step import policy as policy_module
    from services.trainer.step.gradient import GradientSum
    from services.trainer.step.policy import Policy
    from tests.support.models.tiny_model import make_config

    policy_module.LOGPROB_CHUNK_TOKENS = 5  # several chunks per row

    class Recording(GradientSum):
        """Keeps the whole gradient of every optimizer step, before clipping, and counts backward passes."""

        def _backward(self, loss: torch.Tensor) -> None:
            policy.backward_passes += 1
            super()._backward(loss)

        def _step(self, step: int) -> float:
            from deepspeed.utils import safe_get_full_grad

            from services.trainer.step.deepspeed_engine import keeps_gradients

            plain = keeps_gradients(policy.config)
            gradients = {}
            for name, parameter in policy.module.named_parameters():
                if not parameter.requires_grad:
                    continue
                gradient = parameter.grad if plain else safe_get_full_grad(parameter)
                assert gradient is not None
                gradients[name] = gradient.detach().float().cpu().clone()  # which clipping changes in place
            policy.gradients.append(gradients)
            return super()._step(step)

    class Recorded(Policy):
        gradients: list[dict[str, torch.Tensor]]
        backward_passes: int

    world = World.from_environment()
    trainer = {"ranks": world.size} | sections.get("trainer", {})
    policy_module.GradientSum = Recording
    policy = Recorded(make_config(model, **(sections | {"trainer": trainer})), world)
    policy.gradients, policy.backward_passes = [], 0
    return policy


def _train(policy: Any, payloads: Any, samples: Any, layout: Any, step: int, drop: int = 0) -> Any:
    """Train a step, without its first `drop` rows."""
    from services.trainer.step import batches, logprob_gaps
    from tests.support.models.tiny_model import VOCABULARY, plan_of

    plan, ranks = plan_of(layout, samples, step, policy.config.loss)
    rows = batches.build(ranks[policy.data_rank], payloads, vocabulary=VOCABULARY, row_tokens=policy.config.trainer.row_tokens)
    trained = policy.train(rows[drop:], plan)
    policy.gaps = {} if trained.gaps is None else logprob_gaps.message(rows, trained.gaps, 1.0, 1 << 20).by_segment()
    return trained


def polyak(model: Path, sections: Any, payloads: Any, samples: Any, layouts: Any) -> dict[str, Any]:
    """Train one step per layout; return the weights of policy and reference before the first and after each, and metrics."""
    policy = _policy(model, sections)
    weights, references, metrics = [whole_weights(policy)], [reference_weights(policy)], []
    for step, layout in enumerate(layouts):
        metrics.append(_train(policy, payloads, samples, layout, step).metrics)
        weights.append(whole_weights(policy))
        references.append(reference_weights(policy))
    return {"weights": weights, "references": references, "metrics": metrics}


def late_average(model: Path, payloads: Any, samples: Any, layout: Any, root: Path) -> dict[str, Any]:
    """Save with a frozen reference and load with an averaged one. Return the reference before and after, and the warnings."""
    import logging

    warned: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            warned.append(record.getMessage())

    logging.getLogger("services.trainer.step.reference").addHandler(Keep())
    frozen = _policy(model, {})
    _train(frozen, payloads, samples, layout, 0)
    if frozen.world.rank == 0:
        root.mkdir()
    torch.distributed.barrier()
    frozen.save(root)
    late = _policy(model, {"reference": {"alpha": 0.1}})
    late.load(root)
    return {"before": reference_weights(frozen), "after": reference_weights(late), "warned": warned}


def decay(model: Path, stage: int) -> dict[str, float]:
    """Return the weight decay of every parameter by name, as read from DeepSpeed's optimizer groups."""
    policy = _policy(model, {"trainer": {"zero_stage": stage}, "optimizer": {"weight_decay": 0.1}, "loss": {"kl_beta": 0.0}})
    optimizer = policy.engine.optimizer
    rates = [group["weight_decay"] for group in (optimizer.optimizer if stage else optimizer).param_groups]
    match stage:
        case 0:
            groups = [(group["params"], rate) for group, rate in zip(optimizer.param_groups, rates, strict=True)]
        case 3:
            owners = optimizer.sub_group_to_group_id
            groups = [(params, rates[owners[place]]) for place, params in enumerate(optimizer.fp16_groups)]
        case _:
            groups = list(zip(optimizer.bit16_groups, rates, strict=True))
    of_parameter = {id(parameter): rate for params, rate in groups for parameter in params}
    return {name: of_parameter[id(parameter)] for name, parameter in policy.module.named_parameters()}


def in_place(model: Path, sections: Any, payloads: Any, samples: Any, layout: Any) -> list[bool]:
    """Train a step; return, for each bucket of several weights, whether it is sent from the weights' own memory."""
    from services.weights.broadcast.host_memory import HostBuckets, as_they_lie
    from services.weights.buckets import describe, plan_buckets

    policy = _policy(model, sections)
    _train(policy, payloads, samples, layout, 0)
    weights = dict(policy.module.named_parameters(remove_duplicate=False))
    manifest = plan_buckets(
        [describe(name, weights[name]) for name in as_they_lie(weights)], 26_000 * weights["lm_head.weight"].element_size() // 2
    )
    memory, found = HostBuckets(1, fleeting=False), []
    for number, bucket in enumerate(manifest.buckets):
        tensors = [weights[meta.name].detach() for meta in bucket.tensors]
        sent = memory.memory(number, bucket, tensors)
        assert all(torch.equal(view, tensor) for (_, view), tensor in zip(bucket.views(sent), tensors, strict=True))
        if len(tensors) > 1:
            found.append(sent.data_ptr() == tensors[0].data_ptr())
    return found


def fixed_point(gradients: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return sums of the gradients divided among the ranks in several ways, and of values at, above and outside the range."""
    from services.trainer.ranks import World
    from services.trainer.step.fixed_point import FixedPointSum

    world = World.from_environment()
    world.join(60.0)
    parameter = torch.nn.Parameter(torch.zeros_like(gradients[0]))
    total, sums = FixedPointSum([parameter]), {}
    deals = {
        "in order": gradients[world.rank :: world.size],
        "one rank": gradients[::-1] if world.rank == 0 else [],
        "too large": [torch.full_like(parameter, 2000.0 if world.rank else 0.0)],
        "no number": [torch.full_like(parameter, torch.nan if world.rank else 0.0)],
        "afterwards": gradients if world.rank else [],
    }
    for name, mine in deals.items():
        for gradient in mine:
            parameter.grad = gradient.clone()
            total.add()
        total.reduce(len(gradients))
        assert parameter.grad is not None
        sums[name] = parameter.grad.clone()
    parameter.grad = torch.full_like(parameter, 0.0 if world.rank else 2.0**11)
    total.add()
    total.reduce(1)
    return sums | {"at the bound": parameter.grad}


def reference_weights(policy: Any) -> dict[str, torch.Tensor]:
    """Gather and return every parameter of the reference."""
    from services.trainer.model.export import whole_state

    return whole_state(policy.reference.module.model, policy.zero_stage, keep=True)


def whole_weights(policy: Any) -> dict[str, torch.Tensor]:
    """Gather and return every parameter of the policy."""
    from services.trainer.model.export import whole_state

    return whole_state(policy.module, policy.zero_stage, keep=True)


def train(model: Path, sections: Any, payloads: Any, samples: Any, layouts: Any) -> dict[str, Any]:
    """Train one step per layout.

    Return the gradients, metrics and priorities of each step, the final weights, the logprob gaps of the last step, and the
    number of backward passes.
    """
    policy = _policy(model, sections)
    trained = [_train(policy, payloads, samples, layout, step) for step, layout in enumerate(layouts)]
    return {
        "gradients": policy.gradients,
        "metrics": [one.metrics for one in trained],
        "priorities": [one.priorities for one in trained],
        "weights": whole_weights(policy),
        "gaps": policy.gaps,
        "backward_passes": policy.backward_passes,
    }


def saved_step(model: Path, file: Path) -> dict[str, Any]:
    """Train the step in a file that tests/trainer/step/test_saved_step.py wrote; return its metrics and the weights."""
    from services.protocol import codec
    from services.protocol.messages import RankPlan, StepPlan
    from services.trainer.step import batches

    policy = _policy(model, {})
    plan, ranks, payloads = msgspec.msgpack.decode(file.read_bytes(), type=tuple[bytes, list[bytes], dict[str, bytes]])
    rows = batches.build(
        codec.decode(ranks[policy.data_rank], RankPlan),
        {name: codec.decode(body, Payload) for name, body in payloads.items()},
        vocabulary=policy.vocabulary,
        row_tokens=policy.config.trainer.row_tokens,
    )
    return {"metrics": policy.train(rows, codec.decode(plan, StepPlan)).metrics, "weights": whole_weights(policy)}


def variants(model: Path, sections: Any, payloads: Any, samples: Any, layout: Any, losses: dict[str, Any]) -> dict[str, Any]:
    """Train one step with each named loss from the same weights: the learning rate is too small to change float32."""
    policy = _policy(model, sections | {"optimizer": {"learning_rate": 1e-30}})
    results = {}
    for name, config in losses.items():
        policy.config = policy.gradient._config = policy.config.model_copy(update={"loss": config})
        policy.gradients = []
        metrics = _train(policy, payloads, samples, layout, 0).metrics
        results[name] = {"gradients": policy.gradients, "metrics": metrics}
    return results


def resume(model: Path, sections: Any, payloads: Any, samples: Any, layouts: Any, root: Path) -> dict[str, Any]:
    """Train with a checkpoint before the last layout; then restore it into a new policy and train the last layout again."""
    from services.runtime import atomic_folders
    from services.trainer.checkpoints.folder import Checkpoints
    from services.trainer.step import deepspeed_engine as engine

    checkpoints = Checkpoints(root, keep=2)
    policy = _policy(model, sections)
    assert checkpoints.restore(policy) is None
    for step, layout in enumerate(layouts[:-1]):
        _train(policy, payloads, samples, layout, step)
    state = optimizer_state(policy)
    saved = checkpoints.save(policy, len(layouts) - 2, lambda folder: atomic_folders.write(folder / "snapshot", b"of dataprep"))
    metrics = _train(policy, payloads, samples, layouts[-1], len(layouts) - 1).metrics
    uninterrupted = whole_weights(policy), reference_weights(policy), torch.rand(3), engine.random_state()["python"][1][:3]

    fresh = _policy(model, sections)
    found = checkpoints.restore(fresh)
    assert found is not None
    rate = fresh.learning_rate.state
    again = _train(fresh, payloads, samples, layouts[-1], found.step + 1).metrics
    return {
        "rate": rate,
        "uninterrupted": uninterrupted,
        "resumed": (whole_weights(fresh), reference_weights(fresh), torch.rand(3), engine.random_state()["python"][1][:3]),
        "metrics": (metrics, again),
        "saved": saved,
        "state": state,
        "found": found,
    }


def take_up(
    model: Path, sections: Any, payloads: Any, samples: Any, layout: Any, root: Path, again: Path | None = None
) -> dict[str, Any]:
    """Load what another number of ranks or another ZeRO stage saved, save it to `again` if given, and train one step."""
    from services.trainer.checkpoints.folder import Checkpoints

    policy = _policy(model, sections)
    found = Checkpoints(root, keep=2).restore(policy)
    assert found is not None
    taken, random = optimizer_state(policy), torch.rand(3)
    if again is not None:
        Checkpoints(again, keep=2).save(policy, found.step)
    metrics = _train(policy, payloads, samples, layout, found.step + 1).metrics
    return {"state": taken, "random": random, "metrics": metrics, "after": whole_weights(policy)}


def optimizer_state(policy: Any) -> dict[str, Any]:
    """Return the optimizer's state, gathered, by parameter.

    It consists of the model's weights, AdamW's copy of them, its moments and step counts, and the reference, read with
    DeepSpeed's accessors.
    """
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    optimizer = policy.engine.optimizer
    inner, found = getattr(optimizer, "optimizer", optimizer), {}
    if hasattr(optimizer, "_lazy_init_hp_params_optimizer_state"):
        optimizer._hp_optimizer_states_linked = False  # it was linked before AdamW had moments
        optimizer._lazy_init_hp_params_optimizer_state()
    for name, parameter in policy.module.named_parameters():
        if inner is optimizer:
            of = inner.state[parameter]
            found[name] = parameter.detach(), of["exp_avg"], of["exp_avg_sq"]
        else:
            moments = (safe_get_full_optimizer_state(parameter, kind) for kind in ("exp_avg", "exp_avg_sq"))
            found[name] = safe_get_full_fp32_param(parameter), *moments
    return {
        "trained": {name: [one.reshape(-1).cpu().clone() for one in kinds] for name, kinds in found.items()},
        "weights": whole_weights(policy),
        "reference": reference_weights(policy) if policy.reference else {},
        "steps": {float(of["step"]) for of in inner.state.values()},
    }


class SlowStore(Store):
    """A store that delays payloads by `delay_s`."""

    delay_s, asked = 0.0, 0

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self.at_once = self.steps.payloads
        self.steps.payloads = self._late  # type: ignore[method-assign]

    async def _late(self, names: Sequence[str]) -> dict[str, Payload]:
        self.asked += 1
        await asyncio.sleep(self.delay_s)
        return await self.at_once(names)


def through_worker(
    model: Path, url: str, password: str, run: str, steps: int, delay_s: float, lost_step: int = -1
) -> dict[str, Any]:
    """Train prepared steps as rank 0 does, from a slow store; then again on a new policy, from rows built up front.

    Rank 1 first gets a different plan for `lost_step`, as if Redis had lost that plan afterwards.
    """
    from services.protocol.errors import Damaged
    from services.runtime.loops import Broken
    from services.runtime.portal import Portal
    from services.trainer import ranks
    from services.trainer.step import batches
    from services.trainer.step.discard_damaged import discard_damaged
    from services.trainer.worker import Worker

    sections = {"run": {"name": run, "steps": steps}, "trainer": {"row_tokens": 128, "deterministic": True}}
    policy = _policy(model, sections)
    portal = Portal()
    store: SlowStore = portal.call(SlowStore.connect(url, run, password))
    store.delay_s = delay_s
    worker = Worker(policy.config, store, portal, policy, Path("unused"))
    if policy.world.rank == 1:
        _lose(worker, lost_step)
    metrics, problem, weights, at_once, damaged = [], "", {}, {}, []
    try:
        for step in range(steps):
            while isinstance(done := worker.train(step), Damaged):
                damaged.append(str(done))
                if policy.world.rank == 0:
                    fence = portal.call(store.run.attach_trainer())
                    assert portal.call(discard_damaged(store, fence, step, done, policy.config)) == 1
                ranks.gather(None)
            metrics.append(done[1].metrics)
            time.sleep(1.5 * delay_s)  # let the rest of a step take longer than its fetch
        weights = whole_weights(policy)
        policy = _policy(model, sections)
        for step in range(steps):
            plan, ours = portal.call(store.steps.plan(step)), portal.call(store.steps.rank_plan(step, policy.world.rank))
            payloads = portal.call(store.at_once(sorted({sample.payload for row in ours.rows for sample in row})))
            policy.train(batches.build(ours, payloads, vocabulary=policy.vocabulary, row_tokens=128), plan)
        at_once = whole_weights(policy)
    except Broken as error:
        problem = str(error)
    worker.close()
    gaps = [portal.call(store.samples.gaps(step, policy.world.size)) for step in range(steps)]
    portal.call(store.close())
    portal.close()
    return {
        "metrics": metrics, "problem": problem, "damaged": damaged, "weights": weights, "at_once": at_once, "gaps": gaps,
    }  # fmt: skip


def _lose(worker: Worker, step: int) -> None:
    """Make the first fetch of `step` return a plan with other denominators."""
    fetch, lost = worker.prefetch.take, [step]

    def take(step: int) -> tuple[Fetched, float]:
        fetched, ahead_s = fetch(step)
        if step in lost:
            lost.remove(step)
            other = msgspec.structs.replace(fetched.plan, denominators=[3.0 * one for one in fetched.plan.denominators])
            fetched = replace(fetched, plan=other)
        return fetched, ahead_s

    worker.prefetch.take = take  # type: ignore[method-assign]


def non_finite(model: Path, payloads: Any, samples: Any) -> list[str]:
    """Train with NaN logprobs from the reference, then from the policy; return the errors."""
    from services.trainer.step.gradient import NonFinite

    messages = []
    for broken in ("reference", "engine"):
        policy = _policy(model, {"loss": {"kl_beta": 0.1}})
        scorer = policy.reference.module if broken == "reference" else policy.engine
        scorer.model.lm_head.weight.data.fill_(float("nan"))
        try:
            _train(policy, payloads, samples, [[[[0, 1]], [[2]]]], 0)
        except NonFinite as error:
            messages.append(str(error))
    return messages


def export(model: Path, sections: Any, folder: Path) -> dict[str, torch.Tensor]:
    """Export untrained weights and return them."""
    from services.trainer.model import export as exporting

    policy = _policy(model, sections)
    exporting.write(policy.module, policy.config, 7, folder, policy.world.rank, policy.zero_stage)
    return whole_weights(policy)


def failures(model: Path, root: Path) -> dict[str, str]:
    """Make saving and restoring fail in every way; return the messages."""
    import resource
    import signal

    from services.config import ConfigError
    from services.runtime import atomic_folders
    from services.trainer.checkpoints.folder import CheckpointError, Checkpoints, Saved
    from services.trainer.step.batches import PlanMismatch

    messages: dict[str, str] = {}
    policy = _policy(model, {})
    rank = policy.world.rank

    def attempt(name: str, action: Callable[[], Any]) -> None:
        try:
            action()
        except (CheckpointError, ConfigError, PlanMismatch) as error:
            messages[name] = str(error)

    def left(folder: Path) -> str:
        return ",".join(sorted(path.name for path in folder.iterdir()))

    good = Checkpoints(root / "good", keep=2)
    for step in (1, 2, 3):
        good.save(policy, step)
    if rank == 0:
        (root / "file").write_text("")
    attempt("not a folder", lambda: Checkpoints(root / "file", keep=1).save(policy, 1))
    attempt("cannot begin", lambda: Checkpoints(root / "file", keep=1).try_out(rank))
    attempt("beside", lambda: good.save(policy, 4, lambda folder: atomic_folders.write(folder / "none" / "snapshot", b"")))
    if rank == policy.world.size - 1:  # one rank loses the ability to write, in the middle of its file
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    attempt("too large", lambda: good.save(policy, 4))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    messages["left"] = left(good.root)

    if rank == 0:
        (root / "small").mkdir()
        messages["mounted"] = _mount(
            "-t", "tmpfs", "-o", f"size={good.complete()[0].size_bytes * 3 // 2}", "small", root / "small"
        )
    if not _from_rank_0(messages.get("mounted")):
        small = Checkpoints(root / "small" / "checkpoints", keep=1)
        small.save(policy, 1)
        attempt("disk full", lambda: small.save(policy, 2))
        messages["left on the full disk"] = left(small.root)
        messages["read-only mounted"] = _mount("-o", "remount,ro", root / "small") if rank == 0 else ""
        _from_rank_0("")
        attempt("read-only", lambda: small.save(policy, 2))
        attempt("read-only at the start", lambda: small.try_out(rank))
        found = small.restore(policy)
        messages["found"] = str(found and found.step)

    def strange(name: str, **facts: Any) -> Checkpoints:
        """Copy the last good checkpoint, with these facts changed in its manifest."""
        if rank == 0:
            shutil.copytree(good.root / "step-00000003", root / name / "step-00000003")
            path = root / name / "step-00000003" / atomic_folders.MANIFEST
            manifest = json.loads(path.read_text())
            path.write_text(json.dumps(manifest | {"facts": manifest["facts"] | facts}))
        _from_rank_0("")
        return Checkpoints(root / name, keep=2)

    for name, facts in (
        ("newer", {"layout": 99}),
        ("older", {"layout": 1}),
        ("other run", {"run": "b"}),
        ("other model", {"parameters": ""}),
        ("other type", {"dtype": "bfloat16"}),
    ):
        other = strange(name, **facts)
        attempt(name, lambda other=other: other.restore(policy))
    incomplete = strange("incomplete")
    if rank == 0:
        (incomplete.root / "step-00000003" / "trainer" / "state-1.pt").unlink()
        (incomplete.root / "step-00000007.partial").mkdir()
    _from_rank_0("")
    attempt("file gone", lambda: incomplete.restore(policy, 3))
    attempt("half-written", lambda: incomplete.restore(policy, 7))
    attempt("no such step", lambda: good.restore(policy, 1))
    partly = Saved(incomplete.root / "step-00000003", 3, good.complete()[-1].manifest)
    attempt("part of it", lambda: incomplete.load(policy, partly))
    attempt("other ranks", lambda: _policy(model, {"trainer": {"ranks": policy.world.size + 1}}))
    attempt("unequal rows", lambda: _train(policy, {}, [], [[[[]], [[]]]], 0, drop=rank))
    good.restore(policy, 2)
    messages["named"] = good.named()

    listed = Path.rglob
    if rank == policy.world.size - 1:  # its machine lists an older state of the folder
        Path.rglob = lambda *given: (path for path in listed(*given) if path.name != "state-1.pt")  # type: ignore[method-assign]
    messages["recorded"] = ",".join(sorted(good.save(policy, 3).manifest.files))
    Path.rglob = listed  # type: ignore[method-assign]

    hashed, progressed, record = list[str](), list[int](), atomic_folders._record
    atomic_folders._record = lambda path: (hashed.append(path.name), record(path))[1]
    good.progress = lambda: progressed.append(len(hashed))
    good.restore(policy)
    messages["hashed"], messages["progressed"] = ",".join(hashed), str(progressed)
    if rank == policy.world.size - 1:
        damaged = good.root / "step-00000003" / "trainer" / hashed[0]
        damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    found = good.restore(policy)
    messages["fell back"] = f"to {found and found.step}"
    messages["passed over"] = good.passed_over
    if rank == policy.world.size - 1:  # only its machine cannot read
        atomic_folders._record = _cannot_read
    attempt("one cannot read", lambda: good.restore(policy))
    return messages


def _cannot_read(path: Path) -> Any:
    raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))


def _mount(*arguments: object) -> str:
    """Mount; return why that is impossible here, or an empty string."""
    done = subprocess.run(["/usr/bin/mount", *map(str, arguments)], capture_output=True, text=True, check=False)
    return done.stderr.strip() if done.returncode else ""


def _from_rank_0(value: Any) -> Any:
    from services.trainer import ranks

    return ranks.from_rank_0(value)


def lora(**given: Any) -> dict[str, Any]:
    """Run the job of tests/trainer/model/lora_job.py."""
    from tests.trainer.model import lora_job

    return lora_job.run(**given)


JOBS: dict[str, Callable[..., Any]] = {
    "train": train,
    "saved step": saved_step,
    "variants": variants,
    "resume": resume,
    "take up": take_up,
    "polyak": polyak,
    "late average": late_average,
    "decay": decay,
    "in place": in_place,
    "fixed point": fixed_point,
    "export": export,
    "through_worker": through_worker,
    "non_finite": non_finite,
    "failures": failures,
    "lora": lora,
}

if __name__ == "__main__":
    main()
