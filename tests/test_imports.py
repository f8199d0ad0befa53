"""The house rules that a reader relies on: who imports whom, what stays light, no configuration key without a reader."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from services.config.base import Section

ROOT = Path(__file__).parent.parent
SERVICES = ROOT / "services"
LAYERS = ("protocol", "config", "algorithm", "store", "runtime", "weights", "operations")
"""Each may import those before it, and itself."""
SERVICE_LAYERS = {
    "generator": LAYERS,
    "dataprep": LAYERS,
    "trainer": LAYERS,
    "console": (*LAYERS, "web"),  # `grpo web` is the console as a page
    "tracker": LAYERS,
    "scaler": LAYERS,
    "web": LAYERS,
}
MAY_IMPORT = {layer: {*LAYERS[:i], layer} for i, layer in enumerate(LAYERS)} | {
    service: {*layers, service} for service, layers in SERVICE_LAYERS.items()
}
LIGHT_WEIGHTS = ("member", "membership", "receiver")  # the other modules move tensors
HEAVY = ("torch", "vllm", "deepspeed", "transformers")


def imported_rooms(path: Path) -> set[str]:
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.append(node.module)
    return {name.split(".")[1] for name in names if name.startswith("services.")}


@pytest.mark.parametrize("room", sorted(MAY_IMPORT))
def test_rooms_import_inwards_only(room: str) -> None:
    for path in (SERVICES / room).rglob("*.py"):
        assert imported_rooms(path) <= MAY_IMPORT[room], path


def loaded_heavy(statement: str) -> str:
    code = f"import sys; {statement}; print(*[name for name in {HEAVY} if name in sys.modules])"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_light_rooms_import_nothing_heavy() -> None:
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for room in (*LAYERS, "dataprep", "console", "tracker", "scaler", "web")
        for path in (SERVICES / room).rglob("*.py")
        if path.name != "__init__.py" and (room != "weights" or path.stem in LIGHT_WEIGHTS)
    ]
    assert loaded_heavy("import importlib; [importlib.import_module(name) for name in " + repr(modules) + "]") == ""


@pytest.mark.parametrize("service", ["generator", "dataprep", "trainer", "console", "tracker", "scaler", "web"])
def test_entry_points_import_nothing_heavy(service: str) -> None:
    assert loaded_heavy(f"import services.{service}.__main__") == ""


def test_every_configuration_key_is_read_somewhere() -> None:
    code = "\n".join(path.read_text() for path in SERVICES.rglob("*.py") if path.parent.name != "config")
    keys = {f"{section.__name__}.{name}" for section in Section.__subclasses__() for name in section.model_fields}
    assert len(keys) > 80
    assert {key for key in keys if not re.search(rf"\.{key.split('.')[1]}\b", code)} == set()
