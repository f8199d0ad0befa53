"""Start a generator pod: load the engine, wait for weights, then claim and complete tickets until stopped."""

from __future__ import annotations

import contextlib

from services.http.entry import Arguments, end_process, leaving_at_once, main, open_service


def prepare(given: Arguments) -> None:
    """On a CPU, import vLLM once for this process and the engine's, which halves the start time. A pod that stays after its run
    skips this, since it may be idle. Import errors are reported when the engine loads.
    """
    generator = given.config.generator
    if given.stay or generator.engine != "vllm" or generator.tensor_parallel > 1:
        return
    with contextlib.suppress(ImportError):
        from services.generator.engines import template, vllm_arguments

        if not vllm_arguments.has_gpu():
            template.start(lambda: vllm_arguments.set_environment(given.config, gpu=False))


async def generate(given: Arguments) -> None:
    """Run the pod from start to end."""
    from services.generator.pod import GeneratorPod

    async with open_service("generator", given.config, given.name) as service:
        with leaving_at_once():  # loading the tokenizer blocks the event loop for seconds
            pod = GeneratorPod(service)
        await pod.run()


if __name__ == "__main__":
    end_process(main("generator", generate, before=prepare))
