"""Pages of an artificial run, which has what a small real run lacks, such as long completions and members outside a round."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import pytest
import pytest_asyncio

from services.console.run.redis_server import RedisServer
from services.operations.condition import Condition
from services.operations.samples.folder import LogPosition
from services.protocol.messages import PodStatus, Round
from services.store import Store
from tests.operations.samples.made import columns_of, made_row, write_log
from tests.support.flow import start, trainer_fence
from tests.support.harness import save_tokenizer_folder, small_config
from tests.web import browser as browsers
from tests.web.browser import NARROW, WIDE, Visit, opened, settle, violations
from tests.web.served import served

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(browsers.why_not()), reason=browsers.why_not() or "-")]
WORDS = [f"w{i}" for i in range(2_100)]
ASKED = 60  # number of completions of the first prompt
CHOSEN = "() => [...document.querySelectorAll('.token')].findIndex(one => one.ariaCurrent === 'true')"


def sample_of(epoch: int) -> str:
    return f"{epoch}-0.7~{epoch}~trained~0~1"


def logged() -> list[dict[str, Any]]:
    """Return completions of one prompt, one for each epoch; the first two are long and differ in a few words."""
    texts = [" ".join([*WORDS, "one"]), " ".join([*WORDS[:10], "other", *WORDS[10:]])]
    rows = [
        made_row(
            0, group=f"{epoch}-0", step=epoch, payload=f"{epoch}-0.7", completion=texts[epoch] if epoch < 2 else f"in {epoch}",
            tokens=[5, 6, 7, 8, 9], logprobs=[-0.05, -0.25, -3.0, float("nan"), -1.0], gaps=[0.0005, -0.25, 0.5, None, 0.0],
        )
        for epoch in range(ASKED)
    ]  # fmt: skip
    return [*rows, made_row(40, group="0-9", payload="0-9.7", step=1)]


@pytest_asyncio.fixture
async def url(store: Store, server: RedisServer, tmp_path: Path) -> AsyncIterator[str]:
    config = small_config(tmp_path, server, f"run.name={store.keys.name}", "fleet.ttl_s=120")
    save_tokenizer_folder(tmp_path / "model")
    write_log(tmp_path / store.keys.name / "samples", logged())
    await start(store)
    async with served(config, store) as url:
        yield url


def at(url: str, look: Callable[[Any], None], size: dict[str, int] = WIDE) -> Callable[[Any], None]:
    """Open a page in a browser and inspect it; check that it has no errors and is accessible."""

    def opening(browser: Any) -> None:
        with opened(browser, url, size=size) as page:
            settle(page)
            look(page)
            assert violations(page) == []
            assert page.complaints == []

    return opening


def texts(page: Any, selector: str) -> list[str]:
    return [text.strip() for text in page.eval_on_selector_all(selector, "all => all.map(one => one.innerText)")]


async def test_truncation_is_indicated(visit: Visit, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.web.samples.TOKENS", 3)

    def look(page: Any) -> None:
        page.wait_for_selector("main .banner:has-text('Only the first 3 of 5 tokens are shown.')")
        assert len(texts(page, ".token")) == 3
        page.click("main button:has-text('Compare') >> nth=0")
        page.wait_for_selector("main .banner:has-text('Only the first 2,000 words of each completion are compared.')")
        assert texts(page, "main pre ins") == ["other"]
        page.click("main button:has-text('Compare') >> nth=5")
        page.wait_for_selector("main p:has-text('differ in too many words')")

    await visit(at(f"{url}/#/samples/{sample_of(0)}", look))


async def test_every_completion_of_the_prompt_can_be_reached(visit: Visit, url: str) -> None:
    table = "table[aria-label='Completions of the same prompt']"

    def look(page: Any) -> None:
        page.click("main button:has-text('Compare') >> nth=4")
        page.wait_for_selector("pre[aria-label='Differences between the two completions']")
        assert texts(page, "main .banner") == [], "both are compared in full"
        page.wait_for_selector(f"{table} tr.current")
        assert len(texts(page, f"{table} tbody tr")) == 50
        pager = "nav[aria-label='Pages of completions of the same prompt']"
        assert "1 to 50 of 60" in page.inner_text(pager)
        page.click(f"{pager} >> text=Next")
        page.wait_for_selector(f"{table} a[href='#/steps/59']")
        assert "51 to 60 of 60" in page.inner_text(pager)
        page.click("main a:has-text('Open in Samples')")
        page.wait_for_selector("main h1:has-text('Samples')")
        page.wait_for_selector("main :text('60 of 61')")

    await visit(at(f"{url}/#/samples/{sample_of(3)}", look))


async def test_an_undone_completion_is_told_from_the_one_that_replaced_it(
    visit: Visit, url: str, store: Store, tmp_path: Path
) -> None:
    row, restored = made_row(0, group="9-9", payload="9-9.7", step=1, reward=0.125), LogPosition(9, 1, {"1": 0, "9": 1})
    writer = write_log(tmp_path / store.keys.name / "samples", [row])
    writer.write(columns_of([row | {"reward": 0.875, "incarnation": 9}]), restored)

    def look(page: Any) -> None:
        rows = "table[aria-label=Completions] tbody tr"
        page.wait_for_selector(f"{rows} >> nth=1")
        page.click(f"{rows}:has-text('0.125') a[href^='#/samples/']")
        page.wait_for_selector("main dt:has-text('Reward') + dd:text-is('0.125')")
        page.go_back()
        page.click(f"{rows}:has-text('0.875') a[href^='#/samples/']")
        page.wait_for_selector("main dt:has-text('Reward') + dd:text-is('0.875')")

    where = quote("group == '9-9' and (undone or not undone)")
    await visit(at(f"{url}/#/samples?where={where}", look))


@pytest.mark.parametrize("size", [WIDE, NARROW])
async def test_a_token_can_be_chosen_by_pointer_or_keyboard(visit: Visit, url: str, size: dict[str, int]) -> None:
    def look(page: Any) -> None:
        chosen = "main .chosen[aria-live=polite]"
        page.wait_for_selector(f"{chosen}:has-text('arrow keys')")
        assert "-0.1 or more" in page.inner_text("main p:has(.span-key)")
        page.click(".token >> nth=1")
        page.wait_for_selector(f"{chosen}:has-text('Token 1: ')")
        assert "logprob -0.250, gap −0.2500" in page.inner_text(chosen)
        page.focus("pre[aria-label='Tokens of the completion']")
        for key, at in (
            ("ArrowRight", 2),
            ("ArrowRight", 3),
            ("ArrowLeft", 2),
            ("End", 4),
            ("Home", 0),
            ("ArrowDown", 4),
            ("ArrowUp", 0),
        ):
            page.keyboard.press(key)
            page.wait_for_function(f"() => ({CHOSEN})() === {at}")
        page.click(".token >> nth=3")
        page.wait_for_selector(f"{chosen}:has-text('no logprob')")
        page.select_option("#colour-by", "gap")
        page.wait_for_selector("main p:has(.span-key):has-text('up to 0.001')")
        assert page.evaluate(CHOSEN) == 3

    await visit(at(f"{url}/#/samples/{sample_of(2)}", look, size))


def generator(name: str, version: int, weights: dict[str, float]) -> PodStatus:
    return PodStatus("generator", name, "b00t", "here", 1, "", "ready", version, 1, {}, weights=weights)


async def test_weight_sync_shows_what_was_sent_and_every_generator(visit: Visit, store: Store, url: str) -> None:
    trainer = generator("trainer-0", 5, {"bytes": 2.0**20, "share": 0.05, "changed": 0.01, "delta": 1.0})
    await store.fleet.beat(msgspec.structs.replace(trainer, kind="trainer", world=0), 60.0)
    await store.fleet.beat(generator("generator-0", 5, {"bytes": 2048.0, "pause_s": 0.5, "catch_ups": 3.0}), 60.0)
    await store.fleet.beat(generator("generator-1", 4, {"pause_s": 0.25, "catch_ups": 0.0}), 60.0)
    fence = await trainer_fence(store)
    members = {"generator-1:b00t": 1, "generator-2:gone": 2}
    await store.fleet.set_round(fence, Round(1, 5, "join", members, 3, "nccl", "here", 29500, 1, fence))

    def look(page: Any) -> None:
        rows = "table[aria-label=Generators] tbody tr"
        page.wait_for_selector(f"{rows} >> nth=1")
        cells = {row[0]: row[1:] for row in page.eval_on_selector_all(
            rows, "all => all.map(row => [...row.querySelectorAll('td')].map(one => one.innerText.trim()))"
        )}  # fmt: skip
        assert cells["generator-0:b00t"][:6] == ["v5", "–", "not in the round", "2.0 KiB", "0.5 s", "3"]
        assert cells["generator-1:b00t"][:6] == ["v4", "1", "nothing yet", "–", "0.3 s", "0"]
        assert cells["generator-2:gone"][:6] == ["–", "2", "nothing yet", "–", "–", "–"]
        assert len(cells) == 3
        sent = page.inner_text("section[aria-label^=Round] dl div:has(dt:text-is('Sent last')) dd")
        assert " ".join(sent.split()) == "1.0 MiB, 5.00 % of the weights delta"

    await visit(at(f"{url}/#/sync", look))


async def test_a_run_that_ends_cannot_be_scaled(visit: Visit, store: Store, url: str) -> None:
    def disabled(browser: Any) -> list[bool]:
        with opened(browser, f"{url}/#/fleet", token="test-token") as page:
            settle(page)
            page.wait_for_selector("main button:has-text('Scale …')")
            return page.locator("button:has-text('Scale …')").evaluate_all("all => all.map(one => one.disabled)")

    assert await visit(disabled) == [False, False]
    await store.run.stop("ada: enough")
    assert await visit(disabled) == [True, True]


async def test_the_page_of_a_failed_run_says_why_it_failed(
    visit: Visit, store: Store, server: RedisServer, tmp_path: Path
) -> None:
    config = small_config(tmp_path, server, f"run.name={store.keys.name}")
    why = "trainer-0 exited with code 1"

    def unborn(page: Any) -> None:
        page.wait_for_selector(f"main .empty:has-text('Its condition is failed: {why}.')")

    def failed(page: Any) -> None:
        assert texts(page, "main p.banner[role=status]") == [f"failed: {why}"]
        page.wait_for_selector("main :text-is('No step has been trained yet.')")

    async with served(config, store, lambda _: Condition("failed", why)) as url:
        await visit(at(url, unborn))
        await start(store)
        await visit(at(url, failed))


async def test_the_overview_has_pass_at_k_once_rounds_exist(visit: Visit, store: Store, url: str) -> None:
    await store.monitor.record({"step": 0.0, "time_s": 1.0, "run/incarnation": 1.0, "reward/train/mean": 0.5})

    def without(page: Any) -> None:
        page.wait_for_selector("figure.chart >> text=Groups without signal")
        assert page.query_selector("figure.chart >> text=pass@k") is None

    await visit(at(url, without))
    body = {"eval/version": 4, "run/incarnation": 1.0, "eval/math/pass@2": 0.75, "eval/all/pass@2": 0.75}
    await store.client.xadd(store.keys.evaluations, {"m": msgspec.json.encode(body)})

    def look(page: Any) -> None:
        page.wait_for_selector("figure.chart:has-text('pass@k') .legend >> text=math pass@2")
        assert "0.750" in page.inner_text("figure.chart:has-text('pass@k') .legend")

    await visit(at(url, look))


async def test_the_overview_charts_tool_calls_of_runs_with_environments(visit: Visit, store: Store, url: str) -> None:
    record = {"step": 0.0, "time_s": 1.0, "run/incarnation": 1.0, "reward/train/mean": 0.5}
    calls = {"turns/train/mean": 3.25, "tool_calls/train/mean": 2.5, "malformed_calls/train/mean": 0.125}
    await store.monitor.record(record | calls)

    def look(page: Any) -> None:
        page.wait_for_selector("figure.chart:has-text('Environments') .legend >> text=malformed calls")
        shown = page.inner_text("figure.chart:has-text('Environments') .legend")
        assert [value in shown for value in ("3.25", "2.50", "0.13")] == [True] * 3

    await visit(at(url, look))


async def test_a_group_without_tokens_links_to_the_sample_log(visit: Visit, store: Store, url: str) -> None:
    await store.client.setbit(store.keys.trained(0), 9, 1)

    def look(page: Any) -> None:
        page.wait_for_selector("main :text('its plan and tokens were deleted')")
        page.click("main a:has-text('sample log')")
        page.wait_for_selector("main h1:has-text('Samples')")
        settle(page)
        assert page.input_value("#filter-where") == "group == '0-9'"
        assert texts(page, "table[aria-label=Completions] td[data-label=Completion]") == ["0-9, 0"]

    await visit(at(f"{url}/#/groups/0-9", look))
