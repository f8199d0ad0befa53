"""What is wrong with a configuration: pydantic's errors as lines that name the key, the value and what is valid. Pure."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Sequence
from typing import Any, cast

from pydantic import BaseModel

from services.config.root import RunConfig
from services.config.secrets import TOKEN, shown

REPLACED = {
    "api.key_file": "was removed: write the key into the file api.certificate_file, or give it a folder with tls.crt and tls.key",
    "api.server_name": "was removed, and the first name in api.certificate_file is used: remove the key",
    "web.host": "was removed, and api.host is used: set api.host",
    "data.source": "is now a list, data.sources: write [[data.sources]] for [data.source], sources = [{ ... }] for source = "
    "{ ... }, data.sources.0.KEY for data.source.KEY",
    "model.chat_template": "is a key of another section: set data.chat_template",
    "generator.lease_s": "was removed, and one and a half times fleet.ttl_s is used: remove the key, or set fleet.ttl_s",
    "generator.max_attempts": "was removed, and a ticket has 4 attempts: remove the key",
    "generator.max_concurrent_groups": "was removed, and the number of tickets adapts to the engine's load: remove the key, or "
    "set generator.max_num_seqs",
    "evaluation.ks": "was removed, and pass@k is reported for k = 1, 2, 4, … and evaluation.samples: remove the key",
    "evaluation.top_k": "was removed, and completions are sampled from all tokens: remove the key, or set evaluation.top_p",
    "evaluation.min_training_generators": "was removed, and one generator trains while others evaluate; a single one evaluates "
    "while training waits: remove the key",
    "generator.max_expiries": "was removed, and 16 leases of a ticket may expire: remove the key",
    "generator.gpu_memory_utilization": "is an engine option of vLLM now: set generator.engine_options.gpu_memory_utilization",
    "generator.cpu_kv_cache_mib": "is an engine option of vLLM now, in bytes: set generator.engine_options.kv_cache_memory_bytes",
    "generator.partial_every_s": "was removed, and unfinished completions are saved every 5 s: remove the key",
    "replay.error_buffer": "was removed, and the smallest buffer that never blocks a run is used: remove the key",
    "replay.payload_ttl_s": "was removed, and payloads without a header expire after an hour: remove the key",
    "replay.samples_per_insert": "was removed, and replay.max_uses limits how often groups are drawn: remove the key, and set "
    "replay.max_uses",
    "replay.remover": "was removed, and a full table drops the group that replay.sampler would draw last: remove the key",
    "replay.priority_exponent": "was removed, and groups are drawn in proportion to their priority: remove the key",
    "replay.recency_half_life": 'was removed, and with replay.priority = "recency" a weight halves with every policy version: '
    "remove the key",
    "replay.min_size": "was removed, and a step is drawn as soon as the table has its groups: remove the key",
    "filters.active_sampling_bound": "was removed, and up to 10 x admission.prompts_per_step groups that a filter drops are "
    "replaced in a step: remove the key",
    "admission.overtake_deadline_s": "was removed, and a step waits 600 s for an older ticket: remove the key",
    "loss.correction_lower": "was removed, and the correction has no lower bound: remove the key",
    "loss.correction_max_gap": "was removed, and a run stops above 0.1 nats: remove the key",
    "loss.kl_estimator": "was removed, and the KL of the loss is k3: remove the key",
    "loss.old": "was removed, and the ratio starts from the policy that sampled in an asynchronous run with one mini-batch and "
    "no correction keys, otherwise from the weights at the start of the step: remove the key",
    "loss.denominator_tokens": 'was removed, and loss.denominator = "constant" divides by sampling.group_size x '
    "sampling.max_tokens for each group: remove the key",
    "loss.correction_token_mask": "is part of loss.correction_mask now: set loss.correction_mask = { token = [LOWER, UPPER] }",
    "loss.correction_sequence_mask": "is part of loss.correction_mask now: set loss.correction_mask = "
    "{ sequence = [LOWER, UPPER] }",
    "loss.correction_variation_mask": "is part of loss.correction_mask now: set loss.correction_mask = { variation = [UPPER] }",
    "loss.divergence": 'was removed: set loss.policy = "dppo_tv" or "dppo_kl"',
    "loss.divergence_bound": 'was removed: set loss.clip_high, with loss.policy = "dppo_tv" or "dppo_kl"',
    "reference.kind": "was removed: remove the key, and for an average of the policy set reference.alpha > 0",
    "reference.every_steps": "was removed, and the reference is updated after every step: remove the key",
    "data.shuffle": 'is data.curriculum = "in_order" now if it is false: rename the key, or remove it',
    "optimizer.final_fraction": "was removed, and linear and cosine schedules end at a tenth of the peak: remove the key",
    "trainer.peak_tflops": "was removed, and MFU is computed for GPUs whose peak is known: remove the key",
    "trainer.step_timeout_s": "was removed, and a collective operation may take half an hour: remove the key",
    "trainer.attention": "was removed, and the fastest kernel that computes the model's attention is used: remove the key",
    "filters.active_sampling": "was removed, and groups that a filter drops are replaced: remove the key",
    "optimizer.beta1": "was replaced: set optimizer.betas = [BETA1, BETA2]",
    "optimizer.beta2": "was replaced: set optimizer.betas = [BETA1, BETA2]",
    "trainer.logprob_chunk_tokens": "was removed, and logits are computed for 1024 tokens at a time: remove the key",
    "fleet.heartbeat_s": "was removed, and a tenth of fleet.ttl_s is used: remove the key",
    "tracking.wandb_mode": "was removed: remove the key, and to upload set the environment variable WANDB_MODE = online",
    "sync.bucket_mib": "was removed, and buckets have 32 MiB: remove the key",
    "evaluation.final_s": "was removed, and the last round may take 10 minutes: remove the key",
    "admission.overtake": "was removed, and a step waits ten minutes for an older ticket: remove the key",
    "tracing.share": "was removed, and samples.share is used: set samples.share",
    "sync.drain_deadline_s": "was removed, and unfinished completions are kept when new weights are applied: remove the key",
    "sync.in_flight": "was removed, and unfinished completions are kept when new weights are applied: remove the key",
    "sync.kv": "was removed, and unfinished completions keep their KV cache: remove the key",
    "sync.verify": "was removed, and checksums of the received weights are always compared: remove the key",
    "sync.verify_loaded": "was removed: remove the key",
    "sync.encoding": 'was removed, and gloo and nccl send all weights: remove the key, or set sync.backend = "store", which '
    "stores what changed",
    "sync.join_deadline_s": "was merged into sync.deadline_s, of which joining has at most 20 s: remove the key",
    "sync.transfer_deadline_s": "is sync.deadline_s now: set sync.deadline_s",
    "redis.appendfsync": "was removed, and the server that grpo run starts flushes its file every second: remove the key",
    "redis.max_memory_mib": "was removed, and the server's own maxmemory is used: set that, and remove the key",
    "redis.users_dir": "is redis.password_file now, which may be a file or a folder: set that",
    "redis.payload_shards": "was removed, and on a Redis Cluster payloads are always spread over its masters: remove the key",
    "verifiers.token_env": 'is a place of token now: set token = "env:NAME"',
    "verifiers.token_file": 'is a place of token now: set token = "file:PATH"',
    "verifiers.give_up_s": "was removed, and a ticket waits 600 s for a service: remove the key",
    "verifiers.max_requests": "was removed, and a generator has at most 64 requests of a verifier in flight: remove the key",
    "verifiers.memory_mib": "was removed, and a worker may use 4 GiB: remove the key, and for a function that needs more or uses "
    'a GPU set kind = "http"',
    "verifiers.environment": "is variables now: rename the key",
    "verifiers.max_tokens": "was removed, and sampling.max_tokens is used: remove the key",
    "verifiers.system": 'is part of prompt now: set prompt = [{ role = "system", content = SYSTEM }, { role = "user", content = '
    "PROMPT }]",
    "environments.tool_timeout_s": "was removed, and a call may take a twentieth of timeout_s: remove the key, and set timeout_s",
    "environments.memory_mib": "was removed, and the tool python may use 512 MiB: remove the key",
    "environments.environment": "was removed, and name is the id: remove the key, and set name",
    "environments.token_env": 'is a place of token now: set token = "env:NAME"',
    "environments.command": "is run of an agent and server of an MCP server now: rename the key",
    "environments.url": "is server now: rename the key",
    "environments.function": "is run of an agent now: rename the key",
    **{
        f"{section}.sources.{name}": f"is an option of the task now: set options.{name}"
        for section in ("data", "evaluation")
        for name in ("size", "seed")
    },
    **{
        f"sampling.{name}": "was removed, since only the whole distribution can be trained on: with a truncated one the engine's "
        "logprobs would be relative to the tokens that it kept and the trainer's to all, which biases their ratios "
        "(docs/semantics.md, Sampling): remove the key, and lower sampling.temperature or set evaluation.top_p instead"
        for name in ("top_p", "top_k")
    },
}
"""Keys of older versions, or that belong to another section, and what to do instead."""
ELSEWHERE = {
    "lr": "optimizer.learning_rate",
    "num_generations": "sampling.group_size",
    "n": "sampling.group_size",
    "rollout_n": "sampling.group_size",
    "max_completion_length": "sampling.max_tokens",
    "max_response_length": "sampling.max_tokens",
    "max_new_tokens": "sampling.max_tokens",
    "max_prompt_length": "data.max_prompt_tokens",
    "max_model_len": "model.max_tokens",
    "model_name_or_path": "model.path",
    "max_steps": "run.steps",
    "total_training_steps": "run.steps",
    "output_dir": "run.dir",
    "run_name": "run.name",
    "save_steps": "checkpoint.every_steps",
    "save_freq": "checkpoint.every_steps",
    "eval_steps": "evaluation.every_steps",
    "beta": "loss.kl_beta",
    "kl_coef": "loss.kl_beta",
    "kl_loss_coef": "loss.kl_beta",
    "loss_type": "loss.policy",
    "num_iterations": "trainer.mini_batches",
    "train_batch_size": "admission.prompts_per_step",
    "lora_r": "lora.rank",
    "lr_scheduler_type": "optimizer.schedule",
}
"""Names that TRL, verl and others give to a key -> our key."""

IN_WORDS = {
    r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$": 'must begin with a letter or digit and have up to 63 letters, digits, "_", "." and "-"',
    r"^[A-Za-z0-9_.-]+$": 'may have only letters, digits, "_", "." and "-"',
    r"^[A-Za-z0-9_.-]{0,128}$": 'may have up to 128 letters, digits, "_", "." and "-"',
    r"^[A-Za-z0-9_-]{1,40}$": 'must have 1 to 40 letters, digits, "_" and "-"',
    r"^[A-Za-z0-9_-]{0,40}$": 'may have up to 40 letters, digits, "_" and "-"',
    r"^(in_order|[A-Za-z_][\w.]*:[A-Za-z_]\w*)?$": "must be in_order or module:function, such as my_module:my_function",
    r"^(https?://.+)?$": "must begin with http:// or https://",
    r"^https?://[^\s]+$": "must begin with http:// or https://, and have no spaces",
    TOKEN: 'must be "env:NAME", an environment variable, or "file:PATH"',
}
"""The pattern of a text -> what it demands."""


def explained(fault: Any) -> str:
    """Return one of pydantic's errors as a line."""
    location, sections = _located(fault)
    key = ".".join(map(str, location)) or "configuration"
    of_all = ".".join(str(part) for part in location if not isinstance(part, int))  # verifiers.token_env of verifiers.0.token_env
    if fault["type"] == "extra_forbidden" and of_all in REPLACED:
        value = fault["input"]
        return f"{key}{f' = {shown(key, value)}' * isinstance(value, str | int | float)} {REPLACED[of_all]}"
    if fault["type"] == "extra_forbidden":
        if known := ELSEWHERE.get(str(location[-1])):
            return f"{key} = {shown(key, fault['input'])} is not a known key: use {known}"
        names = sorted({name for section in sections for name in section.model_fields})
        near = difflib.get_close_matches(str(location[-1]), names, n=1, cutoff=0.5)
        held = [
            f"{name}.{key}"
            for section in sections
            for name, field in section.model_fields.items()
            for model in models_of(field.annotation)
            if len(location) == 1 and key in model.model_fields
        ]
        meant = held[0] if len(held) == 1 else repr(near[0]) if near else ""
        hint = f"did you mean {meant}?" if meant else f"valid: {', '.join(names)}"
        return f"{key} = {shown(key, fault['input'])} is not a known key; {hint}"
    if fault["type"] == "missing":
        return _missing(key)
    message = fault["msg"].removeprefix("Value error, ")
    if fault["type"] == "string_pattern_mismatch":
        message = IN_WORDS[fault["ctx"]["pattern"]]
    if not location or message.startswith(f"{key}."):
        return message
    if isinstance(fault["input"], dict) and fault["type"] == "value_error":
        return f"{key}: {message}"
    return f"{key} = {shown(key, fault['input'])}: {message[0].lower()}{message[1:]}"


