"""What is learnt from a group: admission, replay, advantages, reference, adapters, optimizer, trainer ranks, checkpoints."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from services.config.base import Section


class Admission(Section):
    """How much work is under way: (max_staleness + 1) x prompts_per_step slots."""

    prompts_per_step: int = Field(default=16, ge=1)
    """Groups that one training step trains on."""
    max_staleness: int = Field(default=1, ge=0)
    """Largest lag, in steps, between the weights that are trained and the oldest that sampled a token. 0: synchronous."""
    overtake: Literal["wait", "drop"] = "wait"
    """When a step could be filled but an older ticket still generates: `wait` for it, or go on, which may drop it as stale."""
    overtake_deadline_s: float = Field(default=600.0, gt=0)
    """`wait` ends after so long."""


class Replay(Section):
    """The replay table: sampler, remover, capacity, uses and rate limiter (the vocabulary is Reverb's; docs/replay.md)."""

    sampler: Literal["fifo", "lifo", "freshest", "uniform", "prioritized"] = "fifo"
    """How groups are drawn: `fifo` oldest ticket first, `lifo` newest first, `freshest` newest policy version first,
    `uniform` at random, `prioritized` at random in proportion to priority ** priority_exponent."""
    remover: Literal["fifo", "lifo", "lowest_priority", "stalest", "uniform"] = "fifo"
    """What leaves a full table: the oldest ticket, the newest, the lowest weight, the oldest policy version, or any."""
    capacity: int = Field(default=100_000, ge=1)
    """Most groups in the table."""
    max_uses: int = Field(default=1, ge=0)
    """Steps that may train on one group before it leaves; 0: until it is stale, which needs `samples_per_insert`."""
    min_size: int = Field(default=1, ge=1)
    """No step is made while the table holds fewer groups."""
    samples_per_insert: float = Field(default=0.0, ge=0)
    """Draws per inserted group that the run is held to, on average; 0: only `max_uses` and staleness hold it."""
    error_buffer: float = Field(default=0.0, ge=0)
    """Draws by which that may be missed either way; 0: the smallest number that can never block a run."""
    priority: Literal["advantage", "reward", "recency", "trainer"] = "advantage"
    """`prioritized` and `lowest_priority`: sum of |A|, sum of rewards, age, or sum of |A| until the trainer has trained on the
    group and from then on what is left to learn: |A| times the share of tokens that are not past the clip's bounds."""
    priority_exponent: float = Field(default=1.0, ge=0, le=4)
    """Weight = priority ** exponent; 0: all alike."""
    recency_half_life: float = Field(default=1.0, gt=0)
    """`recency`: policy versions by which a group must be older to weigh half."""
    importance_beta: float = Field(default=0.0, ge=0, le=1)
    """`prioritized`: a group's loss is multiplied by (N P) ** -beta, over the largest of its step; 0: by 1."""
    payload_ttl_s: int = Field(default=3600, ge=60)
    """A payload that no header committed expires after so long."""


class Filters(Section):
    """Which finished groups are not trained on, in this order: pass rate, zero std, staleness."""

    exclude_pass_rate: float = Field(default=0.0, ge=0, le=1)
    """A prompt whose group reached this share of the largest reward is left out of future epochs; 0: none is."""
    zero_std: bool = False
    """Drop groups whose completions all earned the same: there is nothing to learn from them."""
    active_sampling: bool = True
    """A dropped group does not count towards its step: another prompt takes its place. Off: the step has fewer groups."""
    active_sampling_bound: int = Field(default=10, ge=1)
    """Dropped groups that may be replaced for one step, times prompts_per_step; past it the step trains on what it has."""


class Advantage(Section):
    """Advantages over the full group (formulas: docs/semantics.md)."""

    kind: Literal["centered", "standard", "maxrl", "rloo"] = "standard"
    """`centered` r - mean, `standard` that over the population std, `maxrl` that over the mean, `rloo` leave one out."""
    mask_truncated: bool = False
    """Do not train on completions that hit `sampling.max_tokens`; they still count in the group's statistics."""


class Reference(Section):
    """The reference policy of the KL; with `loss.kl_beta = 0` none is loaded."""

    kind: Literal["none", "frozen", "polyak"] = "frozen"
    """`frozen`: model.path as it is; `polyak`: a running average of the policy that begins there."""
    alpha: float = Field(default=0.01, gt=0, le=1)
    """`polyak`: reference <- (1 - alpha) x reference + alpha x policy."""
    every_steps: int = Field(default=1, ge=1)
    """`polyak`: training steps between two such updates."""


class Lora(Section):
    """Low-rank adapters (Hu et al. 2021): with a rank, they alone are trained, in float32, and generators get merged weights.

    There is no dropout: the policy that is scored would not be the one that sampled.
    """

    rank: int = Field(default=0, ge=0)
    """Rank of the adapters; 0: all weights of the model are trained."""
    alpha: float = Field(default=32.0, gt=0)
    """An adapter's output is multiplied by alpha / rank."""
    targets: list[str] = []
    """Which linear layers get one, by the last part of their names, e.g. `q_proj`; empty: all of the model's blocks."""

    @property
    def scale(self) -> float:
        """Factor of an adapter's output. Without a rank there is none."""
        return self.alpha / self.rank


class Optimizer(Section):
    """AdamW, its learning rate and clipping."""

    learning_rate: float = Field(default=1e-6, gt=0)
    """Peak learning rate."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the first moment."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the second moment."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay of matrices, adapters included; vectors (norms, biases) and the embedding, tied or not, get none."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are clipped to this global norm."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How it falls after the warm-up, down to `final_fraction` at the last of run.steps."""
    final_fraction: float = Field(default=0.0, ge=0, le=1)
    """Share of the peak that `linear` and `cosine` end at."""


class Trainer(Section):
    """Trainer ranks."""

    ranks: int = Field(default=1, ge=1)
    """Ranks (processes; one a GPU). They are data-parallel, in teams of `sequence_parallel`."""
    sequence_parallel: int = Field(default=1, ge=1)
    """Ranks that share a row: each holds a slice of its tokens, and in attention a share of the heads (Ulysses)."""
    row_tokens: int = Field(default=4096, ge=1)
    """Token budget of one packed row, which is a micro-batch. A prompt counts once for all responses of its group there; counted
    for each of them, a row has up to twice as many, which attention sees."""
    mini_batches: int = Field(default=1, ge=1)
    """Optimizer steps per training step; more than one takes `old` logprobs from a pass before the first."""
    zero_stage: Literal[0, 1, 2, 3] = 0
    """DeepSpeed ZeRO stage."""
    offload: bool = False
    """Keep optimizer state (and, at stage 3, parameters) in host memory."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    logprob_chunk_tokens: int = Field(default=1024, ge=1)
    """Logits are made for so many tokens at a time, never for a whole row."""
    deterministic: bool = False
    """Deterministic kernels, and rows that do not depend on the number of ranks. With zero_stage 0 and float32 (or adapters),
    gradients are summed in fixed point too: loss, gradient and weights are then equal to the bit for any number of
    data-parallel ranks."""
    step_timeout_s: float = Field(default=1800.0, gt=0)
    """Limit of a collective among the ranks."""


class Checkpoint(Section):
    """Trainer checkpoints, under run.dir/run.name/checkpoints."""

    every_steps: int = Field(default=20, ge=1)
    """Steps between checkpoints; one is always written at the end."""
    keep: int = Field(default=2, ge=1)
    """Checkpoints kept, the last ones; while one is written there is room needed for one more."""
    save_replay_buffer: bool = False
    """Keep the tokens of the replay table in them. Off: a run that is taken back generates what was not trained yet again."""
