"""DeepSpeed's part: its configuration, the optimizer, and engines for policy and reference.

Guarantees: the engine runs exactly the configured setup; a combination that DeepSpeed would ignore is an error.
"""

from __future__ import annotations

import logging
import math
import random
from typing import Any

import numpy as np
import torch

from services.config import RunConfig
from services.config.training import Optimizer
from services.trainer.model.policy_network import Scorer
from services.weights.broadcast.host_memory import lay_end_to_end

PERSISTENT_FACTOR = 10
"""ZeRO-3 keeps parameters smaller than this many times the hidden size gathered: norms and biases, not worth a collective
each.
"""

MAX_BUCKET = 500_000_000
"""DeepSpeed's default bucket, in elements; smaller models get a smaller one."""


FINAL_FRACTION = 0.1
"""Share of the peak learning rate at which `linear` and `cosine` end. With 0 the last step would change nothing."""


def settings(config: RunConfig, module: Scorer) -> dict[str, Any]:
    """Return DeepSpeed's configuration for training `module`.

    Stage 0 in bfloat16 runs as stage 1, because DeepSpeed's stage 0 would accumulate gradients in bfloat16. Parameters are whole
    on every rank in both. With adapters, bfloat16 is not enabled in DeepSpeed, which would round the adapters to it; frozen
    weights keep the dtype they were loaded in.
    """
    stage, offload = config.trainer.zero_stage, config.trainer.offload
    bf16 = config.trained_dtype == "bfloat16"
    size = sum(parameter.numel() for parameter in module.parameters())
    zero: dict[str, Any] = {
        "stage": 1 if bf16 and stage == 0 else stage,
        "reduce_bucket_size": min(MAX_BUCKET, size),
        "allgather_bucket_size": min(MAX_BUCKET, size),
        "overlap_comm": torch.cuda.is_available(),
    }
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = PERSISTENT_FACTOR * module.model.config.get_text_config().hidden_size
        zero["stage3_prefetch_bucket_size"] = min(MAX_BUCKET // 10, size)
    if offload:
        zero["offload_optimizer"] = {"device": "cpu"}
        if stage == 3:
            zero["offload_param"] = {"device": "cpu"}
    tree: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,  # boundaries are ours: set_gradient_accumulation_boundary
        "gradient_clipping": 0.0 if keeps_gradients(config) else config.optimizer.max_grad_norm,
        "steps_per_print": None,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,  # torch AdamW: needs no compiled kernel, and gives equal numbers everywhere
        "zero_force_ds_cpu_optimizer": False,
    }
    if bf16:
        # In stages 0 and 1, a weight's gradient is added to its float32 sum and freed during the backward pass. Otherwise
        # gradients would be kept, set to 0, and the next row's added to them, and the device would wait for the last sums of
        # each row.
        tree |= {
            "bf16": {"enabled": True, "immediate_grad_update": True},
            "data_types": {"grad_accum_dtype": "fp32"},
            "communication_data_type": "fp32",
        }
    return tree


def keeps_gradients(config: RunConfig) -> bool:
    """Return whether gradients stay whole in `.grad`, where we clip them and take their norm because DeepSpeed reports none."""
    return config.trainer.zero_stage == 0 and config.trained_dtype == "float32"


def start(config: RunConfig, module: Scorer) -> Any:
    """Start a DeepSpeed engine that trains `module`."""
    import deepspeed

    if keeps_gradients(config) and not torch.cuda.is_available():  # otherwise DeepSpeed does it, or they go to a device
        lay_end_to_end(module)
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=adamw(config, module),  # pyright: ignore[reportArgumentType]
        config=settings(config, module),
    )
    return engine


def start_reference(config: RunConfig, module: Scorer, device: torch.device) -> Any:
    """Return `module` frozen and callable: sharded over ranks like the policy under ZeRO-3, otherwise whole on `device`."""
    module.requires_grad_(False).eval()
    if config.trainer.zero_stage < 3:
        return module.to(device)
    import deepspeed

    tree = settings(config, module)
    tree["zero_optimization"].pop("offload_optimizer", None)
    engine, *_ = deepspeed.initialize(model=module, config=tree)
    engine.eval()
    return engine


def adamw(config: RunConfig, module: Scorer) -> torch.optim.Optimizer:
    """Return AdamW that decays matrices but not vectors (norms, biases) or the embedding.

    Rows of the embedding whose tokens do not occur get no gradient, so decay would only shrink them. The same holds for an output
    matrix that is tied to the embedding.
    """
    embedding = module.model.get_input_embeddings().weight
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    decayed = [p for p in parameters if p.ndim >= 2 and p is not embedding]
    options = config.optimizer
    groups = [
        {"params": decayed, "weight_decay": options.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2 or p is embedding], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]  # adapters are all matrices, and DeepSpeed rejects empty groups
    # Fused, it takes a fifth of the time and no memory for intermediate results: 8 bytes per parameter of a group.
    return torch.optim.AdamW(groups, lr=options.learning_rate, betas=(options.betas[0], options.betas[1]), fused=True)


class LearningRate:
    """The learning rate of each training step, which never rises after its warm-up, even if `run.steps` does.

    A linear warm-up to the peak, then constant, or down to `FINAL_FRACTION` of it at the last step: linearly or as half a cosine
    (Loshchilov and Hutter 2017, eq. 5, without restarts).
    """

    def __init__(self, options: Optimizer, steps: int) -> None:
        """`steps`: the number of training steps of the run."""
        self._options, self._steps = options, steps
        self._lowest = 1.0

    @property
    def state(self) -> dict[str, float | str]:
        """The peak, the schedule, and the lowest share of the peak since the warm-up, for a checkpoint."""
        return {"peak": self._options.learning_rate, "schedule": self._options.schedule, "lowest": self._lowest}

    def continue_from(self, state: dict[str, float | str]) -> None:
        """Continue from a checkpoint's state, unless the peak or the schedule has been changed since; {} changes nothing."""
        if {**state, "lowest": 0} == {**self.state, "lowest": 0}:
            self._lowest = float(state["lowest"])

    def at(self, step: int) -> float:
        """Return the rate of training step `step` (from 0). Steps are taken in order."""
        done, warmup, final = step + 1, self._options.warmup_steps, FINAL_FRACTION
        if done <= warmup:
            return self._options.learning_rate * done / warmup
        progress = min(1.0, (done - warmup) / max(1, self._steps - warmup))
        match self._options.schedule:
            case "constant":
                share = 1.0
            case "linear":
                share = 1 - (1 - final) * progress
            case "cosine":
                share = final + (1 - final) * (1 + math.cos(math.pi * progress)) / 2
        self._lowest = min(share, self._lowest)
        return self._options.learning_rate * self._lowest


def seed(number: int, deterministic: bool) -> None:
    """Seed every random generator of this process; `deterministic` also forbids nondeterministic kernels."""
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.manual_seed(number)
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(deterministic)


def seed_of_rank(number: int, rank: int) -> int:
    """Return a seed specific to a rank."""
    return int(np.random.SeedSequence([number, rank]).generate_state(1)[0])


def random_state() -> dict[str, Any]:
    """Return the state of every random generator of this process, as tensors and plain values."""
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Restore what `random_state` returned."""
    name, keys, *rest = state["numpy"]
    random.setstate(state["python"])
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"])
