"""Exit codes of a service's process, by which a supervisor knows whether a restart would help."""

from __future__ import annotations

import signal

EXIT_OK, EXIT_FAILED, EXIT_CONFIG, EXIT_REDIS = 0, 1, 2, 3
EXIT_UNLOADED = 128 + signal.SIGTERM  # told to end before any work had begun
