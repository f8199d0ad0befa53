"""The policy in training: DeepSpeed engine and reference policy, with one method per training step.

Guarantees: the gradient of a mini-batch is that of the written formula (docs/semantics.md) for any number of ranks, any packing
and any split into micro-batches, up to rounding; with `trainer.deterministic`, zero_stage 0 and float32 (or adapters), the same
rows give the same bits on any number of data-parallel ranks; `load` of what `save` wrote continues bit for bit.

Waits for: the other ranks, in every method except the constructor's checks. Each runs the same methods in the same order; a rank
that dies fails the others' collectives at once (gloo) or after `ranks.TIMEOUT_S`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from torch import Tensor

from services.config import ConfigError, RunConfig
from services.config.loss_in_words import clips
from services.config.model_files import check_model
from services.protocol.messages import StepPlan
from services.trainer import losses, ranks
from services.trainer.losses import policies
from services.trainer.model import flops
from services.trainer.model import policy_network as model
from services.trainer.model.attention import UnsupportedModel
from services.trainer.model.proof import Proofs
from services.trainer.model.sequence import Team
from services.trainer.ranks import World
from services.trainer.state import archive, partitions
from services.trainer.state.archive import Archive, StateError, read_state, write_state
from services.trainer.step import deepspeed_engine, denominators, logprob_gaps, priorities
from services.trainer.step.batches import PackedRow, PlanMismatch
from services.trainer.step.gradient import GradientSum, TrainedRow, refuse, score_frozen
from services.trainer.step.metrics import Clock, StepMetrics
from services.trainer.step.reference import ReferencePolicy

LOGPROB_CHUNK_TOKENS = 1024
"""Tokens whose logits are computed at a time. With a vocabulary of 150,000 that is 0.6 GB of float32; fewer tokens make the
products of the output matrix less efficient.
"""

COMPILED_CHUNK_TOKENS = 4 * LOGPROB_CHUNK_TOKENS
"""The same with `trainer.compile`. Compiled passes need no copies in float32, so four times as many tokens take as much memory,
and their products keep all multiprocessors of a large GPU busy.
"""

STATE, RANDOM = "state", "random"
"""Stems of the names of a rank's files: weights with optimizer, and random generators."""


PROOFS = ".proofs"
"""Folder under run.dir with verification results of models (proof.py), shared by all runs there."""


@dataclass(frozen=True)
class Trained:
    """Results of a training step, equal on every rank except `time/...`, which are this rank's seconds, and `gaps`."""

    metrics: dict[str, float]
    priorities: dict[str, float]  # by group; empty unless replay.priority = "trainer"
    gaps: Tensor | None = None  # codes of the logprob gaps of this rank's rows, [sum R] int8; None unless they are to be logged


