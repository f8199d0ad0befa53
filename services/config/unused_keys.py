"""Detects keys that have no effect in combination with the others, and refuses any that is not at its default.

Guarantees: a key that is set either has an effect or is refused with the reason and a remedy. An unused key at its default
is accepted, even if written out, since `to_toml` writes every key. A run that began with such a key, under a version that
accepted it, can be resumed (`load`, `load_resolved`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from services.config.base import Section
from services.config.environments import code_of
from services.config.evaluation import Evaluation
from services.config.loss import CLIPS, CORRECTION, DPPO, POLICIES
from services.config.root import RunConfig
from services.config.secrets import shown
from services.config.verifiers import RemoteVerifier

Rules = Iterator[tuple[str, str, str]]
"""Unused keys, the reason, and what would make them effective (empty if nothing sensible does)."""


def unused_keys(config: RunConfig) -> Iterator[str]:
    """Describe every key that is set without effect: key, value and remedy; those of one reason together. The command line cannot
    remove a key of the file but can set it to its default, so the remedy names both."""
    found: dict[tuple[str, str], list[tuple[str, Any, Any]]] = {}
    for rules in (_prompts, _scoring, _environments, _replay, _loss, _training, _sync, _evaluation, _surroundings):
        for key, why, cure in rules(config):
            value, default = _value_and_default(config, key)
            if value != default:
                found.setdefault((why, cure), []).append((key, value, default))
    for (why, cure), keys in found.items():
        named = _joined([f"{key} = {_shown(value)}" for key, value, _ in keys])
        defaults = _joined([_shown(default) for _, _, default in keys])
        if len(keys) == 1:
            has, remedy = "has", "remove it" + f", or set it to its default, {defaults}" * (keys[0][2] is not None)
        else:
            has, remedy = "have", f"remove them, or set them to their defaults, {defaults}"
        yield f"{named} {has} no effect {why}: {f'{cure}, or ' * bool(cure)}{remedy}"


def _joined(words: list[str]) -> str:
    return " and ".join([", ".join(words[:-1])] * (len(words) > 1) + words[-1:])


def _value_and_default(config: RunConfig, key: str) -> tuple[Any, Any]:
    node: Any = config
    *way, name = key.split(".")
    for part in way:
        node = node[int(part)] if part.isdigit() else getattr(node, part)
    section: Section = node
    return getattr(section, name), type(section).model_fields[name].default


def _shown(value: Any) -> str:
    """Format a value as the file has it, on one line."""
    if isinstance(value, list):
        items = cast("list[Any]", value)
        value = [item.model_dump(exclude_unset=True) if isinstance(item, Section) else item for item in items]
    return shown("", value)


def _prompts(config: RunConfig) -> Rules:
    if len(config.data.sources) == 1:
        yield "data.sources.0.weight", "with one source", "add another"
    if config.data.chat_template is False:
        for key in ("system_prompt", "chat_template_options"):
            yield f"data.{key}", "with data.chat_template = false", "set data.chat_template = true"
    if not config.environments:
        why = "without an environment, since then every completion of a group is generated"
        yield "sampling.min_group_size", why, "give a prompt source an environment"


def _scoring(config: RunConfig) -> Rules:
    if all(isinstance(verifier, RemoteVerifier) for verifier in config.verifiers):
        yield "generator.verifier_workers", "without a verifier that runs on the generator's machine", "add one"
    for index, verifier in enumerate(config.verifiers):
        if verifier.weight <= 0:
            why = f"with weight = {verifier.weight:g}, since only verifiers with a positive weight say what is solved"
            yield f"verifiers.{index}.solved_at", why, "set a positive weight"
        elif verifier.kind == "length":
            yield f"verifiers.{index}.solved_at", 'with kind = "length"', ""
        if verifier.kind == "judge" and verifier.json_schema:
            yield f"verifiers.{index}.verdict", "with json_schema", "remove json_schema"


def _environments(config: RunConfig) -> Rules:
    for index, environment in enumerate(config.environments):
        key = f"environments.{index}"
        if code_of(environment) or environment.kind == "verifiers":
            continue
        yield f"{key}.options", "without function, whose arguments they are", "name one"
        if environment.kind != "agent":  # whose command prints a reward
            yield f"{key}.solved_at", "without function, which alone gives a score", "set solved_at of a verifier"


def _replay(config: RunConfig) -> Rules:
    replay = config.replay
    if replay.sampler != "prioritized":
        for key in ("priority", "importance_beta"):
            yield f"replay.{key}", f'with replay.sampler = "{replay.sampler}"', 'set replay.sampler = "prioritized"'
    elif replay.priority == "trainer" and replay.max_uses == 1:
        yield "replay.priority", "with replay.max_uses = 1, since a group leaves once trained on", "raise replay.max_uses"


def _loss(config: RunConfig) -> Rules:
    loss = config.loss
    for key in CLIPS:
        if key not in POLICIES.get(loss.policy, CLIPS):
            yield f"loss.{key}", f'with loss.policy = "{loss.policy}"', ""
    if loss.policy in DPPO:
        for key in CORRECTION:
            why = f'with loss.policy = "{loss.policy}", whose ratio starts from the policy that sampled: the correction is 1'
            yield f"loss.{key}", why, ""


def _training(config: RunConfig) -> Rules:
    if config.model.dtype == "float32":
        yield "model.fp32_head", 'with model.dtype = "float32"', 'set model.dtype = "bfloat16"'
    if config.loss.kl_beta == 0:
        yield "reference.alpha", "with loss.kl_beta = 0, which loads no reference", "set loss.kl_beta > 0"
    if not config.lora.rank:
        for key in ("alpha", "targets"):
            yield f"lora.{key}", "with lora.rank = 0", "set lora.rank"


def _sync(config: RunConfig) -> Rules:
    if config.sync.backend != "store":
        yield "sync.folder", f'with sync.backend = "{config.sync.backend}"', 'set sync.backend = "store"'


def _evaluation(config: RunConfig) -> Rules:
    if not config.evaluation.every_steps:
        for key in Evaluation.model_fields:
            yield f"evaluation.{key}", "with evaluation.every_steps = 0", "set evaluation.every_steps"
    elif config.evaluation.temperature == 0:
        yield "evaluation.top_p", "with evaluation.temperature = 0", "raise evaluation.temperature"


def _surroundings(config: RunConfig) -> Rules:
    """Check Redis, the sample log and tracing.

    `api.ca_file` is always effective: clients read it too, even if a proxy terminates TLS.
    """
    url = config.redis.url
    if url and not url.startswith("rediss://"):
        yield "redis.ca_file", f"with redis.url = {shown('redis.url', url)}", "use rediss://"
    if not config.samples.keep and not config.tracing.endpoint:
        why = "with samples.keep = 0 and without tracing.endpoint"
        yield "samples.share", why, "set one of them"
