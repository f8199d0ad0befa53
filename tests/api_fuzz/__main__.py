"""`python -m tests.api_fuzz --minutes 10`: fuzz the endpoints of every kind of service for this long."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Collection
from pathlib import Path

from services.console.run.redis_server import RedisServer
from services.runtime.portal import Portal
from tests.api_fuzz.fuzz import fuzz
from tests.api_fuzz.world import endpoints


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.api_fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long (default 10)")
    parser.add_argument("--seed", type=int, default=0, help="of the requests (default 0)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        answers = fuzzed(Path(folder), 60 * options.minutes, options.seed)
    print(f"{sum(answers.values())} requests, none answered otherwise than described:")
    for status, count in sorted(answers.items()):
        print(f"  {status}: {count}")


def fuzzed(folder: Path, seconds: float, seed: int, wanted: Collection[str] = ()) -> dict[str, int]:
    """Serve every kind of service on a separate Redis, and fuzz it."""
    server, portal = RedisServer(folder / "redis"), Portal()
    server.start()
    try:
        served = endpoints(folder, server, "fuzzed")
        found = portal.call(served.__aenter__())
        try:
            return dict(fuzz({kind: url for kind, (url, _) in found.items()}, seconds, seed, wanted))
        finally:
            portal.call(served.__aexit__(None, None, None))
    finally:
        portal.close()
        server.stop()


if __name__ == "__main__":
    main()
