"""Runs code that a model wrote as a script, in the process that calls this; imports nothing but the standard library."""

from __future__ import annotations

import ast
import atexit
import contextlib
import gc
import io
import linecache
import sys
import traceback

NAME = "<code>"
OUTPUT_BYTES = 1 << 20
"""Maximum output of a run; a run with more is ended."""
KEPT_BYTES = 40_000
"""Maximum output that is kept: 10,000 characters, of up to four bytes each."""


def _write_open_files() -> None:
    """Flush the buffers of files that were left open. As garbage in a cycle, they may be closed in the wrong order."""
    there = gc.get_objects()
    for kind in (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom):
        for each in there:
            if type(each) is kind:
                with contextlib.suppress(OSError, ValueError):  # full, or closed
                    each.flush()


def run(code: str) -> None:
    """Run code as the main module; print the value of a last expression, as interactive Python does.

    Whatever it raises is printed, and ends the process with exit status 1.
    """
    linecache.cache[NAME] = (len(code), None, code.splitlines(keepends=True), NAME)
    names = {"__name__": "__main__", "__builtins__": __builtins__}
    atexit.register(_write_open_files)
    try:
        tree = ast.parse(code, NAME)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, NAME, "exec"), names)
        if isinstance(last, ast.Expr):
            sys.displayhook(eval(compile(ast.Expression(last.value), NAME, "eval"), names))
    except SystemExit:
        raise
    except BaseException as error:  # whatever it is, it is reported to the policy
        sys.stdout.flush()
        shown = traceback.TracebackException.from_exception(error)
        shown.stack = traceback.StackSummary.from_list([each for each in shown.stack if each.filename == NAME])
        print("".join(shown.format()), file=sys.stderr, flush=True)
        sys.exit(1)
