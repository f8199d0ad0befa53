"""Compile the modules that dataprep's image loads, and no others: `python bytecode.py MODULE…`. It costs 10 MB.

A pod's root is read-only, so without this every start would compile them again, which takes 7 to 9 s. The files are not checked
against their sources, since an image may not keep modification times.
"""

from __future__ import annotations

import importlib
import py_compile
import sys

MODE = py_compile.PycInvalidationMode.UNCHECKED_HASH


def loaded(names: list[str]) -> int:
    """Compile the modules `names` and all that they import. Return their number."""
    for name in names:
        importlib.import_module(name)
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    sources = sorted(file for file in files if file and file.endswith(".py"))
    for source in sources:
        py_compile.compile(source, doraise=True, invalidation_mode=MODE)
    return len(sources)


if __name__ == "__main__":
    print(f"compiled {loaded(sys.argv[1:])} modules")
