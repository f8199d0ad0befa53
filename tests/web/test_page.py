"""The page in a real browser, fed by a real run."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.web import browser as browsers
from tests.web.browser import NARROW, PAGES, WIDE, a_sample, chromium, go, opened, settle, violations
from tests.web.world import REASON, Shown, kill, shown

pytestmark = [
    pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.skipif(bool(browsers.why_not()), reason=browsers.why_not() or "-"),
]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shown]:
    with shown(tmp_path_factory.mktemp("web")) as run:
        yield run


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Yield one browser, in which tests open isolated contexts (`opened`) that share neither storage nor page processes."""
    with chromium() as browser:
        yield browser


def places(run: Shown) -> dict[str, str]:
    """Return the path of every page: of a step that has its plan, one of its groups, a dead letter and a sample."""
    with httpx.Client(base_url=run.url, headers=bearer(run.read_token), timeout=60) as http:
        run.wait_for(lambda: run.kept_step is not None, "a step that is kept")
        step = run.kept_step
        group = http.get(f"/v1/steps/{step}").json()["plan"]["groups"][0]["group"]
        letter = http.get("/v1/deadletters").json()["letters"][0]["id"]
        run.wait_for(lambda: a_sample(http), "a logged completion")
        sample = a_sample(http)
    return {name: path.format(step=step, group=group, letter=letter, sample=sample) for name, path in PAGES.items()}


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def badge(page: Any) -> str:
    return page.inner_text("header .state .badge")


def unlock(page: Any, token: str) -> None:
    page.click("text=Operate …")
    page.fill("dialog input[name=token]", token)
    page.click("dialog button[type=submit]")


@pytest.mark.parametrize(("theme", "size"), [("light", WIDE), ("dark", NARROW)])
def test_every_page_loads_is_accessible_and_fits(run: Shown, browser: Any, theme: str, size: dict[str, int]) -> None:
    with opened(browser, run.url, theme, size, run.read_token) as page:
        settle(page)
        for name, path in places(run).items():
            go(page, path)
            assert page.inner_text("main h1"), name
            assert page.query_selector("main .fault") is None, (name, page.inner_text("main"))
            assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth"), name
            assert violations(page) == [], name
        assert page.complaints == []


def test_without_a_valid_token_nothing_can_be_changed(run: Shown, browser: Any) -> None:
    with opened(browser, run.url, token=run.read_token) as page:
        for path in ("", "fleet", "deadletters", "checkpoints"):
            go(page, path)
            buttons = page.eval_on_selector_all("button", "all => all.map(one => one.innerText)")
            assert not re.search(r"Pause|Scale|Stop|Requeue|Restore|Write|Checkpoint", " ".join(buttons)), path
        unlock(page, "wrong")
        page.wait_for_selector("dialog .refusal:has-text('Open a link that grpo web prints')")
        assert page.query_selector("header .buttons") is None
        assert page.evaluate("() => Object.values(sessionStorage)") == [run.read_token]


def test_a_link_logs_in_and_its_token_is_removed_from_the_url(run: Shown, browser: Any) -> None:
    with opened(browser, f"{run.url}/#token={run.token}") as page:
        page.wait_for_selector("header .buttons")
        page.wait_for_selector("main h1:has-text('Overview')")
        assert run.token not in page.url
        page.reload()
        page.wait_for_selector("header .buttons")  # the tab keeps the token
        assert page.complaints == []
    with opened(browser, f"{run.url}/#token=wrong") as page:
        page.wait_for_selector(".said .bad:has-text('This is not a token of this run')")
        page.wait_for_selector(".banner:has-text('grpo web')")


def test_a_link_that_is_opened_in_the_same_tab_logs_in(run: Shown, browser: Any) -> None:
    with opened(browser, run.url, token=run.read_token) as page:
        settle(page)
        assert page.query_selector("header .buttons") is None
        page.evaluate("token => { location.hash = `token=${token}` }", run.token)
        page.wait_for_selector("header .buttons")
        page.wait_for_selector("main h1:has-text('Overview')")
        assert run.token not in page.url
        page.go_back()
        assert run.token not in page.url
        assert page.complaints == []


