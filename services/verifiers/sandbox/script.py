"""Runs code that a model wrote as a script, in the process that calls this; imports nothing but the standard library."""

from __future__ import annotations

import ast
import atexit
import linecache
import sys
import traceback

NAME = "<code>"
OUTPUT_BYTES = 1 << 20
"""Most output of a run; with more, it is ended."""
KEPT_BYTES = 40_000
"""Most of it that is kept: 10,000 characters, of up to four bytes each."""


def run(code: str) -> None:
    """Run code as the main module; print the value of a last expression, as an interactive Python does.

    Whatever it raises is printed, and ends the process with exit status 1.
    """
    linecache.cache[NAME] = (len(code), None, code.splitlines(keepends=True), NAME)
    names = {"__name__": "__main__", "__builtins__": __builtins__}
    atexit.register(names.clear)  # as of a main module, so that files which it left open are written: garbage in a cycle is not
    try:
        tree = ast.parse(code, NAME)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, NAME, "exec"), names)
        if isinstance(last, ast.Expr):
            sys.displayhook(eval(compile(ast.Expression(last.value), NAME, "eval"), names))
    except SystemExit:
        raise
    except BaseException as error:  # whatever it is, the policy is told
        sys.stdout.flush()
        shown = traceback.TracebackException.from_exception(error)
        shown.stack = traceback.StackSummary.from_list([each for each in shown.stack if each.filename == NAME])
        print("".join(shown.format()), file=sys.stderr, flush=True)
        sys.exit(1)
