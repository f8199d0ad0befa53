"""The `grpo` command.

Guarantees: `--help` imports nothing but typer; an error is one line `error: …` on standard error and an exit code, never a
traceback.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from services.console.errors import EXIT_CODES, EXIT_CONFIG, EXIT_OK, EXIT_REDIS, EXIT_STOPPED, ConsoleError
from services.console.inspect import inspect_app, replay_app
from services.console.options import Api, CaFile, Json, Listen, Reach, RedisUrl, TokenFile, WaitS

app = typer.Typer(
    help="Asynchronous GRPO: run it on this machine, watch it, steer it.", epilog=EXIT_CODES,
    add_completion=True, rich_markup_mode=None, pretty_exceptions_enable=False,
)  # fmt: skip
app.add_typer(inspect_app, name="inspect")
app.add_typer(replay_app, name="replay")

Run = Annotated[str, typer.Argument(metavar="RUN", help="Folder of the run, or its name under runs/; default: the newest.")]
File = Annotated[Path, typer.Argument(metavar="FILE", help="Configuration, TOML.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="section.key=value", help="Keys laid over the file.")]
Role = Annotated[str, typer.Option(help="all, generator, dataprep or trainer.")]
Why = Annotated[str, typer.Option(help="Reason, kept with the run.")]


@app.command()
def run(
    file: File,
    overrides: Overrides = None,
    redis_url: Annotated[str, typer.Option(help="Use this Redis; default: redis.url, or else a server of the run's own.")] = "",
    screen: Annotated[bool, typer.Option("--screen/--no-screen", help="Live screen on a terminal, or a line a step.")] = True,
    fresh: Annotated[bool, typer.Option("--fresh", help="Delete what a run of this name left, and start it anew.")] = False,
    resume: Annotated[
        str, typer.Option(metavar="latest|STEP", help="Go on only if there is a run; with a step, from its checkpoint.")
    ] = "",
    web: Annotated[bool, typer.Option("--web", help="Serve the web console, on web.port or a free one.")] = False,
) -> int:
    """Run a configuration on this machine, to its end. The same command continues a run that was stopped.

    It goes on where Redis knows the run to be, else from the last checkpoint. With --resume STEP it goes back to that checkpoint,
    and what came after is trained anew.
    Everything lies in run.dir/run.name: config.toml, logs/, checkpoints/, metrics.jsonl, summary.json, report.png.
    Ctrl-C stops the run in order; a second one ends it at once.
    """
    from services.console.run import Options
    from services.console.run import run as run_here

    return run_here(Options(file, overrides or [], redis_url, screen, fresh, resume, web))


@app.command()
def status(run: Run = "", redis_url: RedisUrl = "", as_json: Json = False) -> int:
    """Show a run's state, last step and pods."""
    from services.console import verbs

    return _await(verbs.status(run, redis_url, as_json))


@app.command()
def web(
    run: Run = "",
    redis_url: RedisUrl = "",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the page; 0: a free one.")] = 0,
    host: Annotated[str, typer.Option(help="Address to serve it on; default: web.host.")] = "",
) -> int:
    """Show a run in a browser: the same as status and inspect, live, with charts and buttons.

    It prints the address and serves the page until Ctrl-C. Buttons need the run's token.
    """
    from services.console import web as page

    return _await(page.web(run, redis_url, host, port))


@app.command()
def audit(run: Run = "", redis_url: RedisUrl = "", as_json: Json = False) -> int:
    """Account for every ticket of a run.

    The run may be live, stopped or finished; exit code 1 says that a ticket was lost or doubled, or that slots leak.
    """
    from services.console import verbs

    return _await(verbs.audit(run, redis_url, as_json))


@app.command()
def pause(
    run: Run = "",
    redis_url: RedisUrl = "",
    role: Role = "all",
    mode: Annotated[
        Literal["keep", "drain", "abort"], typer.Option(help="What becomes of requests of generators that are under way.")
    ] = "keep",
    why: Why = "",
    wait: WaitS = 0.0,
    api: Api = "",
    token_file: TokenFile = "",
    ca_file: CaFile = "",
) -> int:
    """Pause a role of a run until it is resumed.

    Pods that start later stay paused too. Requests of generators are kept where they are (keep), finished (drain), or ended
    and their tickets handed back with the tokens made so far (abort); dataprep and trainer halt between two steps. With --wait,
    exit code 1 says that somebody has not followed by then.
    """
    from services.console import steer, verbs

    roles = verbs.roles(role, mode)
    if api:
        return steer.pause(steer.Endpoint(api, token_file, ca_file), run, roles, mode, why, wait)
    return _await(verbs.pause(run, redis_url, roles, mode, why, wait))


