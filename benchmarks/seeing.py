"""The cost of keeping every completion, and how fast they are found again.

    python -m benchmarks.seeing --json

A log of `--rows` completions is written as the tracker does, with texts of random words at Zipf's frequencies. `us_a_completion`
is the CPU time that the tracker spends on a completion: rows, texts, file, merges; `bytes_a_completion` is its size on disk.
`search_ms` is the median of numeric filters, sorted and not, through the endpoint of the page over a real socket; `search_cpu_ms`
is the CPU time of server and client for one. `first_search_s` is the first one, which reads the log. `text_search_s` searches all
texts for a word. `sample_log_share` is the CPU time that the log adds to the tracker, over the wall time of `STEPS` steps of
examples/arithmetic with 256 completions each: `tracker_share` with the log, minus that of a run without it, in which the tracker
only writes TensorBoard's files. No step waits for either. `us_a_logged_completion` is the same per completion, including reads
from Redis and on busy cores. The median of three pairs of runs counts.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

if __name__ == "__main__":  # `python benchmarks/seeing.py` from the repository's root
    sys.path.insert(0, str(Path(__file__).parent.parent))

import httpx
import numpy as np
from tokenizers import Tokenizer

from benchmarks.common import arguments, bare_run, report, run
from examples.arithmetic.tokenizer import save_tokenizer, train_tokenizer
from services.config import RunConfig, digest
from services.console.run.redis_server import RedisServer
from services.operations.inspection.text import TextReader
from services.operations.samples.folder import SAMPLES, LogPosition
from services.operations.samples.search import Search
from services.protocol.logprob_gaps import STEP
from services.protocol.messages import Header
from services.protocol.payloads import Payload
from services.store import Store
from services.tracker.rows import EndedGroup, LoggedRows
from services.tracker.sample_log import LONGEST_S
from services.tracker.writer import PartWriter
from services.web.serving import show

ROOT = Path(__file__).parent.parent
GROUP, GROUPS_A_STEP, TOKENS = 8, 32, 48  # completions per group, groups per step, tokens per completion
GROUPS_A_FILE = int(GROUPS_A_STEP * LONGEST_S)  # at one step per second
FIRST, STEPS = 5, 60  # startup is over by the first
PAIRS = 3
PATTERN = 4000  # completions that are generated; a larger log repeats them under other steps
FILTERS = (
    {"where": "reward < 0.2 and step > 40", "sort": "length"},
    {"where": "outcome == 'filtered'"},
    {"where": "solved and length > 40", "sort": "reward", "reverse": "true"},
    {"where": "source == 'main' and advantage > 1", "offset": "5000"},
    {"where": "not truncated", "sort": "step"},
)
"""The queries of the page."""


def groups(rng: np.random.Generator, count: int, vocabulary: int) -> Iterator[tuple[EndedGroup, Payload]]:
    """Make groups with random completions."""
    for i in range(count):
        lengths = rng.integers(TOKENS // 2, TOKENS * 3 // 2, GROUP).astype(np.int32)
        tokens = (rng.zipf(1.3, int(lengths.sum())) % vocabulary).astype(np.int32)
        rewards = rng.integers(0, 2, GROUP).astype(float).tolist()
        step, name = i // GROUPS_A_STEP, f"0-{i}"
        header = Header(
            name, i, 0, i, f"{name}.{i}", 100, 16, lengths.tolist(), rewards, {"exact": rewards}, [False] * GROUP, [step] * GROUP,
            [step] * GROUP, f"generator-{i % 4}", 1.0, 0.1, "main", [0] * GROUP, solved=[reward == 1.0 for reward in rewards],
        )  # fmt: skip
        spans = np.array([[k, step, 0, length] for k, length in enumerate(lengths)], np.int32)
        prompt = (rng.zipf(1.3, 16) % vocabulary).astype(np.int32)
        logprobs = np.log(rng.random(len(tokens)).astype(np.float32) + 1e-6)
        outcome = "filtered:zero" if i % 10 == 0 else "trained"
        yield EndedGroup(name, step, outcome, 1, header, header.payload), Payload(prompt, lengths, tokens, logprobs, spans)


def gaps_of(payload: Payload, group: EndedGroup) -> dict[tuple[str, int], np.ndarray]:
    """Return the gaps to the trainer if the group was trained: powers of 1.1, which the trainer's codes represent."""
    if group.outcome != "trained":
        return {}
    sizes = np.round(np.log(-payload.logprobs * 0.01) / np.log(STEP))
    parts = np.split((STEP**sizes).astype(np.float32), np.cumsum(payload.lengths)[:-1])
    return {(group.payload, place): part for place, part in enumerate(parts)}


