"""The Dockerfiles and the compose file: pinned, rootless, multi-stage, and consistent with the code."""

from __future__ import annotations

import contextlib
import gzip
import importlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from services.config import load_resolved
from services.weights.broadcast.nccl import VLLM_MODULES
from tests.kubernetes.support import chart

DOCKER = chart.ROOT / "docker"
FILES = sorted(DOCKER.glob("*.Dockerfile"))
PROJECT = tomllib.loads((chart.ROOT / "pyproject.toml").read_text())["project"]
each = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)


def instructions(path: Path) -> list[tuple[str, str]]:
    """Return the instructions of a Dockerfile with their arguments, continued lines joined."""
    text = re.sub(r"\\\n\s*", " ", "\n".join(line for line in path.read_text().splitlines() if not line.startswith("#")))
    return [(words[0], words[1]) for line in text.splitlines() if len(words := line.split(None, 1)) == 2]


def hadolint() -> str | None:
    return shutil.which("hadolint", path=f"{sys.prefix}/bin") or shutil.which("hadolint")


def in_stages(path: Path) -> dict[str, list[tuple[str, str]]]:
    """Return the instructions by the name of their stage; the last stage is ""."""
    stages, name = dict[str, list[tuple[str, str]]](), ""
    for instruction, words in instructions(path):
        if instruction == "FROM":
            name = parts[2] if len(parts := words.split()) == 3 else ""
        stages.setdefault(name, []).append((instruction, words))
    return stages


@each
@pytest.mark.skipif(hadolint() is None, reason="no hadolint here")
def test_hadolint_finds_nothing(path: Path) -> None:
    done = subprocess.run([str(hadolint()), str(path)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout


@each
def test_images_are_pinned_built_in_stages_and_run_without_root(path: Path) -> None:
    found = instructions(path)
    arguments = dict(words.split("=", 1) for name, words in found if name == "ARG" and "=" in words)
    stages = [words.split() for name, words in found if name == "FROM"]
    names = {words[2] for words in stages if len(words) == 3}
    for words in stages:
        image = words[0].replace("${PYTHON}", arguments["PYTHON"])
        if words[0] not in names | {"scratch"} and "VARIANT" not in words[0]:
            assert re.search(r":\d+\.\d+\.\d+-slim-bookworm$", image), image
    assert len(stages) > 1
    last = found[max(i for i, (name, _) in enumerate(found) if name == "FROM") :]
    kinds = [name for name, _ in last]
    assert {"LABEL", "HEALTHCHECK", "USER", "CMD", "WORKDIR"} <= set(kinds)
    assert dict(last)["USER"] == "10001:10001"
    assert "ADD" not in kinds
    assert dict(last)["CMD"].startswith("["), "a shell in between would not forward SIGTERM"
    assert "pip" not in " ".join(words for name, words in last if name == "RUN")
    for name, words in found:
        if name == "RUN" and "apt-get install" in words:
            assert "--no-install-recommends" in words
            assert "rm -rf /var/lib/apt/lists/*" in words


@each
def test_layers_with_dependencies_do_not_depend_on_the_code(path: Path) -> None:
    found = instructions(path)
    code = next(i for i, (name, words) in enumerate(found) if (name, words) == ("COPY", "services /src/services"))
    heavy = [
        i
        for i, (name, words) in enumerate(found)
        if name == "RUN" and " install --no-compile" in words and "--no-deps --force-" not in words
    ]
    assert heavy
    assert max(heavy) < code
    copied = {word for name, words in found[:code] if name == "COPY" for word in words.split()[:-1]}
    assert copied <= {"pyproject.toml", "docker/lean.py", "requirements"}, "more volatile files invalidate the layer"


COMPILED = ("-m compileall -q -j 0 --invalidation-mode unchecked-hash /opt/grpo/lib", "/opt/grpo/bin/python /tmp/bytecode.py ")
"""Commands that compile an environment: all of it, or what dataprep's image loads. The compiled files contain no timestamps."""
IGNORING = {"PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX", "PYTHONOPTIMIZE", "PYTHONHOME"}
"""Variables that make Python skip writing such files, or look for others."""


@each
def test_every_image_contains_compiled_modules(path: Path) -> None:
    stages = in_stages(path)
    (source,) = {
        re.sub(r".*--from=(\w+).*", r"\1", words)
        for name, words in stages[""]
        if name == "COPY" and words.endswith((" /opt/grpo /opt/grpo", " / /"))
    }
    built = [words for name, words in stages[source] if name in ("RUN", "COPY")]
    compiled = [i for i, words in enumerate(built) if any(command in words for command in COMPILED)]
    assert compiled, "a pod's root is read-only, so every start would compile again"
    later = " ".join(built[compiled[-1] + 1 :])
    assert "pip" not in later
    assert "services" not in later, "files copied later are not compiled"
    variables = {word.partition("=")[0] for name, words in instructions(path) if name == "ENV" for word in words.split()}
    assert not variables & IGNORING


@pytest.mark.parametrize("service", ["generator", "trainer"])
def test_images_that_exchange_weights_support_buckets(service: str) -> None:
    """Each variant installs what `sync.folder = "s3://…"` needs."""
    requested = [
        extras.split(",")
        for name, words in instructions(DOCKER / f"{service}.Dockerfile")
        if name == "RUN"
        for extras in re.findall(r"'\.\[([\w,]+)\]'", words)
    ]
    assert len(requested) == 2
    for extras in requested:
        assert set(extras) == {service, "tracing", "bucket"}


def test_the_trainers_cuda_image_has_what_sends_weights_over_nccl() -> None:
    """The trainer's own extra does not name vLLM, because trainers without GPUs do without it."""
    (install,) = (words for name, words in in_stages(DOCKER / "trainer.Dockerfile")["build-cuda"] if name == "RUN")
    requested = {canonicalize_name(requirement.name) for requirement in requested_by(shlex.split(install))}
    assert {module.partition(".")[0] for module in VLLM_MODULES} <= requested


@each
def test_copied_and_installed_files_exist(path: Path) -> None:
    allowed = [line[1:] for line in (chart.ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for name, words in instructions(path):
        if name == "COPY" and "--from" not in words:
            sources = [word for word in shlex.split(words)[:-1] if not word.startswith("--")]
            for source in sources:
                assert (chart.ROOT / source).exists(), source
                assert source in allowed, f"{source} is excluded by .dockerignore"
        if name == "RUN":
            assert set(re.findall(r"source=([\w/]+)/", words)) <= set(allowed)
            for extras in re.findall(r"'\.\[([\w,]+)\]'", words):
                assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])
    module = re.search(r'CMD \["python", "-m", "services\.(\w+)', path.read_text())
    assert module is not None
    assert module[1] == path.stem


def pins(name: str) -> dict[str, str]:
    """Return the pins in a file of constraints."""
    lines = [line for line in (DOCKER / "constraints" / name).read_text().splitlines() if not line.startswith("#")]
    return dict(line.split("==") for line in lines)


@each
def test_a_build_needs_only_the_base_image(path: Path) -> None:
    assert "syntax=" not in path.read_text(), "another frontend is an image from a registry"


@each
def test_every_package_of_an_image_is_pinned(path: Path) -> None:
    """Requested packages are pinned, as are their dependencies where the same version is installed here."""
    stages = [
        words
        for name, words in instructions(path)
        if name == "RUN" and "install --no-compile" in words and "--force" not in words
    ]
    assert stages
    for words in stages:
        match = re.search(r"source=docker/constraints/(\w+\.txt),target=/constraints\.txt ", words)
        assert match, words
        pinned = pins(match[1])
        assert any(requested_by(shlex.split(command)) for command in words.split("&&"))
        for command in words.split("&&"):
            requested = requested_by(shlex.split(command))
            if requested and "--no-deps" not in command:
                assert "--constraint /constraints.txt" in command
                assert unpinned(requested, pinned) == set()
            for requirement in requested:
                assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)]), requirement


