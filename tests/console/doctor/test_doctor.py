"""`grpo doctor` finds problems and suggests a remedy for each."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from resource import RLIM_INFINITY
from typing import Any

import pytest
import redis

from services.chat.errors import DataError
from services.config import RunConfig, load, to_toml
from services.config.model_files import unusable
from services.console.commands.__main__ import main
from services.console.doctor import Finding, functions, gathered, machine, packages, resources, secrets, server
from services.console.doctor.model import Weights, model
from services.console.doctor.preflight import check_again, preflight
from services.console.doctor.rows import data
from services.console.doctor.server import Asked, judge
from services.console.doctor.work import Work
from services.console.lock import FolderLock
from services.console.run.redis_server import RedisServer
from services.protocol.messages import PodStatus
from services.runtime.process_tools import CONFIG_ENV
from services.runtime.redis_process import find_server
from services.store import Store
from services.store.acl import GRANTS
from tests.newcomer.world import make_model
from tests.support.harness import save_model_folder, save_tokenizer_folder, small_config, wait_until
from tests.support.servers.redis_cluster import RedisCluster, redis_cluster


def only(findings: Any, what: str) -> Finding:
    (found,) = (one for one in findings if one.what == what)
    return found


@pytest.mark.parametrize("command", ["run", "doctor", "config"])
def test_a_missing_configuration_file_is_one_error_with_its_remedy(command: str, capfd: pytest.CaptureFixture[str]) -> None:
    main([command, "nowhere.toml"])
    output = capfd.readouterr()
    assert "file nowhere.toml does not exist: correct the path, or write one with grpo init\n" in output.out + output.err


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    """Return the configuration of a run on this machine whose model is a tokenizer and weights of zero."""
    make_model(tmp_path / "model")
    return small_config(tmp_path)


def test_a_healthy_machine_passes_and_missing_data_fails(
    tmp_path: Path, config: RunConfig, server: RedisServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs the whole command and checks its exit codes."""
    exec(machine._ASK_TORCH, {})  # in this process, which has loaded torch, because importing it takes seconds
    assert json.loads(capsys.readouterr().out).keys() == {"torch", "cuda", "gpus", "slow"}
    monkeypatch.setattr(machine, "ask_torch", lambda: {"torch": "2", "cuda": None, "gpus": [], "slow": False})
    file = tmp_path / "run.toml"
    assert main(["doctor", str(file)]) == 0
    assert "All checks passed" in capsys.readouterr().out
    (tmp_path / "data.jsonl").unlink()
    url = server.url.replace("//", f"//:{server.password}@")
    assert main(["doctor", str(file), "--json", "--redis-url", url]) == 1
    out = capsys.readouterr().out
    assert server.password not in out
    report = json.loads(out)
    faults = [one for one in report["findings"] if one["state"] == "fault"]
    assert [one["what"] for one in faults] == ["data source main"]
    assert faults[0]["remedy"]
    assert {"Redis", "Redis: durability", "Redis: memory", "clock", "disk", "model"} <= {
        one["what"] for one in report["findings"]
    }
    assert main(["doctor", str(tmp_path / "nothing.toml")]) == 2


async def test_an_evicting_or_unreachable_redis_is_a_problem(config: RunConfig, server_: RedisServer) -> None:
    with redis.Redis(port=server_.port, password=server_.password) as admin:
        admin.config_set("maxmemory-policy", "allkeys-lru")
        try:
            found = [one async for one in server.server(config, server_.url, server_.password)]
        finally:
            admin.config_set("maxmemory-policy", "noeviction")
    assert "allkeys-lru" in only(found, "Redis").detail
    assert "noeviction" in only(found, "Redis").remedy
    (gone,) = [one async for one in server.server(config, "redis://127.0.0.1:1/0", "")]
    assert (gone.state, bool(gone.remedy)) == ("fault", True)


@pytest.fixture(name="server_")
def _server_(server: RedisServer) -> RedisServer:
    return server