def write(folder: Path, model: Path, completions: int) -> tuple[float, float]:
    """Write a log in real batches; return CPU µs and bytes per completion."""
    reader, rng = TextReader(str(model)), np.random.default_rng(0)
    writer = PartWriter(folder, 10**9)
    vocabulary = Tokenizer.from_file(str(model / "tokenizer.json")).get_vocab_size()
    made = list(groups(rng, completions // GROUP, vocabulary))
    reader.text([1])  # reads the tokenizer
    began = time.process_time()
    for first in range(0, len(made), GROUPS_A_FILE):
        batch, rows = made[first : first + GROUPS_A_FILE], LoggedRows(reader, "standard", 1e9)
        for group, payload in batch:
            rows.add(group, payload, gaps_of(payload, group))
        writer.write(rows.columns(), LogPosition(1, batch[-1][0].step, {"1": 0}))
        writer.tidy()
    spent = time.process_time() - began
    size = sum(part.size_bytes for part in writer.folder.refresh())
    return 1e6 * spent / completions, size / completions


def enlarge(folder: Path, rows: int) -> None:
    """Enlarge the log to `rows` rows, by repeating its rows under other steps."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    writer = PartWriter(folder, 10**9)
    table = pa.concat_tables([pq.read_table(part.path) for part in writer.folder.parts])
    steps, at, position = table["step"].to_numpy(), 0, writer.folder.position
    for part in writer.folder.parts:
        part.path.unlink()
    writer.folder.parts.clear()
    number, per_part = 1, 32_000
    while at < rows:
        repeats = [
            table.set_column(2, "step", pa.array(steps + (at + k * len(steps)) // 256, pa.int32()))
            for k in range(per_part // len(steps))
        ]
        part = pa.concat_tables(repeats).slice(0, rows - at)
        writer._put(part, number, number, position)
        number, at = number + 1, at + part.num_rows


async def search(config: RunConfig, store: Store, repeats: int) -> dict[str, list[float]]:
    """Query the page's endpoint; return the measurements."""
    urls, stopping = list[str](), asyncio.Event()
    serving = asyncio.create_task(show(config, store, urls.append, stopping))
    while not urls:
        await asyncio.sleep(0.05)
    found: dict[str, list[float]] = {"first_search_s": [], "search_ms": [], "search_cpu_ms": [], "text_search_s": []}
    headers = {"Authorization": "Bearer benchmark"}
    async with httpx.AsyncClient(base_url=urls[0], headers=headers, timeout=120) as http:

        async def ask(**asked: str) -> float:
            began = time.perf_counter()
            answer = await http.get("/v1/console/samples", params=asked)
            answer.raise_for_status()
            return time.perf_counter() - began

        found["first_search_s"].append(await ask(**FILTERS[0]))
        for each in FILTERS * repeats:
            before = time.process_time()
            found["search_ms"].append(1e3 * await ask(**each))
            found["search_cpu_ms"].append(1e3 * (time.process_time() - before))
        found["text_search_s"].append(await ask(where="'= 7' in completion and step > 0"))
    stopping.set()
    await serving
    return found


@contextlib.asynccontextmanager
async def logged_run(folder: Path, rows: int) -> AsyncIterator[tuple[RunConfig, Store, tuple[float, float]]]:
    """Create a run with a log of `rows` completions, and yield it with CPU µs and bytes per completion."""
    model = folder / "model"
    model.mkdir()
    save_tokenizer(train_tokenizer(f"say {i} + {i * 7 % 97} = {i * 8}" for i in range(400)), model, 64)
    server = RedisServer(folder / "redis")
    server.start()
    config = bare_run(folder, server, "web.port=0")
    log = folder / config.run.name / SAMPLES
    spent = write(log, model, PATTERN)
    enlarge(log, rows)
    store = await Store.connect(config.redis.url, config.run.name, server.password)
    try:
        await store.run.create(digest(config), "data", 4, 8)
        yield config, store, spent
    finally:
        await store.close()
        server.stop()


def shares(folder: Path) -> dict[str, list[float]]:
    """Return the share of a core that the log and the tracker take, and the seconds per step, from `PAIRS` pairs of runs."""
    subprocess.run([sys.executable, "-m", "examples.arithmetic.warmstart"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    found: dict[str, list[float]] = {"sample_log_share": [], "tracker_share": [], "step_s": [], "us_a_logged_completion": []}
    for pair in range(PAIRS):
        (with_log, step_s), (without, _) = (tracker_share(folder / str(pair), keep) for keep in (1_000_000, 0))
        added = with_log - without
        us = 1e6 * added * step_s / (GROUP * GROUPS_A_STEP)
        for values, value in zip(found.values(), (added, with_log, step_s, us), strict=True):
            values.append(value)
    return found


def tracker_share(folder: Path, keep: int) -> tuple[float, float]:
    """Train the example with `samples.keep`; return the share of a core that its tracker takes, and the seconds per step."""
    name = f"keeps{keep}"
    command = [
        sys.executable, "-m", "services.console.commands", "run", "examples/arithmetic/config.toml", "--no-screen",
        f"run.dir={folder}",
        f"run.name={name}", f"run.steps={FIRST + STEPS}", f"samples.keep={keep}", "tracking.tensorboard=true",
    ]  # fmt: skip
    seen: list[tuple[float, float, int]] = []
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        metrics = folder / name / "metrics.jsonl"
        while process.poll() is None and (not seen or steps_in(metrics) < FIRST + STEPS):
            if steps_in(metrics) >= FIRST and (spent := cpu_s("services.tracker", folder / name)):
                seen.append((time.monotonic(), spent, steps_in(metrics)))
            time.sleep(0.1)
    (began, before, first), (ended, after, last) = seen[0], seen[-1]
    return (after - before) / (ended - began), (ended - began) / (last - first)


def steps_in(metrics: Path) -> int:
    """Return the number of recorded steps."""
    return len(metrics.read_bytes().splitlines()) if metrics.exists() else 0


def cpu_s(module: str, folder: Path) -> float:
    """Return the CPU seconds of the process that runs `module` for the run in `folder`; 0 if there is none."""
    for proc in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            words = (proc / "cmdline").read_bytes().decode(errors="replace")
            if module in words.split("\0") and str(folder) in words:
                fields = (proc / "stat").read_text().rpartition(")")[2].split()
                return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return 0.0


async def measure(options: argparse.Namespace, folder: Path) -> object:
    """Write, enlarge and search the log, train the example, and report."""
    async with logged_run(folder, options.rows) as (config, store, (us, size)):
        log = folder / config.run.name / SAMPLES
        found = await search(config, store, options.repeats)
    rows, tokens = Search.of(log).find(limit=1).of, TOKENS
    found |= await asyncio.to_thread(shares, folder)
    slowest = [max(found["search_ms"])]
    return report(
        {"rows": rows, "tokens_a_completion": tokens, "p90_search_ms": float(np.percentile(found["search_ms"], 90))},
        {**found, "slowest_search_ms": slowest, "us_a_completion": [us], "bytes_a_completion": [size]},
    )


def main() -> int:
    """Parse the command line and measure."""
    parser = arguments(__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000, help="completions in the log")
    parser.add_argument("--repeats", type=int, default=5, help="queries of each filter")
    return run(measure, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
