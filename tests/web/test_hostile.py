"""The page shows text from models, data sets and pods as text, whatever it contains and however long it is."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import numpy as np
import pytest
from tokenizers import Tokenizer

from services.console.run.redis_server import RedisServer
from services.protocol import codec
from services.protocol.messages import PodStatus
from services.protocol.payloads import Payload
from services.store import Store
from tests.operations.samples.made import made_row, write_log
from tests.support.flow import claim, header, issue, settle, start
from tests.support.harness import save_tokenizer_folder, small_config
from tests.web import browser as browsers
from tests.web.browser import PAGES, chromium, go, opened
from tests.web.served import served

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(browsers.why_not()), reason=browsers.why_not() or "-")]
MARKUP = '<img src=x onerror="window.hit=1"><script>window.hit=1</script></pre><h1>mine</h1>&lt;b&gt; javascript:alert(1)'
CONTROLS = "\x1b[2J\x00\x07 \u202eright to left\u202c \u200bhidden\ufeff \u2028 end"
HUGE = "<b>long</b> " * 20_000
PLAIN = "42"


async def bring_in(store: Store, folder: Path) -> str:
    """Create a group with hostile completions, in a run with hostile names and reasons; return its ticket's id."""
    save_tokenizer_folder(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    team = await start(store)
    await issue(store, team, 2)
    good, failing = await claim(store, "g", 2)
    texts = [np.array(tokenizer.encode(text).ids, np.int32) for text in (MARKUP, CONTROLS, HUGE, PLAIN)]
    lengths = [len(tokens) for tokens in texts]
    spans = np.array([[i, 0, 0, length] for i, length in enumerate(lengths)], np.int32)
    tokens = np.concatenate(texts)
    prompt = np.array(tokenizer.encode(MARKUP).ids, np.int32)
    payload = Payload(prompt, np.array(lengths, np.int32), tokens, -np.ones(len(tokens), np.float32), spans)
    submitted = header(
        good, lengths=lengths, prompt_tokens=len(prompt), source=MARKUP, generator=CONTROLS, scores={MARKUP: [0.0, 1.0, 0.0, 1.0]}
    )
    assert await store.tickets.submit("g", good, submitted, codec.encode(payload), 60)
    await settle(store, team)
    await store.tickets.fail("g", failing, MARKUP + CONTROLS, 1)
    await store.run.pause("trainer", MARKUP + CONTROLS)
    pod = PodStatus("generator", MARKUP, "b00t", MARKUP, 1, "javascript:window.hit=1", MARKUP, 0, 1, {"running": 1e12})
    pod = msgspec.structs.replace(pod, waiting="waiting for verifier 'judge' at " + MARKUP + CONTROLS)
    await store.fleet.beat(pod, 60.0)
    await store.monitor.record({"step": 0.0, "time_s": 1.0, f"reward/{MARKUP}": 0.5})
    return good.ticket_id


def log_samples(folder: Path, model: Path) -> str:
    """Write a sample log with hostile texts; return the name of one of its completions on the page."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    rows = [
        made_row(
            i, prompt=MARKUP, completion=text, source=MARKUP, generator=CONTROLS, scores=[(MARKUP, 1.0)], notes=CONTROLS,
            tokens=(tokens := tokenizer.encode(text).ids), logprobs=[-0.1 * (k % 50) for k in range(len(tokens))],
        )
        for i, text in enumerate((MARKUP, CONTROLS, HUGE, PLAIN))
    ]  # fmt: skip
    write_log(folder, [*rows, made_row(4, sample=None, outcome="failed", reason=MARKUP + CONTROLS, completion=None, reward=None)])
    return "0-0.7~0~trained~0~1"


def visit(url: str, group: str, letter: str, sample: str) -> None:
    """Check that every page shows the text and that none executes it."""
    with chromium() as browser, opened(browser, url) as page:
        dialogs: list[Any] = []
        page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
        for name, path in PAGES.items():
            if name == "step":
                continue  # no step was planned
            go(page, path.format(group=group, letter=letter, step=0, sample=sample))
            assert page.evaluate("() => window.hit") is None, name
            assert page.eval_on_selector_all("main img, main script, main b:not(.key b)", "all => all.length") == 0, name
            assert page.eval_on_selector_all("main h1", "all => all.length") == 1, name
            assert page.eval_on_selector_all("a[href^='javascript']", "all => all.length") == 0, name
            words = page.inner_text("body")
            assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\ufeff]", words), name
            assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth"), name
            assert ("waiting for verifier 'judge' at <img" in words) == (name == "fleet"), name
        go(page, f"samples/{sample}")
        assert page.inner_text("pre[aria-label='Tokens of the completion']") == MARKUP
        go(page, "samples?text=" + quote("'); window.hit=1; ('"))
        page.wait_for_selector("main :text('No completion matches.')")
        go(page, f"groups/{group}")
        texts = page.eval_on_selector_all(".completion pre", "all => all.map(one => one.textContent)")
        assert texts[0] == MARKUP
        assert texts[1] == r"\e[2J\x00\x07 \u{202e}right to left\u{202c} \u{200b}hidden\u{feff} \u{2028} end"
        assert texts[2] == HUGE[:4000]
        page.click("text=Show 20,000 more")
        assert page.eval_on_selector_all(".completion pre", "all => all[2].textContent") == HUGE[:24_000]
        assert page.evaluate("async () => (await fetch('/')).headers.get('content-security-policy')").startswith(
            "default-src 'none'"
        )
        assert (page.complaints, dialogs) == ([], [])


async def test_hostile_text_is_shown_as_text(store: Store, server: RedisServer, tmp_path: Path) -> None:
    config = small_config(tmp_path, server, f"run.name={store.keys.name}", "fleet.ttl_s=120")
    group = await bring_in(store, tmp_path / "model")
    letter = (await store.dead_letters.page())[0].id
    sample = log_samples(tmp_path / store.keys.name / "samples", tmp_path / "model")
    async with served(config, store) as url:
        await asyncio.to_thread(visit, url, group, letter, sample)
