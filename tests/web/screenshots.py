"""Take screenshots of every page in both themes: `python -m tests.web.screenshots`, about five minutes on two idle cores.

Without --url it runs the example of `make demo`, with an evaluation, and fails two of its tickets.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from PIL import Image

from services.config import load, to_toml
from services.runtime.process_tools import free_port
from tests.web.browser import NARROW, PAGES, WIDE, a_sample, chromium, go, opened, settle
from tests.web.world import Shown, started

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "docs" / "screenshots"
EXAMPLE, MODEL = ROOT / "examples" / "arithmetic" / "config.toml", ROOT / "build" / "arithmetic"
COLOURS = 256  # size of the palette: pages use few colours, and this halves the size of the files
TALLEST = 1500  # pixels
TRAINED = 60  # of the 100 steps of the example
NARROW_PAGES = ["overview", "fleet", "group", "ledger"]  # also shown at 360 pixels


def places(url: str, token: str) -> dict[str, str]:
    """Return the path of every page: of the last trained step, one of its groups, the last dead letter and a sample."""
    with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {token}"}) as http:
        state = http.get("/v1/state").json()["state"]
        plan = http.get(f"/v1/steps/{state['committed_step']}").json()["plan"]
        letters = http.get("/v1/deadletters").json()["letters"]
        sample = a_sample(http)
    group = max(plan["groups"], key=_worth_a_look)["group"] if plan else "0-0"
    letter = letters[0]["id"] if letters else "0-0"
    found = {"step": state["committed_step"], "group": group, "letter": letter, "sample": sample}
    return {name: path.format(**found) for name, path in PAGES.items()}


def _worth_a_look(group: dict[str, Any]) -> tuple[float, int]:
    """Return a sort key that prefers groups with different rewards, then those with tokens of several versions."""
    return group["advantage"]["max"] > group["advantage"]["min"], group["newest"] - group["oldest"]


def save(page: Any, path: Path) -> None:
    """Save a screenshot of the page with a small palette."""
    height = min(TALLEST, page.evaluate("() => document.documentElement.scrollHeight"))
    size = page.viewport_size
    page.set_viewport_size({"width": size["width"], "height": max(height, 400)})
    page.wait_for_timeout(300)  # charts adapt to the new width
    picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    page.set_viewport_size(size)
    picture.quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path.name}: {path.stat().st_size / 1024:.0f} KiB", flush=True)


def shoot(url: str, folder: Path, token: str) -> None:
    """Save screenshots of every page of the console at `url`, as an operator sees them."""
    folder.mkdir(parents=True, exist_ok=True)
    sessions = [
        (theme, *shape) for theme in ("light", "dark") for shape in ((WIDE, "", [*PAGES]), (NARROW, "-narrow", NARROW_PAGES))
    ]
    for theme, size, end, names in sessions:
        with chromium() as browser, opened(browser, url, theme, size, token) as page:
            settle(page)
            page.wait_for_selector("header .buttons")
            there = places(url, token)
            for name in names:
                go(page, there[name])
                save(page, folder / f"{name}{end}-{theme}.png")


@contextlib.contextmanager
def example(folder: Path) -> Iterator[Shown]:
    """Start a run of the example, with evaluation on other prompts of the same kind; yield it once it has trained some steps."""
    if not MODEL.exists():
        subprocess.run([sys.executable, "-m", "examples.arithmetic.warmstart", "--out", str(MODEL)], check=True, cwd=ROOT)
    port = free_port()
    overrides = [
        f"model.path={MODEL}", f"run.dir={folder / 'runs'}", f"web.port={port}", "checkpoint.every_steps=100000",
        "evaluation.every_steps=10", "evaluation.samples=4",
    ]  # fmt: skip
    plain = load(EXAMPLE, environ={})
    held_out = plain.data.sources[0].model_copy(update={"name": "held_out", "size": 64, "seed": 1})
    evaluation = plain.evaluation.model_copy(update={"sources": [held_out]})
    path = folder / "example.toml"
    path.write_text(to_toml(plain.model_copy(update={"evaluation": evaluation})))
    path.write_text(to_toml(load(path, overrides, environ={})))
    with started(path, folder, plain.run.name, port, TRAINED) as run:
        yield run


def main() -> None:
    """Parse the arguments and take the screenshots."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="", help="address of a console; default: of a run made for it")
    parser.add_argument("--token", default="", help="token that may operate, with --url")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the pictures")
    given = parser.parse_args()
    if given.url:
        shoot(given.url, given.out, given.token)
        return
    with tempfile.TemporaryDirectory() as folder, example(Path(folder)) as run:
        shoot(run.url, given.out, run.token)


if __name__ == "__main__":
    main()
