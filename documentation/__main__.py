"""Write the reference pages: `python -m documentation [--check]`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from documentation import commands, configuration, endpoints, metrics

ROOT = Path(__file__).parent.parent
NOTE = "<!-- made by python -m documentation: change the code, not this page -->\n\n"


def made() -> dict[Path, str]:
    """Return every generated page with its content."""
    pages = {"configuration": configuration, "cli": commands, "rest": endpoints, "metrics": metrics}
    return {ROOT / "docs" / "reference" / f"{name}.md": NOTE + each.page() for name, each in pages.items()}


def main() -> int:
    """Write the pages, or with --check report which are out of date. Return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m documentation", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a page is out of date")
    old = {path: text for path, text in made().items() if not path.exists() or path.read_text(encoding="utf-8") != text}
    if parser.parse_args().check:
        for path in old:
            print(f"{path.relative_to(ROOT)} is out of date: run python -m documentation")
        return int(bool(old))
    for path, text in old.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
