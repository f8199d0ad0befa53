"""Build every image, run the example from them, print as JSON what came of it.

    python docker/rehearse.py                                            (Docker with Compose 2; nothing else but Python)
    python docker/rehearse.py -- --build-arg TORCH_INDEX=https://…       (what else `docker build` is to be told)

The run is that of compose.yaml with the task of examples/arithmetic and two generators. In the middle of it every container is
told to end; then all start again and the run goes on. `faults` names what was not as it should be; the exit code is 1 then.
Guarantees: containers, networks, volumes and secrets are the rehearsal's own and gone when it ends; images stay, with a tag of
their own.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import subprocess
import sys
import tarfile
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, TypeVar

ROOT = Path(__file__).parent.parent
TAG = "rehearsal"
VARIANTS = {"dataprep": "", "tracker": "", "trainer": "cpu", "generator": "cpu"}
IN_ORDER = ("generator", "trainer", "dataprep", "redis")  # are told to end
GENERATORS, STEPS, MIDDLE = 2, 60, 10
MODEL = "/srv/grpo/models/arithmetic"
CHUNK_BYTES = 1 << 20
LIMIT_S = 900.0  # for whatever is waited for
CONFINED = 'test "$(id -u)" = 10001 && ! touch /x 2>/dev/null && touch /tmp/x && ! grep -q "^Cap.*:.*[1-9a-f]" /proc/self/status'
Found = TypeVar("Found")


def call(*words: str) -> str:
    """What a command prints. Ends with its last words if it fails."""
    done = subprocess.run(words, text=True, capture_output=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} ended with {done.returncode}: {done.stderr[-4000:]}")
    return done.stdout


def until(what: str, look: Callable[[], Found | None]) -> Found:
    """Look once a second until there is something."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        if found := look():
            return found
        time.sleep(1.0)
    raise SystemExit(f"waited {LIMIT_S:g} s in vain for {what}")


def name(service: str) -> str:
    """Of a service's image."""
    variant = VARIANTS[service]
    return f"grpo-{service}:{TAG}" + (f"-{variant}" if variant else "")


def build(service: str, options: list[str]) -> float:
    """Build a service's image; seconds."""
    began = time.monotonic()
    variant = ["--build-arg", f"VARIANT={VARIANTS[service]}"] if VARIANTS[service] else []
    call("docker", "build", "-f", f"{ROOT}/docker/{service}.Dockerfile", "-t", name(service), *variant, *options, str(ROOT))
    return round(time.monotonic() - began, 1)


def sizes(image: str) -> dict[str, int]:
    """Bytes of an image as one layer on another, of all layers compressed each by itself, and of the largest."""
    saving = subprocess.Popen(["docker", "save", image], stdout=subprocess.PIPE)
    with saving, tarfile.open(fileobj=saving.stdout, mode="r|") as archive:
        files = ((archive.extractfile(member), member.size) for member in archive)
        layers = [layer_sizes(file, size) for file, size in files if file]
    plain, compressed = zip(*layers, strict=True)
    return {"bytes": sum(plain), "compressed_bytes": sum(compressed), "largest_layer_bytes": max(plain)}


def layer_sizes(file: IO[bytes], size: int) -> tuple[int, int]:
    """Bytes of a layer as containers see it and as registries keep it, with gzip; Docker saves it the one way or the other."""
    chunk, other = file.read(CHUNK_BYTES), 0
    zipped = chunk.startswith(b"\x1f\x8b")
    work = zlib.decompressobj(wbits=31) if zipped else zlib.compressobj(6)
    turn = getattr(work, "decompress" if zipped else "compress")
    while chunk:
        other += len(turn(chunk))
        chunk = file.read(CHUNK_BYTES)
    other += len(work.flush())
    return (other, size) if zipped else (size, other)


def configuration() -> str:
    """The example's configuration, with the addresses and folders of compose.toml."""

    def sections(path: str) -> list[str]:
        return re.split(r"^(?=\[)", (ROOT / path).read_text(encoding="utf-8"), flags=re.MULTILINE)

    text = "".join(sections("examples/arithmetic/config.toml"))
    text = re.sub(r"^\[run\]\n", '[run]\ndir = "/srv/grpo/runs"\n', text, flags=re.MULTILINE)
    text = re.sub(r"^steps = .*", f"steps = {STEPS}", text, flags=re.MULTILINE)
    text = re.sub(r'^path = "build.*', f'path = "{MODEL}"', text, flags=re.MULTILINE)
    return text + "\n" + "".join(part for part in sections("docker/compose.toml") if re.match(r"\[(redis|api|sync)\]", part))


