"""What is learnt from a group: admission, replay, advantages, loss, optimizer, trainer ranks, checkpoints."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from services.protocol.config.base import Section


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
    """The replay table: sampler, remover, capacity and uses (the vocabulary is Reverb's)."""

    sampler: Literal["fifo"] = "fifo"
    """How groups are drawn: `fifo`, oldest ticket first."""
    remover: Literal["fifo"] = "fifo"
    """What leaves a full table: `fifo`, the oldest ticket."""
    capacity: int = Field(default=100_000, ge=1)
    """Most groups in the table."""
    max_uses: int = Field(default=1, ge=1)
    """Steps that may train on one group before it leaves."""
    payload_ttl_s: int = Field(default=3600, ge=60)
    """A payload that no header committed expires after so long."""


class Advantage(Section):
    """Advantages over the full group (formulas: docs/semantics.md)."""

    kind: Literal["centered", "standard", "maxrl", "rloo"] = "standard"
    """`centered` r - mean, `standard` that over the population std, `maxrl` that over the mean, `rloo` leave one out."""
    mask_truncated: bool = False
    """Do not train on completions that hit `sampling.max_tokens`; they still count in the group's statistics."""


class Loss(Section):
    """The policy loss (formulas: docs/semantics.md)."""

    policy: Literal["grpo", "dapo"] = "dapo"
    """`grpo`: symmetric clip; `dapo`: clip-higher."""
    clip_low: float = Field(default=0.2, ge=0, lt=1)
    """Lower clip distance of the ratio; for `grpo` both."""
    clip_high: float = Field(default=0.272, ge=0)
    """Upper clip distance of the ratio (`dapo`)."""
    kl_beta: float = Field(default=0.05, ge=0)
    """Weight of the KL to the reference policy; 0 loads none."""
    kl_estimator: Literal["k0", "k1", "k2", "k3"] = "k2"
    """Estimator of that KL."""
    correction_lower: float = Field(default=0.0, ge=0)
    """Lower bound of the train/infer importance weight."""
    correction_upper: float = Field(default=2.0, gt=0)
    """Upper bound of the train/infer importance weight (truncated importance sampling)."""
    denominator: Literal["token", "constant"] = "token"
    """What the sum over tokens is divided by: response tokens of the step over all ranks, or `denominator_tokens`."""
    denominator_tokens: int = Field(default=0, ge=0)
    """The constant, for `denominator = "constant"`."""


class Optimizer(Section):
    """AdamW with a linear warm-up."""

    learning_rate: float = Field(default=1e-6, gt=0)
    """Peak learning rate."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the first moment."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the second moment."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay of matrices; vectors (norms, biases) get none."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are clipped to this global norm."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises from 0."""


class Trainer(Section):
    """Trainer ranks."""

    ranks: int = Field(default=1, ge=1)
    """Data-parallel ranks (processes; one a GPU)."""
    row_tokens: int = Field(default=4096, ge=1)
    """Token budget of one packed row, which is one micro-batch."""
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
    """Use deterministic kernels only."""
    step_timeout_s: float = Field(default=1800.0, gt=0)
    """Limit of a collective among the ranks."""


class Checkpoint(Section):
    """Trainer checkpoints, under run.dir/run.name/checkpoints."""

    every_steps: int = Field(default=20, ge=1)
    """Steps between checkpoints; one is always written at the end."""
    keep: int = Field(default=2, ge=1)
    """Checkpoints kept."""
