"""An export identifies itself, can be verified, and is atomic whenever the process is killed."""

from __future__ import annotations

import os
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from services.config import RunConfig
from services.runtime import atomic_folders
from services.runtime.atomic_folders import FolderError
from services.trainer.model import export
from tests.support.checkpoints import checked
from tests.support.models.tiny_model import VOCABULARY, make_config


@pytest.fixture(scope="module")
def config(tiny_model: Path) -> RunConfig:
    return make_config(tiny_model, run={"name": "exported"}, sampling={"temperature": 0.7, "max_tokens": 32})


@pytest.fixture(scope="module")
def module(tiny_model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_model)


def write(module: Any, config: RunConfig, step: int, folder: Path) -> None:
    """Export weights that all equal `step`."""
    state = {name: torch.full_like(value, float(step)) for name, value in module.state_dict().items()}
    assert export.save(module, state, config, step, folder) == ""


def test_the_manifest_names_run_step_and_hashes(module: Any, config: RunConfig, tmp_path: Path) -> None:
    write(module, config, 7, tmp_path / "model")
    manifest = checked(tmp_path / "model")
    assert manifest.facts == {"run": "exported", "step": 7, "model": "Qwen3ForCausalLM", "dtype": "float32"}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= set(manifest.files)
    assert {path.name for path in (tmp_path / "model").iterdir()} == {*manifest.files, atomic_folders.MANIFEST}
    defaults = GenerationConfig.from_pretrained(tmp_path / "model")
    assert (defaults.temperature, defaults.top_p, defaults.top_k, defaults.do_sample) == (0.7, 1.0, 0, True)
    assert defaults.eos_token_id == 1
    assert len(AutoTokenizer.from_pretrained(tmp_path / "model")) == VOCABULARY
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert all(bool((value == 7).all()) for value in loaded.parameters())


def test_the_runs_chat_template_is_exported(module: Any, tiny_model: Path, tmp_path: Path) -> None:
    given = "{% for message in messages %}{{ message.content }}!{% endfor %}"
    write(module, make_config(tiny_model, data={"chat_template": given}), 1, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "t5"}], tokenize=False) == "t5!"


def kill_at(call: int, work: Callable[[], None]) -> bool:
    """Run `work` in a child that is killed at its `call`-th disk operation; return whether it got that far."""
    pid = os.fork()
    if pid:
        _, status = os.waitpid(pid, 0)
        assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
        return os.WIFSIGNALED(status)
    code = 1
    try:
        left = call

        def dying(real: Callable[..., Any]) -> Callable[..., Any]:
            def instead(*args: Any, **options: Any) -> Any:
                nonlocal left
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*args, **options)

            return instead

        for owner, name in ((os, "fsync"), (os, "rename"), (os, "mkdir"), (os, "unlink"), (shutil, "rmtree"), (os, "replace")):
            setattr(owner, name, dying(getattr(owner, name)))
        work()
        code = 0
    finally:
        os._exit(code)


def test_a_kill_at_any_point_leaves_a_whole_export_or_none(module: Any, config: RunConfig, tmp_path: Path) -> None:
    folder, seen = tmp_path / "model", []
    write(module, config, 1, folder)
    call = 0
    while kill_at(call, lambda: write(module, config, 2, folder)):
        if folder.exists():
            step = checked(folder).facts["step"]
            weights = AutoModelForCausalLM.from_pretrained(folder).parameters() if not seen or seen[-1] != step else []
            assert all(bool((value == step).all()) for value in weights)
            seen.append(step)
        else:
            seen.append(None)
            with pytest.raises(FolderError, match="is incomplete"):
                checked(folder)
        if seen[-1] != 1:
            write(module, config, 1, folder)  # a later export replaces any leftovers
        call += 1
    assert call > 10
    assert {1, 2} <= set(seen)
    assert seen.count(None) <= 1, "between two renames"
    assert sorted(seen, key=lambda step: (0, 0) if step == 1 else (2, 0) if step == 2 else (1, 0)) == seen
    write(module, config, 3, folder)
    assert [path.name for path in tmp_path.iterdir()] == ["model"], "killed exports leave nothing behind"


def test_damage_is_detected_by_the_reader(module: Any, config: RunConfig, tmp_path: Path) -> None:
    write(module, config, 1, tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\xff")
    with pytest.raises(FolderError, match=r"model\.safetensors differs from the SHA-256 in manifest\.json"):
        checked(tmp_path / "model")


def test_a_full_disk_is_explained_and_the_last_export_is_kept(module: Any, config: RunConfig, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write(module, config, 1, folder)
    handler, limits = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))  # enough for config.json
    try:
        problem = export.save(module, module.state_dict(), config, 2, folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert f"{folder} cannot be written" in problem
    assert "File too large" in problem
    assert "free space" in problem
    assert checked(folder).facts["step"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["model"], "what was written may be what fills the disk"


def test_a_disk_that_is_full_when_the_tokenizer_is_written_is_explained(
    module: Any, config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = AutoTokenizer.from_pretrained

    def filling(*given: Any, **options: Any) -> Any:
        (tmp_path / "model.0.partial" / "tokenizer.json").symlink_to("/dev/full")
        return load(*given, **options)

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", filling)
    problem = export.save(module, module.state_dict(), config, 2, tmp_path / "model")
    assert f"{tmp_path / 'model'} cannot be written: No space left on device; free space there" in problem
    assert not list(tmp_path.iterdir())


def test_what_an_unknown_error_leaves_is_deleted(
    module: Any, config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any, **__: Any) -> Any:
        raise RuntimeError("of another kind")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", failing)
    with pytest.raises(RuntimeError, match="of another kind"):
        export.save(module, module.state_dict(), config, 2, tmp_path / "model")
    assert not list(tmp_path.iterdir())
