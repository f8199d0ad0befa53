"""Prometheus metrics of dataprep."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge


class DataprepMetrics:
    """What dataprep counts."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.issued = Counter("grpo_dataprep_issued_tickets", "Tickets issued by this process.", registry=registry)
        self.settled = Counter("grpo_dataprep_settled_headers", "Headers settled, by action.", ["action"], registry=registry)
        self.prepared = Counter("grpo_dataprep_prepared_steps", "Steps prepared by this process.", registry=registry)
        self.overtook = Counter("grpo_dataprep_overtaking_steps", "Steps made while an older ticket was out.", registry=registry)
        self.leads = Gauge("grpo_dataprep_leads", "1 while this process leads.", registry=registry)
        self.buffered = Gauge("grpo_dataprep_buffered_groups", "Groups in the replay table.", registry=registry)
        self.slots_used = Gauge("grpo_dataprep_used_slots", "Slots in use.", registry=registry)
        self.slots = Gauge("grpo_dataprep_slots", "Slots of the run.", registry=registry)
