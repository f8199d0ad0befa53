"""Write alert rules, dashboard and the tables of docs/operating.md: `python -m monitoring [--check]`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from monitoring import alerts, dashboard, page

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "operating.md"


def made() -> dict[Path, str]:
    """Return every generated file with its content."""
    files = ROOT / "charts" / "files"
    return {
        files / "alerts.yaml": alerts.as_yaml(),
        files / "dashboard.json": dashboard.as_json(),
        PAGE: page.fill(PAGE.read_text(encoding="utf-8")),
    }


def main() -> int:
    """Write the files, or with --check report which are out of date. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m monitoring", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file is out of date")
    old = {
        path: text
        for path, text in made().items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    }  # fmt: skip
    if parser.parse_args().check:
        for path in old:
            print(f"{path.relative_to(ROOT)} is out of date: run python -m monitoring")
        return int(bool(old))
    for path, text in old.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