@app.command()
def resume(
    run: Run = "",
    redis_url: RedisUrl = "",
    role: Role = "all",
    wait: WaitS = 0.0,
    api: Api = "",
    token_file: TokenFile = "",
    ca_file: CaFile = "",
) -> int:
    """Let a paused role go on. With --wait, exit code 1 says who has not followed by then."""
    from services.console import steer, verbs

    roles = verbs.roles(role)
    if api:
        return steer.resume(steer.Endpoint(api, token_file, ca_file), run, roles, wait)
    return _await(verbs.resume(run, redis_url, roles, wait))


@app.command()
def scale(
    what: Annotated[Literal["generators"], typer.Argument(metavar="generators", help="What there are to be more or fewer of.")],
    number: Annotated[int, typer.Argument(metavar="N", min=0, help="How many; 0: the run waits.")],
    run: Run = "",
    redis_url: RedisUrl = "",
    why: Why = "",
    api: Api = "",
    token_file: TokenFile = "",
    ca_file: CaFile = "",
) -> int:
    """Have N generators from now on, while the run trains.

    New ones start and join the next weight sync; the last ones finish what they do, or hand it back, and end.
    """
    from services.console import scale as scaling
    from services.console import steer

    if api:
        return steer.scale(steer.Endpoint(api, token_file, ca_file), run, number, why)
    return _await(scaling.scale(run, redis_url, number, why))


@app.command()
def smoke(
    run: Run = "",
    redis_url: RedisUrl = "",
    steps: Annotated[int, typer.Option(min=1, help="Steps to see trained.")] = 3,
    limit_s: Annotated[float, typer.Option(min=0, help="Seconds to wait for them.")] = 600.0,
) -> int:
    """See that a run gets on: so many more steps are trained, or it ends, and no ticket is lost.

    It watches and changes nothing. Exit code 1 says that the run did not get on in time, and why.
    """
    from services.console import smoke as smoking

    return _await(smoking.smoke(run, redis_url, steps, limit_s))


@app.command()
def drain(
    pod: Annotated[str, typer.Argument(metavar="POD", help="Name of a generator (grpo status).")],
    run: Run = "",
    wait: WaitS = 0.0,
) -> int:
    """Have one generator finish or hand back what it does, leave and exit.

    Whoever starts generators may start it again: `grpo scale` is for fewer of them.
    """
    from services.console import steer

    return _await(steer.drain(pod, run, wait))


@app.command()
def acl(
    run: Annotated[str, typer.Argument(metavar="NAME", help="Name of the run (run.name).")],
    users: Annotated[
        Path, typer.Option("--users", metavar="DIR", help="Folder of passwords, redis.users_dir; missing ones are made.")
    ],
) -> int:
    """Print the Redis users of a run, one a kind of service, as lines of an access list with digests of their passwords.

    `grpo run` makes its own server know them; elsewhere give them to the server, and each pod the password of its kind.
    """
    from services.console.secrets import user_passwords
    from services.protocol.acl import users as lines

    for line in lines(run, user_passwords(users)):
        print(line)
    return EXIT_OK


@app.command()
def checkpoint(
    run: Run = "",
    redis_url: RedisUrl = "",
    why: Why = "",
    wait: Annotated[bool, typer.Option("--wait", help="Return when it is written.")] = False,
) -> int:
    """Have the trainer write a checkpoint now.

    A step that is being trained is trained to its end first. With --wait, exit code 1 says that it could not be written.
    """
    from services.console import checkpoints as verbs

    return _await(verbs.checkpoint(run, redis_url, why, wait))


@app.command()
def restore(
    step: Annotated[int, typer.Argument(metavar="STEP", min=0, help="Step of a checkpoint (grpo checkpoints).")],
    run: Run = "",
    redis_url: RedisUrl = "",
) -> int:
    """Take a run back to a checkpoint, while it runs or for when it goes on.

    What came after is trained anew, with the same prompts in the same order.
    """
    from services.console import checkpoints as verbs

    return _await(verbs.restore(step, run, redis_url))


