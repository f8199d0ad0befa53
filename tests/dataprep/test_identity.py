"""A pod attaches to an existing run of the same name if it is identical, and otherwise names the differing keys and remedies."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from services.config import RunConfig, digest, to_toml
from services.console.run.redis_server import RedisServer
from services.dataprep.identity import create_or_attach, differences
from services.protocol.errors import DifferentRun
from services.runtime.exits import one_line
from services.store import Store
from tests.support.harness import save_tokenizer_folder, small_config, wait_until

REMEDIES = "choose another run.name, or delete the run (its keys in Redis and its folder)"


@pytest.fixture
def config(store: Store, server: RedisServer, tmp_path: Path) -> RunConfig:
    return small_config(tmp_path, server, f"run.name={store.keys.name}")


def changed(config: RunConfig, section: str, **values: object) -> RunConfig:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=values)})


def dataprep(folder: Path, config: RunConfig) -> subprocess.Popen[str]:
    """Start the pod of a release with this configuration."""
    path = folder / "resolved.toml"
    path.write_text(to_toml(config))
    argv = [sys.executable, "-m", "services.dataprep", "--config", str(path), "--name", "dataprep-0"]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ))


async def test_a_release_with_other_values_names_the_differing_keys(config: RunConfig, store: Store, tmp_path: Path) -> None:
    save_tokenizer_folder(Path(config.model.path))
    first = dataprep(tmp_path, config)
    try:
        await wait_until(store.run.state)
    finally:
        first.terminate()
        await asyncio.to_thread(first.communicate, timeout=60)
    before = await store.run.state()
    again = dataprep(tmp_path, changed(changed(config, "loss", kl_beta=0.25), "sampling", max_tokens=12, temperature=0.5))
    output, errors = await asyncio.to_thread(again.communicate, timeout=100)
    assert again.returncode == 2, errors
    (line,) = [line for line in (output + errors).splitlines() if not line.startswith('{"event"')]
    assert line == (
        f"error: run {store.keys.name!r} exists with another configuration: loss.kl_beta was 0.0 and is 0.25; "
        "sampling.max_tokens was 16 and is 12; sampling.temperature was 1.0 and is 0.5. "
        f"These keys define the run and cannot change: set them back, {REMEDIES}"
    )
    assert await store.run.state() == before


async def test_keys_that_do_not_define_a_run_may_differ(config: RunConfig, store: Store) -> None:
    await create_or_attach(store, config, "data")
    await create_or_attach(store, changed(changed(config, "run", steps=9), "optimizer", learning_rate=0.5), "data")
    state = await store.run.state()
    assert state is not None
    assert state.steps == 9


async def test_a_run_of_an_older_version_is_rejected_without_keys(config: RunConfig, store: Store) -> None:
    await store.run.create("another digest", "data", 4, config.slots)
    with pytest.raises(DifferentRun) as refusal:
        await create_or_attach(store, config, "data")
    assert "which keys differ is unknown, since an older version created it" in str(refusal.value)
    assert str(refusal.value).endswith(f"set them back, {REMEDIES}")


async def test_changed_prompts_are_reported(config: RunConfig, store: Store) -> None:
    await create_or_attach(store, config, "data")
    with pytest.raises(DifferentRun, match=r"exists with other prompts: the content of data\.sources has changed since"):
        await create_or_attach(store, config, "other")


async def test_another_protocol_version_is_reported(config: RunConfig, store: Store) -> None:
    await create_or_attach(store, config, "data")
    await store.client.hset(store.keys.run, "protocol", "999")  # type: ignore[misc]
    with pytest.raises(DifferentRun, match="protocol version 999"):
        await create_or_attach(store, config, "data")


async def test_the_remedies_fit_on_the_line_whatever_differs(config: RunConfig, store: Store) -> None:
    await create_or_attach(store, config, "data")
    given = changed(config, "data", chat_template="{{ messages }} " * 1000)
    for section, keys in (("loss", {"kl_beta": 0.5}), ("sampling", {"temperature": 0.5, "max_tokens": 12, "group_size": 8})):
        given = changed(given, section, **keys)
    with pytest.raises(DifferentRun) as refusal:
        await create_or_attach(store, changed(given, "model", path="/srv/grpo/models/" + "x" * 100), "data")
    line = one_line(str(refusal.value))
    assert "; and " in line
    assert line.endswith(REMEDIES)


def test_changed_code_is_named_by_its_file() -> None:
    old = {"verifiers": [{"kind": "python", "function": ["rewards.py", "score", "a" * 64]}]}
    edited = {"verifiers": [{"kind": "python", "function": ["rewards.py", "score", "b" * 64]}]}
    other = {"verifiers": [{"kind": "python", "function": ["new.py", "score", "b" * 64]}]}
    then, edited, other = map(msgspec.json.encode, (old, edited, other))
    assert differences(then, edited) == "verifiers.0.function has another content of rewards.py"
    assert differences(then, other) == "verifiers.0.function was 'rewards.py:score' and is 'new.py:score'"


async def test_a_restore_keeps_the_defining_keys(config: RunConfig, store: Store) -> None:
    from services.store.restore import KEPT

    await create_or_attach(store, config, "data")
    assert await store.run.defining()
    assert store.keys.defining.removeprefix(f"{store.keys.prefix}:") in KEPT
    state = await store.run.state()
    assert state is not None
    assert state.config == digest(config)
