"""Conversations behind the door: whether trained tokens are the sampled ones, and what the door adds to a turn.

    python -m benchmarks.agents --json

`token_identity`: programs with tools, reasoning, compaction, branches and sub-agents converse with scripted policies of
`--templates` chat templates until `--turns` turns are recorded; it is the share of turns whose trained ids equal the ids that the
policy returned, after exactly those it was given. The policies' tokens are never those that their text would be tokenised to.
`segments_per_turn` says how often the recorder could not go on in a segment, which a wrong recorder would do always.

`door_ms`: median of what a turn takes over the policy's own time, seen by a client of `/v1/chat/completions`: its request and
reply over a real loopback socket, rendering, tokenising, parsing and recording, in conversations with tools of `--rounds` turns.
`door_p99_ms` is the 99th percentile; `door_cpu_ms` the mean CPU time of all that, the client's included, which depends less on
what else the machine does. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # `python benchmarks/agents.py` from the repository's root
    sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.common import arguments, report, run
from tests.environment.conversations import TOOL, Program, exact_turns
from tests.environment.rollouts import ScriptedRollout, ScriptedRollouts, served
from tests.environment.templates import FAMILIES, Family

TURNS_A_PROGRAM = 20
RESULT = " ".join(f"line {i} of what the tool has found" for i in range(25))
"""A tool's answer, of about 250 tokens."""
SAID = f"I add the numbers.\n{RESULT[:400]}\n" + '<tool_call>\n{"name": "add", "arguments": {"a": 2, "note": "x"}}\n</tool_call>'


def identity(family: Family, turns: int, seed: int) -> tuple[int, int, int]:
    """Record at least so many turns of a family; how many, how many of them are exact, and their segments."""
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
    """Hold one conversation with tools; milliseconds of each turn over the policy's own."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": RESULT}]
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    took: list[float] = []
    for _ in range(rounds):
        rollout.said.append(SAID)
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


def door(conversations: int, rounds: int) -> tuple[list[float], float]:
    """Hold so many conversations, one after the other; milliseconds that the door added to each turn, and its mean CPU time."""
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


async def measure(options: argparse.Namespace, folder: Path) -> None:
    """Measure both."""
    families = FAMILIES[: options.templates]
    shares: list[float] = []
    turns = segments = 0
    for family in families:
        recorded, exact, opened = await asyncio.to_thread(identity, family, -(-options.turns // len(families)), options.seed)
        shares.append(exact / recorded)
        turns, segments = turns + recorded, segments + opened
        if not options.json:
            print(f"{family.name:18} {recorded} turns, {exact / recorded:.4f} exact, {opened / recorded:.2f} segments a turn")
    took, cpu_ms = await asyncio.to_thread(door, options.conversations, options.rounds)
    slowest = statistics.quantiles(took, n=100)[98]
    samples = {"token_identity": [min(shares)], "segments_per_turn": [segments / turns]}
    samples |= {"door_ms": took, "door_p99_ms": [slowest], "door_cpu_ms": [cpu_ms]}
    report({"benchmark": "agents", "turns": turns, "templates": len(families)}, samples)


def main() -> int:
    """Parse the command line and measure."""
    parser = arguments(__doc__)
    parser.add_argument("--turns", type=int, default=10_000, help="turns to record, over all templates")
    parser.add_argument("--templates", type=int, default=len(FAMILIES), help="chat templates, of those of tests/environment")
    parser.add_argument("--conversations", type=int, default=40, help="conversations through the door")
    parser.add_argument("--rounds", type=int, default=12, help="turns of each")
    parser.add_argument("--seed", type=int, default=0)
    return run(measure, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
