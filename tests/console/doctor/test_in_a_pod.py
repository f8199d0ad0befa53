"""Doctor in a pod of a release, which has only what its own service needs."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.console.doctor import machine, packages
from services.console.doctor.preflight import preflight
from services.runtime.process_tools import CONFIG_ENV
from tests.support.harness import save_model_folder, small_config

OTHER_POD = "192.0.2.1"  # an address of no machine (RFC 5737)


def test_what_other_pods_need_is_not_missing_in_this_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model_folder(tmp_path / "model")
    config = small_config(tmp_path, None, "api.port=8000", "trainer.ranks=8", "run.dir=/proc/nothing", f"sync.host={OTHER_POD}")
    (tmp_path / "data.jsonl").unlink()
    monkeypatch.setattr(packages, "there", lambda name: name != "deepspeed")
    one_gpu = ["0"]
    faults = {one.what for one in preflight(config, one_gpu, {}, own=False) if one.state == "fault"}
    assert faults >= {"packages", "GPUs for this run", "disk", "data source main"}
    found = preflight(config, one_gpu, {CONFIG_ENV: "/etc/grpo/config.toml"}, own=False)
    assert {one.what for one in found if one.state == "fault"} == set()
    assert {"model", "loss"} <= {one.what for one in found}


def test_the_trainers_address_is_that_of_another_pod(tmp_path: Path) -> None:
    config = small_config(tmp_path, None, f"sync.host={OTHER_POD}")
    (found,) = machine.network(config, {CONFIG_ENV: "/etc/grpo/config.toml"})
    assert (found.state, found.detail) == ("ok", f"weight-sync groups meet at {OTHER_POD} ({OTHER_POD}), another pod")
    assert [one.state for one in machine.network(config, {})] == ["fault"]
    unknown = small_config(tmp_path, None, "sync.host=nowhere.invalid")
    assert [one.state for one in machine.network(unknown, {CONFIG_ENV: "/etc/grpo/config.toml"})] == ["fault"]