@app.command()
def checkpoints(
    run: Run = "",
    as_json: Json = False,
    verify: Annotated[bool, typer.Option("--verify", help="Read every file, and compare every byte.")] = False,
) -> int:
    """List the checkpoints of a run, from its folder alone.

    Exit code 1 says that one cannot be taken up; --verify finds damage in files.
    """
    from services.console import checkpoints as verbs

    return verbs.checkpoints(run, as_json, verify)


@app.command()
def stop(
    run: Run = "", redis_url: RedisUrl = "", why: Why = "", api: Api = "", token_file: TokenFile = "", ca_file: CaFile = ""
) -> int:  # fmt: skip
    """End a run early, for good.

    The trainer finishes its step, saves and ends the run. To go on later, press Ctrl-C in `grpo run` instead. --api is
    dataprep's.
    """
    from services.console import steer, verbs

    if api:
        return steer.stop(steer.Endpoint(api, token_file, ca_file), run, why)
    return _await(verbs.stop(run, redis_url, why))


@app.command()
def doctor(
    file: Annotated[Path | None, typer.Argument(metavar="FILE", help="Configuration, TOML; in a pod default: its own.")] = None,
    overrides: Overrides = None,
    redis_url: RedisUrl = "",
    as_json: Json = False,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="In a pod of a release: look at Redis, model, data and services, not at the pod.")
    ] = False,
    listen: Listen = False,
    reach: Reach = "",
) -> int:
    """Check this machine, its Redis and a configuration before a run, and say what to do about each finding.

    Exit code 1 says that something would keep the run from starting, or from going on.
    """
    from services.console.doctor import visit

    if listen and reach:
        raise ConsoleError("--listen is for one machine, --reach for the other: give one of them", EXIT_CONFIG)
    if listen or reach:
        return visit.network(file, overrides or [], reach, as_json)
    return _await(visit.doctor(file, overrides or [], redis_url, as_json, cluster))


@app.command()
def config(
    file: Annotated[Path | None, typer.Argument(metavar="FILE", help="Configuration, TOML.")] = None,
    overrides: Overrides = None,
    explain: Annotated[bool, typer.Option("--explain", help="Every key with its type, default and meaning.")] = False,
    as_json: Json = False,
) -> int:
    """Print a configuration, checked and complete.

    Or, with --explain, every key that there is.
    """
    if explain:
        from services.console import explain as explanation

        print(explanation.as_json() if as_json else explanation.as_text())
        return EXIT_OK
    if file is None:
        raise ConsoleError("give a configuration file, or --explain", EXIT_CONFIG)
    from services.protocol.config import load, to_toml

    loaded = load(file, overrides or [])
    print(loaded.model_dump_json(indent=2) if as_json else to_toml(loaded).rstrip())
    return EXIT_OK


def _await(verb: Any) -> int:
    import asyncio

    return asyncio.run(verb)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; its exit code."""
    usage_error = typer.BadParameter.__base__  # of typer's own click, which has no public name
    assert usage_error is not None
    try:
        given = list(sys.argv[1:] if argv is None else argv)
        result = typer.main.get_command(app).main(args=given or ["--help"], prog_name="grpo", standalone_mode=False)
    except ConsoleError as error:
        return _report(error, error.code)
    except KeyboardInterrupt:
        return EXIT_STOPPED
    except Exception as error:
        if isinstance(error, usage_error):
            return _report(error.format_message(), EXIT_CONFIG)  # type: ignore[attr-defined]
        return _report_known(error)
    return result if isinstance(result, int) else EXIT_OK


def _report_known(error: Exception) -> int:
    """Errors that say themselves what to do; any other is a bug and keeps its traceback."""
    from redis.exceptions import RedisError

    from services.protocol.config import ConfigError
    from services.protocol.errors import DifferentRun, StoreError

    if isinstance(error, ConfigError | DifferentRun):
        return _report(error, EXIT_CONFIG)
    if isinstance(error, StoreError):
        return _report(error, EXIT_REDIS)
    if isinstance(error, RedisError):
        return _report(f"Redis failed: {error}", EXIT_REDIS)
    raise error


def _report(error: object, code: int) -> int:
    print("error:", " ".join(str(error).split()), file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
