"""Garbage collection is paused during imports."""

from __future__ import annotations

import gc

import pytest

from services.runtime import garbage_collection


def test_collection_resumes_after_a_failed_import() -> None:
    enabled: list[bool] = []

    @garbage_collection.paused()
    def load() -> None:
        enabled.append(gc.isenabled())
        raise ImportError

    with pytest.raises(ImportError):
        load()
    assert [*enabled, gc.isenabled()] == [False, True]


def test_a_nested_pause_does_not_end_the_outer_one() -> None:
    with garbage_collection.paused():
        with garbage_collection.paused():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
