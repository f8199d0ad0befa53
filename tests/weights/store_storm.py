"""Repeatedly kills writers and readers of a version store: `python -m tests.weights.store_storm --kills 500 --seed 1`.

Writers and readers are processes, forked once torch is loaded, and killed with SIGKILL after a random time: while they encode,
write a part, a manifest or the catalogue, sweep, fetch or apply. After every kill of a writer, an empty receiver fetches the
version that was published last. Whatever a reader has applied is compared with the version of that trainer, which anyone can
compute: its weights are a function of the trainer's fence and the version. With `--bucket` the store is a bucket of a real S3
server, which is killed and restarted while a writer and a reader run; both must survive it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from services.weights.deadline import Deadline
from services.weights.transport import SendFailed, TrainedWeights, make_sender
from services.weights.versions import catalogue
from services.weights.versions.mirror import WeightMirror
from services.weights.versions.reader import VersionReader
from tests.support.models.tiny_vllm import make_config
from tests.support.servers.s3_server import S3Server

LENGTH, TENSORS = 200_000, 3
LIMIT_S = 60.0
"""Seconds within which a writer must publish or a reader apply; longer counts as a hang."""
SEEN_S = 0.05, 0.1
"""Mean seconds from the first sign of life of a reader, and of a writer, to its kill."""
AWAY_S = 0.5
"""Mean downtime of a bucket's server in seconds: the client's own retries end after about one."""

Tell = Callable[..., None]


def first_of(fence: int) -> torch.nn.ParameterDict:
    """Return a trainer's initial weights."""
    torch.manual_seed(fence)
    return torch.nn.ParameterDict({f"w{i}": torch.nn.Parameter(torch.randn(LENGTH).bfloat16()) for i in range(TENSORS)})