async def test_a_misconfigured_replica_is_a_problem(tmp_path: Path, config: RunConfig) -> None:
    (tmp_path / "cluster").mkdir()
    with redis_cluster(tmp_path / "cluster", find_server(), config.run.name) as cluster:
        what = f"Redis: replica 127.0.0.1:{cluster.replica.port}"

        async def look() -> Finding:
            url = cluster.url(cluster.third)
            return only([one async for one in server.server(config, url, cluster.password)], what)

        port = cluster.replica.port
        await wait_until(lambda: any(port == replica[1] for part in cluster.slots(cluster.owner) for replica in part[3:]))
        assert await look() == Finding(what, "ok", "no eviction, append-only file on")
        cluster.call(cluster.replica, "CONFIG", "SET", "maxmemory-policy", "allkeys-lru", "appendonly", "no")
        found = await look()
        assert (found.state, found.detail.partition(":")[0]) == ("fault", "maxmemory-policy allkeys-lru and append-only file off")
        assert found.remedy.startswith("set maxmemory-policy noeviction and appendonly yes")
        cluster.call(cluster.replica, "ACL", "SETUSER", "default", "resetpass", ">another")
        found = await look()
        assert (found.state, "rejected the password" in found.detail) == ("fault", True)
        await see_that_masters_with_shards_are_looked_at(cluster, config)


async def see_that_masters_with_shards_are_looked_at(cluster: RedisCluster, config: RunConfig) -> None:
    spread = config.model_copy(update={"sampling": config.sampling.model_copy(update={"max_tokens": 10**9})})
    cluster.call(cluster.other, "CONFIG", "SET", "appendonly", "no")
    found = [one async for one in server.server(spread, cluster.url(cluster.third), cluster.password)]
    other, third = (f"Redis: master 127.0.0.1:{node.port}" for node in (cluster.other, cluster.third))
    assert only(found, third).state == "ok"
    assert only(found, other).detail == "append-only file off: a restart may lose payloads"
    alone = [one for one in found if one.what == "Redis: Cluster"]
    assert len(alone) == 2, "the master of the run has a replica"
    assert all("which holds shards of the run, has no replica" in one.detail for one in alone)
    memories = [one for one in found if one.what.startswith("Redis: memory")]
    assert [one.state for one in memories] == ["fault"] * 3
    assert len({one.detail.partition("need")[2] for one in memories}) == 1, "a third each"
    cluster.call(cluster.third, "CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    found = [one async for one in server.server(spread, cluster.url(cluster.owner), cluster.password)]
    assert "has maxmemory-policy allkeys-lru" in only(found, "Redis").detail


def test_the_state_of_a_server_is_judged(config: RunConfig) -> None:
    well = {"redis_version": "7.0.15", "aof_enabled": 1, "used_memory": 10**6, "total_system_memory": 16 * 2**30}
    assert {one.state for one in judge(Asked(well, 0.0005, 0.01), config)} == {"ok"}
    assert only(judge(Asked({**well, "aof_enabled": 0}, 0.0005, 0.0), config), "Redis: durability").state == "fault"
    full = {**well, "aof_last_write_status": "err", "used_memory": 2**30, "maxmemory": 2**30}
    alone = judge(Asked({**well, "redis_mode": "cluster", "connected_slaves": 0}, 0.0005, 0.0), config)
    assert only(alone, "Redis: Cluster").state == "note"
    found = judge(Asked(full, 0.05, -42.0), config)
    assert only(found, "Redis: disk").state == only(found, "Redis: memory").state == only(found, "clock").state == "fault"
    assert "-42.000 s" in only(found, "clock").detail
    assert only(found, "Redis: latency").state == "note"
    assert all(one.remedy for one in found if one.state == "fault")


def test_missing_model_and_data_are_problems(tmp_path: Path, config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    assert only(model(config), "model").state == "ok"
    (tmp_path / "model" / "config.json").unlink()
    assert "config.json" in only(model(config), "model").detail
    (tmp_path / "model" / "config.json").touch()
    (tmp_path / "data.jsonl").write_text('{"prompt": "?", "answer": "!"}\n{"question": "?", "answer": "!"}\n')
    found = only(data(config), "data source main")
    assert (found.state, "data.jsonl:2: no field 'prompt'" in found.detail) == ("fault", True)
    (tmp_path / "data.jsonl").write_text("no json\n")
    assert "data.jsonl:1: not valid JSON" in only(data(config), "data source main").detail
    monkeypatch.setattr(packages, "there", lambda name: name != "math_verify")
    monkeypatch.setattr(functions, "there", lambda name: name != "math_verify")
    math = load(tmp_path / "run.toml", ['verifiers.0.kind="math"'], environ={})
    assert only(packages.packages(math), "packages").remedy == "run pip install 'grpo[generator]'"
    assert list(functions.verifiers(math, Work())) == []
    (tmp_path / "cert").write_text("no certificate")
    api = config.api.model_copy(update={"certificate_file": str(tmp_path / "cert")})
    assert only(secrets.secrets(config.model_copy(update={"api": api}), {}, own=True), "secrets").state == "fault"


def test_a_missing_token_stops_pods_but_not_grpo_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRPO_API_TOKEN", raising=False)
    config = small_config(tmp_path, None, "api.token_file=")
    assert not [one for one in secrets.secrets(config, {}, own=True) if one.what == "API tokens"]
    found = list(secrets.secrets(config, {}, own=False))
    assert only(found, "API tokens").state == "note", "redis.url is set, and the run is started on this machine"
    assert "grpo run creates them" in only(found, "API tokens").detail
    pod = list(secrets.secrets(config, {"GRPO_CONFIG": "/etc/grpo/config.toml"}, own=False))
    assert (only(pod, "secrets").state, "no API token" in only(pod, "secrets").detail) == ("fault", True)


@pytest.mark.parametrize(
    ("overrides", "package", "key", "extra"),
    [
        (["sync.backend=store", "sync.folder=s3://bucket/run"], "obstore", "sync.folder = 's3://bucket/run'", "bucket"),
        (["samples.keep=10"], "pyarrow", "samples.keep = 10", "tracking"),
        ([], "zstandard", "a run on this machine", "local"),
    ],
)
def test_a_package_is_required_only_by_runs_that_use_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], package: str, key: str, extra: str
) -> None:
    monkeypatch.setattr(packages, "there", lambda name: name != package)
    found = only(packages.packages(small_config(tmp_path, None, *overrides)), "packages")
    assert (found.state, found.detail) == ("fault", f"{key} needs the package {package}")
    assert found.remedy.startswith(f"run pip install 'grpo[{extra}]'")
    monkeypatch.setattr(packages, "there", lambda name: name not in ("obstore", "pyarrow"))
    without = small_config(tmp_path, None, "samples.keep=0", "sync.backend=store")
    assert only(packages.packages(without), "packages").state == "ok"


