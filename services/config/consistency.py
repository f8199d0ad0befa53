"""Rules across sections: which combinations of keys make a run that can progress and whose results are meaningful."""

from __future__ import annotations

import json
from collections.abc import Iterator

from services.config.environments import check_environments
from services.config.evaluation import check_evaluation
from services.config.generation import check_sampling
from services.config.loss import check_loss
from services.config.root import RunConfig
from services.config.verifiers import check_verifiers


def broken(config: RunConfig) -> Iterator[str]:
    """Return the broken rules, naming the keys, their values and the remedy."""
    for rule in (_room, _replay, _training, _scores, _rewards):
        yield from rule(config)
    sources, evaluation = config.all_sources, config.evaluation
    room = config.data.max_prompt_tokens, config.model.max_tokens
    for check in (
        lambda: check_loss(config.loss, config.advantage.kind),
        lambda: check_sampling(config.sampling),
        lambda: check_verifiers(config.verifiers, sources),
        lambda: check_environments(config.environments, config.verifiers, sources),
        lambda: check_evaluation(evaluation, config.sampling, *room),
    ):
        try:
            check()
        except ValueError as error:
            yield str(error)


def _room(config: RunConfig) -> Iterator[str]:
    """Check that sequences fit into the model and into packed rows, and a step into the replay table."""
    longest, row_tokens = config.max_sequence_tokens, config.trainer.row_tokens
    if longest > config.model.max_tokens:
        yield (
            f"data.max_prompt_tokens + sampling.max_tokens = {longest} exceeds model.max_tokens = {config.model.max_tokens}: "
            "lower one of the two or raise model.max_tokens"
        )
    if longest > row_tokens:
        yield (
            f"trainer.row_tokens = {row_tokens} is shorter than the longest sequence, "
            f"data.max_prompt_tokens + sampling.max_tokens = {longest}: raise trainer.row_tokens"
        )
    if config.environments and row_tokens < config.model.max_tokens:
        yield (
            f"trainer.row_tokens = {row_tokens} is shorter than the longest segment of a rollout in an environment, "
            f"model.max_tokens = {config.model.max_tokens}: raise trainer.row_tokens or lower model.max_tokens"
        )
    per_step, capacity, mini_batches = config.admission.prompts_per_step, config.replay.capacity, config.trainer.mini_batches
    if capacity < per_step:
        yield (
            f"replay.capacity = {capacity} cannot hold a step of admission.prompts_per_step = {per_step} groups: "
            "raise replay.capacity"
        )
    if mini_batches > per_step:
        yield (
            f"trainer.mini_batches = {mini_batches} exceeds admission.prompts_per_step = {per_step}: "
            "a mini-batch holds at least one group; lower trainer.mini_batches"
        )


def _replay(config: RunConfig) -> Iterator[str]:
    """Check that the replay table lets the run progress."""
    replay, admission = config.replay, config.admission
    if replay.max_uses > admission.max_staleness + 1:
        yield (
            f"replay.max_uses = {replay.max_uses} cannot be reached: a group is at most admission.max_staleness = "
            f"{admission.max_staleness} steps old; lower replay.max_uses to {admission.max_staleness + 1} "
            "or raise admission.max_staleness"
        )


def _training(config: RunConfig) -> Iterator[str]:
    """Check that model, reference, optimizer and trainer are compatible."""
    trainer, optimizer, reference = config.trainer, config.optimizer, config.reference
    if trainer.offload and trainer.zero_stage == 0:
        yield ("trainer.offload needs trainer.zero_stage 1, 2 or 3: set one of these, or trainer.offload = false")
    for key in trainer.against_compile if trainer.compile else ():
        value = json.dumps(getattr(trainer, key))
        yield f"trainer.compile = true and trainer.{key} = {value} are incompatible: set trainer.compile = false"
    if trainer.ranks % trainer.sequence_parallel:
        yield (
            f"trainer.ranks = {trainer.ranks} cannot be divided into teams of trainer.sequence_parallel = "
            f"{trainer.sequence_parallel} ranks: set a multiple of it"
        )
    if config.lora.rank and reference.alpha:
        yield (
            f"lora.rank = {config.lora.rank} and reference.alpha = {reference.alpha} are incompatible: averaging adapters does "
            "not average the weights they produce; set reference.alpha = 0, or lora.rank = 0"
        )
    if optimizer.schedule != "constant" and optimizer.warmup_steps >= config.run.steps:
        yield (
            f"optimizer.warmup_steps = {optimizer.warmup_steps} leaves no step of run.steps = {config.run.steps} for "
            f'optimizer.schedule = "{optimizer.schedule}": lower optimizer.warmup_steps'
        )


def _scores(config: RunConfig) -> Iterator[str]:
    """Check that completions can have different rewards, and that the shortest ones are not penalised for their length."""
    for source in config.data.sources:
        weights = [verifier.weight for verifier in config.verifiers if verifier.scores(source.name)]
        if weights and not any(weights) and not source.environment:
            yield (
                f'every verifier that scores the prompt source "{source.name}" has weight = 0, so that every reward would be 0: '
                "give one of them another weight"
            )
    for index, verifier in enumerate(config.verifiers):
        if verifier.kind == "length" and verifier.soft_tokens > (limit := config.sampling.max_tokens):
            yield (
                f"verifiers.{index}.soft_tokens = {verifier.soft_tokens} exceeds sampling.max_tokens = {limit}, so that even an "
                f"empty completion would be penalised: lower verifiers.{index}.soft_tokens or raise sampling.max_tokens"
            )


def _rewards(config: RunConfig) -> Iterator[str]:
    """Check that completions can be solved where pass rates are needed."""
    remedy = (
        "give one of its verifiers a positive weight and `solved_at` (or a `range`, whose top then counts), or its environment "
        "`solved_at`"
    )
    if excluded := config.filters.exclude_pass_rate:
        for source in config.data.sources:
            if not config.thresholds(source.name):
                yield (
                    f'filters.exclude_pass_rate = {excluded} is meaningless for the prompt source "{source.name}", since no '
                    f"verifier says when a completion is solved: {remedy}, or remove the key"
                )
    for source in config.evaluation.sources:
        if not config.thresholds(source.name):
            yield (
                f'evaluation source "{source.name}" has no pass@k, since no verifier says when a completion is solved: {remedy}'
            )
