"""The rules by which a cluster applies manifests: server-side apply with field managers, and the patch of Helm 3.

A field is a path of names; lists count as one value, which is enough for this chart's replicas. The rules are those of
https://kubernetes.io/docs/reference/using-api/server-side-apply/: a manager that applies a manifest owns the fields that the
manifest names; a different value for a field of another manager is a conflict; a field that a manager's manifest stops naming is
removed unless somebody else owns it; an update takes ownership of the fields that it changes. A Deployment without
`spec.replicas` gets 1, which nobody owns.
"""

from __future__ import annotations

import copy
from typing import Any

Fields = dict[tuple[str, ...], Any]
REPLICAS = ("spec", "replicas")
DEFAULT = 1


class FieldConflict(Exception):
    """A field is applied with a different value than that of the manager that owns it."""


def fields(tree: dict[str, Any], path: tuple[str, ...] = ()) -> Fields:
    """Return the leaves of an object."""
    found: Fields = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            found |= fields(value, (*path, key))
        else:
            found[*path, key] = value
    return found


class LiveObject:
    """One object in a cluster."""

    def __init__(self) -> None:
        self.fields: Fields = {}
        self.owners: dict[str, set[tuple[str, ...]]] = {}

    @property
    def replicas(self) -> int:
        """The number of replicas that its controller acts on."""
        return self.fields[REPLICAS]

    def apply(self, manager: str, manifest: dict[str, Any], force: bool = False) -> None:
        """Apply on the server's side, as Helm 4, Argo CD, Flux and `kubectl apply --server-side` do."""
        wanted = fields(manifest)
        for path, value in wanted.items():
            others = [name for name, owned in self.owners.items() if name != manager and path in owned]
            if others and self.fields.get(path) != value:
                if not force:
                    raise FieldConflict(f"conflict with {others}: {'.'.join(path)}")
                for name in others:
                    self.owners[name].discard(path)
        dropped = self.owners.get(manager, set()) - wanted.keys()
        self.owners[manager] = set(wanted)
        for path in dropped:
            if not any(path in owned for owned in self.owners.values()):
                del self.fields[path]
        self.fields |= copy.deepcopy(wanted)
        self._default()

    def scale(self, manager: str, replicas: int) -> None:
        """Update the scale subresource, as `kubectl scale`, the scaler, an HPA and KEDA do."""
        if self.fields[REPLICAS] != replicas:
            self.fields[REPLICAS] = replicas
            for owned in self.owners.values():
                owned.discard(REPLICAS)
            self.owners.setdefault(f"{manager}/scale", set()).add(REPLICAS)

    def patch(self, before: dict[str, Any] | None, manifest: dict[str, Any]) -> None:
        """Patch what differs between two manifests and what was changed live, as Helm 3 and `kubectl apply` do."""
        wanted = fields(manifest)
        for path in fields(before or {}).keys() - wanted.keys():
            self.fields.pop(path, None)
        self.fields |= copy.deepcopy(wanted)
        self._default()

    def replace(self, manifest: dict[str, Any]) -> None:
        """Replace the object, as `helm upgrade --force-replace` and `kubectl replace` do; fields not in the manifest are lost."""
        self.fields = copy.deepcopy(fields(manifest))
        self._default()

    def _default(self) -> None:
        self.fields.setdefault(REPLICAS, DEFAULT)
