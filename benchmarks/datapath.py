"""What the data path costs: groups/s from the claim to the commit, against raw pipelined SET and GET of the same bytes.

    python benchmarks/datapath.py --json

One repetition takes `--groups` groups of 40 KB through the store's own calls, as the services make them: issue, claim, submit,
read and settle headers, plan and prepare steps, fetch each payload, commit, publish, retire. The raw side writes and reads
the same bytes with the same client library on the same server, in batches of the same size. Both sides run in one process
and take turns. `ratio` is the median of the pairwise ratios, the goal is 0.5; `dataprep_us_per_group` is the CPU time of the
dataprep side. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

if __name__ == "__main__":  # `python benchmarks/datapath.py` from the repository's root
    sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.common import report
from services.console.audit import audit
from services.console.redis_server import RedisServer
from services.dataprep import admission, advantages, stats
from services.dataprep.planning import Layout, PlanGroup, plan_step
from services.dataprep.table import Table
from services.protocol import codec
from services.protocol.messages import Header, Payload, Ticket
from services.protocol.store import Claim, Settlement, Store

GROUP_SIZE = 16
COMPLETION_TOKENS = 310  # of int32 and float32 each: 16 of them make 40 KB
PROMPT_TOKENS = 60
ROW_TOKENS = 4096
LEASE_S, TTL_S = 60.0, 600


@dataclass(frozen=True)
class Times:
    """Of one repetition: wall seconds, and CPU seconds of this process for the dataprep side."""

    wall_s: float
    dataprep_s: float


def make_tickets(count: int) -> list[Ticket]:
    """Tickets of prompts of a usual length."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, 30_000, (count, PROMPT_TOKENS)).tolist()
    return [Ticket(f"0-{i}", i, 0, i, 1000 * i, prompt, str(i), GROUP_SIZE) for i, prompt in enumerate(prompts)]


def make_payload(seed: int) -> bytes:
    """A payload of 40 KB that does not compress."""
    rng = np.random.default_rng(seed)
    total = GROUP_SIZE * COMPLETION_TOKENS
    payload = Payload(
        rng.integers(0, 30_000, PROMPT_TOKENS, np.int32), np.full(GROUP_SIZE, COMPLETION_TOKENS, np.int32),
        rng.integers(0, 30_000, total, np.int32), -rng.random(total, np.float32),
        np.array([[i, 0, 0, COMPLETION_TOKENS] for i in range(GROUP_SIZE)], np.int32),
    )  # fmt: skip
    return codec.encode(payload)


def make_header(claim: Claim, payload: bytes) -> Header:
    """What a generator would write beside it."""
    ticket = claim.ticket
    assert ticket is not None
    rewards = [float((ticket.index + i) % 3 == 0) for i in range(GROUP_SIZE)]
    return Header(
        ticket.id, ticket.seq, ticket.epoch, ticket.index, claim.payload, len(payload), PROMPT_TOKENS,
        [COMPLETION_TOKENS] * GROUP_SIZE, rewards, {"math": rewards}, [False] * GROUP_SIZE, [0] * GROUP_SIZE, [0] * GROUP_SIZE,
        "generator-0", 1.0, 0.1,
    )  # fmt: skip
