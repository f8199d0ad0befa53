"""Keys that nothing reads in the combination at hand: one that is set to something is refused.

Guarantees: whoever sets a key has its effect, or is told why there is none and what to do. A default that goes unread is no
error, written out or not: a configuration that `to_toml` wrote holds every key. A run that was begun with such a key, under a
version that took it, goes on with it (`load`, `load_resolved`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from services.config.base import Section
from services.config.evaluation import Evaluation
from services.config.loss import CLIPS, CORRECTION, POLICIES
from services.config.root import RunConfig

Rules = Iterator[tuple[str, str, str]]
"""Keys that are not read; why; and what would have them read, empty if nothing sensible."""


def unread(config: RunConfig) -> Iterator[str]:
    """What to tell the user of every key that is set for nothing: key, value and remedy. The command line cannot remove a key of
    the file, but set its default: the remedy names both."""
    for rules in (_prompts, _admission, _filters, _replay, _loss, _training, _sync, _evaluation, _surroundings):
        for key, why, cure in rules(config):
            value, default = _value_and_default(config, key)
            if value != default:
                remedy = f"remove it, or set its default, {_shown(default)}"
                yield f"{key} = {_shown(value)} has no effect {why}: {f'{cure}, or ' * bool(cure)}{remedy}"


def _value_and_default(config: RunConfig, key: str) -> tuple[Any, Any]:
    node: Any = config
    *way, name = key.split(".")
    for part in way:
        node = node[int(part)] if part.isdigit() else getattr(node, part)
    return getattr(node, name), type(node).model_fields[name].default


def _shown(value: Any) -> str:
    """As in the file, as far as one line goes."""
    if isinstance(value, list):
        value = [item.model_dump(exclude_unset=True) if isinstance(item, Section) else item for item in value]
    return repr(value)


def _prompts(config: RunConfig) -> Rules:
    if len(config.data.sources) == 1:
        yield "data.sources.0.weight", "with one source", "add another"
    if not config.data.chat_template:
        for key in ("system_prompt", "chat_template_options"):
            yield f"data.{key}", "with data.chat_template = false", "set data.chat_template = true"
    for index, verifier in enumerate(config.verifiers):
        if verifier.kind not in ("exact", "reasoning_gym"):
            yield f"verifiers.{index}.extract", f'with kind = "{verifier.kind}"', 'use "exact" or "reasoning_gym"'
        if verifier.kind != "regex":
            yield f"verifiers.{index}.pattern", f'with kind = "{verifier.kind}"', 'use "regex"'


def _admission(config: RunConfig) -> Rules:
    if config.replay.sampler != "fifo":
        for key in ("overtake", "overtake_deadline_s"):
            why = f'with replay.sampler = "{config.replay.sampler}", which waits for no ticket'
            yield f"admission.{key}", why, 'set replay.sampler = "fifo"'
    elif config.admission.overtake == "drop":
        yield "admission.overtake_deadline_s", 'with admission.overtake = "drop"', 'set admission.overtake = "wait"'


def _filters(config: RunConfig) -> Rules:
    if not config.filters.zero_std and not config.advantage.mask_truncated:
        for key in ("active_sampling", "active_sampling_bound"):
            why = "without filters.zero_std or advantage.mask_truncated, as nothing else drops groups of a step"
            yield f"filters.{key}", why, "set one of them"
    elif not config.filters.active_sampling:
        yield "filters.active_sampling_bound", "with filters.active_sampling = false", "set filters.active_sampling = true"


def _replay(config: RunConfig) -> Rules:
    replay = config.replay
    by_weight = 'set replay.sampler = "prioritized" or replay.remover = "lowest_priority"'
    weighted = replay.sampler == "prioritized" or replay.remover == "lowest_priority"
    if not weighted:
        for key in ("priority", "priority_exponent", "recency_half_life"):
            why = f'with replay.sampler = "{replay.sampler}" and replay.remover = "{replay.remover}"'
            yield f"replay.{key}", why, by_weight
    elif replay.priority != "recency":
        yield "replay.recency_half_life", f'with replay.priority = "{replay.priority}"', 'set replay.priority = "recency"'
    if replay.priority == "trainer" and replay.max_uses == 1:
        yield "replay.priority", "with replay.max_uses = 1, as a group leaves when it was trained", "raise replay.max_uses"
    if replay.sampler != "prioritized":
        yield "replay.importance_beta", f'with replay.sampler = "{replay.sampler}"', 'set replay.sampler = "prioritized"'
    elif replay.priority_exponent == 0:
        yield "replay.importance_beta", "with replay.priority_exponent = 0, which weighs all groups alike", "raise that"
    if not replay.samples_per_insert:
        yield "replay.error_buffer", "without replay.samples_per_insert", "set that"


def _loss(config: RunConfig) -> Rules:
    loss = config.loss
    for key in CLIPS:
        if key not in POLICIES.get(loss.policy, CLIPS):
            yield f"loss.{key}", f'with loss.policy = "{loss.policy}"', ""
    if loss.from_behaviour:
        start = 'loss.policy = "dppo"' if loss.policy == "dppo" else 'loss.old = "behaviour"'
        for key in CORRECTION:
            why = f"with {start}, whose ratio is to the generators' policy already, so that the correction is 1"
            yield f"loss.{key}", why, ""
    if loss.kl_beta == 0:
        yield "loss.kl_estimator", "with loss.kl_beta = 0", "raise that"
    if loss.denominator != "constant":
        yield "loss.denominator_tokens", f'with loss.denominator = "{loss.denominator}"', 'set loss.denominator = "constant"'


def _training(config: RunConfig) -> Rules:
    if config.model.dtype == "float32":
        yield "model.fp32_head", 'with model.dtype = "float32"', 'set model.dtype = "bfloat16"'
    if config.reference.kind != "polyak":
        for key in ("alpha", "every_steps"):
            yield f"reference.{key}", f'with reference.kind = "{config.reference.kind}"', 'set reference.kind = "polyak"'
    elif config.loss.kl_beta == 0:
        yield "reference.kind", "with loss.kl_beta = 0, which loads no reference", "set loss.kl_beta > 0"
    if not config.lora.rank:
        for key in ("alpha", "targets"):
            yield f"lora.{key}", "with lora.rank = 0", "set lora.rank"
    if config.optimizer.schedule == "constant":
        cure = 'set optimizer.schedule = "linear" or "cosine"'
        yield "optimizer.final_fraction", 'with optimizer.schedule = "constant"', cure


def _sync(config: RunConfig) -> Rules:
    sync = config.sync
    if sync.backend != "filesystem":
        yield "sync.folder", f'with sync.backend = "{sync.backend}"', 'set sync.backend = "filesystem"'
    if sync.in_flight != "drain":
        yield "sync.drain_deadline_s", f'with sync.in_flight = "{sync.in_flight}"', 'set sync.in_flight = "drain"'


def _evaluation(config: RunConfig) -> Rules:
    if not config.evaluation.every_steps:
        for key in Evaluation.model_fields:
            yield f"evaluation.{key}", "with evaluation.every_steps = 0", "set evaluation.every_steps"
    elif config.evaluation.temperature == 0:
        for key in ("top_p", "top_k"):
            yield f"evaluation.{key}", "with evaluation.temperature = 0", "raise evaluation.temperature"


def _surroundings(config: RunConfig) -> Rules:
    """Redis, trackers and traces. What is said of endpoints is read by who calls them too, where somebody else ends their TLS."""
    url = config.redis.url
    if url and not url.startswith("rediss://"):
        yield "redis.ca_file", f"with redis.url = {url!r}", "use rediss://"
    if not config.tracking.wandb:
        yield "tracking.wandb_mode", "without a project", "set tracking.wandb"
    if not config.tracing.endpoint:
        yield "tracing.share", "without tracing.endpoint", "set that"
