"""Implements `grpo run`: one run on this machine, from its folder and server to its summary.

Guarantees: no process that it started outlives it. All state is in the run folder, so the same command resumes a run that was
stopped or killed. Two runs with different names share only the machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redis.exceptions import RedisError

from services.config import RunConfig
from services.config.loss_in_words import loss_in_words
from services.console.display.plain import PlainDisplay
from services.console.display.screen import ScreenDisplay
from services.console.doctor.preflight import Check, check_again, preflight
from services.console.errors import EXIT_CONFIG, EXIT_OK, EXIT_STOPPED, ConsoleError
from services.console.gpus import visible_gpus
from services.console.lock import FolderLock, InUse
from services.console.options import who
from services.console.printable import print_json, say
from services.console.run import summary
from services.console.run.folder import RunFolder, resolve
from services.console.run.launcher import Launcher, LaunchOutcome
from services.console.run.mirror import RunRecords
from services.console.run.place import (
    Options,
    administrator,
    as_started,
    checked,
    claim_name,
    fresh_or_asked,
    judged_as_before,
    placed_error,
    redis_of,
    resumed_step,
    trained,
)
from services.console.run.plan import common_environment, max_generators, plan_units
from services.console.run.redis_server import RedisServer, start_server
from services.console.run.resumption import again, requeue_failed, written
from services.console.run.secrets import write_secret
from services.console.run.terminal import Interrupts, lasting_output
from services.http.credentials import api_tokens, holds_users
from services.operations.condition import Condition
from services.operations.control import reason
from services.operations.inspection.ledger import audit
from services.operations.observe import RunFeed
from services.protocol.errors import StoreError
from services.runtime.child_processes import ServicePlan
from services.runtime.process_tools import free_port
from services.store import Store
from services.store.client import Login

ORPHANS_S = 60.0  # services of a killed console took up to 35 s to exit, longer on a busy machine; then they are killed

Planner = Callable[[RunConfig, Path, Sequence[str]], Sequence[ServicePlan]]


def run(options: Options, planner: Planner = plan_units, check: Check | None = None) -> int:
    """Run until finished or stopped, and return the exit code. `check`: the checks of a new run before it is started."""
    ended = list[Mapping[str, Any]]()
    try:
        output = contextlib.redirect_stdout(sys.stderr) if options.as_json else contextlib.nullcontext()
        with lasting_output(), output, Interrupts() as interrupts:
            return _start(options, planner, check, interrupts, ended)
    except InUse as error:
        raise ConsoleError(f"{error}; choose another run.name, or stop it first", EXIT_CONFIG) from None
    except KeyboardInterrupt:
        return EXIT_STOPPED
    finally:
        for result in ended if options.as_json else ():
            print_json(result)


def _start(
    options: Options, planner: Planner, check: Check | None, interrupts: Interrupts, ended: list[Mapping[str, Any]]
) -> int:
    """Load and check the configuration, lock the folder and clear up what is in it, start Redis, launch, and conclude.

    Add the summary to `ended`, unless the run could not be started.
    """
    gpus = visible_gpus(os.environ)
    config, places = checked(
        options,
        check or (lambda config: preflight(config, gpus, os.environ, own=True)),
        lambda config, held: check_again(config, held, gpus, os.environ),
    )
    url, password = redis_of(options, config)
    folder = RunFolder.of(config)
    with FolderLock(folder.path, ORPHANS_S, say=say) as lock:
        web_port = config.web.port or (free_port() if options.web else 0)
        config = as_started(config, gpus, web_port)
        options = fresh_or_asked(options, config, folder, lambda: asyncio.run(trained(folder, config, url, password)))
        if not options.fresh:
            config = judged_as_before(config, folder)
        held = not options.fresh and folder.check(config)
        before = folder.held() if held else None
        step = resumed_step(options, folder, held)
        if options.fresh:
            folder.check_clearable()  # before anything of the run is deleted
        if url:
            try:
                asyncio.run(claim_name(config, url, administrator(config, password), options.fresh))
            except StoreError as error:
                raise placed_error(error, options, url, places) from None
        if options.fresh:
            folder.clear()
        with _redis(config, folder, url, password) as (config, server):
            password = server.password if server else password
            config = written(config, folder, before, step, password)
            for sentence in loss_in_words(config):
                print(f"loss: {sentence}", flush=True)
            environ = common_environment(os.environ, config, gpus)
            interrupts.check()
            login = administrator(config, password)
            return asyncio.run(_Job(options, config, folder, planner, gpus, server, login, lock.fd, environ, step, ended).run())


@contextlib.contextmanager
def _redis(config: RunConfig, folder: RunFolder, url: str, password: str) -> Iterator[tuple[RunConfig, RedisServer | None]]:
    """Yield the configuration with Redis filled in, and the run's own server, or None if it uses the one at `url`."""
    if url:
        shared = bool(password) and not holds_users(config)
        if shared:
            write_secret(folder.redis_password, password)
        yield resolve(config, folder, url, str(folder.redis_password.resolve()) if shared else ""), None
        return
    server = start_server(folder.redis, folder.path.name)
    try:
        yield resolve(config, folder, server.url, str(server.users.resolve())), server
    finally:
        server.stop()


