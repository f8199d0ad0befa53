"""TRL's virtual environment, build/trl: it borrows torch and transformers from the one this runs in, so it is made in seconds."""

from __future__ import annotations

import site
import subprocess
import sys
from pathlib import Path

TRL = "trl==1.16.0"  # works with the transformers of pyproject.toml
PEER = Path(__file__).parent.parent.parent / "build" / "trl"


def trl_python() -> Path:
    """Its Python; the environment is made once. Raises SystemExit when TRL cannot be installed."""
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