class Run:
    """The run of the rehearsal; `folder` has its secrets and configuration."""

    def __init__(self, folder: Path) -> None:
        files = {"redis-password": secrets.token_hex(24), "api-token": secrets.token_hex(24), "config.toml": configuration()}
        for file, text in files.items():
            (folder / file).write_text(text, encoding="utf-8")
        folder.chmod(0o755)
        overlay = {
            "configs": {"config": {"file": str(folder / "config.toml")}},
            "secrets": {file: {"file": str(folder / file)} for file in ("redis-password", "api-token")},
        }
        (folder / "overlay.json").write_text(json.dumps(overlay), encoding="utf-8")
        files_given = ("-f", f"{ROOT}/docker/compose.yaml", "-f", str(folder / "overlay.json"))
        self.compose = ("docker", "compose", "-p", f"grpo-{TAG}", *files_given)
        os.environ |= {"TAG": TAG, "VARIANT": VARIANTS["trainer"], "THREADS": "1"}

    def containers(self, service: str) -> list[dict[str, Any]]:
        """All that Docker knows of a service's containers."""
        found = call(*self.compose, "ps", "-a", "-q", service).split()
        return json.loads(call("docker", "inspect", *found)) if found else []

    def make_model(self) -> None:
        """Warm-start the example's model, in the generator's image, which has all that takes."""
        examples = ("-v", f"{ROOT}/examples:/srv/grpo/code/examples:ro", "-e", "PYTHONPATH=/srv/grpo/code")
        call(
            *self.compose, "run", "--rm", *examples, "generator", "python", "-m", "examples.arithmetic.warmstart", "--out", MODEL
        )

    def start(self) -> float:
        """Start all containers, and wait until each is healthy; seconds."""
        began = time.monotonic()
        call(*self.compose, "up", "-d", "--no-build", "--scale", f"generator={GENERATORS}")

        def healthy() -> bool:
            states = [found["State"] for service in IN_ORDER for found in self.containers(service)]
            return all(state.get("Health", {}).get("Status") == "healthy" for state in states)

        until("every container to be healthy", healthy)
        return round(time.monotonic() - began, 1)

    def ask(self, *words: str) -> dict[str, Any]:
        """The answer of `grpo WORDS --json` in dataprep's container; nothing while it starts."""
        done = subprocess.run(
            [*self.compose, "exec", "-T", "dataprep", "grpo", *words, "--json"], capture_output=True, check=False
        )
        return json.loads(done.stdout) if done.stdout.startswith(b"{") else {}

    def stop(self, service: str) -> dict[str, Any]:
        """Tell a service's containers to end; the seconds they took, and their exit codes."""
        began = time.monotonic()
        call(*self.compose, "stop", service)
        codes = [found["State"]["ExitCode"] for found in self.containers(service)]
        return {"seconds": round(time.monotonic() - began, 1), "exit_codes": codes}

    def confined(self, service: str) -> bool:
        """Whether its processes are no root's, may do nothing that is root's, and write nowhere but to /tmp."""
        done = subprocess.run([*self.compose, "exec", "-T", service, "sh", "-c", CONFINED], capture_output=True, check=False)
        return done.returncode == 0

    def down(self) -> list[str]:
        """Remove everything but the images; the fault if that failed, said on stderr so that an error before it stands, too."""
        try:
            call(*self.compose, "down", "--volumes", "--timeout", "0")
        except SystemExit as error:
            print(error, file=sys.stderr)
            return ["not everything was removed"]
        return []


def rehearse(run: Run) -> dict[str, Any]:
    """Train the example's run, all containers stopped once in the middle; what was seen."""
    run.make_model()
    seen: dict[str, Any] = {"healthy_after_s": [run.start()]}
    seen["confined"] = {service: run.confined(service) for service in IN_ORDER}
    until(f"step {MIDDLE}", lambda: run.ask("status").get("state", {}).get("published_version", 0) >= MIDDLE)
    seen["stopped"] = {service: run.stop(service) for service in IN_ORDER}
    seen["healthy_after_s"].append(run.start())
    until("the end of the run", lambda: run.ask("status").get("state", {}).get("finished"))
    seen["audit"] = until("the audit", lambda: run.ask("audit"))
    return seen


def faults(seen: dict[str, Any]) -> list[str]:
    """What was not as it should be."""
    found = [f"{service} can do more than it should" for service, confined in seen["confined"].items() if not confined]
    for service, stop in seen["stopped"].items():
        found += [f"{service} ended with code {code} when it was told to end" for code in stop["exit_codes"] if code]
    audit = seen["audit"]
    if astray := audit["issued"] - sum(audit["outcomes"].values()):  # dropped as stale, filtered, evicted: ends like any other
        found.append(f"{astray} of {audit['issued']} tickets came to no end")
    return found + [f"audit: {message}" for message in audit["messages"]]  # lost or doubled among them


def main() -> int:
    """Build, measure, run; the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--no-build", action="store_true", help=f"take images that are there with the tag {TAG}")
    parser.add_argument("options", nargs="*", metavar="-- OPTION", help="further options of docker build")
    given = parser.parse_args()
    images: dict[str, dict[str, Any]] = {}
    for service in VARIANTS:
        built = {} if given.no_build else {"built_in_s": build(service, given.options)}
        images[name(service)] = built | sizes(name(service))
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder))
        try:
            seen = rehearse(run)
        finally:
            left = run.down()
    print(json.dumps({"images": images, "run": seen, "faults": (wrong := faults(seen) + left)}, indent=2))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
