"""Runs a command in a pod of a release, for `grpo status --kube-context CONTEXT -n NAMESPACE RELEASE`.

Guarantees: the command runs in a pod that has what it reads (one that mounts the volume of the runs, or one of dataprep), with
that pod's credentials, so none of these leave the cluster; its output and exit code are those of this command. Commands that act
on files of this machine are refused. The user needs the rights to list pods and to execute in them, and no forwarded port.
Waits for: the command in the pod. Unblocked by: its end, Ctrl-C, or a lost connection, which is an error.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, BinaryIO

from services.console.arguments import USAGE_ERROR
from services.console.cluster.access import Remote, access, chosen, explained, opened, pods_of
from services.console.commands.control import who
from services.console.errors import EXIT_CONFIG, EXIT_FAILED, ConsoleError
from services.console.options import KUBE_CONTEXT, NAMESPACES, confirm

HERE = frozenset({"init", "run", "fork", "ls", "doctor", "score", "rows", "config", "version", "compare", "replay-step", "acl"})
"""Commands about files of this machine."""
READERS = ("trainer", "tracker", "web")
"""Components whose pods mount the volume of the runs; the web console's only with `web.runs`. A finished run has no trainer."""
ON_THE_VOLUME = {
    **dict.fromkeys(("checkpoints", "cost", "samples"), READERS),
    **dict.fromkeys(("export", "record", "restore"), ("trainer",)),
}
"""Commands that read the run's folder, and the components whose pods can run them, in order. Only the trainer's have torch, and
the password of the Redis user that requests a restore."""
VOLUME = "runs"
ELSEWHERE = ("dataprep",)
INSTEAD = {
    "logs": "its pods log to the cluster: run kubectl logs --prefix --selector app.kubernetes.io/instance={release}",
}
STDOUT, STDERR, STATUS = 1, 2, 3
"""Channels of the remote command's protocol (v4.channel.k8s.io): the first byte of each message."""
NO_RELEASE = re.compile(r"generators|[0-9]+(-[0-9]+)?")
"""Words beside the name of a release: a number, its unit, or the id of a dead letter."""
NARROWEST = 80


def asked(argv: Sequence[str]) -> Remote:
    """Return the request to a cluster in arguments with `--kube-context`. Raises `ConsoleError`."""
    rest, verb, found = list[str](), "", {"context": "", "namespace": ""}
    words = iter(argv)
    for word in words:
        name, given, value = word.partition("=")
        if name not in (KUBE_CONTEXT, *NAMESPACES) or (word, verb) == ("-n", "logs"):  # there it is a number of lines
            rest.append(word)
            verb = verb or ("" if word.startswith("-") else word)
            continue
        value = value if given else next(words, "")
        if not value or value.startswith("-"):
            raise ConsoleError(
                f"{name} needs a value: name {'a context of your kubeconfig' if name == KUBE_CONTEXT else 'a namespace'}",
                EXIT_CONFIG,
            )
        found["context" if name == KUBE_CONTEXT else "namespace"] = value
    return Remote(found["context"], found["namespace"], rest)


def run(given: Remote, tree: Any) -> int:
    """Run the command in its pod and return its exit code. `tree` has all commands. Raises `ConsoleError`."""
    verb, release, words = split(given.command, tree)
    if verb in HERE:
        raise ConsoleError(f"grpo {verb} works on files of this machine: leave out {KUBE_CONTEXT}", EXIT_CONFIG)
    if verb in INSTEAD:
        raise ConsoleError(
            f"grpo {verb} does not run in a pod: {INSTEAD[verb].format(release=release or 'RELEASE')}", EXIT_CONFIG
        )
    if not release:
        raise ConsoleError(f"grpo {verb} {KUBE_CONTEXT} {given.context} needs the name of a release in place of RUN", EXIT_CONFIG)
    if verb == "web":
        from services.console.cluster.forwarding import serve

        return asyncio.run(_served(given, release, words[1:], tree, serve))
    if verb == "stop" and not {"--yes", "-y"}.intersection(words):
        confirm(f"End the run of release {release} permanently?")  # nobody can answer in the pod
    return asyncio.run(_in_pod(given, release, verb, words))


def split(command: Sequence[str], tree: Any) -> tuple[str, str, list[str]]:
    """Return the name of a command, its argument RUN, and its words without that one, to pass to the pod.

    `tree` has all commands.
    """
    words, path = list(command), list[str]()
    while words and words[0] in getattr(tree, "commands", {}):
        path.append(words.pop(0))
        tree = tree.commands[path[-1]]
    if hasattr(tree, "commands"):
        raise ConsoleError(f"there is no command {' '.join(['grpo', *path, *words[:1]])}: see grpo --help", EXIT_CONFIG)
    release, others = _named(tree, path, words)
    if release:
        # An option may have the same value: the word that is taken out is the one without which no other value changes.
        places = [at for at, word in enumerate(words) if word == release]
        without = [[*words[:at], *words[at + 1 :]] for at in reversed(places)]
        words = next(left for left in without if _parses(tree, path, left, others))
    return " ".join(path[:1]), release, [*path, *words]


