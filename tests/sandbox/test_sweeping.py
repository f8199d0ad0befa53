"""Warm pods are kept ready, handed out once and swept; nothing is left over, despite kills and late requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

pytest.importorskip("kubernetes", reason="pip install 'grpo[cluster]'")

from services.config import ConfigError
from services.protocol.sandboxes import SandboxName
from services.sandbox.pods import HELD, ROLLOUT, STATE, TEMPLATE, WARM, SandboxPod
from services.sandbox.settings import SandboxSettings
from services.sandbox.sweeping import decide
from tests.kubernetes.support.pod_cluster import Pod
from tests.sandbox.worlds import SandboxWorld, kept, sandboxes, swept, warmed


@pytest_asyncio.fixture
async def place(tmp_path: Path) -> AsyncIterator[SandboxWorld]:
    async with sandboxes(tmp_path, warm=2) as found:
        yield found


def pod(name: str, state: str, fence: int = 0, template: str = "t", created: float = 100.0, **given: object) -> SandboxPod:
    labels = {STATE: state, TEMPLATE: template, ROLLOUT: f"{fence}.0"}
    known = {"phase": "Running", "ready": True, "deleting": False, **given}
    return SandboxPod(name, f"uid-{name}", "1", labels, "", created=created, **known)  # pyright: ignore[reportArgumentType]


def test_pods_without_holders_are_swept_and_warm_ones_valid() -> None:
    pods = [
        pod("mine", HELD, 7), pod("orphan", HELD, 8), pod("ended", HELD, 7, phase="Failed"), pod("going", HELD, 9, deleting=True),
        pod("old", WARM, created=10.0), pod("other", WARM, template="s"), pod("failed", WARM, phase="Failed", ready=False),
        pod("starting", WARM, phase="Pending", ready=False), pod("second", WARM, created=102.0),
        pod("first", WARM, created=101.0), pod("stranger", "?"),
    ]  # fmt: skip
    plan = decide(pods, {"7"}, "t", 3, 50.0)
    assert [each.name for each in plan.orphaned] == ["orphan"]
    assert {each.name for each in plan.spare} == {"old", "other", "failed", "stranger"}
    assert ([each.name for each in plan.ready], plan.create) == (["first", "second"], 0)
    fewer = decide(pods, {"7"}, "t", 1, 50.0)
    assert {each.name for each in fewer.spare} >= {"second", "starting"}
    assert [each.name for each in fewer.ready] == ["first"]
    assert decide([], set(), "t", 2, 50.0).create == 2


async def test_a_warm_pod_is_given_out_once_and_replaced(place: SandboxWorld) -> None:
    await warmed(place, 2)
    first = set(place.cluster.of_state("warm"))
    tools = [place.tool(f"0-0.7.{sample}.0") for sample in range(3)]
    assert await asyncio.gather(*(tool.call({"code": "1 + 1"}) for tool in tools)) == ["2"] * 3
    pods = {tool._pod for tool in tools}
    assert len(pods) == 3
    assert first < pods, "and a new one"
    assert place.kept.taken.is_set()
    await warmed(place, 2)
    await asyncio.gather(*(tool.close() for tool in tools))
    await swept(place)
    assert len(place.cluster.of_state("warm")) == 2
    assert not pods & set(place.cluster.of_state("warm")), "a used pod is never given to another rollout"


async def test_a_claimed_or_missing_pod_is_not_given_out(place: SandboxWorld) -> None:
    await warmed(place, 2)
    one, other = [each.name for each in place.kept._ready]

    def meanwhile(verb: str, pod: Pod) -> None:
        if pod["metadata"]["name"] == one:
            place.cluster._touched(pod)

    place.cluster.before = meanwhile
    await asyncio.to_thread(place.cluster.lose, other)
    tool = place.tool()
    assert await tool.call({"code": "1"}) == "1"
    assert tool._pod not in (one, other)


async def test_a_service_killed_during_a_claim_leaves_nothing(place: SandboxWorld) -> None:
    """Its request arrives late, when the next service has already given the rollout another pod."""
    await warmed(place, 2)
    late = place.kept._ready[0]
    name = SandboxName("0-0.7.0.0", "aa")
    async with kept(place, warm=2) as fresh:
        opened = await fresh.open(name, 60.0)
        assert opened.pod
        assert opened.pod != late.name
        again = await place.keeper._claimed(name, "7.0") if place.keeper else None  # with its outdated state
        await fresh.close(name)
        await swept(place)
    assert place.cluster.held() == [], again


async def test_sandboxes_end_with_their_claims(place: SandboxWorld) -> None:
    tools = [place.tool(f"0-0.{fence}.0.0") for fence in (7, 8)]
    place.fences |= {"8"}
    await asyncio.gather(*(tool.call({"code": "1"}) for tool in tools))
    await swept(place)
    assert len(place.cluster.held()) == 2
    place.fences -= {"7"}
    await swept(place)
    assert place.cluster.held() == [tools[1]._pod]
    assert await tools[1].call({"code": "2"}) == "2"


async def test_a_new_template_replaces_warm_pods(place: SandboxWorld) -> None:
    await warmed(place, 2)
    before = set(place.cluster.of_state("warm"))
    place.cluster.template["template"]["spec"]["runtimeClassName"] = "other"
    await swept(place)
    await warmed(place, 2)
    after = set(place.cluster.of_state("warm"))
    assert len(after) == 2
    assert not before & after
    assert await place.tool().call({"code": "1"}) == "1"
    await asyncio.to_thread(place.cluster.uninstall)
    assert place.cluster.pods == {}


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({}, "GRPO_SANDBOX_TEMPLATE"),
        ({"GRPO_SANDBOX_TEMPLATE": "a"}, "GRPO_RELEASE"),
        ({"GRPO_SANDBOX_TEMPLATE": "a", "GRPO_RELEASE": "b", "GRPO_SANDBOX_WARM": "two"}, "must be a number of pods"),
    ],
)
def test_invalid_environment_variables_are_rejected(environ: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        SandboxSettings.from_environment(environ)
