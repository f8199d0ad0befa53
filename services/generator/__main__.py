"""Start a generator pod: load the engine, wait for weights, then claim and complete tickets until stopped."""

from __future__ import annotations

from services.http.entry import Arguments, end_process, leaving_at_once, main, open_service


async def generate(given: Arguments) -> None:
    """Run the pod from start to end."""
    from services.generator.pod import GeneratorPod

    async with open_service("generator", given.config, given.name) as service:
        with leaving_at_once():  # loading the tokenizer blocks the event loop for seconds
            pod = GeneratorPod(service)
        await pod.run()


if __name__ == "__main__":
    end_process(main("generator", generate))