def keys_of(fault: Any) -> tuple[str | int, ...]:
    """Return the keys that lead to the subject of one of pydantic's errors."""
    return tuple(_located(fault)[0])


def without(tree: dict[str, Any], location: Sequence[str | int]) -> None:
    """Remove from a tree the value at a location, if there is one and it is not an entry of a list."""
    node: Any = tree
    for part in location[:-1]:
        if isinstance(node, list):
            node = cast("list[Any]", node)[int(part)]
        elif isinstance(node, dict):
            node = cast("dict[Any, Any]", node).get(part)
    if isinstance(node, dict) and location:
        cast("dict[Any, Any]", node).pop(location[-1], None)


def _located(fault: Any) -> tuple[list[str | int], list[type[BaseModel]]]:
    """Return the keys that lead to the subject of an error, and the sections that may have the last one.

    Pydantic also names the branch of a union that it took: the kind of an entry, or a type.
    """
    keys, sections, holders = list[str | int](), list[type[BaseModel]]([RunConfig]), list[type[BaseModel]]()
    for part in fault["loc"]:
        fields = [section.model_fields[part] for section in sections if part in section.model_fields]
        if isinstance(part, int):
            keys.append(part)
        elif fields or (fault["type"] == "extra_forbidden" and part == fault["loc"][-1] and not _of_kind(sections, part)):
            keys.append(part)
            holders, sections = sections, [model for field in fields for model in models_of(field.annotation)]
        else:
            sections = _of_kind(sections, part) or sections
    return keys, holders


def _of_kind(sections: Sequence[type[BaseModel]], kind: str) -> list[type[BaseModel]]:
    """Return the sections of a kind."""
    kinds = [(each, each.model_fields["kind"].annotation) for each in sections if "kind" in each.model_fields]
    return [section for section, annotation in kinds if kind in typing.get_args(annotation)]


def _missing(key: str) -> str:
    if "." in key:
        return f"missing required key {key}: add it"
    listed = typing.get_origin(RunConfig.model_fields[key].annotation) is list
    return f"missing required section {f'[[{key}]]' if listed else f'[{key}]'}: add it"


def models_of(annotation: Any) -> list[type[BaseModel]]:
    """Return the section classes that an annotation names, through unions, lists and Annotated."""
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in typing.get_args(annotation) for model in models_of(part)]