def requested_by(words: list[str]) -> list[Requirement]:
    """Return the packages that a pip command installs, without the code itself."""
    if "install" not in words:
        return []
    lines = [word for word in words if "==" in word]
    for word in words:
        if extras := re.fullmatch(r"\.\[([\w,]+)\]", word):
            lines += [
                *PROJECT["dependencies"],
                *(line for one in extras[1].split(",") for line in PROJECT["optional-dependencies"][one]),
            ]
        elif word.endswith(".txt") and word.startswith("requirements/"):
            lines += [line for line in (chart.ROOT / word).read_text().splitlines() if not line.startswith("#")]
    return [Requirement(line) for line in lines]


def unpinned(requested: list[Requirement], pinned: dict[str, str]) -> set[str]:
    """Return the unpinned names among the requested packages and their dependencies."""
    waiting, seen, missing = list(requested), set[tuple[str, str]](), set[str]()
    while waiting:
        wanted = waiting.pop()
        name = canonicalize_name(wanted.name)
        for extra in {"", *wanted.extras} - {extra for known, extra in seen if known == name}:
            seen.add((name, extra))
            if name not in pinned:
                missing.add(name)
                continue
            with contextlib.suppress(PackageNotFoundError):
                here = distribution(name)
                if Version(here.version).public == pinned[name]:
                    needs = [Requirement(line) for line in here.requires or []]
                    waiting += [need for need in needs if not need.marker or need.marker.evaluate({"extra": extra})]
    return missing


def test_images_and_chart_use_the_same_user() -> None:
    assert chart.parse((chart.CHART / "values.yaml").read_text())["security"]["user"] == 10001


