"""Agents: exact tokens, the endpoint's overhead per turn, turn commits, a storm of kills, and whether a tool is learned.

    python -m benchmarks.agents --json

`token_identity`: programs with tools, reasoning, compaction, branches and sub-agents converse with scripted policies in
`--templates` chat templates until `--turns` turns are recorded. The figure is the share of turns whose trained ids equal the ids
that the policy returned, preceded by exactly the ids that it was given. The policies' tokens always differ from those that their
text would be tokenised to. `segments_per_turn` says how often the recorder had to start a new segment; a wrong recorder would
always do so.

`door_ms`: median time that the endpoint adds to a turn beyond the policy's own, as a client of `/v1/chat/completions` sees it:
request and reply over a real loopback socket, rendering, tokenising, parsing and recording, in conversations of `--rounds` turns
with tools. `door_p99_ms` is the 99th percentile. `door_cpu_ms` is the mean CPU time of all that, including the client's, which
depends less on other load on the machine.

`turns_per_s`: records that one client commits through one Redis, `--commits` in total, to `--rollouts` open rollouts at random.
`turn_p99_ms` is the 99th percentile of a commit's time with 64 in flight, `turns_per_core_s` the rate per CPU second of both
sides, `turn_server_of_plain` the server's CPU time over that of plain HSETs of the same bytes.

`lost`, `doubled`, `tools_twice`, `resampled_turns`, `leaked`: the damage done by a storm of `--kills` kills (tests/storm).

`learned`: mean reward of the last ten steps of examples/tools minus that of the first ten, in the run `--run`, which is made if
it is missing. `--kills 0` and `--run ""` leave out the last two. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import time
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # `python benchmarks/agents.py` from the repository's root
    sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.common import arguments, report, run
from benchmarks.turn_commits import commits
from examples.tools.curve import learned, rewards
from tests.environment.support.conversations import TOOL, Program, exact_turns
from tests.environment.support.rollouts import ScriptedRollout, ScriptedRollouts, served
from tests.environment.support.templates import FAMILIES, Family
from tests.storm.kills import storm
from tests.support.preloading import starter

ROOT = Path(__file__).parent.parent
TURNS_A_PROGRAM = 20
RESULT = " ".join(f"line {i} of what the tool has found" for i in range(25))
"""A tool's result of about 250 tokens."""
REPLY = f"I add the numbers.\n{RESULT[:400]}\n" + '<tool_call>\n{"name": "add", "arguments": {"a": 2, "note": "x"}}\n</tool_call>'


def identity(family: Family, turns: int, seed: int) -> tuple[int, int, int]:
    """Record at least `turns` turns of a family; return the number of turns, of exact ones, and of segments."""
    recorded = exact = segments = 0
    while recorded < turns:
        program = Program(family, random.Random(f"{family.name} {seed} {recorded}"))
        for _ in range(TURNS_A_PROGRAM):
            program.turn()
        recorder = program.recorder
        found = recorder.segments()
        exact += exact_turns(program.prompt, found, recorder.turns, program.policy.asked)
        recorded, segments = recorded + len(recorder.turns), segments + len(found)
    return recorded, exact, segments


