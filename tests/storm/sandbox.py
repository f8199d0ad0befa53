"""The sandbox service of a storm: the real one, with credentials for a cluster whose pods are local processes.

`python -m tests.storm.sandbox CONFIG NAME ACCOUNT`.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from services.config.load import load_resolved
from services.http.entry import Arguments
from services.sandbox import __main__ as service

if __name__ == "__main__":
    service.SWEEP_S = 0.5
    asyncio.run(service.keep(Arguments(load_resolved(sys.argv[1]), sys.argv[2]), os.environ, Path(sys.argv[3])))
