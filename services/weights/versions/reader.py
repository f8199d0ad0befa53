"""Brings a mirror to a version from the store, by the shortest way from what it holds.

Guarantees: nothing is read that the catalogue does not name; objects come several at a time, those of an anchor to where they
belong; every wait has a limit; an error leaves the mirror at a version or empty (`WeightMirror.apply`). What comes from
the store may be anything (manifest.py, mirror.py).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from services.weights.checksums import WeightChanged
from services.weights.collective import Deadline
from services.weights.versions import catalogue, manifest
from services.weights.versions.catalogue import CATALOGUE, MANIFEST, Catalogue, Entry
from services.weights.versions.manifest import DataPart
from services.weights.versions.mirror import NOTHING, WeightMirror
from services.weights.versions.objects import Objects, Target, open_objects
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
                self._apply(fetch, pool, deadline, fetch.entry.version == version)
            objects, nbytes = sum(1 + len(entry.parts) for entry in way), sum(entry.nbytes for entry in way)
            full = way[-1].full_nbytes if way else 0
        except TimeoutError:  # of a future, without a text
            raise TimeoutError(f"version {version} was not fetched in {time.monotonic() - began:.0f} s") from None
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

    def _apply(self, fetch: _Fetch, pool: ThreadPoolExecutor, deadline: Deadline, last: bool) -> None:
        entry, made = fetch.entry, manifest.decode(fetch.manifest(deadline))
        if (made.fence, made.version, made.base) != (self._fence, entry.version, entry.base):
            raise InvalidVersion(f"{entry.folder} holds version {made.version} of trainer {made.fence}")
        places = {part.name: i for i, part in enumerate(made.parts)}
        if sorted(places) != sorted(entry.parts):
            raise InvalidVersion(f"{entry.folder} has other parts than the catalogue says")
        if made.base is None:
            self._mirror.load(made, lambda part, targets: self._read_into(entry, made.parts[part], targets), pool, deadline, last)
        else:  # once all of it is here, so that a broken link touches nothing
            self._mirror.apply(made, [(places[name], data) for name, data in fetch.parts(deadline)], last)

    def _read_into(self, entry: Entry, part: DataPart, targets: Sequence[Target]) -> None:
        self._objects.read_into(f"{entry.folder}/{part.name}", part.nbytes, targets)


class _Fetch:
    """The manifest of one version and the parts of a delta, which come from its construction on."""

    def __init__(self, objects: Objects, pool: ThreadPoolExecutor, entry: Entry) -> None:
        self.entry = entry
        self._manifest = pool.submit(objects.get, f"{entry.folder}/{MANIFEST}")
        names = [] if entry.base is None else entry.parts
        self._parts = [(name, pool.submit(objects.get, f"{entry.folder}/{name}")) for name in names]

    def manifest(self, deadline: Deadline) -> memoryview:
        """Return the bytes of the manifest."""
        return self._manifest.result(deadline.left.total_seconds())

    def parts(self, deadline: Deadline) -> list[tuple[str, memoryview]]:
        """Return the name and bytes of each part."""
        return [(name, part.result(deadline.left.total_seconds())) for name, part in self._parts]
