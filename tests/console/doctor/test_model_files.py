"""Doctor on models: what their checkpoints take, and downloads from the hub."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from services.config import RunConfig
from services.console.doctor import Finding, resources
from services.console.doctor.model import folder_of, model
from services.console.doctor.resources import GIBIBYTE
from tests.support.harness import save_model_folder, small_config

HIDDEN, LAYERS, BILLION = 4096, 32, 10**9


def sparse_model(folder: Path) -> Path:
    """Write the headers of a model of eight billion parameters, without its weights."""
    folder.mkdir(parents=True)
    shapes = {"model.embed_tokens.weight": [6 * BILLION // HIDDEN, HIDDEN], "model.layers.0.input_layernorm.weight": [HIDDEN]}
    for layer in range(LAYERS):
        for name in ("self_attn.q_proj", "self_attn.o_proj"):
            shapes[f"model.layers.{layer}.{name}.weight"] = [HIDDEN, HIDDEN]
    header, end = dict[str, object](), 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * shape[0] * (shape[1] if len(shape) == 2 else 1)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        file.truncate(8 + len(encoded) + end)
    (folder / "config.json").write_text("{}")
    return folder


def disk(config: RunConfig) -> Finding:
    (found,) = resources.disk(config)
    return found


def test_checkpoints_take_what_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = sparse_model(tmp_path / "big")
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 30 * GIBIBYTE})())

    def needed(*overrides: str) -> float:
        given = f'model.path="{folder}"', "model.dtype=bfloat16", "checkpoint.keep=1", *overrides
        return float(disk(small_config(tmp_path, None, *given)).detail.rpartition("up to ")[2].split()[0])

    parameters = 6 * BILLION // HIDDEN * HIDDEN + HIDDEN + 2 * LAYERS * HIDDEN**2
    final = 2 * parameters
    assert needed() == pytest.approx((2 * 12 * parameters + final) / GIBIBYTE, abs=0.1)
    averaged = needed("loss.kl_beta=0.1", "reference.alpha=0.1")
    assert averaged == pytest.approx((2 * 16 * parameters + final) / GIBIBYTE, abs=0.1)
    adapters = LAYERS * 8 * 2 * HIDDEN  # of one layer in each block
    assert needed("lora.rank=8") == pytest.approx((2 * 12 * 2 * adapters + final) / GIBIBYTE, abs=0.1)
    assert needed("lora.rank=800", 'lora.targets=["o_proj"]') == pytest.approx((2400 * adapters + final) / GIBIBYTE, abs=0.1)


def test_an_interrupted_download_is_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    snapshot = tmp_path / "hub" / "models--some--model" / "snapshots" / "abc"
    save_model_folder(snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc\n")
    assert folder_of("some/model") == snapshot
    config = small_config(tmp_path, None, "model.path=some/model")
    shutil.copy(snapshot / "model.safetensors", snapshot / "model-00001-of-00002.safetensors")
    index = snapshot / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {name: f"model-0000{name}-of-00002.safetensors" for name in "12"}}))
    assert folder_of("some/model") is None
    [found] = model(config)
    assert (found.state, "is downloaded from the Hugging Face Hub" in found.detail) == ("note", True)
    index.unlink()
    (snapshot / "tokenizer.json").unlink()
    assert folder_of("some/model") is None


@pytest.mark.parametrize("said", ["1", "true", "YES", "on"])
def test_without_access_to_the_hub_a_missing_model_is_a_fault(said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", said)
    [found] = model(small_config(tmp_path, None, "model.path=some/model"))
    assert (found.state, f"HF_HUB_OFFLINE={said} prevents" in found.detail) == ("fault", True)


def test_targets_of_adapters_are_compared_with_the_layers(tmp_path: Path) -> None:
    folder = sparse_model(tmp_path / "big")
    given = f'model.path="{folder}"', "lora.rank=4"
    wrong = [
        one for one in model(small_config(tmp_path, None, *given, 'lora.targets=["query_key_value", "o_proj"]')) if one.detail
    ]
    assert [f"{one.detail}: {one.remedy}" for one in wrong if "lora.targets" in one.detail] == [
        f"lora.targets names ['query_key_value'], which model.path = '{folder}' lacks: "
        "choose among its linear layers ['o_proj', 'q_proj']"
    ]
    right = model(small_config(tmp_path, None, *given, 'lora.targets=["o_proj"]'))
    assert not [one for one in right if "lora.targets" in one.detail]
