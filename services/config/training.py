"""How groups are trained on: admission, replay, advantages, reference, adapters, optimizer, trainer ranks, checkpoints."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from services.config.base import Section


class Admission(Section):
    """How much work may be in progress: (max_staleness + 1) x prompts_per_step slots."""

    prompts_per_step: int = Field(default=16, ge=1)
    """Groups per training step."""
    max_staleness: int = Field(default=1, ge=0)
    """Maximum lag, in steps, between the weights being trained and the oldest that sampled a token. 0: synchronous."""


class Replay(Section):
    """The replay table: sampler, capacity and uses (terms as in Reverb; docs/replay.md)."""

    sampler: Literal["fifo", "lifo", "freshest", "uniform", "prioritized"] = "fifo"
    """Order in which groups are drawn: `fifo` oldest ticket first, `lifo` newest first, `freshest` newest policy version first,
    `uniform` at random, `prioritized` at random in proportion to the priority."""
    capacity: int = Field(default=100_000, ge=1)
    """Maximum number of groups in the table. A full one drops the group that the sampler would draw last: the lowest priority for
    `prioritized`, the oldest policy version for `freshest`; for the others the oldest ticket."""
    max_uses: int = Field(default=1, ge=1)
    """Steps that may train on a group before it leaves the table."""
    priority: Literal["advantage", "reward", "recency", "trainer"] = "advantage"
    """Priority for `prioritized`: sum of |A|, sum of rewards, age (halved by every policy version), or (`trainer`) sum of |A|
    until the group is first trained on, then |A| times the share of its tokens that are not clipped, to estimate what is left to
    learn."""
    importance_beta: float = Field(default=0.0, ge=0, le=1)
    """`prioritized`: a group's loss is multiplied by (N P) ** -beta, divided by the largest such factor in its step. 0: no
    correction."""

    @property
    def remover(self) -> str:
        """Which group leaves a full table (store/functions/replay_table.lua)."""
        return {"prioritized": "lowest_priority", "freshest": "stalest"}.get(self.sampler, "fifo")


class Filters(Section):
    """Which finished groups are not trained on. The order is pass rate, zero std, staleness."""

    exclude_pass_rate: float = Field(default=0.0, ge=0, le=1)
    """Exclude a prompt from future epochs once at least this share of its group's completions is solved. 0: never."""
    zero_std: bool = False
    """Drop groups whose completions all have the same reward, since they give no gradient. Other prompts take their places, up to
    ten steps' worth of groups in a step; beyond that, the step trains on what it has."""


class Advantage(Section):
    """Advantages over the full group (formulas: docs/semantics.md)."""

    kind: Literal["centered", "standard", "maxrl", "rloo"] = "standard"
    """`centered`: r - mean; `standard`: that divided by the population std; `maxrl`: that divided by the mean, from -1 to
    group_size - 1; `rloo`: leave one out."""
    mask_truncated: bool = False
    """Do not train on completions that hit `sampling.max_tokens`. They still count in the group's statistics."""


class Reference(Section):
    """The reference policy of the KL. With `loss.kl_beta = 0` none is loaded."""

    alpha: float = Field(default=0.0, ge=0, le=1)
    """After each step, reference <- (1 - alpha) x reference + alpha x policy. 0: it stays model.path, unchanged."""


class Lora(Section):
    """Low-rank adapters (Hu et al. 2021). With a rank, only they are trained, in float32. Generators receive merged weights or,
    with `sync.backend = "store"`, the adapters, which they merge.

    There is no dropout: it would make the scored policy differ from the one that sampled.
    """

    rank: int = Field(default=0, ge=0)
    """Rank of the adapters. 0: no adapters; all weights of the model are trained."""
    alpha: float = Field(default=32.0, gt=0)
    """An adapter's output is multiplied by alpha / rank."""
    targets: list[str] = []
    """Linear layers that get an adapter, by the last part of their names, e.g. `q_proj`. Empty: all in the model's blocks."""

    @property
    def scale(self) -> float:
        """Factor of an adapter's output; undefined if `rank` is 0."""
        return self.alpha / self.rank


class Optimizer(Section):
    """AdamW, its learning rate and gradient clipping."""

    learning_rate: float = Field(default=1e-6, gt=0)
    """Peak learning rate."""
    betas: list[Annotated[float, Field(ge=0, lt=1)]] = Field(default=[0.9, 0.95], min_length=2, max_length=2)
    """Decay of the first and of the second moment."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay of matrices, including adapters. Norms, biases and the embedding, tied or not, are exempt."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Global norm to which gradients are clipped."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning-rate decay after the warm-up, down to a tenth of the peak at the last step of the run. If `run.steps` is raised
    later, the rate does not rise: it stays where it is until the longer schedule falls below it."""


class Trainer(Section):
    """The trainer's ranks, packing and memory use."""

    ranks: int = Field(default=1, ge=1)
    """Number of ranks (processes, one per GPU). They are data-parallel, in teams of `sequence_parallel`."""
    sequence_parallel: int = Field(default=1, ge=1)
    """Ranks that share a row. Each processes a slice of its tokens and, in attention, a share of the heads (Ulysses)."""
    row_tokens: int = Field(default=4096, ge=1)
    """Token budget of a packed row, which is a micro-batch. The prompt of a group counts once per row; attention sees it once per
    response, which is at most about twice as many tokens. Unset: this default, or the longest sequence."""
    mini_batches: int = Field(default=1, ge=1)
    """Optimizer steps per training step. With more than one, an extra pass before the first computes the `old` logprobs."""
    zero_stage: Literal[0, 1, 2, 3] = 0
    """DeepSpeed ZeRO stage."""
    offload: bool = False
    """Keep optimizer state (and, at stage 3, parameters) in host memory."""
    gradient_checkpointing: bool | Literal["selective"] = False
    """Recompute activations in the backward pass. `selective`: all but the results of matrix products and attention, which take
    most of the time to recompute. With adapters on all layers this saves little memory, since their products are kept, too."""
    compile: bool = False
    """Compile the model's blocks and the logprobs with torch.compile, which about halves the time of a step on a GPU. Needs a
    C compiler there. Loading a model for the first time takes some 10 s longer, and so does the first step. Without
    gradient_checkpointing, the logits of a row are kept, 2 bytes x vocabulary a token."""
    deterministic: bool = False
    """Use deterministic kernels, and rows that depend neither on the number of ranks nor on when groups ended. With zero_stage 0
    and float32 (or adapters), gradients are also summed in fixed point, so that loss, gradient and weights are bit-identical for
    any number of data-parallel ranks."""

    @property
    def against_compile(self) -> list[str]:
        """The keys whose values `compile` is incompatible with."""
        wrong = {
            "deterministic": self.deterministic,
            "zero_stage": self.zero_stage == 3,
            "sequence_parallel": self.sequence_parallel > 1,
            "gradient_checkpointing": self.gradient_checkpointing == "selective",  # compiled products write into buffers
        }
        return [key for key, found in wrong.items() if found]


class Checkpoint(Section):
    """Trainer checkpoints, under run.dir/run.name/checkpoints."""

    every_steps: int = Field(default=20, ge=1)
    """Steps between checkpoints: 20 writes them after steps 19, 39, 59 …, as steps are numbered from 0, and one at the end."""
    keep: int = Field(default=2, ge=1)
    """Number of most recent checkpoints to keep. Writing one needs disk space for one more."""
    save_replay_buffer: bool = False
    """Store the tokens of the replay table in checkpoints. If false, a restored run generates untrained groups again."""