@pytest.mark.parametrize(("prompts", "note"), [(0, "1 of its 2 prompts are trained on, too"), (1, "")])
def test_prompts_that_are_trained_on_and_evaluated_are_counted(tmp_path: Path, prompts: int, note: str) -> None:
    save_tokenizer_folder(tmp_path / "model")
    source = f'{{ name = "test", kind = "jsonl", path = "{tmp_path / "test.jsonl"}" }}'
    given = f"evaluation.sources=[{source}]", "evaluation.every_steps=1"
    config = small_config(tmp_path, None, *given, f"evaluation.prompts={prompts}")
    first = (tmp_path / "data.jsonl").read_text().splitlines()[0]
    (tmp_path / "test.jsonl").write_text('{"prompt": "say 7 twice", "answer": "77"}\n' + first + "\n")
    notes = [one.detail for one in data(config) if one.state == "note"]
    assert notes == [note] * bool(note)


def test_an_unavailable_model_does_not_hide_problems_of_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(path: str) -> Path:
        raise DataError(str(unusable(path, "is neither a folder nor a model available on the hub", OSError("404; not found"))))

    monkeypatch.setattr("services.dataprep.prompts.catalogue.tokenizer_folder", unreachable)
    monkeypatch.setattr(functions, "verifiers", lambda config, remote: ())
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    config = small_config(tmp_path, None, "model.path=nobody/nothing")
    found = preflight(config, [], {}, own=True)
    fault = only(found, "data source main")
    assert fault.detail == "model.path = 'nobody/nothing' is neither a folder nor a model available on the hub: 404; not found"
    assert fault.remedy == "correct the path to a folder, or the name (a private or gated model needs HF_TOKEN)"
    assert not [one for one in found if one.what == "model"], "a note that it is downloaded"
    (tmp_path / "data.jsonl").unlink()
    found = preflight(config, [], {}, own=True)
    assert only(found, "data source main").detail.startswith("data.sources.0.path = ")
    assert only(found, "model").state == "note"


