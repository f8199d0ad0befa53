"""Start a tracker pod, which writes the run's records to the trackers of `tracking`, its completions to the sample log, and its
account.
"""

from __future__ import annotations

import asyncio
import os
from functools import partial

from services.config import ConfigError
from services.http.entry import Arguments, end_process, main, open_service
from services.runtime.loops import Loop
from services.runtime.tracking import check_tracking

WRITE_LIMIT_S = 120.0  # a tracker that takes longer for a batch makes the pod fail its liveness probe


async def track(given: Arguments) -> None:
    """Run the pod from the run's creation to its end."""
    from services.tracker.account import keep_account
    from services.tracker.follower import Follower, show_backlog
    from services.tracker.metrics import TrackerMetrics
    from services.tracker.sample_log import SampleLog

    config = given.config
    check_tracking(config, os.environ)
    if not config.tracking.trackers and not config.samples.keep:
        raise ConfigError(
            "nothing to track: set tracking.tensorboard, tracking.wandb or samples.keep, or do not start a tracker pod"
        )
    async with open_service("tracker", config, given.name) as service:
        folder = service.folder / "tracking"
        metrics = TrackerMetrics(service.registry)
        followers = [
            Follower(name, config, service.store, folder, service.stopping, metrics) for name in config.tracking.trackers
        ]
        for follower in followers:
            service.add_loop(follower.name, follower.follow, WRITE_LIMIT_S)
        service.add_loop("backlog", partial(show_backlog, service.store, followers, metrics))
        done = [follower.done for follower in followers]
        if config.samples.keep:
            samples = SampleLog(config, service.store, service.folder, service.stopping, metrics)
            service.add_loop("samples", samples.follow, WRITE_LIMIT_S)
            done.append(samples.done)
        accounted = asyncio.Event()
        keep = partial(keep_account, config, service.store, service.folder, service.stopping, accounted)
        service.add_loop("account", keep, WRITE_LIMIT_S)
        done.append(accounted)
        service.say(phase="ready")

        async def until_done(loop: Loop) -> None:
            loop.limit_s = float("inf")
            await asyncio.gather(*(each.wait() for each in done))

        await service.run(until_done)


if __name__ == "__main__":
    end_process(main("tracker", track))
