"""Guards whose removal no test notices, and why: what would go wrong without them is also prevented by something else."""

from __future__ import annotations

EXPLAINED: dict[str, str] = {}
