"""No garbage is collected while a process imports."""

from __future__ import annotations

import gc

import pytest

from services.runtime import garbage_collection


def test_collections_go_on_after_an_import_that_fails() -> None:
    enabled: list[bool] = []

    @garbage_collection.paused()
    def load() -> None:
        enabled.append(gc.isenabled())
        raise ImportError

    with pytest.raises(ImportError):
        load()
    assert [*enabled, gc.isenabled()] == [False, True]


def test_a_pause_within_a_pause_ends_nothing() -> None:
    with garbage_collection.paused():
        with garbage_collection.paused():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
