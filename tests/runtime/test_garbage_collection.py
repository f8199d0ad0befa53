"""Imports run no garbage collection, and later collections skip the objects that they loaded."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from services.runtime import garbage_collection

FROZEN = """
import gc, sys
from services.runtime import garbage_collection

with garbage_collection.importing():
    collected = gc.get_stats()[0]["collections"]
    import services.config
    assert gc.get_stats()[0]["collections"] == collected
assert gc.get_freeze_count() > 10_000
assert not any(one is sys.modules["services.config"].__dict__ for one in gc.get_objects())
"""


def test_what_an_import_loads_is_excluded_from_later_collections() -> None:
    subprocess.run([sys.executable, "-c", FROZEN], check=True)


def test_collection_resumes_after_a_failed_import() -> None:
    enabled: list[bool] = []

    @garbage_collection.importing()
    def load() -> None:
        enabled.append(gc.isenabled())
        raise ImportError

    with pytest.raises(ImportError):
        load()
    assert [*enabled, gc.isenabled()] == [False, True]


def test_nested_imports_do_not_resume_collection_early() -> None:
    with garbage_collection.importing():
        with garbage_collection.importing():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