def test_a_resumed_run_is_checked_for_what_may_change(tmp_path: Path, config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def faults(*overrides: str) -> set[str]:
        now = load(tmp_path / "run.toml", overrides, environ={})
        return {one.what for one in check_again(now, config, [], {}) if one.state == "fault"}

    monkeypatch.setattr(resources, "free_bytes", lambda: 30 * 2**30)
    assert faults() == set()
    (tmp_path / "data.jsonl").unlink()  # not needed: dataprep compares the data with the original data
    source = '{ name = "test", kind = "jsonl", path = "/nonexistent" }'
    evaluation = (f"evaluation.sources=[{source}]", "evaluation.every_steps=1")
    changed = (*evaluation, "generator.count=64", "api.host=192.0.2.1", "web.port=80", "checkpoint.keep=900000000000")
    assert faults(*changed) == {"evaluation source test", "memory", "ports", "disk"}
    monkeypatch.setattr(packages, "there", lambda name: name != "obstore")
    assert faults("sync.backend=store", "sync.folder=s3://bucket/run", "api.token_file=/nonexistent") == {"packages", "secrets"}
    with FolderLock(tmp_path / "small", 0.0, say=print):
        assert faults(*changed) == {"evaluation source test", "disk"}, "memory and ports are used by the run itself"
        found = check_again(load(tmp_path / "run.toml", changed, environ={}), config, [], {})
        assert only(found, "memory and ports").line.endswith("not checked, since run small is running and uses them")


def test_existing_checkpoints_count_towards_the_required_space(
    tmp_path: Path, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resources, "LEAST_FREE_BYTES", 1)
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 10**6})())
    many = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"keep": 15})})
    assert only(resources.disk(many), "disk").state == "fault"
    written = tmp_path / "small" / "checkpoints" / "step-00000003" / "trainer"
    written.mkdir(parents=True)
    (written / "state-0.pt").write_bytes(bytes(10**6))
    assert only(resources.disk(many), "disk").state == "ok"


def test_the_memory_of_processes_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured: 0.3 GiB for the example's trainer without activations, 1.07 GiB for a vLLM generator with 80 MiB of KV cache."""
    save_model_folder(tmp_path / "model")
    monkeypatch.setattr(resources, "free_bytes", lambda: 30 * 2**30)
    given = 'generator.engine="vllm"', "generator.count=2", "generator.engine_options.kv_cache_memory_bytes=83886080"
    found = only(resources.memory(small_config(tmp_path, None, *given), []), "memory")
    more = "and more for activations, which grow with trainer.row_tokens = 256"
    assert f"needs at least 2.4 GiB of memory, {more}; " in found.detail


@pytest.mark.parametrize(
    ("gpus", "setting", "expected"),
    [
        (["0", "1"], "trainer.compile=false", ["GPUs for this run", "compiled training"]),
        (["0", "1"], "trainer.compile=true", ["GPUs for this run"]),
        (["0", "1"], "trainer.deterministic=true", ["GPUs for this run"]),
        ([], "trainer.compile=false", ["GPUs for this run"]),
    ],
)
def test_compiled_training_is_recommended_where_a_gpu_gains_by_it(
    tmp_path: Path, gpus: list[str], setting: str, expected: list[str]
) -> None:
    config = small_config(tmp_path, None, "generator.count=1", setting)
    assert [found.what for found in resources.fleet(config, gpus)] == expected


def test_a_trainer_that_shares_a_gpu_needs_room_beside_its_generators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "gpu_bytes", lambda: 80 * 2**30)
    weights = Weights({"all": [3 * 10**9]}, 1)  # training takes 18 bytes per weight: 50 GiB
    monkeypatch.setattr(resources, "folder_of", lambda path: tmp_path)
    monkeypatch.setattr(resources, "weights_of", lambda folder: weights)

    def checked(gpus: str, *given: str) -> tuple[str, str]:
        overrides = ("generator.engine=vllm", "model.dtype=bfloat16", *given)
        found = only(resources.memory(small_config(tmp_path, None, *overrides), list(gpus)), "memory")
        return found.state, found.detail.rpartition("; ")[2]

    assert checked("01") == ("ok", "a GPU has 80.0 GiB")
    assert checked("0") == ("fault", "a GPU, beside its generators, has 44.0 GiB")
    less = "generator.engine_options.gpu_memory_utilization=0.3"
    assert checked("0", less) == ("ok", "a GPU, beside its generators, has 56.0 GiB")
    assert checked("0", "sync.backend=nccl") == ("ok", "a GPU has 80.0 GiB"), "refused for another reason"


def test_an_unhealthy_machine_is_reported(tmp_path: Path, config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "ask_torch", lambda: {"torch": "2", "cuda": "13", "gpus": []})
    assert only(machine.gpus({"CUDA_VISIBLE_DEVICES": "0,1"}), "GPUs").state == "fault"
    monkeypatch.setattr(machine, "ask_torch", lambda: {"error": "no module named torch"})
    assert only(machine.gpus({"CUDA_VISIBLE_DEVICES": ""}), "torch").state == "fault"
    assert only(machine.network(config, {}), "network").state == "ok"
    found = [*machine.network(config, {"NCCL_SOCKET_IFNAME": "nosuch0"})]
    assert (found[0].state, found[0].remedy) == ("fault", "set or unset NCCL_SOCKET_IFNAME")
    away = config.model_copy(update={"sync": config.sync.model_copy(update={"host": "192.0.2.1"})})
    assert only(machine.network(away, {}), "network").state == "fault"
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 2**20})())
    assert only(resources.disk(config), "disk").state == only(machine.shared_memory(config, 0), "shared memory").state == "fault"


