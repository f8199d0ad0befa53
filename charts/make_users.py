"""Write charts/files/users.acl: what the Redis user of each kind of service may do, for the chart's own Redis.

A line is a kind and its rules, with @RUN@ for the name of the run; no password stands in it. `python charts/make_users.py`; a
test holds that the file is what this makes.
"""

from __future__ import annotations

from pathlib import Path

from services.store.acl import GRANTS, rules

FILE = Path(__file__).parent / "files" / "users.acl"
RUN = "@RUN@"
"""Stands for the name of the run, which the chart knows; no name of a run has such a character."""


def make() -> str:
    """The file."""
    return "".join(" ".join((kind, *rules(RUN, kind))) + "\n" for kind in GRANTS)


if __name__ == "__main__":
    FILE.write_text(make(), encoding="utf-8")
