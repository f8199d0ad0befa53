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
from services.weights.versions.mirror import NOTHING, WeightMirror
from services.weights.versions.objects import Objects, open_objects
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
            way = self._way_to(version, deadline)
            fetches = (_Fetch(self._objects, pool, entry) for entry in way)
            coming = next(fetches, None)
            while (fetch := coming) is not None:
                coming = next(fetches, None)  # fetched while this one is applied
                self._apply(fetch, deadline, fetch.entry.version == version)
            objects, nbytes = sum(1 + len(entry.parts) for entry in way), sum(entry.nbytes for entry in way)
            full = way[-1].full_nbytes if way else 0
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

    def _apply(self, fetch: _Fetch, deadline: Deadline, last: bool) -> None:
        """Apply a version: a delta once all of it is here, so that a broken link touches nothing; an anchor as it comes."""
        entry, made = fetch.entry, manifest.decode(fetch.manifest(deadline))
        if (made.fence, made.version, made.base) != (self._fence, entry.version, entry.base):
            raise InvalidVersion(f"{entry.folder} holds version {made.version} of trainer {made.fence}")
        places = {part.name: i for i, part in enumerate(made.parts)}
        if sorted(places) != sorted(entry.parts):
            raise InvalidVersion(f"{entry.folder} has other parts than the catalogue says")
        parts = ((places[name], data) for name, data in fetch.parts(deadline))
        self._mirror.apply(made, parts if made.base is None else list(parts), last)


class _Fetch:
    """The objects of one version, of which a few come at a time from its construction on."""

    def __init__(self, objects: Objects, pool: ThreadPoolExecutor, entry: Entry) -> None:
        self.entry = entry
        self._objects, self._pool = objects, pool
        self._manifest = self._get(MANIFEST)
        self._parts = deque((name, self._get(name)) for name in entry.parts[:AHEAD])

    def _get(self, name: str) -> Future[memoryview]:
        return self._pool.submit(self._objects.get, f"{self.entry.folder}/{name}")

    def manifest(self, deadline: Deadline) -> memoryview:
        """Return the bytes of the manifest."""
        return _result(self._manifest, deadline)

    def parts(self, deadline: Deadline) -> Iterator[tuple[str, memoryview]]:
        """Yield every part's name and bytes."""
        following = iter(self.entry.parts[AHEAD:])
        while self._parts:
            name, future = self._parts.popleft()
            data = _result(future, deadline)
            if (later := next(following, None)) is not None:
                self._parts.append((later, self._get(later)))
            yield name, data


def _result(future: Future[memoryview], deadline: Deadline) -> memoryview:
    return future.result(deadline.left.total_seconds())