@pytest.mark.parametrize("slow", [False, True])
def test_the_faster_attention_for_hopper_is_recommended(slow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "ask_torch", lambda: {"torch": "2", "cuda": "13", "gpus": ["NVIDIA H100"], "slow": slow})
    found = [*machine.gpus({"CUDA_VISIBLE_DEVICES": "0"})]
    assert [(one.what, one.state) for one in found] == [("GPUs", "ok"), ("attention", "note")][: 1 + slow]
    assert not slow or "pip install 'flash-attn-4" in found[1].remedy


def test_infiniband_needs_locked_memory(tmp_path: Path, config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def remedies(limit: int) -> list[str]:
        monkeypatch.setattr("resource.getrlimit", lambda which: (limit, limit))
        return [one.remedy for one in machine.network(config, {}) if one.state == "fault"]

    monkeypatch.setattr(machine, "INFINIBAND", tmp_path)
    assert [remedy.partition(" or")[0] for remedy in remedies(8 << 20)] == ["raise ulimit -l"]
    assert remedies(RLIM_INFINITY) == remedies(2 << 30) == []
    monkeypatch.setattr(machine, "INFINIBAND", tmp_path / "none")
    assert remedies(8 << 20) == []


def test_a_check_that_crashes_does_not_stop_the_others() -> None:
    def broken() -> list[Finding]:
        raise RuntimeError("the driver crashed")

    found = gathered([("GPUs", broken), ("disk", lambda: [Finding("disk", "ok", "fine")])])
    assert [(one.what, one.state) for one in found] == [("GPUs", "fault"), ("disk", "ok")]
    assert "the driver crashed" in found[0].detail


async def test_a_release_is_checked_from_one_of_its_pods(
    tmp_path: Path, config: RunConfig, server: RedisServer, store: Store, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """It checks what all pods share, not the pod itself. A service that is unreachable at its address is a problem."""
    (tmp_path / "run.toml").write_text(to_toml(small_config(tmp_path, server, f"run.name={store.keys.name}")))

    async def look() -> tuple[int, dict[str, dict[str, str]]]:
        code = await asyncio.to_thread(main, ["doctor", "--cluster", "--json"])
        return code, {one["what"]: one for one in json.loads(capsys.readouterr().out)["findings"]}

    monkeypatch.delenv(CONFIG_ENV, raising=False)
    assert await asyncio.to_thread(main, ["doctor", "--cluster"]) == 2
    monkeypatch.setenv(CONFIG_ENV, str(tmp_path / "run.toml"))
    code, found = await look()
    assert (code, found["run"]["state"], found["generator"]["state"]) == (0, "note", "note")
    assert not {"disk", "GPUs", "shared memory"} & found.keys()
    await store.run.create("config", "data", 4, 8)
    away = PodStatus("generator", "generator-0", "b", "here", 1, "http://127.0.0.1:1", "ready", 0, 1, {})
    await store.fleet.beat(away, 10.0)
    code, found = await look()
    assert (code, found["run"]["state"]) == (1, "ok")
    assert found["generator generator-0"]["remedy"].startswith("check the NetworkPolicies")
    assert "generator" not in found


async def test_users_that_can_log_in_are_named(tmp_path: Path, config: RunConfig) -> None:
    guarded = RedisServer(tmp_path / "redis", run="small")
    await asyncio.to_thread(guarded.start)
    try:
        redis_section = config.redis.model_copy(update={"password_file": str(guarded.users)})
        guarded_config = config.model_copy(update={"redis": redis_section})
        found = [one async for one in server.server(guarded_config, guarded.url, guarded.password)]
        assert only(found, "Redis: users").detail == f"can log in: {', '.join(GRANTS)}"
        (guarded.users / "trainer").write_text("wrong")
        (guarded.users / "tracker").unlink()  # as in a pod, which has only its own user's password
        found = [one async for one in server.server(guarded_config, guarded.url, "")]
        assert only(found, "Redis: user trainer").state == "fault"
        assert "tracker" not in only(found, "Redis: users").detail
        for path in guarded.users.iterdir():
            path.unlink()
        found = [one async for one in server.server(guarded_config, guarded.url, guarded.password)]
        assert only(found, "Redis: users").state == "fault"
    finally:
        await asyncio.to_thread(guarded.stop)
