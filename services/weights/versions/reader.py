"""The receiver of `sync.backend = "store"`: brings a mirror to a version from the store, by the shortest way from what it holds.

Guarantees: nothing is read that the catalogue does not name; several objects are fetched at a time, those of an anchor straight
into their place; every wait has a limit; an error leaves the mirror at a version or empty (`WeightMirror.apply`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from services.weights.checksums import WeightChanged
from services.weights.deadline import Deadline
from services.weights.transport import Address, Loaded, Receiver
from services.weights.versions import catalogue, manifest
from services.weights.versions.catalogue import CATALOGUE, MANIFEST, Catalogue, Entry, InvalidVersion
from services.weights.versions.manifest import DataPart, VersionManifest
from services.weights.versions.mirror import NOTHING, Delta, WeightMirror, alike
from services.weights.versions.objects import Objects, Target, open_objects

AHEAD = 4
"""Objects fetched at a time. Over a link of 80 ms, one after the other would leave it idle."""
FETCHED_AHEAD = 1 / 8
"""Memory for deltas that are fetched before their turn, as a share of the weights."""
FETCHED_AHEAD_BYTES = 256 << 20
"""The same in bytes, for weights so small that it does not matter."""

_LATE_S = 5.0  # an NFS client may show a catalogue that is a few seconds old
_POLL_S = 0.1


class VersionReader:
    """Reads the versions of one trainer. Several readers may share a mirror: one that begins waits for the others' fetches."""

    def __init__(self, place: str, mirror: WeightMirror) -> None:
        """`place` ends with the trainer's fence. Raises `RuntimeError` if this machine cannot read it."""
        self._objects, self._mirror = open_objects(place), mirror
        self._fence = int(place.rpartition("/")[2])
        self.fetched_bytes = 0
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

        Raises `RuntimeError` (of which `InvalidVersion` is one: the store has no way there), `TimeoutError` or `WeightChanged`.
        """
        if not self._mirror.busy.acquire(timeout=deadline.left.total_seconds()):
            raise TimeoutError("an earlier fetch has not ended")
        began, self.fetched_bytes = time.monotonic(), 0
        pool = ThreadPoolExecutor(AHEAD, "fetch-weights")
        try:
            way = self._way_to(version, deadline)
            try:
                self._follow(way, pool, deadline)
            except InvalidVersion as error:  # of an object: the store does not hold what was written
                raise WeightChanged(f"version {version} in the store ({error})") from error
            self.fetched_bytes = sum(entry.nbytes for entry in way)
        except TimeoutError:  # of a future, without a text
            raise TimeoutError(f"version {version} was not fetched in {time.monotonic() - began:.0f} s") from None
        except OSError as error:
            raise RuntimeError(f"cannot fetch version {version}: {error}") from error
        except WeightChanged:  # what arrived or what was held is damaged: the next attempt begins with an anchor
            self._mirror.forget()
            raise
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # a request that hangs ends by its own limit
            self._mirror.busy.release()
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

    def _follow(self, way: Sequence[Entry], pool: ThreadPoolExecutor, deadline: Deadline) -> None:
        """Apply entries in turn, an anchor together with the deltas that follow it. The next ones are fetched meanwhile, one at
        least and as many as fit into memory.
        """
        rest, coming = deque(way), deque[_Fetch]()
        room = max(FETCHED_AHEAD_BYTES, FETCHED_AHEAD * way[-1].full_nbytes) if way else 0.0
        while rest or coming:
            while rest and (len(coming) < 2 or _stored(rest[0]) + sum(_stored(each.entry) for each in coming) <= room):
                coming.append(_Fetch(self._objects, pool, rest.popleft(), self._fence, deadline))
            first = coming.popleft()
            if first.entry.base is None:
                self._load(first, coming, pool, deadline, last=not rest)
            else:  # once all of it has arrived, so that a broken link changes nothing
                self._mirror.apply(first.delta(), last=not rest and not coming)

    def _load(self, anchor: _Fetch, coming: deque[_Fetch], pool: ThreadPoolExecutor, deadline: Deadline, last: bool) -> None:
        """Load an anchor, together with the deltas that follow it if they fit."""
        made = anchor.manifest()
        following = [each.delta for each in coming] if alike([made, *(each.manifest() for each in coming)]) else []
        compare = last and len(following) == len(coming)
        self._mirror.load(
            made,
            lambda part, targets: self._read_into(anchor.entry, made.parts[part], targets),
            pool,
            deadline,
            following,
            compare,
        )
        if following:
            coming.clear()

    def _read_into(self, entry: Entry, part: DataPart, targets: Sequence[Target]) -> Iterator[None]:
        return self._objects.read_into(f"{entry.folder}/{part.name}", part.nbytes, targets)


def _stored(entry: Entry) -> int:
    """Return the bytes that an entry takes in memory besides the weights."""
    return 0 if entry.base is None else entry.nbytes


class _Fetch:
    """The manifest of one version and the parts of a delta, which are fetched from its construction on."""

    def __init__(self, objects: Objects, pool: ThreadPoolExecutor, entry: Entry, fence: int, deadline: Deadline) -> None:
        self.entry, self._fence, self._deadline = entry, fence, deadline
        self._coming_manifest = pool.submit(objects.get, f"{entry.folder}/{MANIFEST}")
        names = [] if entry.base is None else entry.parts
        self._parts = [(name, pool.submit(objects.get, f"{entry.folder}/{name}")) for name in names]
        self._manifest: VersionManifest | None = None
        self._delta: Delta | None = None

    def manifest(self) -> VersionManifest:
        """Return the manifest. Raises `InvalidVersion` if it contradicts the catalogue."""
        if self._manifest is None:
            entry, made = self.entry, manifest.decode(self._awaited(self._coming_manifest))
            if (made.fence, made.version, made.base) != (self._fence, entry.version, entry.base):
                raise InvalidVersion(f"{entry.folder} holds version {made.version} of trainer {made.fence}")
            if sorted(part.name for part in made.parts) != sorted(entry.parts):
                raise InvalidVersion(f"{entry.folder} has other parts than the catalogue says")
            self._manifest = made
        return self._manifest

    def delta(self) -> Delta:
        """Return the delta. Several threads may call this. Raises `InvalidVersion`."""
        if self._delta is None:
            made = self.manifest()
            places = {part.name: i for i, part in enumerate(made.parts)}
            self._delta = Delta(made, [(places[name], self._awaited(part)) for name, part in self._parts])
        return self._delta

    def _awaited(self, coming: Future[memoryview]) -> memoryview:
        return coming.result(self._deadline.left.total_seconds())


class StoreReceiver(Receiver):
    """Fetches versions. Its copy of the weights outlives the group, so a worker that missed rounds fetches only the deltas it
    lacks.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._mirror = WeightMirror()

    def connect(self, address: Address, rank: int) -> VersionReader:
        """Check that the versions at `host` can be read."""
        return VersionReader(address.host, self._mirror)

    def take(self, connection: VersionReader, version: int, deadline: Deadline) -> Loaded:
        """Fetch the objects that lead to the version."""
        weights = connection.take(deadline, version)
        self.fetched_bytes = connection.fetched_bytes
        return weights