@dataclass
class _Job:
    options: Options
    config: RunConfig
    folder: RunFolder
    planner: Planner
    gpus: Sequence[str]
    server: RedisServer | None
    login: Login
    lock_fd: int
    environ: dict[str, str]
    restore: int | None  # step of the checkpoint to return to
    ended: list[Mapping[str, Any]]  # receives the summary
    signals: int = 0  # to stop, received so far
    launcher: Launcher | None = None

    async def run(self) -> int:
        # First of all: asyncio's own handler cancels running tasks, and a client may swallow that.
        for sig in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(sig, self._interrupt)
        config = self.config
        store = await Store.connect(config.redis.url, config.run.name, self.login)
        try:
            return await self._see_through(store, RunRecords(self.folder))
        finally:
            await store.close()

    async def _see_through(self, store: Store, records: RunRecords) -> int:
        began = time.monotonic()
        await store.run.resumed("")
        if failed := await requeue_failed(store, self.restore):
            print(f"{failed} prompts that failed are generated again", flush=True)
        if self.restore is not None:
            await store.run.request_restore(self.restore, reason("grpo run --resume", who()))
        observer = RunFeed(store, self.config.fleet.ttl_s)
        before = summary.read(self.folder.summary)
        async for poll in observer.poll_to_end():
            records.add(poll)
        if await store.run.set_steps(self.config.run.steps):
            async for _ in observer.poll_to_end():
                pass
        if how := observer.last.finished:
            what = f"run {self.config.run.name} has already finished ({how})"
            print(f"{what}; raise run.steps to continue it, or give --fresh", flush=True)
            if before.get("status") == "finished":
                self.ended.append(before)
                return EXIT_OK
            outcome, restarts = LaunchOutcome("finished", how, EXIT_OK), {}
        else:
            outcome, restarts = await self._launch(observer, records)
        restarts = {child: before.get("restarts", {}).get(child, 0) + count for child, count in restarts.items()}
        wall_s = before.get("wall_s", 0.0) + time.monotonic() - began
        self.folder.note(Condition(outcome.status, "" if outcome.status == "stopped" else outcome.message))
        concluded = summary.Concluded(outcome.status, wall_s, before.get("restarts", {}) | restarts)
        await self._conclude(observer, records, concluded)
        if outcome.status == "failed":
            raise ConsoleError(outcome.message, outcome.code)
        return outcome.code

    async def _launch(self, observer: RunFeed, records: RunRecords) -> tuple[LaunchOutcome, dict[str, int]]:
        config, rows = self.config, records.steps.in_order()
        with contextlib.ExitStack() as stack:
            if self.options.screen and not self.options.as_json and sys.stdout.isatty():
                display = stack.enter_context(ScreenDisplay(config.run.name, config.run.steps, rows, self.folder.logs))
            else:
                display = stack.enter_context(PlainDisplay(config.run.steps, self.folder.logs))
            where = f"resuming after {observer.last.committed_step + 1} of {config.run.steps} steps"
            if observer.last.state is None:
                where = "from its checkpoint" if any(self.folder.checkpoints.glob("step-*")) else "new"
            display.event(f"run {config.run.name} ({where}) in {self.folder.path}, Redis at {config.redis.url}")
            if observer.last.state is not None and observer.last.state.paused:
                display.event(
                    f"it is paused and does not train until it is resumed: grpo resume {shlex.quote(str(self.folder.path))}"
                )
            if config.web.port:
                host = config.api.host
                page = f"http://{f'[{host}]' if ':' in host else host}:{config.web.port}"
                link = f"{page}/#token={api_tokens(config).operate}" if sys.stdout.isatty() else ""
                display.event(f"web console: {link or f'{page}, with the token in {config.api.token_file}'}")
            limit = max_generators(config, self.gpus, len(os.sched_getaffinity(0)))
            await observer.store.run.bound_generators(limit)
            self.launcher = Launcher(
                self._plan,
                config.generator.count,
                limit,
                observer,
                records,
                display,
                logs=self.folder.logs,
                environ=self.environ,
                lock_fd=self.lock_fd,
                server=self.server,
                note=self.folder.note,
            )
            for _ in range(self.signals):
                self.launcher.interrupt()
            try:
                return await self.launcher.run(), self.launcher.restarts
            finally:
                for sig in (signal.SIGINT, signal.SIGTERM):
                    asyncio.get_running_loop().remove_signal_handler(sig)

    def _interrupt(self) -> None:
        """Stop once there is something to stop, and on the second signal immediately."""
        self.signals += 1
        if self.launcher is not None:
            self.launcher.interrupt()
        elif self.signals > 1:
            raise KeyboardInterrupt

    def _plan(self, generators: int) -> Sequence[ServicePlan]:
        config = self.config.with_values({"generator.count": generators})
        return self.planner(config, self.folder.config.resolve(), self.gpus)

    async def _conclude(self, observer: RunFeed, records: RunRecords, ended: summary.Concluded) -> None:
        """Write the run's results into its folder, and print them."""
        rows, state, audited = records.steps.in_order(), observer.last.state, None
        if state is not None:
            with contextlib.suppress(StoreError, RedisError):
                audited = await audit(observer.store)
        result = summary.summarise(self.config, rows, state, audited, ended, records.rounds.in_order())
        self.ended.append(result)
        self._write_results(result, rows)
        for fault in filter(None, (records.steps.fault, records.rounds.fault)):
            say(f"{fault}; rerun the same command to add what it lacks")
        print(f"{ended.status}: run {self.config.run.name}", *summary.in_words(result), sep="\n  ", flush=True)
        if ended.status == "stopped":
            print(f"  resume it with: {shlex.join(['grpo', *again(sys.argv[1:])])}", flush=True)
        else:
            print(f"  {self.folder.report if rows else self.folder.logs}", flush=True)
        if ended.status == "finished" and (model := self.folder.path / "model").is_dir():
            print(f"  {model}: the trained model, in Hugging Face format", flush=True)

    def _write_results(self, result: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
        """Write the summary and, if there are steps, the report. On a full disk, say so: the run itself has ended."""
        try:
            summary.write(self.folder.summary, result)
            if rows:
                from services.console.run.report import write_report

                write_report(rows, result, self.folder.report)
        except OSError as error:
            say(f"the summary in {self.folder.path} cannot be written: {error.strerror}")
