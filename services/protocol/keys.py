"""Every Redis key of a run. The run's name is the {hash tag}, so a run occupies one cluster slot. Payloads on a Cluster are the
exception: each shard has the keys of a separate run (store/payloads.py).

The Redis Functions receive the prefix `grpo:{NAME}` as their only key and build the same names from it (functions/*.lua).
"""

from __future__ import annotations

TOPICS = ("acks", "control", "evaluation", "fleet", "headers", "slots", "steps", "sync", "tickets", "version")
"""What the functions notify of; each has a channel (`Keys.notifications`)."""


class Keys:
    """Key names of the run `name`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.prefix = prefix = f"grpo:{{{name}}}"
        self.run = f"{prefix}:run"
        """Hash: identity, desired state, cursor, versions and step counters."""
        self.defining = f"{prefix}:defining"
        """String: the keys that define the run, JSON."""
        self.tickets = f"{prefix}:tickets"
        """Stream: work for generators; consumer group `generators`."""
        self.rollout_tickets = f"{prefix}:tickets:rollouts"
        """Stream: work for environments; consumer group `environments`."""
        self.headers = f"{prefix}:headers"
        """Stream: finished groups; consumer group `dataprep`."""
        self.outstanding = f"{prefix}:outstanding"
        """Sorted set: tickets issued and not settled, by issue sequence."""
        self.replay_order = f"{prefix}:replay:order"
        """Sorted set: groups in the replay table, by issue sequence."""
        self.replay_version = f"{prefix}:replay:version"
        """Sorted set: groups in the replay table, by oldest policy version x 2^32 + issue sequence."""
        self.replay_clock = f"{prefix}:replay:clock"
        """Prefix of the sorted sets `:1` to `:4`, by weight: groups in the replay table, by their next ring time."""
        self.replay_idle = f"{prefix}:replay:idle"
        """Sorted set: groups of weight 0, by their ring time on a separate clock."""
        self.replay_weight = f"{prefix}:replay:weight"
        """Sorted set: groups in the replay table, by sampling weight."""
        self.replay_gaps = f"{prefix}:replay:gaps"
        """Sorted set: groups filtered since the last step, by issue sequence."""
        self.replay_state = f"{prefix}:replay:state"
        """Hash: the table's rules, its clocks' time, sum of weights and counters."""
        self.reissue = f"{prefix}:reissue"
        """Sorted set: tickets that a restore interrupted, by issue sequence, waiting to be issued again."""
        self.requeued = f"{prefix}:requeued"
        """Sorted set: tickets taken from the dead letters, in the order in which they will be issued again."""
        self.departed = f"{prefix}:departed"
        """List: groups that left the replay table after use, whose payload the next plan takes charge of."""
        self.order = f"{prefix}:order"
        """Hash: state of the prompt order, and the dataset rows of each source's epoch, int32 little-endian."""
        self.rates = f"{prefix}:rates"
        """Hash: dataset row -> issue sequence and pass rate of the settled group that counts (functions/replay.lua)."""
        self.ledger = f"{prefix}:ledger"
        """Hash: number of tickets issued and of each outcome."""
        self.fleet = f"{prefix}:fleet"
        """Sorted set: pods by last heartbeat, ms of the server's clock."""
        self.fleet_status = f"{prefix}:fleet:status"
        """Hash: each pod's last status."""
        self.sync = f"{prefix}:sync"
        """Hash: the current weight-sync round."""
        self.sync_ranks = f"{prefix}:sync:ranks"
        """Hash: member of that round -> its first rank."""
        self.claims = f"{prefix}:claims"
        """Hash: entry of `tickets` -> who may submit it, `<consumer>|<fence>`."""
        self.attempts = f"{prefix}:attempts"
        """Hash: entry of `tickets` -> failures reported."""
        self.expiries = f"{prefix}:expiries"
        """Hash: entry of `tickets` -> leases that expired."""
        self.drops = f"{prefix}:drops"
        """Hash: ticket -> when and why it was dropped, for the most recent ones."""
        self.evaluations = f"{prefix}:evaluations"
        """Stream: one capped entry per complete evaluation round. Separate from `metrics`, whose entries are steps."""
        self.deadletter = f"{prefix}:deadletter"
        """Stream: tickets that failed for good, with the reason."""
        self.metrics = f"{prefix}:metrics"
        """Stream: one capped entry per step, for the console."""
        self.samples = f"{prefix}:samples"
        """Stream: groups that ended without being trained, until the sample log has them."""
        self.samples_state = f"{prefix}:samples:state"
        """Hash: lease and position of the sample log, and how many groups it missed, by outcome."""
        self.payloads = f"{prefix}:payloads"
        """Sorted set of a shard: places of the payloads it holds."""

    def evaluation(self, part: str) -> str:
        """Return a part of the open evaluation round (functions/evaluation.lua names them); no round, no key."""
        return f"{self.prefix}:eval:{part}"

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
