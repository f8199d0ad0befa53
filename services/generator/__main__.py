"""Start a generator pod: load the engine, wait for weights, then claim and complete tickets until told to stop."""

from __future__ import annotations

import sys

from services.runtime.entry import Arguments, leaving_at_once, main, open_service


async def generate(given: Arguments) -> None:
    """The whole life of the pod."""
    from services.generator.pod import GeneratorPod

    async with open_service("generator", given.config, given.name) as service:
        with leaving_at_once():  # its tokenizer takes seconds, in which the event loop hears nothing
            pod = GeneratorPod(service)
        await pod.run()


if __name__ == "__main__":
    sys.exit(main("generator", generate))
