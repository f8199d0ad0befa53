"""The processes of a run and the GPUs visible to each."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from services.config import RunConfig, digest
from services.console.errors import ConsoleError
from services.console.gpus import forced_backend, memory_share, sharing, visible_gpus
from services.console.run.place import as_started
from services.console.run.plan import common_environment, max_generators, plan_units, wanted_generators
from services.runtime.child_processes import ServicePlan
from services.store.records import RunState, Scale
from services.tracker.account import OTHERS_S
from tests.support.harness import small_config


def config(folder: Path, *overrides: str) -> RunConfig:
    return small_config(folder, None, *overrides)


def seen(children: list[ServicePlan]) -> dict[str, str | None]:
    return {pod.name: pod.environ.get("CUDA_VISIBLE_DEVICES") for child in children for pod in child.pods}


def test_a_run_consists_of_dataprep_trainer_ranks_and_generators(tmp_path: Path) -> None:
    children = plan_units(config(tmp_path, "trainer.ranks=2", "generator.count=2"), Path("/run/config.toml"))
    assert [(child.name, child.collective, [pod.name for pod in child.pods]) for child in children] == [
        ("dataprep-0", False, ["dataprep-0"]),
        ("trainer", True, ["trainer-0", "trainer-1"]),
        ("generator-0", False, ["generator-0"]),
        ("generator-1", False, ["generator-1"]),
    ]
    rank_1 = children[1].pods[1]
    assert rank_1.argv == (sys.executable, "-m", "services.trainer", "--config", "/run/config.toml", "--name", "trainer-1")
    assert rank_1.environ == {
        "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "GRPO_CONFIG": "/run/config.toml",
        "GRPO_POD": "trainer-1",
    }  # fmt: skip


def test_trainer_ranks_get_the_first_gpus_and_generators_the_next(tmp_path: Path) -> None:
    children = plan_units(
        config(tmp_path, "trainer.ranks=2", "generator.count=3", "generator.tensor_parallel=2"), Path("c"), list("01234567")
    )
    assert seen(children) == {
        "dataprep-0": "", "trainer-0": "0,1", "trainer-1": "0,1", "generator-0": "2,3", "generator-1": "4,5",
        "generator-2": "6,7",
    }  # fmt: skip


def test_too_few_gpus_are_shared_using_gloo(tmp_path: Path) -> None:
    few = config(tmp_path, "generator.count=2")
    assert sharing(few, ["3"])
    assert forced_backend(few, ["3"]) == "gloo"
    assert [forced_backend(few, gpus) for gpus in ([], list("012345678"))] == ["", ""]
    assert forced_backend(config(tmp_path, "generator.count=2", "sync.backend=store"), ["3"]) == ""
    assert not sharing(few, ["0", "1", "2"])
    assert not sharing(few, [])
    assert seen(plan_units(few, Path("c"), ["3"])) == {
        "dataprep-0": "", "trainer-0": "3", "generator-0": "3", "generator-1": "3"
    }  # fmt: skip


def test_a_run_grows_by_generators_up_to_what_its_machine_allows(tmp_path: Path) -> None:
    eight = list("01234567")
    small, grown = (config(tmp_path, "trainer.ranks=2", f"generator.count={count}") for count in (2, 6))
    assert plan_units(grown, Path("c"), eight)[: 2 + 2] == plan_units(small, Path("c"), eight)
    assert max_generators(small, eight, 2) == 6
    assert max_generators(config(tmp_path, "trainer.ranks=2", "generator.tensor_parallel=4"), eight, 2) == 1
    assert max_generators(small, [], 2) == 8
    assert max_generators(grown, [], 1) == 6, "those that it starts with"
    assert max_generators(config(tmp_path, 'sync.backend="gloo"'), ["0", "1"], 2) == 8
    assert max_generators(config(tmp_path, "generator.count=2"), ["0"], 2) == 8  # the GPU is already shared


def test_a_run_does_not_grow_beyond_the_memory_of_its_gpus(tmp_path: Path) -> None:
    """One more engine would find no memory, and its second death would end the run."""

    def most(gpus: str, *overrides: str) -> int:
        return max_generators(config(tmp_path, "generator.engine=vllm", *overrides), list(gpus), 16)

    assert most("01234567", "sync.backend=gloo") == 7
    assert most("01234567", "sync.backend=gloo", "trainer.ranks=2", "generator.tensor_parallel=2") == 3
    assert most("0", "generator.engine_options.gpu_memory_utilization=0.45") == 1, "what memory_share gives to a pair"
    assert most("0", "generator.engine_options.gpu_memory_utilization=0.3", "generator.count=2") == 2
    assert most("01", "sync.backend=store", "generator.engine_options.gpu_memory_utilization=0.3") == 5
    assert most("0", "generator.count=3") == 3, "those that it starts with"
    assert most("01", "sync.backend=store", "generator.engine_options.gpu_memory_utilization=none") == 1


def test_a_scale_request_overrides_the_configuration(tmp_path: Path) -> None:
    request = RunState(4, 8, 0, 0, -1, -1, -1, -1, "", {}, "", "", "d", "c", scale=Scale(5, "more"))
    assert wanted_generators(None, 2, 9) == (2, "")
    assert wanted_generators(replace(request, scale=Scale()), 2, 9) == (2, "")
    assert wanted_generators(request, 2, 9) == (5, "")
    assert wanted_generators(request, 2, 3) == (3, "5 generators desired, but this machine allows only 3")
    assert wanted_generators(replace(request, scale=Scale(0)), 2, 3) == (0, "")


def test_too_many_generators_are_rejected_with_a_remedy() -> None:
    assert Scale(most=3).refusal(3) == Scale().refusal(1000) == ""
    assert "generators = 4 exceeds the 3 that the run's machine allows" in Scale(most=3).refusal(4)
    assert "request fewer" in Scale().refusal(10_001)


@pytest.mark.parametrize(
    ("override", "names"), [('sync.backend="nccl"', "sync.backend"), ("trainer.ranks=2", "trainer.ranks = 2")]
)
def test_impossible_gpu_sharing_is_rejected(tmp_path: Path, override: str, names: str) -> None:
    with pytest.raises(ConsoleError, match=names):
        sharing(config(tmp_path, override), ["0"])


def test_services_inherit_no_overrides_and_limited_threads(tmp_path: Path) -> None:
    given = {"PATH": "/bin", "GRPO__RUN__STEPS": "5", "GRPO_REDIS_PASSWORD": "x"}
    common = common_environment(given, config(tmp_path), [])
    assert common["OMP_NUM_THREADS"] == "1"
    assert "GRPO__RUN__STEPS" not in common
    assert common["GRPO_REDIS_PASSWORD"] == "x"
    assert "HF_HUB_OFFLINE" not in common_environment(given, config(tmp_path, "model.path=owner/name"), [])
    assert common_environment(given, config(tmp_path), ["0"]).get("OMP_NUM_THREADS") is None
    assert common_environment(given, config(tmp_path), ["0"])["HF_HUB_OFFLINE"] == "1"


def test_the_tracker_may_see_the_others_off(tmp_path: Path) -> None:
    (tracker,) = [unit for unit in plan_units(config(tmp_path, "samples.keep=100"), Path("c")) if unit.name == "tracker-0"]
    assert tracker.stop_s > 2 * OTHERS_S, "then it closes its trackers"


def test_visible_gpus_come_from_cuda_visible_devices(tmp_path: Path) -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "2, 5"}) == ["2", "5"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == visible_gpus({"CUDA_VISIBLE_DEVICES": "-1"}) == []
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "1,-1,0"}) == ["1"]


def test_gpus_are_counted_by_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'GPU 0: H (UUID: a)'\necho 'GPU 1: H (UUID: b)'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert visible_gpus({}) == ["0", "1"]


def test_engines_that_share_a_gpu_share_its_memory(tmp_path: Path) -> None:
    pair = config(tmp_path, "generator.engine=vllm", "generator.count=1")
    assert memory_share(pair, ["0"]) == 0.45
    assert memory_share(config(tmp_path, "generator.engine=vllm", "generator.count=3"), ["0", "1"]) == 0.45
    assert [memory_share(pair, gpus) for gpus in ([], ["0", "1"])] == [None, None], "the generator has its own GPU"
    given = config(tmp_path, "generator.engine=vllm", "generator.engine_options.gpu_memory_utilization=0.3")
    assert memory_share(given, ["0"]) is None
    assert memory_share(config(tmp_path), ["0"]) is None, "a custom engine has its own options"
    shared = as_started(pair, ["0"])
    assert shared.generator.engine_options == {"gpu_memory_utilization": 0.45}
    assert digest(shared) == digest(pair)