def test_a_damaged_link_leads_to_a_missing_page(run: Shown, browser: Any) -> None:
    with opened(browser, f"{run.url}/#/steps%", token=run.read_token) as page:
        page.wait_for_selector("main h1:has-text('not found')")
        assert page.complaints == []


SLOW = """seconds => {
    const before = window.fetch;
    window.fetch = async (path, options) => {
        if (String(path).includes('v1/buffer')) await new Promise((done, failed) => {
            setTimeout(done, 1000 * seconds);
            options.signal.addEventListener('abort', () => failed(options.signal.reason));
        });
        return before(path, options);
    };
}"""


def test_a_response_that_takes_longer_than_its_interval_is_shown(run: Shown, browser: Any) -> None:
    with opened(browser, run.url, token=run.read_token) as page:
        settle(page)
        page.evaluate(SLOW, 3.0)  # the page sends a request every two seconds
        page.evaluate("() => { location.hash = '/buffer' }")
        page.wait_for_selector("main .tile:has-text('Sampler')", timeout=20_000)
        assert page.complaints == []


def test_buttons_pause_and_resume_the_run(run: Shown, browser: Any) -> None:
    with opened(browser, run.url, token=run.read_token) as page:
        settle(page)
        unlock(page, run.token)
        page.click("header >> text=Pause …")
        page.fill("dialog input[name=why]", "looking at a <b>spike</b>")
        page.click("dialog button:has-text('Pause')")
        try:
            page.wait_for_selector("header .badge:has-text('paused')")
            everyone = dict.fromkeys(("generator", "dataprep", "trainer"), "web console: looking at a <b>spike</b>")
            run.wait_for(lambda: run.state().paused == everyone, "a pause of all roles")
            page.wait_for_selector("main :text('looking at a <b>spike</b>')")
        finally:
            page.click("header >> text=Resume")
        page.wait_for_selector("header .badge:has-text('running')")
        run.wait_for(lambda: run.state().paused == {}, "all roles resumed")
        page.wait_for_selector("main dt:has-text('Resumed') + dd:has-text('by web console')")
        step = run.state().committed_step
        run.wait_for(lambda: run.state().committed_step > step, "another step after the pause")


def test_buttons_write_a_checkpoint_and_requeue_a_dead_letter(run: Shown, browser: Any) -> None:
    with opened(browser, run.url, token=run.read_token) as page:
        settle(page)
        unlock(page, run.token)
        before = run.state().checkpointed_step
        go(page, "checkpoints")
        page.click("text=Write now")
        page.wait_for_selector(".said :text('heckpoint')")
        run.wait_for(lambda: run.state().checkpointed_step > before, "a checkpoint")
        page.click("main td button:has-text('Restore') >> nth=0")
        page.fill("dialog input[name=why]", "a spike")
        posted: list[str] = []
        page.route("**/v1/restore?step=*", lambda route: (posted.append(route.request.post_data), route.abort()))
        page.click("dialog button:has-text('Restore step')")
        run.wait_for(lambda: posted or page.wait_for_timeout(50), "a request")
        assert json.loads(posted[0]) == {"who": "web console", "why": "a spike"}
        page.click("dialog button:has-text('Cancel')")
        go(page, "deadletters")
        page.wait_for_selector(f"main :text('{REASON}')")
        left = run.ask(lambda store: store.dead_letters.count())
        page.click("main td button >> nth=0")
        page.wait_for_selector(".said :text('1 requeued')")
        assert run.ask(lambda store: store.dead_letters.count()) == left - 1
        page.wait_for_function("left => document.querySelectorAll('main tbody tr').length === left", arg=left - 1)


def test_figures_are_live_and_recover_with_the_server(run: Shown, browser: Any) -> None:
    with opened(browser, run.url, token=run.read_token) as page:
        page.wait_for_selector("header .badge:has-text('running')")
        first = page.inner_text("header .progress")
        page.wait_for_function("first => document.querySelector('header .progress').innerText !== first", arg=first)
        kill(run, "web-0")
        page.wait_for_selector("body:has(header .badge:has-text('disconnected')):has(.banner:has-text('Retrying'))")
        page.wait_for_selector("header .badge:has-text('running')")
        page.wait_for_selector(".banner", state="detached")


