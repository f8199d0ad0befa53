"""Debian's headless Chromium, driven by playwright. Without either of them, tests of the page are skipped with the reason."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from pathlib import Path
from typing import Any

WIDE, NARROW = {"width": 1280, "height": 800}, {"width": 360, "height": 740}
PAGES = {
    "overview": "", "fleet": "fleet", "steps": "steps", "step": "steps/{step}", "buffer": "buffer", "group": "groups/{group}",
    "sync": "sync", "ledger": "ledger", "deadletters": "deadletters", "deadletter": "deadletters/{letter}",
    "checkpoints": "checkpoints", "evaluation": "evaluation", "samples": "samples", "sample": "samples/{sample}",
    "account": "account", "configuration": "configuration",
}  # fmt: skip
"""Path of every page by name, with placeholders for a step, a group, a dead letter and a completion."""
KEPT = "grpo-token"  # where the page keeps the token (static/api.js)
Visit = Callable[[Callable[[Any], Any]], asyncio.Future[Any]]
"""Calls a function with the browser as its argument, on the browser's thread; the future has the result."""
PROGRAMS = ("chromium-headless-shell", "chromium", "chromium-browser")
LIMIT_MS = 60_000  # for each wait for the page, on a busy machine
# Every page must satisfy these rules of axe-core: WCAG 2.2 A and AA, and best practices.
AXE = """async () => {
    const found = await axe.run(document, { resultTypes: ['violations'] });
    return found.violations.map(one => `${one.id}: ${one.help}: ` + one.nodes.slice(0, 3).map(node => node.html).join(' | '));
}"""


def why_not() -> str:
    """Return why no browser is available, or an empty string."""
    try:
        import playwright.sync_api  # noqa: F401
    except ImportError:
        return "playwright is not installed: pip install -e '.[dev]'"
    if _program() is None and not _own():
        return "no chromium here: apt-get install chromium-headless-shell (make debian), or playwright install chromium"
    return ""


def _program() -> str | None:
    """Return Debian's Chromium, preferably the headless shell: windows take half of the CPU time and 1 s for each tab."""
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


def _own() -> bool:
    return any(Path.home().joinpath(".cache/ms-playwright").glob("chromium*"))


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """Open a browser."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=_program(), args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


@contextlib.contextmanager
def on_a_thread() -> Iterator[Visit]:
    """Open a browser for tests that have an event loop, on another thread, because playwright runs its own loop."""
    with ThreadPoolExecutor(1) as thread, contextlib.ExitStack() as stack:
        browser = thread.submit(stack.enter_context, chromium()).result()
        try:
            yield lambda look: asyncio.wrap_future(thread.submit(look, browser))
        finally:
            thread.submit(stack.close).result()


@contextlib.contextmanager
def opened(browser: Any, url: str, theme: str = "light", size: dict[str, int] = WIDE, token: str = "") -> Iterator[Any]:
    """Open a tab at `url`, logged in with `token`. `page.complaints` collects errors and violations of the security policy."""
    context = browser.new_context(viewport=size, color_scheme=theme, reduced_motion="reduce")
    try:
        if token:
            context.add_init_script(f"sessionStorage.getItem('{KEPT}') || sessionStorage.setItem('{KEPT}', {json.dumps(token)})")
        page = context.new_page()
        page.set_default_timeout(LIMIT_MS)
        page.complaints = []
        page.on("pageerror", lambda error: page.complaints.append(str(error)))
        page.on("console", lambda message: page.complaints.append(message.text) if message.type == "error" else None)
        page.goto(url)
        try:
            yield page
        except Exception as error:  # raised again with the contents of the page
            error.add_note(f"the page complained: {page.complaints}\nit shows: {page.inner_text('body')[:2000]}")
            raise
    finally:
        context.close()


def violations(page: Any) -> list[str]:
    """Return the page's violations of the rules of axe-core."""
    if not page.evaluate("() => 'axe' in window"):
        page.evaluate(resources.files("axe_playwright_python").joinpath("axe.min.js").read_text())
    return page.evaluate(AXE)


GO = """path => new Promise(there => {
    const before = location.hash
    addEventListener('hashchange', there, { once: true })
    location.hash = '/' + path
    if (location.hash === before) there()
})"""
"""Returns once the page's own listener, which came first, has begun to show the path."""


def go(page: Any, path: str) -> None:
    """Go to a page of the console and wait until it has loaded its data."""
    page.evaluate(GO, path)
    settle(page)


def settle(page: Any) -> None:
    """Wait until the page has no pending requests."""
    page.wait_for_selector("main h1")
    page.wait_for_function("() => !document.querySelector('[aria-busy=true]')")


def a_sample(http: Any) -> str:
    """Return the name of a trained completion in the sample log, as used in the page's address."""
    rows = http.get("/v1/console/samples", params={"where": "outcome == 'trained'"}).json()["rows"]
    return "~".join(str(rows[0][name]) for name in ("payload", "step", "outcome", "sample", "incarnation")) if rows else ""
