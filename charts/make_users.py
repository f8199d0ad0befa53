"""Write charts/files/users.acl: the permissions of each service's Redis user, for the chart's own Redis.

Each line is a kind of service and its rules, with @RUN@ for the name of the run and without a password. Run
`python charts/make_users.py`; a test checks that the file is up to date.
"""

from __future__ import annotations

from pathlib import Path

from services.store.acl import GRANTS, rules

FILE = Path(__file__).parent / "files" / "users.acl"
RUN = "@RUN@"
"""Placeholder for the name of the run, which the chart fills in. No run's name contains such a character."""


def make() -> str:
    """Return the file's text."""
    return "".join(" ".join((kind, *rules(RUN, kind))) + "\n" for kind in GRANTS)


if __name__ == "__main__":
    FILE.write_text(make(), encoding="utf-8")