class Policy:
    """The model of a run on one rank.

    Attributes: `module` (the Hugging Face model), `engine` (DeepSpeed's), `learning_rate`, `gradient`, `reference`, `zero_stage`,
    `world`, `device`, `peak_tflops` (peak of the device, 0 if unknown), `data_rank` (the rank whose rows of a plan this rank
    trains; all ranks of a sequence-parallel team have the same).
    """

    def __init__(self, config: RunConfig, world: World) -> None:
        if world.size != config.trainer.ranks:
            raise ConfigError(f"trainer.ranks = {config.trainer.ranks}, but {world.size} trainer ranks were started (WORLD_SIZE)")
        if config.trainer.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic only with it
        check_model(config)
        policies.check(config.loss)
        deepspeed_engine.seed(config.run.seed, config.trainer.deterministic)
        self.config, self.world, self.device = config, world, world.device
        self.zero_stage: int = config.trainer.zero_stage
        world.join()
        width = config.trainer.sequence_parallel
        self.data_rank = world.rank // width
        self._team = Team(width, world.rank, world.size) if width > 1 else None
        self._leads = self._team is None or self._team.rank == 0  # contributes for the team where values of ranks are summed
        scorer = self._proven()
        self.module = scorer.model
        self._flops = flops.of_model(self.module)
        self.peak_tflops = flops.peak_tflops(config.model.dtype, self.device)
        self.engine = deepspeed_engine.start(config, scorer)
        self.learning_rate = deepspeed_engine.LearningRate(config.optimizer, config.run.steps)
        self.reference = ReferencePolicy(config, self._scorer, self.engine, world) if config.loss.kl_beta > 0 else None
        self.gradient = GradientSum(config, self.engine, self.reference, world, self._leads)

    @property
    def vocabulary(self) -> int:
        """Return the number of token ids."""
        return self.module.config.get_text_config().vocab_size

    def train(self, rows: Sequence[PackedRow], plan: StepPlan) -> Trained:
        """Run one training step, with one optimizer step per mini-batch of the plan. Collective.

        `rows` are this rank's, in the plan's order. Raises `PlanMismatch` before anything is trained, and `NonFinite` during
        training.
        """
        ranks.agree(_misfit(plan, len(rows), self.config), PlanMismatch)
        started, clock, kind = time.perf_counter(), Clock(self.device), self.config.loss.denominator
        acts = clips(self.config, len(plan.mini_batch_rows)), not self.config.from_behaviour
        metrics = StepMetrics(self.device, self.reference is not None, *acts)
        batches = _split(len(rows), plan.mini_batch_rows)
        token_counts, learns = self._survey(rows, batches)
        old: list[Tensor | None] = [None] * len(rows)
        if len(batches) > 1 and not self.config.from_behaviour:
            with clock.phase("old"):
                self.engine.eval()
                old = [score_frozen(self.engine, row.to(self.device)) for row in rows]
        rate, norms, done = self.learning_rate.at(plan.step), list[float](), list[TrainedRow]()
        for parameters in self.engine.optimizer.param_groups:
            parameters["lr"] = rate
        for batch, planned, counts in zip(batches, plan.denominators, token_counts, strict=True):
            divisor, shares = (
                denominators.divisor(planned, counts, kind),
                denominators.shares([rows[i] for i in batch], counts, kind),
            )
            for i, share in zip(batch, shares, strict=True):
                done.append(self.gradient.add(rows[i], old[i], share, divisor, learns[i], i == batch[-1], metrics, clock))
            with clock.phase("step"):
                norms.append(self.gradient.update(plan.step, len(batch)))
        record = metrics.report(self._flops_of(rows, learns))
        refuse("the loss", record["loss/train/sum"], plan.step)
        if self.reference is not None:
            self.reference.update()
        greatest = self.config.optimizer.max_grad_norm
        record |= {
            "excluded/train/tokens": float(sum(map(denominators.excluded, token_counts))),
            "gradient/train/norm": sum(norms) / len(norms),
            "gradient/train/clipped_norm": sum(min(norm, greatest) for norm in norms) / len(norms),
            "learning_rate/train/value": rate,
            "time/train/total_s": time.perf_counter() - started,
            **{f"time/train/{phase}_s": seconds for phase, seconds in clock.seconds.items()},
        }
        return self._results(rows, done, record)

    def _results(self, rows: Sequence[PackedRow], done: Sequence[TrainedRow], metrics: dict[str, float]) -> Trained:
        """Return the results of a step that was trained. Collective."""
        keeps = self.config.samples.keep and self._leads
        gaps = logprob_gaps.codes([row.gap for row in done]) if keeps else None
        if self.config.replay.priority != "trainer":
            return Trained(metrics, {}, gaps)
        mine = priorities.of_rows(rows, [row.learning.cpu() for row in done]) if self._leads else {}
        return Trained(metrics, priorities.join(ranks.gather(mine)), gaps)

    def save(self, folder: Path) -> list[str]:
        """Write this rank's state (weights, optimizer, averaged reference, random generators) into `folder`. Collective.

        Returns the names of the files that this rank wrote. Weights that adapters do not change are those of model.path and are
        not written. Every rank raises `StateError` if any rank could not write.
        """
        problem, written = "", [f"{STATE}-{self.world.rank}.pt", f"{RANDOM}-{self.world.rank}.pt"]
        try:
            archive.write(folder / written[0], partitions.held(self.engine, self.world))
            write_state(folder / written[1], deepspeed_engine.random_state())
            if self.reference is not None:
                written += self.reference.save(folder)
        except StateError as error:
            problem = str(error)
        ranks.agree(problem, StateError)
        return written

    def load(self, folder: Path) -> None:
        """Load the state that `save` wrote, with any number of ranks and any ZeRO stage. Collective.

        Call it on a policy that has not trained yet. A rank beyond the number of writers seeds its random generators with
        `run.seed` and its number. Every rank raises `StateError` if any rank could not read.
        """
        problem, random_state = "", None
        random_file = folder / f"{RANDOM}-{self.world.rank}.pt"
        try:
            random_state = read_state(random_file) if random_file.exists() else None
            partitions.put_back(self.engine, self.world, Archive(folder, STATE))
            if self.reference is not None:
                self.reference.load(folder)
        except StateError as error:
            problem = str(error)
        ranks.agree(problem, StateError)
        partitions.show(self.engine)
        if random_state is not None:
            deepspeed_engine.set_random_state(random_state)
        else:
            derived = deepspeed_engine.seed_of_rank(self.config.run.seed, self.world.rank)
            deepspeed_engine.seed(derived, self.config.trainer.deterministic)

    def _proven(self) -> model.Scorer:
        """Load the model, which rank 0 proves unless it is known. Collective. Raises `UnsupportedModel` on every rank."""
        scorer, problem = None, ""
        try:
            scorer = self._scorer(Proofs(Path(self.config.run.dir) / PROOFS) if self.world.rank == 0 else None)
        except UnsupportedModel as error:
            problem = str(error)
        ranks.agree(problem, UnsupportedModel)
        assert scorer is not None
        return scorer

    def _scorer(self, proofs: Proofs | None = None) -> model.Scorer:
        return model.load(
            self.config.model,
            self.config.sampling.temperature,
            COMPILED_CHUNK_TOKENS if self.config.trainer.compile else LOGPROB_CHUNK_TOKENS,
            self.config.trainer,
            self._team,
            self.config.lora,
            proofs,
            self.device,
        )

    def _survey(self, rows: Sequence[PackedRow], batches: Sequence[range]) -> tuple[list[denominators.Counts], list[bool]]:
        """Return (1) token counts per response and mini-batch over all ranks, (2) which rows need a backward pass. Collective.

        These are the rows with a gradient on any rank, and the last of a mini-batch, whose backward pass ends it.
        """
        mine = [denominators.count_tokens(rows[i] for i in batch) if self._leads else {} for batch in batches]
        moving = [losses.has_gradient(row.advantages, row.weights, self.config.loss) for row in rows]
        counts, moves = zip(*ranks.gather((mine, moving)), strict=True)
        last = {batch[-1] for batch in batches}
        learns = [any(of_ranks) or i in last for i, of_ranks in enumerate(zip(*moves, strict=True))]
        return [denominators.join(parts) for parts in zip(*counts, strict=True)], learns

    def _flops_of(self, rows: Sequence[PackedRow], learns: Sequence[bool]) -> float:
        """Return the FLOPs that this rank's rows need, 0 if the model's are unknown or another rank counts them."""
        if self._flops is None or not self._leads:
            return 0.0
        of_rows = zip(rows, learns, strict=True)
        return sum(self._flops.of_row(row.packing, len(row.targets), trained) for row, trained in of_rows if row.samples)


def _misfit(plan: StepPlan, rows: int, config: RunConfig) -> str:
    """Return why a plan does not fit the configuration, or the number of rows that this rank has for it; or an empty string."""
    if plan.ranks != config.data_parallel:
        return (
            f"step {plan.step} was planned for {plan.ranks} data-parallel ranks, but "
            f"trainer.ranks / trainer.sequence_parallel is {config.data_parallel}"
        )
    if rows != plan.rows_per_rank:
        return f"step {plan.step} has {plan.rows_per_rank} rows per rank, but there are {rows} rows"
    return ""


def _split(rows: int, sizes: Sequence[int]) -> list[range]:
    """Return the places of `rows` rows, in parts of these sizes."""
    ends = list(accumulate(sizes))
    assert ends[-1] == rows
    return [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]
