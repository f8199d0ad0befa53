"""Runs a command in a pod of a release, for `grpo status --kube-context CONTEXT -n NAMESPACE RELEASE`.

Guarantees: the command runs in the pod that has what it reads (the trainer's for the volume of the runs, otherwise dataprep's),
with that pod's credentials, so nothing of them leaves the cluster; its output and exit code are those of this command. What
acts on files of this machine is refused. The user needs the rights to list pods and to execute in them, and no forwarded port.
Waits for: the command in the pod. Unblocked by: its end, Ctrl-C, or a lost connection, which is an error.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from services.console.commands.control import who
from services.console.errors import EXIT_CONFIG, EXIT_FAILED, ConsoleError
from services.console.options import KUBE_CONTEXT, confirm

NAMESPACES = ("-n", "--namespace")
HERE = frozenset({"init", "run", "fork", "ls", "doctor", "score", "rows", "config", "version", "compare", "replay-step", "acl"})
"""Commands about files of this machine."""
ON_THE_VOLUME = frozenset({"restore", "checkpoints", "logs", "samples", "cost", "export", "record"})
"""Commands that read the run's folder, which the trainer's pods mount."""
INSTEAD = {"web": "run kubectl port-forward service/{release}-web 8000:80"}
STDOUT, STDERR, STATUS = 1, 2, 3
"""Channels of the remote command's protocol (v4.channel.k8s.io): the first byte of each message."""
NO_RELEASE = re.compile(r"generators|[0-9]+(-[0-9]+)?")
"""What stands beside the name of a release: a number, its unit, or the id of a dead letter."""
NARROWEST = 80


@dataclass(frozen=True)
class Remote:
    """A command for a release on a cluster."""

    context: str
    namespace: str
    """Empty: the context's own."""
    command: list[str]
    """The arguments without those above."""


def asked(argv: Sequence[str]) -> Remote:
    """Return what is asked of a cluster by arguments with `--kube-context`. Raises `ConsoleError`."""
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
    if verb == "stop" and not {"--yes", "-y"}.intersection(words):
        confirm(f"End the run of release {release} permanently?")  # the pod has nobody to ask
    return asyncio.run(_in_pod(given, release, "trainer" if verb in ON_THE_VOLUME else "dataprep", words))


def split(command: Sequence[str], tree: Any) -> tuple[str, str, list[str]]:
    """Return the name of a command, its argument RUN, and its words without that one, as the pod is to be given them.

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
    except Exception:  # the parser's usage errors, whose class has no public name
        return False


async def _in_pod(given: Remote, release: str, component: str, words: Sequence[str]) -> int:
    configuration, namespace = await _access(given)
    import aiohttp
    from kubernetes.aio.client.api.core_v1_api import CoreV1Api
    from kubernetes.aio.client.api_client import ApiClient
    from kubernetes.aio.client.exceptions import ApiException

    where = f"namespace {namespace} of {given.context}"
    try:
        async with ApiClient(configuration) as client:
            pods: Any = CoreV1Api(client)
            labels = f"app.kubernetes.io/instance={release},app.kubernetes.io/component={component}"
            pod = chosen((await pods.list_namespaced_pod(namespace, label_selector=labels)).items)
        if pod is None:
            raise ConsoleError(
                f"release {release} has no running pod of its {component} in {where}: kubectl -n {namespace} get pods shows why",
                EXIT_FAILED,
            )
        return await _executed(configuration, f"/api/v1/namespaces/{namespace}/pods/{pod}/exec", component, words)
    except ApiException as error:
        refused: Any = error
        raise ConsoleError(f"the cluster refused: {refused.status} {refused.reason} ({where})", EXIT_FAILED) from None
    except aiohttp.ClientError as error:
        raise ConsoleError(f"the cluster cannot be reached: {error} ({where})", EXIT_FAILED) from None


async def _access(given: Remote) -> tuple[Any, str]:
    """Return how the context reaches its cluster, and the namespace."""
    try:
        from kubernetes.aio.client.configuration import Configuration
        from kubernetes.aio.config import (
            KUBE_CONFIG_DEFAULT_LOCATION,
            ConfigException,
            list_kube_config_contexts,
            load_kube_config,
        )
    except ImportError as error:
        raise ConsoleError(f"{KUBE_CONTEXT} needs {error.name}: pip install 'grpo[cluster]'", EXIT_CONFIG) from None
    configuration: Any = Configuration()
    try:
        file = os.environ.get("KUBECONFIG") or KUBE_CONFIG_DEFAULT_LOCATION  # the library reads the variable as it is imported
        await load_kube_config(file, given.context, client_configuration=configuration)
        contexts: Any = list_kube_config_contexts(file)[0]
    except (ConfigException, OSError) as error:
        raise ConsoleError(f"{KUBE_CONTEXT} {given.context}: {error}", EXIT_CONFIG) from None
    own = next((each["context"].get("namespace") for each in contexts if each["name"] == given.context), "")
    return configuration, given.namespace or own or "default"


async def _executed(configuration: Any, path: str, container: str, words: Sequence[str]) -> int:
    """Run `grpo` with `words` in a container, and return its exit code."""
    from kubernetes.aio.stream import WsApiClient

    place = f"{configuration.host}{path}"
    columns = [f"COLUMNS={shutil.get_terminal_size((NARROWEST, 24)).columns}"] if sys.stdout.isatty() else []
    query = [("container", container), ("stdout", "true"), ("stderr", "true")]
    query += [("command", word) for word in ("env", *columns, f"LOGNAME={who()}", "grpo", *words)]
    async with WsApiClient(configuration) as client:  # its generated method waits for the end, and loses the exit code
        headers: dict[str, str] = {}
        await client.update_params_for_auth(headers, [], ["BearerToken"], place, "GET", None)
        opened: Any = await client.request("GET", place, query_params=query, headers=headers, _preload_content=False)
        async with opened as socket:
            return await passed_on(socket)


def chosen(pods: Sequence[Any]) -> str | None:
    """Return the name of the pod to run in: one that is ready, or else runs; the first by name."""

    def ready(pod: Any) -> bool:
        return any(each.type == "Ready" and each.status == "True" for each in pod.status.conditions or [])

    there = [pod for pod in pods if pod.status.phase == "Running" and pod.metadata.deletion_timestamp is None]
    return min(((not ready(pod), pod.metadata.name) for pod in there), default=(None, None))[1]


async def passed_on(socket: Any) -> int:
    """Pass on what the command prints, and return its exit code. Raises `ConsoleError` if the connection ends before it."""
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
