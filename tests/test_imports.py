"""Rules that a reader can rely on: allowed imports, light modules, no unused configuration key."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from services.config.base import Section

ROOT = Path(__file__).parent.parent
SERVICES = ROOT / "services"
LAYERS = (
    "protocol",
    "config",
    "chat",
    "groups",
    "store",
    "runtime",
    "operations",
    "http",
    "weights",
    "confined",
    "verifiers",
)
"""Each layer may import itself and those before it."""
SERVICE_LAYERS = {
    "generator": LAYERS,
    "environment": LAYERS,
    "dataprep": LAYERS,
    "trainer": LAYERS,
    # `grpo web` only serves a page; data, verifiers and environments are tried out before a run
    "console": (*LAYERS, "web", "dataprep", "environment", "generator"),
    "tracker": LAYERS,
    "scaler": LAYERS,
    "web": LAYERS,
}
MAY_IMPORT = {layer: {*LAYERS[:i], layer} for i, layer in enumerate(LAYERS)} | {
    service: {*layers, service} for service, layers in SERVICE_LAYERS.items()
}
LIGHT_WEIGHTS = ("catalogue", "catch_up", "member", "membership", "reaching", "receiver")  # the other modules move tensors
HEAVY = ("torch", "vllm", "deepspeed", "transformers", "kubernetes")
OF_CLUSTERS = ("services.scaler",)
"""Packages whose modules may import a cluster client, which takes half a second; others import it where they need it."""


def layer_of(module: str) -> str:
    """Return the layer of one of our modules."""
    return module.split(".")[1]


def modules_of(layer: str) -> list[Path]:
    paths = SERVICES.rglob("*.py")
    return [path for path in paths if path.parent != SERVICES and layer_of(name_of(path)) == layer]


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def imported(path: Path) -> list[str]:
    """Return what a module imports, anywhere in it."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def imported_layers(path: Path) -> set[str]:
    return {layer_of(name) for name in imported(path) if name.startswith("services.")}


@pytest.mark.parametrize("layer", sorted(MAY_IMPORT))
def test_packages_import_inwards_only(layer: str) -> None:
    modules = modules_of(layer)
    assert modules
    for path in modules:
        assert imported_layers(path) <= MAY_IMPORT[layer], path


def module_of(name: str) -> str | None:
    """Return the module that an imported name is or belongs to: `services.store.Store` belongs to `services.store`."""
    for known in (name, name.rpartition(".")[0]):
        path = ROOT.joinpath(*known.split("."))
        if path.with_suffix(".py").is_file():
            return known
        if (path / "__init__.py").is_file():
            return f"{known}.__init__"
    return None


@pytest.mark.parametrize("package", ["services", "benchmarks"])
def test_there_are_no_import_cycles(package: str) -> None:
    """Find cycles, counting imports inside functions and for type checkers, too."""
    paths = [path for path in (ROOT / package).rglob("*.py") if path.parent != SERVICES]
    graph = {
        name_of(path): {module for name in imported(path) if (module := module_of(name))} - {name_of(path)} for path in paths
    }
    assert sum(map(len, graph.values())) > len(graph)
    TopologicalSorter(graph).prepare()  # CycleError names the modules of a cycle


def loaded_heavy(statement: str, heavy: tuple[str, ...] = HEAVY) -> str:
    """Return which modules of `heavy` a statement imports. Garbage collection would take a fifth of that time."""
    code = f"import gc, sys; gc.disable(); {statement}; print(*[name for name in {heavy} if name in sys.modules])"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize(("of_clusters", "loaded"), [(False, ""), (True, "kubernetes")])
def test_light_packages_import_nothing_heavy(of_clusters: bool, loaded: str) -> None:
    modules = [
        name_of(path)
        for layer in (*LAYERS, "dataprep", "environment", "console", "tracker", "scaler", "web")
        for path in modules_of(layer)
        if path.name != "__init__.py" and (layer != "weights" or path.stem in LIGHT_WEIGHTS)
    ]
    modules = [name for name in modules if name.startswith(OF_CLUSTERS) == of_clusters]
    assert loaded_heavy("import importlib; [importlib.import_module(name) for name in " + repr(modules) + "]") == loaded


@pytest.mark.parametrize("layer", ["generator", "trainer", "weights"])
def test_packages_with_heavy_modules_import_no_cluster_client(layer: str) -> None:
    """Read their import statements, since importing them would take long."""
    for path in modules_of(layer):
        names = {name for name in imported(path) if name.startswith(("kubernetes", *OF_CLUSTERS))}
        assert not names, path


@pytest.mark.parametrize(
    ("service", "loaded"),
    [
        *((name, "") for name in ("generator", "environment", "dataprep", "trainer", "console.commands", "tracker", "web")),
        ("scaler", "kubernetes"),
    ],
)
def test_entry_points_import_nothing_heavy(service: str, loaded: str) -> None:
    assert loaded_heavy(f"import services.{service}.__main__") == loaded


@pytest.mark.parametrize("module", ["trainer.node", "trainer.save", "generator.drain", "dataprep.prompts.preload"])
def test_other_programs_in_pods_import_nothing_heavy(module: str) -> None:
    assert loaded_heavy(f"import services.{module}", (*HEAVY, "fastapi")) == ""


def test_every_configuration_key_is_read_somewhere() -> None:
    code = "\n".join(path.read_text() for path in SERVICES.rglob("*.py") if path.parent.name != "config")
    keys = {f"{section.__name__}.{name}" for section in Section.__subclasses__() for name in section.model_fields}
    assert len(keys) > 80
    of_sections = "\n".join(path.read_text() for path in (SERVICES / "config").glob("*.py"))  # properties, which read `self.KEY`
    unread = {key for key in keys if not re.search(rf"\.{key.split('.')[1]}\b", code)}
    assert {key for key in unread if not re.search(rf"\bself\.{key.split('.')[1]}\b", of_sections)} == set()
