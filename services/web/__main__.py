"""Starts the web console as a pod of a run. It keeps running after the run has ended, until it is stopped."""

from __future__ import annotations

from functools import partial

from services.http.entry import Arguments, end_process, main, open_service


async def show_run(given: Arguments) -> None:
    """Run the pod from start to end."""
    from services.web.serving import add_console, at_its_port

    async with open_service("web", at_its_port(given.config), given.name) as service:
        service.stays = True
        watch = add_console(service)
        service.say(phase="ready")
        await service.run(partial(watch.follow, service.stopping))


if __name__ == "__main__":
    end_process(main("web", show_run))
