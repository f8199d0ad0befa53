"""TRL's virtual environment, build/trl. It borrows torch and transformers from the current one, so creating it takes seconds."""

from __future__ import annotations

import site
import subprocess
import sys
from pathlib import Path

TRL = "trl==1.16.0"  # works with the transformers of pyproject.toml
PEER = Path(__file__).parent.parent.parent / "build" / "trl"


def trl_python() -> Path:
    """Return its Python; the first call creates the environment. Raises SystemExit if TRL cannot be installed."""
    python, done = PEER / "bin" / "python", PEER / ".installed"
    if not done.exists():
        print(f"installing {TRL} into {PEER}", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(PEER)], check=True)
        packages = next(PEER.glob("lib/python*/site-packages"))
        (packages / "borrowed.pth").write_text("\n".join(site.getsitepackages()))
        pip = subprocess.run([str(python), "-m", "pip", "install", "-q", TRL], capture_output=True, text=True, check=False)
        if pip.returncode:
            raise SystemExit(f"cannot install {TRL}: {pip.stderr[-500:]}")
        done.touch()
    return python