def _named(tree: Any, path: Sequence[str], words: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """Return RUN, and the values of all other parameters. Raises the parser's error."""
    with tree.make_context(" ".join(["grpo", *path]), list(words)) as parsed:
        values = dict(parsed.params)
    if "words" in values:  # `grpo scale N [RUN]`, and commands that take ids of dead letters
        given = list(values["words"] or ())
        releases = [word for word in given if not NO_RELEASE.fullmatch(word)]
        return "".join(releases[:1]), {**values, "words": [word for word in given if word not in releases[:1]]}
    return str(values.pop("run", None) or ""), values


def _parses(tree: Any, path: Sequence[str], words: Sequence[str], others: dict[str, Any]) -> bool:
    try:
        return _named(tree, path, words) == ("", others)
    except USAGE_ERROR:
        return False


async def _served(given: Remote, release: str, words: Sequence[str], tree: Any, serve: Callable[..., Awaitable[int]]) -> int:
    with tree.commands["web"].make_context("grpo web", list(words)) as parsed:
        options = dict(parsed.params)
    if options["redis_url"]:
        raise ConsoleError(f"grpo web {KUBE_CONTEXT} reads no Redis from here: leave out --redis-url", EXIT_CONFIG)
    configuration, namespace = await access(given)
    with explained(f"namespace {namespace} of {given.context}"):
        return await serve(configuration, namespace, release, options)


async def _in_pod(given: Remote, release: str, verb: str, words: Sequence[str]) -> int:
    configuration, namespace = await access(given)
    where = f"namespace {namespace} of {given.context}"
    with explained(where):
        found = await pods_of(configuration, namespace, release)
        place = chosen(found, ON_THE_VOLUME.get(verb, ELSEWHERE), VOLUME if verb in ON_THE_VOLUME else "")
        if place is None:
            raise ConsoleError(nowhere(verb, release, namespace, where, bool(found)), EXIT_FAILED)
        component, pod = place
        return await _executed(configuration, f"/api/v1/namespaces/{namespace}/pods/{pod}/exec", component, words)


async def _executed(configuration: Any, path: str, container: str, words: Sequence[str]) -> int:
    """Run `grpo` with `words` in a container, and return its exit code."""
    columns = [f"COLUMNS={shutil.get_terminal_size((NARROWEST, 24)).columns}"] if sys.stdout.isatty() else []
    query = [("container", container), ("stdout", "true"), ("stderr", "true")]
    query += [("command", word) for word in ("env", *columns, f"LOGNAME={who()}", "grpo", *words)]
    async with opened(configuration, path, query) as socket:
        return await passed_on(socket)


def nowhere(verb: str, release: str, namespace: str, where: str, installed: bool) -> str:
    """Return why there is no pod to run a command in, and what to do. `installed`: the release has pods."""
    kubectl = f"kubectl -n {namespace}"
    if verb not in ON_THE_VOLUME or not installed:
        component = ON_THE_VOLUME.get(verb, ELSEWHERE)[0]
        return f"release {release} has no running pod of its {component} in {where}: {kubectl} get pods shows why"
    return (
        f"grpo {verb} needs a pod that mounts the volume of the runs, and release {release} has none in {where}: start one with "
        f"{kubectl} scale statefulset/{release}-trainer --replicas=1 (leaderworkerset/{release}-trainer if that is its kind)"
        f"{', or set web.enabled and web.runs with helm upgrade' if 'web' in ON_THE_VOLUME[verb] else ''}"
    )


async def passed_on(socket: Any) -> int:
    """Forward the command's output, and return its exit code. Raises `ConsoleError` if the connection ends before it."""
    outputs: dict[int, BinaryIO] = {STDOUT: sys.stdout.buffer, STDERR: sys.stderr.buffer}
    async for message in socket:
        data = message.data if isinstance(message.data, bytes) else str(message.data).encode()
        if not data:
            continue
        channel, body = data[0], data[1:]
        if channel in outputs:
            outputs[channel].write(body)
            outputs[channel].flush()
        elif channel == STATUS:
            return exit_code(body)
    raise ConsoleError("the connection to the pod ended before the command did: it may have taken effect", EXIT_FAILED)


def exit_code(status: bytes) -> int:
    """Return the exit code of a finished command. Raises `ConsoleError` if it could not be run."""
    match json.loads(status):
        case {"status": "Success"}:
            return 0
        case {"details": {"causes": [{"reason": "ExitCode", "message": code}, *_]}}:
            return int(code)
        case {"message": str(why)}:
            raise ConsoleError(f"the pod did not run the command: {why}", EXIT_FAILED)
        case _:
            raise ConsoleError("the pod did not run the command", EXIT_FAILED)
