"""Write alert rules, dashboard and the tables of docs/operating.md: `python -m monitoring`."""

from __future__ import annotations

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


def main() -> None:
    """Write the files."""
    for path, text in made().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