@torch.no_grad()
def step(fence: int, version: int, model: torch.nn.ParameterDict) -> None:
    """Turn the weights of the previous version into those of `version`."""
    torch.manual_seed(fence * 1_000_003 + version)
    for weight in model.values():
        places = torch.randint(0, LENGTH, (LENGTH // 50,))
        weight[places] = torch.randn(len(places)).bfloat16()


def checksum(weights: dict[str, torch.Tensor]) -> str:
    """Return a checksum that does not depend on the transfer's code."""
    return hashlib.blake2b(b"".join(weights[name].view(torch.int16).numpy().tobytes() for name in sorted(weights))).hexdigest()


class Forked:
    """A process that prints JSON lines."""

    def __init__(self, body: Callable[[Tell], None]) -> None:
        self._lines, writing = os.pipe()
        self._rest = b""
        self.pid = os.fork()
        if self.pid == 0:
            self._live(body, writing)
        os.close(writing)

    def _live(self, body: Callable[[Tell], None], writing: int) -> None:
        def tell(**facts: Any) -> None:
            os.write(writing, json.dumps(facts).encode() + b"\n")

        try:
            body(tell)
        except BaseException as error:  # of any kind: the storm reports it
            tell(error=f"{type(error).__name__}: {error}")
        os._exit(1)

    def output(self, limit_s: float) -> list[dict[str, Any]]:
        """Return its output so far; wait up to `limit_s` for some."""
        found: list[dict[str, Any]] = []
        while select.select([self._lines], [], [], 0.0 if found else limit_s)[0]:
            data = os.read(self._lines, 1 << 16)
            if not data:
                break
            *whole, self._rest = (self._rest + data).split(b"\n")
            found += [json.loads(line) for line in whole]
        return found

    def kill(self) -> list[dict[str, Any]]:
        """Kill it, and return the rest of its output."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        found = self.output(1.0)
        os.close(self._lines)
        return found


def write(place: str, fence: int, tell: Tell) -> None:
    """Publish version after version, as a trainer does."""
    config = make_config(Path("nowhere"), sync={"backend": "store", "folder": place})
    model, version = first_of(fence), 0
    weights = TrainedWeights(dict(model.items()), {name: [name] for name in model})
    sender = make_sender(config, weights, 0, 1, lambda value: [value])
    while True:
        try:
            if version == 0:
                sender.open(fence)
            sender.send(version, fence)
        except SendFailed as error:  # the server is down: retry, as a sync round would
            tell(repeated=str(error)[:200])
            continue
        tell(published=version, fence=fence)
        sender.sweep(list)
        version += 1
        step(fence, version, model)


def read(place: str, fence: int, tell: Tell) -> None:
    """Follow the newest version, as a generator does."""
    mirror = WeightMirror()
    while True:
        try:
            reader = VersionReader(f"{place}/{fence}", mirror)
            newest = reader.catalogue().newest
            if newest is None or mirror.held == (fence, newest):
                time.sleep(0.002)
                continue
            held = dict(reader.take(Deadline(20), newest))
        except (RuntimeError, OSError) as error:  # the version was swept meanwhile, or the bucket's server is down
            if isinstance(error, OSError) and "://" not in place:
                raise
            tell(failed=str(error)[:200])
            continue
        tell(applied=newest, fence=fence, checksum=checksum(held))


def fetch(place: str, fence: int, version: int, tell: Tell) -> None:
    """Fetch a version into an empty receiver."""
    try:
        held = dict(VersionReader(f"{place}/{fence}", WeightMirror()).take(Deadline(20), version))
    except (RuntimeError, TimeoutError) as error:
        tell(error=f"version {version} of {fence} was published and cannot be fetched: {error}")
        return
    tell(fetched=version, fence=fence, checksum=checksum(held))


@dataclass
class Tally:
    """Counts of a storm."""

    writers: int = 0
    readers: int = 0
    published: int = 0
    compared: int = 0
    fetched: int = 0
    failed: int = 0
    repeated: int = 0
    servers: int = 0
    wrong: list[str] = field(default_factory=list)


class Storm:
    """One writer and one reader at a time."""

    def __init__(self, place: str, seed: int, bucket: S3Server | None) -> None:
        self.place, self.random, self.tally, self._bucket = place, random.Random(seed), Tally(), bucket
        self._known: dict[int, tuple[list[str], torch.nn.ParameterDict]] = {}
        self._last = (0, -1)

    def run(self, kills: int) -> Tally:
        """Kill `kills` processes."""
        fence = 0
        while self.tally.writers + self.tally.readers + self.tally.servers < kills:
            fence += 1
            writer = Forked(lambda tell, fence=fence: write(self.place, fence, tell))
            self._await(writer, "published", "a writer published nothing")
            for _ in range(self.random.randint(0, 3)):
                reader = Forked(lambda tell, fence=fence: read(self.place, fence, tell))
                self._await(reader, "applied", "a reader applied nothing")
                time.sleep(self.random.expovariate(1 / SEEN_S[0]))
                self._strike(writer, reader)
                self._check(reader.kill())
                self.tally.readers += 1
                self._check(writer.output(0.0))
            time.sleep(self.random.expovariate(1 / SEEN_S[1]))
            self._check(writer.kill())
            self.tally.writers += 1
            self._fetch()
        return self.tally

    def _strike(self, writer: Forked, reader: Forked) -> None:
        """Kill the bucket's server half of the time. Both processes continue once it is back."""
        if self._bucket is None or self.random.random() < 0.5:
            return
        self._bucket.kill(self.random.expovariate(1 / AWAY_S))
        self.tally.servers += 1
        for one in (writer, reader):
            self._check(one.output(0.0))  # earlier output
        self._await(writer, "published", "a writer published nothing after its store was back")
        self._await(reader, "applied", "a reader applied nothing after its store was back")

    def _await(self, one: Forked, fact: str, otherwise: str) -> None:
        """Wait until a process reports that fact."""
        until = time.monotonic() + LIMIT_S
        while time.monotonic() < until:
            lines = one.output(until - time.monotonic())
            self._check(lines)
            if any(fact in line for line in lines):
                return
            if not lines or any("error" in line for line in lines):
                break
        self.tally.wrong.append(otherwise)

    def _check(self, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            if "error" in line:
                self.tally.wrong.append(line["error"])
            elif "failed" in line:
                self.tally.failed += 1
            elif "repeated" in line:
                self.tally.repeated += 1
            elif "published" in line:
                self.tally.published += 1
                self._last = line["fence"], line["published"]
            elif "applied" in line:
                self.tally.compared += 1
                self._compare(line, line["applied"], "a reader held")
            else:
                self.tally.fetched += 1
                self._compare(line, line["fetched"], "an empty receiver fetched")

    def _compare(self, line: dict[str, Any], version: int, what: str) -> None:
        if line["checksum"] != self._of(line["fence"], version):
            self.tally.wrong.append(f"{what} other weights than version {version} of {line['fence']}")

    def _fetch(self) -> None:
        """Fetch the last published version in a separate process, as threads of the client do not survive a fork."""
        fence, version = self._last
        receiver = Forked(lambda tell: fetch(self.place, fence, version, tell))
        self._await(receiver, "fetched", f"version {version} of {fence} was not fetched")
        receiver.kill()

    def _of(self, fence: int, version: int) -> str:
        """Return the checksum that a version must have."""
        known, model = self._known.setdefault(fence, ([], first_of(fence)))
        while len(known) <= version:
            if known:
                step(fence, len(known), model)
            known.append(checksum({name: weight.detach() for name, weight in model.items()}))
        return known[version]


def storm(kills: int, seed: int, with_server: bool = False) -> Tally:
    """Run a storm in a separate folder or bucket, with anchors and sweeps every few versions."""
    torch.set_num_threads(1)  # a forked process has only one thread
    place, every = tempfile.mkdtemp(), catalogue.ANCHOR_EVERY
    bucket = S3Server(Path(place)) if with_server else None
    os.environ |= bucket.environment if bucket else {}
    catalogue.ANCHOR_EVERY = 4
    try:
        return Storm(bucket.url if bucket else place, seed, bucket).run(kills)
    finally:
        if bucket is not None:
            bucket.stop()
        catalogue.ANCHOR_EVERY = every
        shutil.rmtree(place, ignore_errors=True)


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--bucket", action="store_true", help="store the versions in a bucket, and kill its server, too")
    options = parser.parse_args()
    tally = storm(options.kills, options.seed, options.bucket)
    print(json.dumps(asdict(tally)))
    return 1 if tally.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