def test_everything_has_visible_keyboard_focus(run: Shown, browser: Any) -> None:
    where = """() => {
        const at = document.activeElement, style = getComputedStyle(at);
        return at === document.body ? null : [at.innerText.split('\\n')[0].trim(), style.outlineStyle, style.outlineWidth];
    }"""
    with opened(browser, f"{run.url}/#/fleet", token=run.read_token) as page:
        settle(page)
        seen = []
        page.keyboard.press("Tab")
        while (focus := page.evaluate(where)) is not None:
            assert focus[1:] == ["solid", "2px"], focus
            seen.append(focus[0])
            page.keyboard.press("Tab")
        assert seen[0] == "Skip to content"
        assert {"Operate …", "Dark", "Overview", "Ledger", "Evaluation", "REST"} <= set(seen)
        page.focus("nav a[href='#/ledger']")
        page.keyboard.press("Enter")
        settle(page)
        assert page.evaluate("() => document.activeElement.innerText") == "Ledger"


def test_completions_can_be_filtered_and_coloured_by_token(run: Shown, browser: Any) -> None:
    with httpx.Client(base_url=run.url, headers=bearer(run.read_token), timeout=60) as http:
        run.wait_for(lambda: a_sample(http), "a logged completion")
    with opened(browser, f"{run.url}/#/samples", token=run.read_token) as page:
        settle(page)
        page.fill("#filter-least", "1")
        page.select_option("#filter-outcome", "trained")
        page.fill("#filter-where", "length > 3")
        page.wait_for_function("was => document.querySelector('header').innerText !== was", arg=page.inner_text("header"))
        page.press("#filter-where", "Enter")
        page.wait_for_function("() => location.hash.includes('least=1')")
        rewards = "[...document.querySelectorAll('main td[data-label=Reward]')].map(one => one.innerText.trim())"
        page.wait_for_function(f"() => String([...new Set({rewards})]) === '1'")
        page.fill("#filter-where", "lenght > 3")
        page.press("#filter-where", "Enter")
        page.wait_for_selector("main .fault:has-text(\"no column 'lenght'\")")
        page.fill("#filter-where", "")
        page.press("#filter-where", "Enter")
        page.wait_for_selector("main td a[href^='#/samples/']")
        page.click("main td a[href^='#/samples/'] >> nth=0")
        page.wait_for_selector("pre[aria-label='Tokens of the completion'] .token")
        text = page.text_content("pre[aria-label='Tokens of the completion']")
        assert "=" in text
        assert "token 0, logprob" in page.get_attribute(".token >> nth=0", "title")
        page.select_option("#colour-by", "gap")
        page.wait_for_selector(".token[class*=heat][title*=', gap ']")
        page.select_option("#colour-by", "advantage")
        page.wait_for_selector(".token.gain, .token.loss, .token:not([class*=heat])")
        shown = "table[aria-label='Completions of the same prompt'] tr.current"
        page.wait_for_selector(shown)
        assert page.eval_on_selector_all(shown, "all => all.length") == 1


def test_the_chosen_theme_persists(run: Shown, browser: Any) -> None:
    with opened(browser, run.url, "light", token=run.read_token) as page:
        settle(page)
        page.click("header >> text=Dark")
        page.reload()
        settle(page)
        assert page.evaluate("() => getComputedStyle(document.documentElement).colorScheme") == "dark"


def test_grpo_web_runs_beside_the_runs_own_page(run: Shown) -> None:
    command = [sys.executable, "-m", "services.console.commands", "web", str(run.folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "run shown: running\n"
        link = re.search(r"(http://127\.0\.0\.1:\d+)/#token=(\S+)", process.stdout.readline())
        assert link
        assert link[2] == run.token
        with httpx.Client(base_url=link[1], headers=bearer(run.read_token), timeout=60) as http:
            assert http.get("/v1/console/about").json()["run"] == "shown"
            checkpoints = http.get("/v1/checkpoints").json()
            assert checkpoints["folder"] == str(run.folder / "checkpoints")
            assert http.post("/v1/pause").status_code == 403
            assert http.get("/v1/state", headers={"Authorization": ""}).status_code == 401
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    pods = run.ask(lambda store: store.fleet.members(60.0))
    assert [pod.name for pod in pods if pod.kind == "web"] == ["web-0"], "grpo web is not a pod of the run"
