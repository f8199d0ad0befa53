"""Start a generator pod: load the engine, wait for weights, then claim and complete tickets until told to stop."""

from __future__ import annotations

import sys

from services.runtime.entry import Arguments, main, open_service


async def generate(given: Arguments) -> None:
    """The whole life of the pod."""
    from services.generator.pod import Pod

    async with open_service("generator", given.config, given.name) as service:
        await Pod(service).run()


if __name__ == "__main__":
    sys.exit(main("generator", generate))
