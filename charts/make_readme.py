"""Write charts/README.md: every value with its default and meaning, from values.yaml and its comments.

Run `python charts/make_readme.py`; a test checks that the file is up to date.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
FILE = HERE / "README.md"
LINE = re.compile(r"^(?P<indent> *)(?P<key>[A-Za-z]\w*):(?P<value> [^#]*?)?\s*(?:#\s*(?P<meaning>.*))?$")
HEAD = """# The grpo chart

Installs a run of asynchronous GRPO on Kubernetes. [docs/kubernetes.md](../docs/kubernetes.md) explains how to install,
scale, upgrade and repair it; [examples](examples) has values for common sizes. `values.schema.json` rejects wrong keys and types,
including those of `config`.

Every section of pods ({pods}) accepts the keys of `podDefaults`, too.

| value | default | meaning |
|---|---|---|
"""


def comments(text: str) -> dict[str, str]:
    """Return the comment of each key, by its path. A comment line above a key, or continued below it, belongs to it."""
    found: dict[str, str] = {}
    path: list[str] = []
    above: list[str] = []
    last = ""
    for line in text.splitlines():
        bare = line.strip()
        if bare.startswith("#"):
            deep = len(line) - len(line.lstrip()) > 20
            if deep and last:
                found[last] = f"{found.get(last, '')} {bare[1:].strip()}".strip()
            elif line.startswith("#"):
                above.append(bare[1:].strip())
            continue
        if match := LINE.match(line):
            depth = len(match["indent"]) // 2
            path = [*path[:depth], match["key"]]
            last = ".".join(path)
            meaning = " ".join([*above, match["meaning"] or ""]).strip()
            if meaning:
                found[last] = meaning
        above = []
    return found


def leaves(tree: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield path and default of every value; a map whose keys are not the chart's own counts as one value."""
    for key, value in tree.items():
        here = (*path, key)
        if isinstance(value, dict) and value and key not in ("requests", "limits", "startup", "liveness", "readiness"):
            yield ".".join(here), None
            yield from leaves(value, here)
        else:
            yield ".".join(here), value


def make() -> str:
    """Return the file's text."""
    from make_schema import PODS

    text = (HERE / "values.yaml").read_text(encoding="utf-8")
    meanings = comments(text)
    rows: list[str] = []
    for path, value in leaves(yaml.safe_load(text)):
        meaning = meanings.get(path, "").replace("|", r"\|")
        if value is None and not meaning:
            continue
        default = "" if value is None else f"`{json.dumps(value, ensure_ascii=False)}`"
        rows.append(f"| `{path}` | {default} | {meaning} |")
    return HEAD.format(pods=", ".join(f"`{pod}`" for pod in PODS)) + "\n".join(rows) + "\n"


if __name__ == "__main__":
    FILE.write_text(make(), encoding="utf-8")
