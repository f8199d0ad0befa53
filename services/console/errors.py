"""The console's error type, whose message is one line that says what happened and what to do, and the exit codes of `grpo`."""

from __future__ import annotations

EXIT_OK, EXIT_FAILED, EXIT_CONFIG, EXIT_REDIS, EXIT_STOPPED = 0, 1, 2, 3, 130

EXIT_CODES = """Exit codes: 0 success; 1 the run failed, an audit found a lost or duplicated ticket, nothing could be requeued,
a checkpoint cannot be written or loaded, a wait timed out, a service did not respond, or doctor found a problem; 2 the command
line, the configuration or the run folder is invalid, the requested item does not exist, or a service refused the request; 3
Redis failed; 130 stopped early (rerun the same command to resume)."""


class ConsoleError(Exception):
    """An error that ends the command. Its message is shown as one line; `code` is the exit code."""

    def __init__(self, message: str, code: int = EXIT_FAILED) -> None:
        super().__init__(message)
        self.code = code
