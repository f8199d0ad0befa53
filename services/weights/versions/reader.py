"""Brings a mirror to a version from the store, by the shortest way from what it holds.

Guarantees: nothing is read that the catalogue does not name; parts come several at a time, and no more than a few of an anchor
are in memory; every wait has a limit; an error leaves the mirror at a version or empty (`WeightMirror.apply`). What comes from
the store may be anything (manifest.py, mirror.py).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from services.weights.checksums import WeightChanged
from services.weights.collective import Deadline
from services.weights.versions import catalogue, manifest
from services.weights.versions.catalogue import CATALOGUE, MANIFEST, Catalogue, Entry
from services.weights.versions.manifest import VersionManifest
from services.weights.versions.mirror import NOTHING, WeightMirror
from services.weights.versions.objects import open_objects
from services.weights.versions.positions import InvalidVersion

AHEAD = 4
"""Objects fetched at a time. Over a link of 80 ms, one after the other would leave it idle."""

_LATE_S = 5.0  # an NFS client may show a catalogue that is some seconds old
_POLL_S = 0.1


@dataclass(frozen=True)
class FetchedVersion:
    """What was read to bring a mirror to a version."""

    objects: int
    nbytes: int
    full_nbytes: int
    seconds: float


class VersionReader:
    """Reads the versions of one trainer. A mirror may be shared by several readers, one after the other."""

    def __init__(self, place: str, mirror: WeightMirror) -> None:
        """`place` ends with the trainer's fence. Raises `RuntimeError` if this machine cannot read it."""
        self._objects, self._mirror = open_objects(place), mirror
        self._fence = int(place.rpartition("/")[2])
        self._busy = threading.Lock()
        self.fetched = FetchedVersion(0, 0, 0, 0.0)
        """What the last `take` read."""
        try:
            self.catalogue()
        except OSError as error:
            raise RuntimeError(
                f"cannot read {place} here ({error}): sync.folder must be a volume that trainer and generators share, or a URL "
                "with credentials in the environment of both"
            ) from None

    def catalogue(self) -> Catalogue:
        """Read which versions there are. Raises `OSError` or `InvalidVersion`."""
        return catalogue.decode(self._objects.get(CATALOGUE), self._fence)

    def take(self, deadline: Deadline, version: int) -> list[tuple[str, torch.Tensor]]:
        """Bring the mirror to `version` and return its weights, which share its memory where nothing is merged.

        Raises `RuntimeError` (of which `InvalidVersion` is one), `TimeoutError` or `WeightChanged`.
        """
        if not self._busy.acquire(timeout=deadline.left.total_seconds()):
            raise TimeoutError("an earlier fetch has not ended")
        began, objects, nbytes, full = time.monotonic(), 0, 0, 0
        pool = ThreadPoolExecutor(AHEAD, "fetch-weights")
        try:
            for entry in self._way_to(version, deadline):
                self._apply(pool, entry, deadline, entry.version == version)
                objects, nbytes, full = objects + 1 + len(entry.parts), nbytes + entry.nbytes, entry.full_nbytes
        except OSError as error:
            raise RuntimeError(f"cannot fetch version {version}: {error}") from error
        except WeightChanged:  # what arrived was damaged, or what was here: the next attempt begins with an anchor
            self._mirror.forget()
            raise
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # a request that hangs ends by its own limit
            self._busy.release()
        self.fetched = FetchedVersion(objects, nbytes, full, time.monotonic() - began)
        return self._mirror.weights()

    def _way_to(self, version: int, deadline: Deadline) -> list[Entry]:
        """Return the entries to apply. Waits for a moment for a version that the catalogue does not name yet."""
        until = time.monotonic() + min(_LATE_S, deadline.left.total_seconds())
        while True:
            fence, held = self._mirror.held
            known = fence == self._fence and self._mirror.held != NOTHING
            try:
                return self.catalogue().chain(held if known else None, version)
            except InvalidVersion:
                if time.monotonic() > until:
                    raise
                time.sleep(_POLL_S)

    def _apply(self, pool: ThreadPoolExecutor, entry: Entry, deadline: Deadline, last: bool) -> None:
        place = entry.folder
        described = pool.submit(self._objects.get, f"{place}/{MANIFEST}")
        fetching = deque((i, pool.submit(self._objects.get, f"{place}/{name}")) for i, name in enumerate(entry.parts[:AHEAD]))
        made = manifest.decode(_result(described, deadline))
        if (made.fence, made.version, made.base) != (self._fence, entry.version, entry.base):
            raise InvalidVersion(f"{place} holds version {made.version} of trainer {made.fence}")
        names = {part.name: i for i, part in enumerate(made.parts)}
        if sorted(names) != sorted(entry.parts):
            raise InvalidVersion(f"{place} has other parts than the catalogue says")

        def parts() -> Iterator[tuple[int, memoryview]]:
            while fetching:
                i, future = fetching.popleft()
                data = _result(future, deadline)
                if (following := i + AHEAD) < len(entry.parts):
                    fetching.append((following, pool.submit(self._objects.get, f"{place}/{entry.parts[following]}")))
                yield names[entry.parts[i]], data

        self._put(made, parts(), last)

    def _put(self, made: VersionManifest, parts: Iterator[tuple[int, memoryview]], last: bool) -> None:
        """Apply a version: a delta once all of it is here, so that a broken link touches nothing; an anchor as it comes."""
        self._mirror.apply(made, parts if made.base is None else list(parts), last)


def _result(future: Future[memoryview], deadline: Deadline) -> memoryview:
    return future.result(deadline.left.total_seconds())
