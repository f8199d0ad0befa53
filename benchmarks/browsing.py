"""The page of the sample log in a real browser, with a million completions.

    python -m benchmarks.browsing --json

The log is that of `benchmarks.seeing`. Headless Chromium is driven as a person would use it: through form fields, keyboard and
links. `page_ms` is the median time from a key press or click to the new rows in the document, over filters, sorts and pages;
`page_cpu_ms` is the CPU time of server, browser and driver for it. `first_page_s` is the first page, for which the server reads
the log. `sample_ms` opens a completion with its tokens, `same_prompt_ms` is the time until the completions of the same prompt at
all steps are shown, `compare_ms` compares one of them word by word with the first. `text_page_s` searches all texts for a word.
Then every page is opened, checked for accessibility by axe-core, and saved as a picture in `--screenshots`; `pages` is their
number.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # `python benchmarks/browsing.py` from the repository's root
    sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import psutil

from benchmarks.common import arguments, report, run
from benchmarks.seeing import logged_run
from services.web.serving import show
from tests.web.browser import PAGES, chromium, opened, settle, violations, why_not

FORMS: tuple[dict[str, str], ...] = (
    {"most": "0.2", "from": "40", "sort": "length"},
    {"outcome": "filtered", "sort": ""},
    {"least": "1", "longer": "40", "sort": "reward", "reverse": "true"},
    {"source": "main", "where": "advantage > 0.5", "sort": "advantage", "reverse": "true"},
    {"version": "10"},
    {"where": "not truncated and score.exact < 1", "sort": "step"},
)
"""The forms to submit, one after another."""
CHOSEN = ("outcome", "sort", "reverse")
FIELDS = sorted({name for form in FORMS for name in form})
TABLE = "table[aria-label='Completions']"
OTHERS = "table[aria-label='Completions of the same prompt']"
WORD = "= 7"


def timed(act: Callable[[], object]) -> float:
    """Return the seconds that `act` takes."""
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def cpu_s() -> float:
    """Return the CPU seconds of the server, which is this process, and of the browser."""
    spent = time.process_time()
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            spent += sum(child.cpu_times()[:2])
    return spent


class Reader:
    """A user who reads samples in a tab."""

    def __init__(self, page: Any) -> None:
        self.page, self.seen = page, dict[str, list[float]]()

    def note(self, name: str, value: float) -> None:
        self.seen.setdefault(name, []).append(value)

    def search(self, form: dict[str, str]) -> float:
        """Submit a form; return the seconds from the key press to the rows."""
        for name in FIELDS:
            field = f"#filter-{'order' if name == 'reverse' else name}"
            (self.page.select_option if name in CHOSEN else self.page.fill)(field, form.get(name, ""))
        return self._after(lambda: self.page.press("#filter-where", "Enter"))

    def _after(self, act: Callable[[], object]) -> float:
        """Call `act`; return the seconds until the table shows its new rows, fully drawn."""
        self.page.evaluate(f"() => document.querySelector(\"{TABLE}\")?.setAttribute('data-old', 'yes')")
        before = self.page.evaluate("() => location.hash")

        def until_drawn() -> None:
            act()
            self.page.wait_for_function("was => location.hash !== was", arg=before)
            settle(self.page)
            self.page.wait_for_selector(f"{TABLE} tbody tr")

        before_s = cpu_s()
        took_s = timed(until_drawn)
        self.note("page_cpu_ms", 1e3 * (cpu_s() - before_s))
        return took_s

    def read(self, url: str) -> None:
        """Search, sort, turn pages, open a completion and compare it."""
        for form in FORMS:
            self.note("page_ms", 1e3 * self.search(form))
            for _ in range(2):
                self.note(
                    "page_ms", 1e3 * self._after(lambda: self.page.click("nav[aria-label='Pages of completions'] >> text=Next"))
                )
        self.search({"outcome": "trained"})
        self.page.click(f"{TABLE} td a[href^='#/samples/'] >> nth=0")
        self.note("sample_ms", 1e3 * timed(lambda: self.page.wait_for_selector(".token", state="attached")))
        self.note("same_prompt_ms", 1e3 * timed(lambda: self.page.wait_for_selector(f"{OTHERS} tbody tr")))
        other = self.page.locator(f"{OTHERS} button").last
        self.note(
            "compare_ms", 1e3 * timed(lambda: (other.click(), self.page.wait_for_selector("pre[aria-label^='Differences']")))
        )
        self.page.goto(f"{url}/#/samples")
        settle(self.page)


def look_around(page: Any, url: str, folder: Path | None) -> int:
    """Open every page without parameters, and a completion's. Return their number; exit if one violates a rule of axe-core."""
    page.click(f"{TABLE} td a[href^='#/samples/'] >> nth=0")
    settle(page)
    chosen = page.evaluate("() => location.hash").removeprefix("#/samples/")
    paths = {name: path.replace("{sample}", chosen) for name, path in PAGES.items()}
    shown = {name: path for name, path in paths.items() if "{" not in path}
    for name, path in shown.items():
        page.goto(f"{url}/#/{path}")
        settle(page)
        if broken := violations(page):
            raise SystemExit(f"{name}: {broken}")
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            page.screenshot(path=folder / f"{name}.png", full_page=True)
    return len(shown)


def browse(url: str, token: str, repeats: int, folder: Path | None) -> dict[str, list[float]]:
    """Read samples at `url`; return the measurements."""
    with chromium() as browser, opened(browser, url, token=token) as page:
        settle(page)
        reader = Reader(page)
        began = time.perf_counter()
        page.evaluate("() => { location.hash = '/samples' }")
        page.wait_for_selector(f"{TABLE} tbody tr")
        reader.note("first_page_s", time.perf_counter() - began)
        for _ in range(repeats):
            reader.read(url)
        page.fill("#filter-text", WORD)
        reader.note("text_page_s", timed(lambda: (page.press("#filter-text", "Enter"), settle(page))))
        reader.note("pages", look_around(page, url, folder))
        if page.complaints:
            raise SystemExit(f"the page reported errors: {page.complaints}")
    return reader.seen


async def measure(options: argparse.Namespace, folder: Path) -> object:
    """Write the log, serve it, read it, and report."""
    async with logged_run(folder, options.rows) as (config, store, _):
        urls, stopping = list[str](), asyncio.Event()
        serving = asyncio.create_task(show(config, store, urls.append, stopping))
        while not urls:
            await asyncio.sleep(0.05)
        found = await asyncio.to_thread(browse, urls[0], "benchmark", options.repeats, options.screenshots)
        stopping.set()
        await serving
    return report({"rows": options.rows, "p90_page_ms": float(np.percentile(found["page_ms"], 90))}, found)


def main() -> int:
    """Parse the command line and measure."""
    parser = arguments(__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000, help="completions in the log")
    parser.add_argument("--repeats", type=int, default=3, help="repetitions of everything")
    parser.add_argument("--screenshots", type=Path, help="folder for pictures of the pages; default: none")
    options = parser.parse_args()
    if reason := why_not():
        parser.error(reason)
    return run(measure, options)


if __name__ == "__main__":
    sys.exit(main())
