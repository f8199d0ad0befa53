"""Errors of the store, each a line that says what happened and what to do."""

from __future__ import annotations


class StoreError(Exception):
    """Redis cannot be used as it is; the message says why and how to mend it."""


class Fenced(StoreError):
    """A newer leader or trainer has taken over: this process must stop writing."""


class OutOfOrder(StoreError):
    """A step or version does not follow the last one; read the run's state again."""


class DifferentRun(StoreError):
    """Another run already has this name."""
