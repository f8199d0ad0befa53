"""Rewrite the assertions of all test files once, before each pytest-xdist worker does so as it collects the same files.

It happens in a separate process while the zygote imports, which leaves the second core idle. In a clean clone it halves a
worker's collection time; files that have not changed since are skipped.
"""

from __future__ import annotations

import os
import traceback

import pytest
from _pytest.assertion import rewrite

from tests.support.preloading.starter import ROOT


def start(config: pytest.Config) -> int:
    """Start the process and return its id, which the caller must wait for. The caller must have no other threads."""
    if (process := os.fork()) != 0:
        return process
    try:
        for path in sorted((ROOT / "tests").rglob("test_*.py")):
            folder = rewrite.get_cache_dir(path)
            folder.mkdir(exist_ok=True)
            compiled = folder / (path.stem + rewrite.PYC_TAIL)
            if rewrite._read_pyc(path, compiled) is None:
                digest, code = rewrite._rewrite_test(path, config)
                rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, digest, compiled)
    except BaseException:  # this process must exit here whatever was raised; the workers compile what is missing
        traceback.print_exc()
    finally:
        os._exit(0)
