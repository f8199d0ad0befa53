"""A run of which only the folder is left: its page, and the commands that read it."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
import pytest_asyncio

from services.config import RunConfig, load_resolved, to_toml
from services.console.commands.__main__ import main
from services.console.paths import RunPaths
from services.groups.histograms import counted
from services.http.credentials import api_tokens
from services.operations.condition import Condition
from services.operations.cost import FILE, Account, ProcessTime, write_account
from services.operations.inspection.ledger import assess
from services.store import Store
from services.web import files
from services.web.from_folder import GoneStore
from services.web.serving import show
from tests.operations.samples.made import made_row, write_log
from tests.support.harness import save_tokenizer_folder, small_config, wait_until
from tests.web import browser

STEPS = 4
COUNTS = {
    "tickets": 0, "headers": 0, "buffered": 0, "prepared": 0, "requeued": 0, "reissue": 0, "slots_used": 0, "outstanding": 0,
    "unpublished": 0, "refused_submits": 0, "ledger:issued": 32, "ledger:trained": 32,
}  # fmt: skip


DAMAGED = """\
{"epoch": 1}
{"step": null}
{"step": NaN, "time_s": 1}
{"step": "2"}
{"step": 1, "run/incarnation": "first"}
{"step": 1e400}
{"step": 8, "run/incarnation": 0, "time_s": "never", "reward/train/mean": 1%s}
""" % ("0" * 400)
"""Records that another program wrote or that are damaged; the last is of a step that a restore undid."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder of a finished run, as if copied from another machine without its Redis."""
    config = small_config(tmp_path, None, "run.name=left", f"run.steps={STEPS}", "redis.url=redis://127.0.0.1:1/0")
    run = tmp_path / "left"
    run.mkdir()
    save_tokenizer_folder(tmp_path / "model")
    (run / "config.toml").write_text(to_toml(config))
    rewards = counted("reward", "train", [0.0, 0.05, 1.0, 1.0])
    records = [
        {"step": i, "reward/train/mean": 0.1 * i, "time_s": 1e9 + i, "run/incarnation": 1, **rewards} for i in range(STEPS)
    ]
    (run / "metrics.jsonl").write_text(DAMAGED + "".join(json.dumps(record) + "\n" for record in records) + '{"step": 9, "torn')
    (run / "evaluations.jsonl").write_text('{"eval/version": 4, "eval/math/solved": 0.5, "run/incarnation": 1}\n')
    report = assess("left", COUNTS)
    (run / "summary.json").write_text(json.dumps({"status": "finished", "steps": STEPS, "audit": report.as_dict()}))
    RunPaths(run).note(Condition("finished", "trained 4 of 4 steps"))
    write_log(run / "samples", [made_row(i) for i in range(40)])
    return run


