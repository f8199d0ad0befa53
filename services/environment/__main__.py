"""Start an environment pod: claim tickets whose rollouts have several turns, and run them until stopped."""

from __future__ import annotations

from services.http.entry import Arguments, end_process, main, open_service


async def run(given: Arguments) -> None:
    """Run the pod from start to end."""
    from services.environment.pod import EnvironmentPod

    async with open_service("environment", given.config, given.name) as service:
        await EnvironmentPod(service).run()


if __name__ == "__main__":
    end_process(main("environment", run))
