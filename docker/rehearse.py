"""Build every image, run the example with them, and print the results as JSON.

    python docker/rehearse.py                                            (needs only Docker with Compose 2, and Python)
    python docker/rehearse.py -- --build-arg TORCH_INDEX=https://…       (with further options of `docker build`)

The run is that of compose.yaml with the task of examples/arithmetic and two generators. Halfway through, every container is
stopped; then all are started again and the run resumes. `faults` lists what went wrong; the exit code is then 1.
Guarantees: containers, networks, volumes and secrets belong to the rehearsal and are removed at its end; images are kept, under
their own tag.
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
IN_ORDER = ("generator", "trainer", "dataprep", "redis")  # the order in which they are stopped
GENERATORS, STEPS, MIDDLE = 2, 60, 10
MODEL = "/srv/grpo/models/arithmetic"
CHUNK_BYTES = 1 << 20
LIMIT_S = 900.0  # limit of any wait
CONFINED = 'test "$(id -u)" = 10001 && ! touch /x 2>/dev/null && touch /tmp/x && ! grep -q "^Cap.*:.*[1-9a-f]" /proc/self/status'
Found = TypeVar("Found")


def call(*words: str) -> str:
    """Return the output of a command. If it fails, exit with the end of its stderr."""
    done = subprocess.run(words, text=True, capture_output=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} ended with {done.returncode}: {done.stderr[-4000:]}")
    return done.stdout


def until(what: str, look: Callable[[], Found | None]) -> Found:
    """Call `look` once a second until it returns something."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        if found := look():
            return found
        time.sleep(1.0)
    raise SystemExit(f"timed out after {LIMIT_S:g} s waiting for {what}")


def name(service: str) -> str:
    """Return the name of a service's image."""
    variant = VARIANTS[service]
    return f"grpo-{service}:{TAG}" + (f"-{variant}" if variant else "")


def build(service: str, options: list[str]) -> float:
    """Build a service's image and return the seconds it took."""
    began = time.monotonic()
    variant = ["--build-arg", f"VARIANT={VARIANTS[service]}"] if VARIANTS[service] else []
    call("docker", "build", "-f", f"{ROOT}/docker/{service}.Dockerfile", "-t", name(service), *variant, *options, str(ROOT))
    return round(time.monotonic() - began, 1)


def sizes(image: str) -> dict[str, int]:
    """Return the bytes of an image: all layers uncompressed, all layers compressed one by one, and the largest layer."""
    saving = subprocess.Popen(["docker", "save", image], stdout=subprocess.PIPE)
    with saving, tarfile.open(fileobj=saving.stdout, mode="r|") as archive:
        files = ((archive.extractfile(member), member.size) for member in archive)
        layers = [layer_sizes(file, size) for file, size in files if file]
    plain, compressed = zip(*layers, strict=True)
    return {"bytes": sum(plain), "compressed_bytes": sum(compressed), "largest_layer_bytes": max(plain)}


def layer_sizes(file: IO[bytes], size: int) -> tuple[int, int]:
    """Return the bytes of a layer uncompressed and with gzip, as registries store it; Docker saves either of the two."""
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
    """Return the example's configuration, with the addresses and folders of compose.toml."""

    def sections(path: str) -> list[str]:
        return re.split(r"^(?=\[)", (ROOT / path).read_text(encoding="utf-8"), flags=re.MULTILINE)

    text = "".join(sections("examples/arithmetic/config.toml"))
    text = re.sub(r"^\[run\]\n", '[run]\ndir = "/srv/grpo/runs"\n', text, flags=re.MULTILINE)
    text = re.sub(r"^steps = .*", f"steps = {STEPS}", text, flags=re.MULTILINE)
    text = re.sub(r'^path = "build.*', f'path = "{MODEL}"', text, flags=re.MULTILINE)
    return text + "\n" + "".join(part for part in sections("docker/compose.toml") if re.match(r"\[(redis|api|sync)\]", part))


class Run:
    """The run of the rehearsal. `folder` holds its secrets and configuration."""

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
        """Return what Docker knows of a service's containers."""
        found = call(*self.compose, "ps", "-a", "-q", service).split()
        return json.loads(call("docker", "inspect", *found)) if found else []

    def make_model(self) -> None:
        """Warm-start the example's model in the generator's image, which has all the packages for it."""
        examples = ("-v", f"{ROOT}/examples:/srv/grpo/code/examples:ro", "-e", "PYTHONPATH=/srv/grpo/code")
        call(
            *self.compose, "run", "--rm", *examples, "generator", "python", "-m", "examples.arithmetic.warmstart", "--out", MODEL
        )

    def start(self) -> float:
        """Start all containers, wait until each is healthy, and return the seconds it took."""
        began = time.monotonic()
        call(*self.compose, "up", "-d", "--no-build", "--scale", f"generator={GENERATORS}")

        def healthy() -> bool:
            states = [found["State"] for service in IN_ORDER for found in self.containers(service)]
            return all(state.get("Health", {}).get("Status") == "healthy" for state in states)

        until("every container to be healthy", healthy)
        return round(time.monotonic() - began, 1)

    def ask(self, *words: str) -> dict[str, Any]:
        """Return the output of `grpo WORDS --json` in dataprep's container; empty while it starts."""
        done = subprocess.run(
            [*self.compose, "exec", "-T", "dataprep", "grpo", *words, "--json"], capture_output=True, check=False
        )
        return json.loads(done.stdout) if done.stdout.startswith(b"{") else {}

    def stop(self, service: str) -> dict[str, Any]:
        """Stop a service's containers; return the seconds it took and their exit codes."""
        began = time.monotonic()
        call(*self.compose, "stop", service)
        codes = [found["State"]["ExitCode"] for found in self.containers(service)]
        return {"seconds": round(time.monotonic() - began, 1), "exit_codes": codes}

    def confined(self, service: str) -> bool:
        """Return whether its processes run without root and capabilities, and can only write to /tmp."""
        done = subprocess.run([*self.compose, "exec", "-T", service, "sh", "-c", CONFINED], capture_output=True, check=False)
        return done.returncode == 0

    def down(self) -> list[str]:
        """Remove everything except the images. If that fails, return the fault, and print it, as an earlier error may hide it."""
        try:
            call(*self.compose, "down", "--volumes", "--timeout", "0")
        except SystemExit as error:
            print(error, file=sys.stderr)
            return ["some containers, networks or volumes were not removed"]
        return []


def rehearse(run: Run) -> dict[str, Any]:
    """Train the example's run, stopping all containers once halfway, and return the observations."""
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
    """Return what went wrong."""
    found = [f"{service} is not confined" for service, confined in seen["confined"].items() if not confined]
    for service, stop in seen["stopped"].items():
        found += [f"{service} exited with code {code} when it was stopped" for code in stop["exit_codes"] if code]
    audit = seen["audit"]
    if astray := audit["issued"] - sum(audit["outcomes"].values()):  # dropped as stale, filtered or evicted counts as ended
        found.append(f"{astray} of {audit['issued']} tickets have no outcome")
    return found + [f"audit: {message}" for message in audit["messages"]]  # including lost or doubled tickets


def main() -> int:
    """Build, measure, run, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--no-build", action="store_true", help=f"use existing images with the tag {TAG}")
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