def converse(client: HTTPConnection, rollout: ScriptedRollout, key: str, rounds: int) -> list[float]:
    """Hold one conversation with tools; return the milliseconds of each turn beyond the policy's own."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": RESULT}]
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    took: list[float] = []
    for _ in range(rounds):
        rollout.said.append(REPLY)
        sampled_before = rollout.sampling_s
        begun = time.perf_counter()
        client.request("POST", "/v1/chat/completions", json.dumps({"messages": messages, "tools": [TOOL]}), headers)
        reply = json.loads(client.getresponse().read())
        ended = time.perf_counter()
        took.append(1e3 * (ended - begun - (rollout.sampling_s - sampled_before)))
        message = reply["choices"][0]["message"]
        answer = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": RESULT}
        messages = [*messages, message, answer]
    assert len(rollout.recorder.segments()) == 1
    return took


def endpoint_overhead(conversations: int, rounds: int) -> tuple[list[float], float]:
    """Hold conversations one after another; return the milliseconds that the endpoint added per turn, and its mean CPU time."""
    rollouts = {key: ScriptedRollout(FAMILIES[0], key) for key in ("warm", *map(str, range(conversations)))}
    took: list[float] = []
    with served(ScriptedRollouts(rollouts)) as url, closing(HTTPConnection(url.removeprefix("http://"))) as client:
        converse(client, rollouts["warm"], "warm", rounds)
        del rollouts["warm"]
        begun = time.process_time()
        for key, rollout in rollouts.items():
            took += converse(client, rollout, key, rounds)
        cpu_s = time.process_time() - begun - sum(rollout.sampling_cpu_s for rollout in rollouts.values())
    return took, 1e3 * cpu_s / len(took)


def learn(folder: Path) -> float:
    """Return what the example's run in `folder` learned; run it first if it is missing."""
    if not (folder / "summary.json").exists():
        console = [
            sys.executable,
            "-m",
            "services.console.commands",
            "run",
            "examples/tools/config.toml",
            "--fresh",
            "--yes",
            "--no-screen",
        ]
        made = [sys.executable, "-m", "examples.tools.warmstart", "--out", "build/tools"]
        for command in (made, [*console, f"run.dir={folder.parent}", f"run.name={folder.name}"]):
            subprocess.run(command, cwd=ROOT, stdout=sys.stderr, check=True)
    return learned(rewards(folder))


async def measure(options: argparse.Namespace, folder: Path) -> None:
    """Measure everything, and report."""
    families = FAMILIES[: options.templates]
    shares: list[float] = []
    turns = segments = 0
    for family in families:
        recorded, exact, opened = await asyncio.to_thread(identity, family, -(-options.turns // len(families)), options.seed)
        shares.append(exact / recorded)
        turns, segments = turns + recorded, segments + opened
        if not options.json:
            print(f"{family.name:18} {recorded} turns, {exact / recorded:.4f} exact, {opened / recorded:.2f} segments per turn")
    took, cpu_ms = await asyncio.to_thread(endpoint_overhead, options.conversations, options.rounds)
    slowest = statistics.quantiles(took, n=100)[98]
    samples = {"token_identity": [min(shares)], "segments_per_turn": [segments / turns]}
    samples |= {"door_ms": took, "door_p99_ms": [slowest], "door_cpu_ms": [cpu_ms]}
    samples |= await commits(folder / "commits", options.rollouts, options.commits)
    if options.kills:
        found = await storm(folder / "storm", options.kills, options.seed)
        samples |= {name: [count] for name, count in found.harm.items()} | {"kills": [found.kills.total()]}
    if options.run:
        samples["learned"] = [await asyncio.to_thread(learn, Path(options.run))]
    report({"benchmark": "agents", "turns": turns, "templates": len(families)}, samples)


def main() -> int:
    """Parse the command line and measure."""
    parser = arguments(__doc__)
    parser.add_argument("--turns", type=int, default=10_000, help="turns to record, over all templates")
    parser.add_argument(
        "--templates", type=int, default=len(FAMILIES), help="number of chat templates of tests/environment to use"
    )
    parser.add_argument("--conversations", type=int, default=40, help="conversations through the endpoint")
    parser.add_argument("--rounds", type=int, default=12, help="turns per conversation")
    parser.add_argument("--rollouts", type=int, default=10_000, help="open rollouts")
    parser.add_argument("--commits", type=int, default=30_000, help="turns to commit to the open rollouts")
    parser.add_argument("--kills", type=int, default=1000, help="kills in the storm")
    parser.add_argument("--run", default="runs/tools", help="folder of a run of examples/tools")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.kills:
        starter.start("light")  # forks the storm's processes
    try:
        return run(measure, options)
    finally:
        starter.stop()


if __name__ == "__main__":
    sys.exit(main())
