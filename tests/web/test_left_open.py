"""A page that stays open while its server, the run or the reader's mind changes."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from services.config import RunConfig
from services.console.run.redis_server import RedisServer
from services.runtime.process_tools import free_port
from services.store import Store
from tests.operations.samples.made import made_row, write_log
from tests.support.flow import start
from tests.support.harness import small_config
from tests.web import browser as browsers
from tests.web.browser import Visit, opened
from tests.web.served import served

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(browsers.why_not()), reason=browsers.why_not() or "-")]
HIDE = """hidden => {
    Object.defineProperty(document, 'hidden', { value: hidden, configurable: true });
    document.dispatchEvent(new Event('visibilitychange'));
}"""


@pytest.mark.parametrize("hidden", [False, True])
async def test_the_facts_of_a_run_are_read_again_when_its_server_is_back(
    visit: Visit, store: Store, server: RedisServer, tmp_path: Path, hidden: bool
) -> None:
    await start(store)
    port, stack = free_port(), ExitStack()

    def config(name: str, generators: int) -> RunConfig:
        given = f"run.name={name}", f"web.port={port}", f"generator.count={generators}"
        return small_config(tmp_path, server, *given)

    def open_pages(browser: Any) -> list[Any]:
        pages = [stack.enter_context(opened(browser, f"{url}/#/{path}")) for path in ("", "configuration")]
        pages[0].wait_for_selector("main .tile:has-text('of 1 desired')")
        pages[1].wait_for_selector(f"main td:has-text('{store.keys.name}')")
        for page in pages:
            page.evaluate(HIDE, hidden)
        return pages

    def look(pages: list[Any]) -> None:
        for page in pages:
            page.evaluate(HIDE, False)
            page.wait_for_selector("header .run-name:text-is('renamed')")
        pages[0].wait_for_selector("main .tile:has-text('of 4 desired')")
        pages[1].wait_for_selector("main td:has-text('renamed')")

    try:
        async with served(config(store.keys.name, 1), store) as url:
            pages = await visit(open_pages)
        async with served(config("renamed", 4), store):
            await visit(lambda _: look(pages))
    finally:
        await visit(lambda _: stack.close())


async def test_completions_logged_after_the_last_step_appear(
    visit: Visit, store: Store, server: RedisServer, tmp_path: Path
) -> None:
    await start(store)
    folder = tmp_path / store.keys.name / "samples"
    write_log(folder, [made_row(0)])

    def look(browser: Any) -> None:
        with opened(browser, f"{url}/#/samples") as page:
            page.wait_for_selector("main td:has-text('0-0, 0')")
            write_log(folder, [made_row(1)])
            page.wait_for_selector("main td:has-text('0-0, 1')")

    async with served(small_config(tmp_path, server, f"run.name={store.keys.name}"), store) as url:
        await visit(look)


@pytest.mark.parametrize("refused", [False, True])
async def test_the_result_of_a_cancelled_dialog_leaves_the_next_one_alone(
    visit: Visit, store: Store, server: RedisServer, tmp_path: Path, refused: bool
) -> None:
    await start(store)

    def look(browser: Any) -> None:
        held: list[Any] = []
        with opened(browser, url, token="test-token") as page:
            page.route("**/v1/fleet/generators", lambda route: held.append(route))
            page.click("header >> text=Scale …")
            page.fill("dialog input[name=replicas]", "2")
            page.click("dialog button[type=submit]")
            while not held:
                page.wait_for_timeout(20)
            page.click("dialog button:has-text('Cancel')")
            page.click("header >> text=Pause …")
            if refused:
                held[0].fulfill(status=409, json={"detail": "they do not fit"})
            else:
                held[0].continue_()
            page.wait_for_selector(f".said :text('{'they do not fit' if refused else 'Desired generators set to 2.'}')")
            assert page.inner_text("dialog[open] h2") == "Pause the run"
            assert page.inner_text("dialog .refusal") == ""

    async with served(small_config(tmp_path, server, f"run.name={store.keys.name}"), store) as url:
        await visit(look)


async def test_a_request_that_is_never_answered_is_repeated(
    visit: Visit, store: Store, server: RedisServer, tmp_path: Path
) -> None:
    await start(store)

    def look(browser: Any) -> None:
        asked: list[Any] = []
        with opened(browser, "about:blank") as page:
            page.clock.install()
            page.route("**/v1/console/live", lambda route: route.continue_() if asked else asked.append(route))
            with page.expect_request("**/v1/console/live"):
                page.goto(url)
            page.clock.fast_forward(15_000)
            page.wait_for_selector("header .badge:has-text('running')")

    async with served(small_config(tmp_path, server, f"run.name={store.keys.name}"), store) as url:
        await visit(look)


@pytest.mark.parametrize("scaling", ["request", "cluster"])
async def test_a_desired_number_is_shown_where_requests_are_followed(
    scaling: str, visit: Visit, store: Store, server: RedisServer, tmp_path: Path
) -> None:
    await start(store)
    await store.run.scale_generators(8, "last week")

    def texts(browser: Any, url: str) -> str:
        found = list[str]()
        for path in ("", "fleet"):
            with opened(browser, f"{url}/#/{path}") as page:
                page.wait_for_selector("main .tile:has-text('Generators')")
                page.wait_for_function("document.querySelector('header .run-name')?.textContent")  # the facts have arrived
                found.append(page.inner_text("main"))
        return "\n".join(found)

    config = small_config(tmp_path, server, f"run.name={store.keys.name}", f"web.port={free_port()}", f"fleet.scaling={scaling}")
    async with served(config, store) as url:
        text = await visit(lambda browser: texts(browser, url))
    expected = (2, 2) if scaling == "request" else (0, 0)  # two tiles; a tile's note and the state
    assert (text.count("of 8 desired"), text.count("last week")) == expected, text
