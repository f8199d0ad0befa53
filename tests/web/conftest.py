"""A fixture: the browser for tests of the page that have an event loop."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.web.browser import Visit, on_a_thread


@pytest.fixture(scope="module")
def visit() -> Iterator[Visit]:
    """Yield one browser for all tests of a file, each of which opens its own tabs (`opened`)."""
    with on_a_thread() as visit:
        yield visit
