"""One rank of a replay: `python -m services.trainer.replay BUNDLE WORK`, with the environment of a trainer rank.

WORK has the configuration as config.toml and, if the bundle brings them, weights in `state`. Rank 0 leaves results.json there,
every rank `rank-<n>.safetensors` with its logprobs of the last step by row.

Guarantees: it runs the code of the run's trainer on the plans and payloads of the bundle; it uses no Redis.
Waits for: the other ranks.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save_file

from services.config import ConfigError, load_resolved
from services.operations.bundles import format as bundles
from services.operations.bundles.format import Bundle, BundleError
from services.protocol import codec
from services.protocol.errors import Damaged
from services.protocol.messages import RankPlan, StepPlan
from services.protocol.payloads import Payload
from services.trainer import ranks
from services.trainer.checkpoints.folder import CheckpointError
from services.trainer.model.attention import UnsupportedModel
from services.trainer.ranks import World
from services.trainer.replay import weights
from services.trainer.state.files import StateError
from services.trainer.step import batches
from services.trainer.step.batches import PackedRow, PlanMismatch
from services.trainer.step.gradient import NonFinite
from services.trainer.step.policy import Policy

RESULTS = "results.json"
FAILURES = (
    BundleError, CheckpointError, ConfigError, Damaged, NonFinite, PlanMismatch, StateError, UnsupportedModel,
    codec.CorruptMessage,
)  # fmt: skip


class ReplayResult(msgspec.Struct):
    """The results of a replay."""

    metrics: list[dict[str, float]]
    """Metrics of each step."""
    weights: dict[str, str]
    """Parameter -> SHA-256 of its float32 weights after the last step."""


def replay(bundle: Bundle, work: Path) -> None:
    """Train the steps of a bundle, and write the results to `work`. Collective. Raises one of `FAILURES`."""
    policy = Policy(load_resolved(work / "config.toml"), World.from_environment())
    rank = policy.world.rank
    if bundle.origin.step >= 0:
        _load(policy, bundle, work)
    payloads = {name: codec.decode(group.payload, Payload) for name, group in bundle.groups.items()}
    seen, metrics = _Seen(policy), list[dict[str, float]]()
    for step in bundle.steps:
        plan = codec.decode(step.plan, StepPlan)
        if len(step.ranks) != plan.ranks or plan.ranks != policy.config.data_parallel:
            raise PlanMismatch(f"step {plan.step} has plans of {len(step.ranks)} ranks, not {policy.config.data_parallel}")
        mine = codec.decode(step.ranks[policy.data_rank], RankPlan)
        rows = batches.build(
            mine, _known(payloads, mine), vocabulary=policy.vocabulary, row_tokens=policy.config.trainer.row_tokens
        )
        seen.clear()
        metrics.append(policy.train(rows, plan).metrics)
    save_file(seen.tensors(rows), work / f"rank-{rank}.safetensors")
    after = work / "after"
    after.mkdir(exist_ok=True)
    policy.save(after)
    if rank == 0:
        (work / RESULTS).write_bytes(msgspec.json.encode(ReplayResult(metrics, weights.digests(after))))


def _load(policy: Policy, bundle: Bundle, work: Path) -> None:
    """Load the weights before the first step: those in the bundle, or of the checkpoint that it names. Collective."""
    folder, problem = work / bundles.STATE, ""
    if policy.world.rank == 0 and folder.is_dir():
        try:
            weights.restore(folder)
        except StateError as error:
            problem = str(error)
    ranks.agree(problem, StateError)
    policy.load(folder if folder.is_dir() else Path(bundle.origin.folder))


def _known(payloads: dict[str, Payload], plan: RankPlan) -> dict[str, Payload]:
    names = {sample.payload for row in plan.rows for sample in row}
    if missing := names - payloads.keys():
        raise PlanMismatch(f"the bundle has no payload {min(missing)}, which its plan names")
    return {name: payloads[name] for name in names}


class _Seen:
    """Logprobs and entropy of each row as the loss received them, in the order of training."""

    def __init__(self, policy: Policy) -> None:
        self._outputs: list[tuple[torch.Tensor, torch.Tensor]] = []
        policy.engine.module.register_forward_hook(self._note)

    def _note(self, _: Any, __: Any, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        if torch.is_grad_enabled():  # otherwise it is the old or the reference policy that is scored
            logprobs, entropy = output
            self._outputs.append((logprobs.detach().cpu().clone(), entropy.detach().cpu().clone()))

    def clear(self) -> None:
        self._outputs.clear()

    def tensors(self, rows: list[PackedRow]) -> dict[str, torch.Tensor]:
        """Return what was recorded of each row, as `row-<n>/<tensor>`."""
        found = dict[str, torch.Tensor]()
        for number, (row, (logprobs, entropy)) in enumerate(zip(rows, self._outputs, strict=True)):
            found |= {
                f"row-{number:05d}/targets": row.targets, f"row-{number:05d}/behaviour": row.behaviour,
                f"row-{number:05d}/advantages": row.advantages, f"row-{number:05d}/logprobs": logprobs,
                f"row-{number:05d}/entropy": entropy,
            }  # fmt: skip
        return found


def main(argv: list[str] | None = None) -> int:
    """Run this rank, and return the exit code."""
    path, work = sys.argv[1:] if argv is None else argv
    try:
        replay(bundles.read(Path(path)).bundle, Path(work))
    except FAILURES as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