def test_compose_is_consistent(tmp_path: Path) -> None:
    compose: dict[str, Any] = chart.parse((DOCKER / "compose.yaml").read_text())
    config = load_resolved(DOCKER / "compose.toml")
    services = compose["services"]
    for name, service in services.items():
        assert re.search(r":[\w.${}:-]+$", service["image"]), name
        for volume in service.get("volumes", []):
            assert volume.split(":")[0] in compose["volumes"]
        for needed, condition in service.get("depends_on", {}).items():
            assert needed in services
            assert (condition["condition"] == "service_healthy") <= ("healthcheck" in services[needed])
        assert set(service.get("secrets", [])) <= compose["secrets"].keys()
        if build := service.get("build"):
            assert (chart.ROOT / build["dockerfile"]).is_file()
        if name != "volumes":
            assert service["read_only"]
            assert service["user"] == "10001:10001"
            assert service["cap_drop"] == ["ALL"]
    assert config.redis.url == "redis://redis:6379/0"
    assert config.sync.host == services["trainer"]["hostname"] == "trainer"
    mounted = {f"/run/secrets/{name}" for name in compose["secrets"]}
    assert {config.redis.password_file, config.api.token_file} == mounted
    assert f"runs:{config.run.dir}" in services["trainer"]["volumes"]
    overlay = chart.parse((DOCKER / "compose.gpu.yaml").read_text())["services"]
    assert set(overlay) <= set(services)
    drain = float(services["generator"]["stop_grace_period"].rstrip("s"))
    assert drain > config.generator.drain_s + 10
    grace = 60 * float(services["trainer"]["stop_grace_period"].removesuffix("m"))
    environment = services["trainer"]["environment"]
    assert grace / 2 < float(environment["GRPO_STOP_S"]) < grace
    assert services["generator"]["environment"].items() <= environment.items()


@pytest.fixture
def rehearse(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import docker/rehearse.py."""
    monkeypatch.syspath_prepend(str(DOCKER))
    return importlib.import_module("rehearse")


def test_the_rehearsal_builds_all_images_and_runs_compose(rehearse: ModuleType, tmp_path: Path) -> None:
    services = chart.parse((DOCKER / "compose.yaml").read_text())["services"]
    assert {path.stem for path in FILES} == set(rehearse.VARIANTS)
    assert set(rehearse.IN_ORDER) == set(services) - {"volumes"}
    for service in set(rehearse.IN_ORDER) - {"redis"}:
        image = services[service]["image"].replace("${TAG:-0.2.0}", rehearse.TAG).replace("${VARIANT:-cpu}", "cpu")
        assert rehearse.name(service) == image
    (tmp_path / "config.toml").write_text(rehearse.configuration())
    config, composed = load_resolved(tmp_path / "config.toml"), load_resolved(DOCKER / "compose.toml")
    for section in ("redis", "api", "sync"):
        assert getattr(config, section) == getattr(composed, section)
    assert config.run.dir == composed.run.dir
    assert config.model.path.startswith(services["generator"]["volumes"][0].split(":")[1])
    assert config.run.steps > rehearse.MIDDLE


def test_a_layer_is_measured_plain_and_gzipped(rehearse: ModuleType) -> None:
    plain = b"0123456789" * 200_000
    zipped = gzip.compress(plain, 6)
    assert rehearse.layer_sizes(io.BytesIO(zipped), len(zipped)) == (len(plain), len(zipped))
    size, compressed = rehearse.layer_sizes(io.BytesIO(plain), len(plain))
    assert size == len(plain)
    assert abs(compressed - len(zipped)) < 32  # gzip's own header


def test_the_rehearsal_names_problems(rehearse: ModuleType) -> None:
    audit = {"issued": 8, "outcomes": {"trained": 6, "stale": 1, "filtered:zero_std": 1}, "messages": []}
    seen = {"confined": {"redis": True}, "stopped": {"redis": {"seconds": 0.2, "exit_codes": [0, 0]}}, "audit": audit}
    assert rehearse.faults(seen) == []
    seen = {
        "confined": {"redis": False},
        "stopped": {"redis": {"seconds": 9.0, "exit_codes": [0, 137]}},
        "audit": audit | {"outcomes": {"trained": 7}, "messages": ["1 of 8 issued tickets are lost"]},
    }
    assert len(rehearse.faults(seen)) == 4


def test_the_rehearsal_reports_failures_and_failed_cleanup(
    rehearse: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def call(*words: str) -> str:
        raise SystemExit("in use" if "down" in words else "no model")

    monkeypatch.setattr(rehearse, "call", call)
    monkeypatch.setattr(rehearse, "sizes", lambda _: {})
    monkeypatch.setattr("os.environ", dict(os.environ))  # Compose's variables are set there
    monkeypatch.setattr(sys, "argv", ["rehearse.py", "--no-build"])
    with pytest.raises(SystemExit, match="no model"):
        rehearse.main()
    assert "in use" in capsys.readouterr().err
