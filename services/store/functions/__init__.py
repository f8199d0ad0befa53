"""The Redis Functions as one library, named by the digest of its code.

Different versions of the code have different names, so runs of two versions may share a server, and a service that finds the
library loaded need not load it again.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

SHARED = ("arguments", "prelude", "replay_table")
"""Files whose helpers the others use."""

FILES = ("tickets", "replay", "steps", "deadletters", "control", "fleet", "evaluation", "snapshot", "samples")


@cache
def library() -> tuple[str, str]:
    """Return the name of the library and its code, in the format of `FUNCTION LOAD`."""
    folder = Path(__file__).parent
    # Each file becomes a separate block, so that its locals stay its own; later files may use only the helpers that a shared file
    # leaves in the prelude.
    parts = [(folder / f"{name}.lua").read_text() for name in SHARED]
    parts += [f"do\n{(folder / f'{name}.lua').read_text()}\nend" for name in FILES]
    body = "\n".join(parts)
    name = f"grpo_{hashlib.sha256(body.encode()).hexdigest()[:12]}"
    return name, f"#!lua name={name}\nlocal LIBRARY = '{name}'\n{body}"
