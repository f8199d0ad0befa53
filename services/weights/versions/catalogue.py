"""Which versions of one trainer a store holds: how to get from one to another, when an anchor is due, what may be deleted.

Guarantees: pure functions over values, without torch; the versions that a chain leads through exist in the catalogue; what
`trimmed` keeps contains, for every version it keeps, an anchor and the deltas that lead there; `garbage` names nothing that the
catalogue holds, that is being written, that an announced reader may still need, or that belongs to a later trainer.

A version is stored as an anchor, as a delta of the version before, or as both. Each trainer, known by its fence, has its own
folder with a catalogue that only it writes, so a superseded trainer disturbs nobody.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

import msgspec

ANCHOR_EVERY = 32
"""Versions between two anchors: at a delta of 2 % of the weights, a late joiner reads 0.6 times an anchor besides the anchor."""

CATALOGUE = "catalogue.json"
MANIFEST = "manifest"


class InvalidVersion(RuntimeError):
    """Bytes of a version contradict its manifest, or the manifest its catalogue."""


class Entry(msgspec.Struct, frozen=True):
    """One object: an anchor or a delta."""

    version: int
    base: int | None  # None: an anchor
    nbytes: int  # of the data
    full_nbytes: int  # of the weights
    changed: float  # share of the elements that changed; 1 for an anchor
    parts: list[str]

    @property
    def folder(self) -> str:
        """Return its name below the trainer's folder."""
        return folder_of(self.version, anchor=self.base is None)


class Catalogue(msgspec.Struct, frozen=True):
    """What the store holds of one trainer, in the order written."""

    fence: int
    entries: list[Entry] = []

    @property
    def newest(self) -> int | None:
        """Return the last version, or None."""
        return max((entry.version for entry in self.entries), default=None)

    def anchor_due(self) -> bool:
        """Return whether the next version should have an anchor: the last one is `ANCHOR_EVERY` versions old, or the deltas since
        have grown as large as it is.
        """
        newest, anchors = self.newest, [entry for entry in self.entries if entry.base is None]
        if not anchors or newest is None:
            return True
        since = [entry for entry in self.entries if entry.base is not None and entry.version > anchors[-1].version]
        return newest + 1 - anchors[-1].version >= ANCHOR_EVERY or sum(entry.nbytes for entry in since) >= anchors[-1].nbytes

    def chain(self, held: int | None, version: int) -> list[Entry]:
        """Return the entries with the fewest bytes that lead to `version` from `held`, or from nothing.

        Raises `InvalidVersion` if none do.
        """
        if held == version:
            return []
        deltas = {entry.version: entry for entry in self.entries if entry.base is not None}
        anchors = {entry.version: entry for entry in self.entries if entry.base is None}
        best, best_bytes = list[Entry](), math.inf
        suffix, size, at = list[Entry](), 0, version
        while True:
            if at == held and size <= best_bytes:
                return suffix
            if at in anchors and size + anchors[at].nbytes < best_bytes:
                best, best_bytes = [anchors[at], *suffix], size + anchors[at].nbytes
            step = deltas.get(at)
            if step is None or step.base is None:
                break
            suffix, size, at = [step, *suffix], size + step.nbytes, step.base
        if not best:
            raise InvalidVersion(f"the store has no way to version {version} of trainer {self.fence}, newest is {self.newest}")
        return best

    def with_entry(self, entry: Entry) -> Catalogue:
        """Return the catalogue with one more entry."""
        return Catalogue(self.fence, [*(known for known in self.entries if known.folder != entry.folder), entry])

    def trimmed(self) -> Catalogue:
        """Return the catalogue from the last anchor but one on, so that readers that have begun with it can continue."""
        anchors = sorted(entry.version for entry in self.entries if entry.base is None)
        first = anchors[-2:][0] if anchors else 0
        kept = [entry for entry in self.entries if entry.version > first or (entry.version == first and entry.base is None)]
        return Catalogue(self.fence, kept)

    def existing(self, names: Collection[str]) -> Catalogue:
        """Return the catalogue with the entries of which all objects are among `names`, which begin with the trainer's folder."""
        found = set(names)
        return Catalogue(
            self.fence,
            [
                entry
                for entry in self.entries
                if found.issuperset(f"{self.fence}/{entry.folder}/{name}" for name in (MANIFEST, *entry.parts))
            ],
        )


def folder_of(version: int, anchor: bool) -> str:
    """Return the name of an object below its trainer's folder."""
    return f"{version}.{'anchor' if anchor else 'delta'}"


def encode(catalogue: Catalogue) -> bytes:
    """Return the catalogue as JSON."""
    return msgspec.json.encode(catalogue)


def decode(encoded: bytes | memoryview, fence: int) -> Catalogue:
    """Return the catalogue of trainer `fence`. Raises `InvalidVersion`."""
    try:
        catalogue = msgspec.json.decode(encoded, type=Catalogue)
    except (msgspec.MsgspecError, ValueError) as error:
        raise InvalidVersion(f"this is no catalogue: {error}") from None
    wrong = [name for entry in catalogue.entries for name in entry.parts if not name.replace(".", "").isalnum()]
    if catalogue.fence != fence or wrong:
        raise InvalidVersion(f"this is not the catalogue of trainer {fence}")
    return catalogue


def announce(fence: int, version: int) -> str:
    """Return the text by which a reader announces that it needs everything of trainer `fence` from `version` on."""
    return f"{fence}/{version}"


def garbage(names: Iterable[str], catalogue: Catalogue, writing: Collection[str], readers: Iterable[str]) -> list[str]:
    """Return which objects may be deleted.

    `names`: all objects, `<fence>/<folder>/<part>`; `writing`: folders of this trainer that are not complete yet; `readers`: what
    they announced. Objects with other names are not ours, and stay.
    """
    needed = dict[int, int]()
    for reader in readers:
        fence, _, version = reader.partition("/")
        if fence.isdecimal() and version.isdecimal():
            needed[int(fence)] = min(int(version), needed.get(int(fence), int(version)))
    kept = {entry.folder for entry in catalogue.entries} | set(writing)
    found: list[str] = []
    for name in names:
        match name.split("/"):
            case [fence, folder, _] if fence.isdecimal() and folder.partition(".")[0].isdecimal():
                own, version = int(fence) == catalogue.fence, int(folder.partition(".")[0])
                if int(fence) > catalogue.fence or (own and folder in kept) or version >= needed.get(int(fence), version + 1):
                    continue
                found.append(name)
            case [fence, file] if fence.isdecimal() and file.startswith(CATALOGUE):
                if int(fence) < catalogue.fence and int(fence) not in needed:
                    found.append(name)
            case _:
                pass
    return found
