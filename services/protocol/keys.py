"""Every Redis key of a run. The run's name stands in a {hash tag}, so a run lives in one cluster slot.

The Redis Functions receive the prefix `grpo:{NAME}` as their one key and build the same names from it (functions/*.lua).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Keys:
    """Key names of the run `name`."""

    name: str

    @property
    def prefix(self) -> str:
        """Common prefix of all keys of the run."""
        return f"grpo:{{{self.name}}}"

    @property
    def run(self) -> str:
        """Hash: identity, desired state, cursor, versions and step counters."""
        return f"{self.prefix}:run"

    @property
    def tickets(self) -> str:
        """Stream: work for generators; consumer group `generators`."""
        return f"{self.prefix}:tickets"

    @property
    def headers(self) -> str:
        """Stream: finished groups; consumer group `dataprep`."""
        return f"{self.prefix}:headers"

    @property
    def outstanding(self) -> str:
        """Sorted set: tickets issued and not settled, by issue sequence."""
        return f"{self.prefix}:outstanding"

    @property
    def replay_order(self) -> str:
        """Sorted set: groups in the replay table, by issue sequence."""
        return f"{self.prefix}:replay:order"

    @property
    def replay_version(self) -> str:
        """Sorted set: groups in the replay table, by oldest policy version."""
        return f"{self.prefix}:replay:version"

    @property
    def ledger(self) -> str:
        """Hash: how many tickets were issued and reached each outcome."""
        return f"{self.prefix}:ledger"

    @property
    def fleet(self) -> str:
        """Sorted set: pods by last heartbeat, ms of the server's clock."""
        return f"{self.prefix}:fleet"

    @property
    def fleet_status(self) -> str:
        """Hash: what each pod last said of itself."""
        return f"{self.prefix}:fleet:status"

    @property
    def sync(self) -> str:
        """Hash: the current weight-sync round."""
        return f"{self.prefix}:sync"

    @property
    def deadletter(self) -> str:
        """Stream: what failed for good, with its reason."""
        return f"{self.prefix}:deadletter"

    @property
    def metrics(self) -> str:
        """Stream: one capped entry a step, for the console."""
        return f"{self.prefix}:metrics"

    @property
    def bell(self) -> str:
        """Pub/sub channel: names of topics that changed. A hint only; state is read from the keys."""
        return f"{self.prefix}:bell"

    def group(self, group: str) -> str:
        """Hash: header, sequence and uses of a group."""
        return f"{self.prefix}:group:{group}"

    def payload(self, payload: str) -> str:
        """String: tokens, behaviour logprobs and spans of a group; `payload` is `<ticket>.<fence>`."""
        return f"{self.prefix}:payload:{payload}"

    def partial(self, ticket: str) -> str:
        """String: tokens so far of a ticket handed back or interrupted."""
        return f"{self.prefix}:partial:{ticket}"

    def step(self, step: int) -> str:
        """Hash: the plan of a step."""
        return f"{self.prefix}:step:{step}"

    def trained(self, epoch: int) -> str:
        """Bitmap: dataset rows of the epoch that were trained; the witness that none was trained twice."""
        return f"{self.prefix}:trained:{epoch}"