def test_commands_read_the_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(folder)]) == 0
    printed = capsys.readouterr()
    assert "127.0.0.1:1" in printed.err, "why its Redis cannot be used"
    text = " ".join(printed.out.split())
    assert "left 4/4 steps finished" in text
    assert "reward 0.300" in text
    assert "without its Redis" in text
    assert main(["status", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["condition"]["word"], found["last_step"]["step"], found["state"]) == ("finished", 3, None)
    for command in (["audit"], ["inspect", "ledger"]):
        assert main([*command, str(folder), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["outcomes"]["trained"] == 32
    shutil.move(folder / "summary.json", folder / "was.json")
    assert main(["audit", str(folder)]) == 3
    assert "127.0.0.1:1" in capsys.readouterr().err


def test_a_run_that_was_never_trained_is_still_an_error(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "metrics.jsonl").unlink()
    assert main(["status", str(folder)]) == 3
    assert "127.0.0.1:1" in capsys.readouterr().err


@pytest_asyncio.fixture
async def served(folder: Path) -> AsyncIterator[str]:
    config: RunConfig = load_resolved(folder / "config.toml")
    lines, until = list[str](), asyncio.Event()
    store = cast("Store", GoneStore())
    task = asyncio.create_task(
        show(config, store, lines.append, until, lambda _: Condition("finished", "trained 4 of 4 steps"), folder=folder)
    )
    await wait_until(lambda: lines or task.done())
    yield lines[0]
    until.set()
    await task


async def test_the_pages_endpoints_read_from_files(served: str, folder: Path) -> None:
    async with httpx.AsyncClient(base_url=f"{served}/v1", timeout=30) as http:

        async def answer(path: str) -> dict[str, object]:
            found = await http.get(path)
            assert found.status_code == 200, found.text
            return found.json()

        charts = await answer("/console/series")
        assert charts["steps"] == [0, 1, 2, 3]
        assert (await answer("/console/steps"))["total"] == STEPS
        assert (await answer("/console/evaluations"))["rounds"][0]["eval/math/solved"] == 0.5  # pyright: ignore
        assert (await answer("/console/samples"))["of"] == 40
        assert (await answer("/audit"))["outcomes"]["trained"] == 32  # pyright: ignore
        assert (await answer("/steps/2"))["record"]["step"] == 2  # pyright: ignore
        assert (await answer("/checkpoints"))["checkpoints"] == []
        gone = await http.get("/buffer")
        assert (gone.status_code, "Redis is gone" in gone.json()["detail"]) == (503, True)
        token = api_tokens(load_resolved(folder / "config.toml")).operate
        stopped = await http.post("/run/stop", headers={"Authorization": f"Bearer {token}"})
        assert (stopped.status_code, "Redis is gone" in stopped.json()["detail"]) == (503, True)
        assert (await http.get("/ledger")).status_code == 503
        for method, path, use in (("GET", "/run/stop", "POST"), ("DELETE", "/state", "GET"), ("PUT", "/console/series", "GET")):
            refused = await http.request(method, path)
            assert (refused.status_code, refused.json()["detail"].rpartition("; ")[2]) == (405, f"use {use}")
        page = await http.get(f"{served}/docs")
        assert (page.status_code, "jsdelivr" in page.text) == (404, False), "a script of another server could read the token"
        for undone_or_torn in (8, 9):
            assert (await http.get(f"/steps/{undone_or_torn}")).status_code == 404


@pytest.mark.slow
@pytest.mark.skipif(bool(browser.why_not()), reason=browser.why_not() or "there is a browser")
async def test_the_page_shows_charts_samples_and_ledger(visit: browser.Visit, served: str) -> None:
    def look(chromium: Any) -> None:
        with browser.opened(chromium, served) as page:
            page.wait_for_selector("text=4 of 4 steps", timeout=browser.LIMIT_MS)
            assert "finished" in page.inner_text("header")
            page.wait_for_selector("figure.chart >> text=Groups without signal", timeout=browser.LIMIT_MS)
            page.goto(f"{served}/#/ledger")
            page.wait_for_selector("text=All 32 tickets are accounted for", timeout=browser.LIMIT_MS)
            page.goto(f"{served}/#/samples")
            page.wait_for_selector("text=0-9, 3", timeout=browser.LIMIT_MS)
            page.goto(f"{served}/#/steps/2")
            page.wait_for_selector("section[aria-label=Rewards] td:has-text('50.0')", timeout=browser.LIMIT_MS)
            bounds = page.eval_on_selector_all(
                "section[aria-label=Rewards] td[data-label='Up to']", "all => all.map(one => one.innerText)"
            )
            assert bounds == ["0", "0.1", "1"]
            assert "histogram" not in page.inner_text("main")
            assert page.complaints == []

    await visit(look)


@pytest.mark.slow
@pytest.mark.skipif(bool(browser.why_not()), reason=browser.why_not() or "there is a browser")
async def test_a_page_recovers_from_an_error_that_passes(visit: browser.Visit, served: str) -> None:
    def look(chromium: Any) -> None:
        back = list[bool]()
        with browser.opened(chromium, served) as page:
            browser.settle(page)
            page.route("**/v1/steps/2*", lambda route: route.continue_() if back else route.abort())
            page.goto(f"{served}/#/steps/2")
            page.wait_for_selector("main >> text=the server does not respond", timeout=browser.LIMIT_MS)
            back.append(True)
            page.wait_for_selector("section[aria-label=Rewards]", timeout=browser.LIMIT_MS)
            assert "does not respond" not in page.inner_text("main")

    await visit(look)


async def test_account_configuration_and_nearby_runs_come_from_files(served: str, folder: Path) -> None:
    beside(folder)
    async with httpx.AsyncClient(base_url=f"{served}/v1/console", timeout=30) as http:
        assert "The tracker writes it" in (await http.get("/account")).json()["missing"]
        add_account(folder)
        found = (await http.get("/account")).json()
        (folder / FILE).unlink()
        assert (await http.get("/account")).json() == found, "it is cached for all pages"
        add_account(folder)
        assert sum(found["spent"].values()) == pytest.approx(1200.0)
        assert found["divided"]
        assert found["trainer"]["training"] == 400.0
        keys = {key["key"]: key for key in (await http.get("/configuration")).json()["keys"]}
        assert keys["run.steps"]["value"] == STEPS
        assert keys["run.steps"]["changed"]
        assert "its own server" in keys["redis.url"]["help"], "the page shows a line break as an escape"
        assert keys["redis.url"]["value"].startswith("redis://127.0.0.1:1")
        assert not keys["optimizer.warmup_steps"]["changed"]
        assert (await http.get("/runs")).json() == {"runs": ["another"]}
        other = (await http.get("/runs/another/series")).json()
        assert other["steps"] == [0, 1, 2, 3, 4, 5]
        assert other["columns"]["reward/train/mean"] == [0.0, 0.1, 0.2, 0.3, 0.4, 0.5]
        for name, status in (("none", 404), (folder.name, 404), (".hidden", 422), ("..%2F..", 404)):
            assert (await http.get(f"/runs/{name}/series")).status_code == status, name


def test_the_configuration_is_shown_without_secrets(tmp_path: Path) -> None:
    own = "{kind='python', function='f.py:f', options={deep=[{api_key='s3cret', n=3}]}}"
    config = small_config(
        tmp_path, None, f"verifiers=[{own}]", "redis.url=redis://user:s3cret@here:6379/0?password=s3cret",
        "generator.engine_options={hf_token='s3cret'}",
        "tracing.endpoint=http://u:s3cret@traces:4318/v1?api_key=s3cret&region=west",
    )  # fmt: skip
    keys = {key.key: key.value for key in files.configuration_keys(config)}
    assert keys["redis.url"] == "redis://(hidden)@here:6379/0?password=(hidden)"
    assert keys["tracing.endpoint"] == "http://(hidden)@traces:4318/v1?api_key=(hidden)&region=west"
    assert keys["verifiers"][0]["options"] == {"deep": [{"api_key": "(hidden)", "n": 3}]}
    assert "s3cret" not in repr(keys)


@pytest.mark.slow
@pytest.mark.skipif(bool(browser.why_not()), reason=browser.why_not() or "there is a browser")
async def test_charts_can_be_enlarged_smoothed_and_overlaid(visit: browser.Visit, served: str, folder: Path) -> None:
    beside(folder)

    def look(chromium: Any) -> None:
        with browser.opened(chromium, served) as page:
            browser.settle(page)
            legend = "figure.chart:has-text('Reward') .legend"
            exact = page.inner_text(legend)
            page.locator("#smoothing").fill("0.9")
            page.wait_for_function("before => document.querySelector('figure.chart .legend').innerText !== before", arg=exact)
            assert "smoothed" in page.inner_text("figure.chart .chart-title")
            page.locator("#smoothing").fill("0")
            page.select_option("#against", "another")
            page.wait_for_selector(f"{legend} >> text=another: trained")
            assert "against=another" in page.url
            page.click("button[aria-label='Enlarge Reward']")
            page.wait_for_selector("dialog.enlarged[open] .plot canvas")
            assert page.locator("dialog.enlarged .plot").bounding_box()["height"] > 300
            assert page.evaluate("() => document.activeElement.closest('dialog') !== null")
            page.keyboard.press("Escape")
            page.wait_for_selector("dialog.enlarged", state="detached")
            assert page.complaints == []

    await visit(look)


@pytest.mark.slow
@pytest.mark.skipif(bool(browser.why_not()), reason=browser.why_not() or "there is a browser")
async def test_account_configuration_and_comparison_are_pages(visit: browser.Visit, served: str, folder: Path) -> None:
    add_account(folder)

    def look(chromium: Any) -> None:
        with browser.opened(chromium, f"{served}/#/account") as page:
            browser.settle(page)
            page.wait_for_selector("main td:has-text('trained')")
            page.fill("#price", "3")
            page.evaluate("location.hash = '#/account?unrelated=1'")
            browser.settle(page)
            assert page.input_value("#price") == "3", "what is being typed survives an update of the page"
            page.press("#price", "Enter")
            page.wait_for_selector("main th:has-text('Cost')")
            browser.go(page, "configuration")
            page.wait_for_selector("main td:has-text('run.steps')")
            few = page.locator("main tbody tr").count()
            assert page.locator("main td .name", has_text="run.steps").bounding_box()["height"] < 24, "a key is on one line"
            page.select_option("#every", "yes")
            page.wait_for_function("few => document.querySelectorAll('main tbody tr').length > few", arg=few)
            browser.go(page, "samples")
            page.click("main td a[href^='#/samples/'] >> nth=0")
            page.click("main button:has-text('Compare') >> nth=0")
            page.wait_for_selector("pre[aria-label='Differences between the two completions']")
            page.click("main button:has-text('Close')")
            page.wait_for_selector("pre[aria-label='Differences between the two completions']", state="detached")
            assert page.complaints == []

    await visit(look)


def beside(folder: Path) -> None:
    """Write another run's metrics into a folder next to this one."""
    other = folder.parent / "another"
    other.mkdir()
    lines = [json.dumps({"step": step, "reward/train/mean": step / 10}) for step in range(6)]
    (other / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def add_account(folder: Path) -> None:
    """Write an account of a trainer with four devices that lived for 300 s."""
    spent = {"training": 100.0, "loading": 50.0, "waiting": 150.0}
    write_account(folder, Account({"trainer-0:a": ProcessTime("trainer-0", "trainer", 4, 300.0, spent)}))
