"""The code of a run under test: a copy of `services`, complete or with one guard removed.

Guarantees: changes to the working tree do not affect runs; a guard that no longer exists verbatim is an error, not a silent pass.
"""

from __future__ import annotations

import shutil
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent

MUTANTS = {
    "fencing": (
        "services/store/functions/prelude.lua",
        "  if redis.call('HGET', prefix .. ':run', field) ~= fence then\n",
        "  if false then\n",
    ),
    "commit": (
        "services/store/functions/steps.lua",
        "  if step <= committed then return 0 end\n  if step ~= committed + 1 or step > number(prefix, 'prepared_step') then\n",
        "  if step > number(prefix, 'prepared_step') then\n",
    ),
    "submit": (
        "services/store/functions/tickets.lua",
        "  return redis.call('HGET', prefix .. ':claims', entry) == consumer .. '|' .. fence\n",
        "  return true\n",
    ),
    "commit_turn": (
        "services/store/functions/tickets.lua",
        "      if (before[1] or '0') ~= args[i + 5] then\n",
        "      if false then\n",
    ),
    "restart_rollout": (
        "services/store/functions/tickets.lua",
        "  if before >= now then return before == now and 1 or 0 end\n",
        "",
    ),
}
"""Name -> file, guard and replacement."""


def copy_code(to: Path, mutant: str = "") -> None:
    """Copy `services` to `to/services`. Raises `LookupError` unless the guard of `mutant` occurs there exactly once."""
    shutil.copytree(ROOT / "services", to / "services", ignore=shutil.ignore_patterns("__pycache__"))
    if mutant:
        name, guard, without = MUTANTS[mutant]
        text = (to / name).read_text()
        if text.count(guard) != 1:
            raise LookupError(
                f"mutant {mutant}: {name} holds its guard {text.count(guard)} times; write the guard again:\n{guard}"
            )
        (to / name).write_text(text.replace(guard, without))
