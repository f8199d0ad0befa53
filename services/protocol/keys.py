"""Every Redis key of a run. The run's name is the {hash tag}, so a run occupies one cluster slot. Payloads on a Cluster are the
exception: each shard has the keys of a separate run (store/calls/payloads.py).

The Redis Functions receive the prefix `grpo:{NAME}` as their only key and build the same names from it (functions/*.lua).
"""

from __future__ import annotations

from dataclasses import dataclass

TOPICS = ("acks", "control", "evaluation", "fleet", "headers", "slots", "steps", "sync", "tickets", "version")
"""What the functions notify of; each has a channel (`Keys.notifications`)."""


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
    def defining(self) -> str:
        """String: the keys that define the run, JSON."""
        return f"{self.prefix}:defining"

    @property
    def tickets(self) -> str:
        """Stream: work for generators; consumer group `generators`."""
        return f"{self.prefix}:tickets"

    @property
    def rollout_tickets(self) -> str:
        """Stream: work for environments; consumer group `environments`."""
        return f"{self.prefix}:tickets:rollouts"

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
        """Sorted set: groups in the replay table, by oldest policy version x 2^32 + issue sequence."""
        return f"{self.prefix}:replay:version"

    @property
    def replay_clock(self) -> str:
        """Prefix of the sorted sets `:1` to `:4`, by weight: groups in the replay table, by their next ring time."""
        return f"{self.prefix}:replay:clock"

    @property
    def replay_idle(self) -> str:
        """Sorted set: groups of weight 0, by their ring time on a separate clock."""
        return f"{self.prefix}:replay:idle"

    @property
    def replay_weight(self) -> str:
        """Sorted set: groups in the replay table, by sampling weight."""
        return f"{self.prefix}:replay:weight"

    @property
    def replay_gaps(self) -> str:
        """Sorted set: groups filtered since the last step, by issue sequence."""
        return f"{self.prefix}:replay:gaps"

    @property
    def replay_state(self) -> str:
        """Hash: the table's rules, its clocks' time, sum of weights and counters."""
        return f"{self.prefix}:replay:state"

    @property
    def reissue(self) -> str:
        """Sorted set: tickets that a restore interrupted, by issue sequence, waiting to be issued again."""
        return f"{self.prefix}:reissue"

    @property
    def requeued(self) -> str:
        """Sorted set: tickets taken from the dead letters, in the order in which they will be issued again."""
        return f"{self.prefix}:requeued"

    @property
    def departed(self) -> str:
        """List: groups that left the replay table after use, whose payload the next plan takes charge of."""
        return f"{self.prefix}:departed"

    @property
    def order(self) -> str:
        """Hash: state of the prompt order, and the dataset rows of each source's epoch, int32 little-endian."""
        return f"{self.prefix}:order"

    @property
    def rates(self) -> str:
        """Hash: dataset row -> issue sequence and pass rate of the settled group that counts (functions/replay.lua)."""
        return f"{self.prefix}:rates"

    @property
    def ledger(self) -> str:
        """Hash: number of tickets issued and of each outcome."""
        return f"{self.prefix}:ledger"

    @property
    def fleet(self) -> str:
        """Sorted set: pods by last heartbeat, ms of the server's clock."""
        return f"{self.prefix}:fleet"

    @property
    def fleet_status(self) -> str:
        """Hash: each pod's last status."""
        return f"{self.prefix}:fleet:status"

    @property
    def sync(self) -> str:
        """Hash: the current weight-sync round."""
        return f"{self.prefix}:sync"

    @property
    def sync_ranks(self) -> str:
        """Hash: member of that round -> its first rank."""
        return f"{self.prefix}:sync:ranks"

    @property
    def claims(self) -> str:
        """Hash: entry of `tickets` -> who may submit it, `<consumer>|<fence>`."""
        return f"{self.prefix}:claims"

    @property
    def attempts(self) -> str:
        """Hash: entry of `tickets` -> failures reported."""
        return f"{self.prefix}:attempts"

    @property
    def expiries(self) -> str:
        """Hash: entry of `tickets` -> leases that expired."""
        return f"{self.prefix}:expiries"

    @property
    def drops(self) -> str:
        """Hash: ticket -> when and why it was dropped, for the most recent ones."""
        return f"{self.prefix}:drops"

    def evaluation(self, part: str) -> str:
        """Return a part of the open evaluation round (functions/evaluation.lua names them); no round, no key."""
        return f"{self.prefix}:eval:{part}"

    @property
    def evaluations(self) -> str:
        """Stream: one capped entry per complete evaluation round. Separate from `metrics`, whose entries are steps."""
        return f"{self.prefix}:evaluations"

    @property
    def deadletter(self) -> str:
        """Stream: tickets that failed for good, with the reason."""
        return f"{self.prefix}:deadletter"

    @property
    def metrics(self) -> str:
        """Stream: one capped entry per step, for the console."""
        return f"{self.prefix}:metrics"

    @property
    def samples(self) -> str:
        """Stream: groups that ended without being trained, until the sample log has them."""
        return f"{self.prefix}:samples"

    @property
    def samples_state(self) -> str:
        """Hash: lease and position of the sample log, and how many groups it missed, by outcome."""
        return f"{self.prefix}:samples:state"

    def logprob_gaps(self, step: int, rank: int) -> str:
        """String: logprob gaps of the tokens that a data-parallel rank trained in a step, for the sample log. Expires."""
        return f"{self.prefix}:logprob_gaps:{step}.{rank}"

    def notifications(self, topic: str) -> str:
        """Pub/sub channel: the name of the topic, whenever it changed. A hint; state is read from the keys. `*`: all channels."""
        return f"{self.prefix}:notifications:{topic}"

    def group(self, group: str) -> str:
        """Hash: header, sequence and uses of a group."""
        return f"{self.prefix}:group:{group}"

    def payload(self, payload: str) -> str:
        """String: tokens, behaviour logprobs and spans of a group; on a Cluster their place in a shard.

        `payload` is `<ticket>.<fence>`.
        """
        return f"{self.prefix}:payload:{payload}"

    @property
    def payloads(self) -> str:
        """Sorted set of a shard: names of the payloads it holds."""
        return f"{self.prefix}:payloads"

    def partial(self, ticket: str) -> str:
        """String: tokens so far of a ticket that was handed back or interrupted."""
        return f"{self.prefix}:partial:{ticket}"

    def turns(self, ticket: str) -> str:
        """Hash: `<sample>` -> how often its rollout has started again, `<sample>:<place>` -> a turn or a reply."""
        return f"{self.prefix}:turns:{ticket}"

    def step(self, step: int) -> str:
        """Hash: the plan of a step."""
        return f"{self.prefix}:step:{step}"

    def trained(self, epoch: int) -> str:
        """Bitmap: dataset rows of the epoch that were trained; proves that none was trained twice."""
        return f"{self.prefix}:trained:{epoch}"


def user_name(run: str, kind: str) -> str:
    """Return the name of the Redis user of a kind of service."""
    return f"{run}.{kind}"
