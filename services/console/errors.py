"""Errors of the console, each a line that says what happened and what to do, and the exit codes of `grpo`."""

from __future__ import annotations

EXIT_OK, EXIT_FAILED, EXIT_CONFIG, EXIT_REDIS, EXIT_STOPPED = 0, 1, 2, 3, 130

EXIT_CODES = """Exit codes: 0 done; 1 the run failed, an audit found a fault (a lost or doubled ticket), nothing could be
requeued, a checkpoint cannot be written or taken up, a wait for an effect was in vain, a service did not answer, or doctor found
a fault; 2 the command line, the configuration or the run folder is at fault, what was asked for is not there, or a service
refused it; 3 Redis is at fault; 130 stopped before its end (the same command continues the run)."""


class ConsoleError(Exception):
    """What ends a command: the message is shown as one line, `code` is the exit code."""

    def __init__(self, message: str, code: int = EXIT_FAILED) -> None:
        super().__init__(message)
        self.code = code
