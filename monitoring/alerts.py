"""Alert rules, each with what an operator does about it.

A rule's expression yields one sample a run, or one a pod; its runbook is a section of docs/operating.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import yaml

GROUP = "grpo"
RUNBOOKS = "docs/operating.md"


@dataclass(frozen=True)
class Alert:
    """One rule."""

    name: str
    expression: str
    lasting: str
    """For how long the expression has to hold."""
    severity: Literal["critical", "warning", "info"]
    """critical: the run stands still or loses something; warning: it is slower or worse than it could be."""
    summary: str
    runbook: str
    """What to look at, and what to do."""

    @property
    def anchor(self) -> str:
        """Where the runbook stands."""
        return f"{RUNBOOKS}#{self.name.lower()}"

    def rule(self) -> dict[str, Any]:
        """As Prometheus takes it."""
        return {
            "alert": self.name,
            "expr": self.expression,
            "for": self.lasting,
            "labels": {"severity": self.severity},
            "annotations": {"summary": self.summary, "runbook": self.anchor},
        }


def _while_it_works(expression: str) -> str:
    """The expression, where the run is neither paused nor at its end."""
    return f"({expression}) unless on (run) (max by (run) (grpo_run_ended) == 1 or max by (run) (grpo_run_paused) == 1)"


def _step_metric(name: str) -> str:
    return f'max by (run) (grpo_trainer_step_metric{{name="{name}"}})'


RUN, POD = "Run {{ $labels.run }}", "{{ $labels.pod }} of run {{ $labels.run }}"

ALERTS = (
    Alert(
        "GrpoLoopStuck", "max by (run, pod) (grpo_pod_loop_silent_seconds > grpo_pod_loop_limit_seconds)", "1m", "critical",
        f"A loop of {POD} makes no progress",
        "`/health/live` of the pod names the loop, its log says what it did last. Kubernetes starts the pod again by itself; "
        "`grpo run` does not: kill the process, its place is taken and nothing is lost. A `tracker-0` that hangs holds up "
        "nobody.",
    ),
    Alert(
        "GrpoLoopFails", "sum by (run, pod) (increase(grpo_pod_loop_failures_total[15m])) > 5", "0m", "warning",
        f"A loop of {POD} fails again and again",
        "The pod's log has the traceback under `loop failed, starting it again`. While Redis is away this is expected of all "
        "pods.",
    ),
    Alert(
        "GrpoNoLeader", _while_it_works("max by (run) (grpo_dataprep_leads) == 0"), "2m", "critical",
        f"{RUN} has no dataprep that leads",
        "No step is prepared and no ticket issued. Look at dataprep's log and exit code; `grpo status` names the leader. A "
        "leader that died is followed after `fleet.ttl_s`; during a restore nobody leads.",
    ),
    Alert(
        "GrpoNoTrainer", _while_it_works('max by (run) (grpo_run_pods{kind="trainer"}) == 0'), "5m", "critical",
        f"{RUN} has no trainer",
        "Look at the exit code and the last line of the trainer's log (the table of exit codes below). The next trainer takes "
        "the run up from its last checkpoint and trains the same plans again.",
    ),
    Alert(
        "GrpoTooFewGenerators",
        _while_it_works('max by (run) (grpo_run_pods{kind="generator"}) < max by (run) (grpo_run_wanted_generators)'), "10m",
        "warning", f"{RUN} has fewer generators than it wants",
        "The run goes on with those it has. Look for pods that cannot be placed (GPUs), that load for long, or that exit; "
        "`grpo scale generators N` changes the wish.",
    ),
    Alert(
        "GrpoPodNotReady", _while_it_works("max by (run, pod) (grpo_pod_ready) == 0"), "15m", "warning",
        f"{POD} would do no work",
        "`/health/ready` of the pod says why: weights that are not the published ones (see GrpoGeneratorBehind), a full Redis "
        "(see GrpoRedisFull), a model that still loads.",
    ),
    Alert(
        "GrpoNoStep", _while_it_works("sum by (run) (increase(grpo_trainer_steps_total[30m])) == 0"), "15m", "critical",
        f"{RUN} has trained no step in half an hour",
        "`grpo_trainer_phase_seconds_total` says what the trainer does, `grpo_dataprep_wait_seconds_total` why no step is "
        "prepared: `groups` - generators are too slow or there are none; `older_ticket` - one long completion holds a step up "
        "(admission.overtake); `min_size`, `rate_limiter` - the replay table's own keys; `ahead` - the trainer is what is "
        "slow. Steps longer than half an hour: raise the window of this rule.",
    ),
    Alert(
        "GrpoTrainerStarves",
        _while_it_works('sum by (run) (rate(grpo_trainer_phase_seconds_total{phase="waiting for data"}[15m])) > 0.5'), "30m",
        "info", "The trainer of run {{ $labels.run }} waits for data more than half of its time",
        "More generators (`grpo scale generators`), shorter completions (sampling.max_tokens), or more uses of a group "
        "(replay.max_uses). Nothing is wrong.",
    ),
    Alert(
        "GrpoGeneratorBehind", "max by (run, pod) (grpo_generator_versions_behind unless grpo_generator_evaluating == 1) > 1",
        "10m", "warning", f"{POD} does not get the current weights",
        "It claims nothing meanwhile. Its log says why rounds fail there (`round failed here`): a port of the trainer that it "
        "cannot reach, a deadline that is too short (sync.join_deadline_s, sync.transfer_deadline_s). Ending the pod lets "
        "another take its place.",
    ),
    Alert(
        "GrpoSyncFails", "sum by (run) (increase(grpo_trainer_sync_failures_total[15m])) > 3", "0m", "warning",
        "Weight syncs of run {{ $labels.run }} fail again and again",
        "The trainer's log names who is left out (`goes on under a new epoch`). A pod that is always among them: see "
        "GrpoGeneratorBehind. Pods that come and go all the time make a new group each time.",
    ),
    Alert(
        "GrpoSyncSlow", _while_it_works('sum by (run) (rate(grpo_trainer_phase_seconds_total{phase="syncing"}[15m])) > 0.3'),
        "30m", "warning", "Run {{ $labels.run }} spends more than 30 % of its time on weight syncs",
        "`grpo_trainer_sync_seconds` says which phase, the trainer's log who was last in it (`sync phase was slow`), and of "
        "generators `grpo_generator_sync_seconds` which pod waits least in `paused` and `joined`: that is the one the others "
        "wait for. `join` is paid by changes of the fleet, `transfer` is bandwidth.",
    ),
    Alert(
        "GrpoTicketsDoubled", "max by (run) (grpo_run_doubled_tickets) > 0", "0m", "critical",
        f"{RUN} trained a ticket twice as new",
        "This cannot happen: keep the run's Redis and its logs, run `grpo audit`, and report it.",
    ),
    Alert(
        "GrpoLagBeyondBound",
        f'{_step_metric("staleness/trained/max")} > max by (run) (grpo_dataprep_lag_bound_steps)', "0m", "critical",
        f"{RUN} trained a group older than admission.max_staleness",
        "This cannot happen: as GrpoTicketsDoubled.",
    ),
    Alert(
        "GrpoStaleGroups",
        'sum by (run) (increase(grpo_dataprep_stale_groups_total[30m])) '
        '+ sum by (run) (increase(grpo_dataprep_settled_groups_total{action="stale"}[30m])) > 0', "0m", "warning",
        "Groups of run {{ $labels.run }} are dropped as stale",
        "With a FIFO table and no overtaking there are none. Otherwise: tickets that were overtaken (admission.overtake), a "
        "table that holds more than steps use (replay.samples_per_insert, replay.min_size), or a long standstill with full "
        "tables.",
    ),
    Alert(
        "GrpoTicketStuck", _while_it_works("max by (run) (grpo_run_oldest_ticket_seconds) > 3600"), "5m", "warning",
        "A ticket of run {{ $labels.run }} has been out for more than an hour",
        "`grpo inspect ledger` and `grpo inspect group` show who holds it. A prompt that kills its generator is buried after "
        "generator.max_expiries lost leases; a verifier that hangs ends at its time limit.",
    ),
    Alert(
        "GrpoDeadLetters", "max by (run) (delta(grpo_run_dead_letters[30m])) > 0", "0m", "warning",
        "Tickets of run {{ $labels.run }} were given up",
        "`grpo inspect deadletter` has their reasons. When the cause is mended, `grpo replay requeue --all` puts them back to "
        "work.",
    ),
    Alert(
        "GrpoRolloutsFail", "sum by (run, reason) (increase(grpo_generator_failures_total[15m])) > 5", "0m", "warning",
        "Rollouts of run {{ $labels.run }} fail: {{ $labels.reason }}",
        "`verifier`: its message is in the generator's log and, after generator.max_attempts, in the dead letters; "
        "`generation`: the engine refused or stopped completions; `store`: Redis was away; `other`: the log has a traceback.",
    ),
    Alert(
        "GrpoLeasesLost", "sum by (run, pod) (increase(grpo_generator_lost_leases_total[15m])) > 5", "0m", "warning",
        f"{POD} loses its leases",
        "It renews too late: a machine that stalls or is overloaded, or a generator.lease_s that is too short for it. Its work "
        "is done again by others.",
    ),
    Alert(
        "GrpoKvCacheFull", "max by (run, pod) (grpo_generator_kv_usage_ratio) > 0.95", "15m", "info",
        f"The KV cache of {POD} is full",
        "The pod takes fewer tickets by itself. More memory (generator.gpu_memory_utilization, cpu_kv_cache_mib), fewer "
        "sequences (generator.max_num_seqs) or more pods make it faster.",
    ),
    Alert(
        "GrpoRedisFull",
        "max by (run) (grpo_redis_used_memory_bytes / (grpo_redis_memory_limit_bytes > 0)) > 0.85", "1m", "critical",
        "Redis of run {{ $labels.run }} is nearly full",
        "Above 0.7 the trainer saves early so that Redis may forget, above 0.9 no prompt is issued. Lower replay.capacity or "
        "checkpoint.every_steps, or raise redis.max_memory_mib and the server's maxmemory. If checkpoints fail (see "
        "GrpoCheckpointFails), mend those first.",
    ),
    Alert(
        "GrpoRedisSlow",
        "histogram_quantile(0.9, sum by (run, le) (rate(grpo_redis_answer_seconds_bucket[5m]))) > 0.5", "5m", "warning",
        "Redis of run {{ $labels.run }} answers slowly",
        "`SLOWLOG GET` and `LATENCY DOCTOR` on the server; its disk (append-only file), its core, its network. Nothing of ours "
        "takes it longer than some milliseconds at a time, but for replay's recency at 100,000 groups (docs/log.md).",
    ),
    Alert(
        "GrpoRedisNotPersisting", "min by (run) (grpo_redis_persists) == 0", "1m", "critical",
        "Redis of run {{ $labels.run }} cannot write its append-only file",
        "Its disk is full or broken. What it has not written is lost when it ends; the run would go back to its last checkpoint.",
    ),
    Alert(
        "GrpoCheckpointFails", "max by (run) (grpo_trainer_failed_checkpoints) > 0", "0m", "critical",
        "Run {{ $labels.run }} cannot write its checkpoint",
        "`grpo status` and the trainer's log say why: mostly a disk that is full. The run goes on and tries again when the "
        "next one is due; Redis keeps all plans meanwhile, so it fills.",
    ),
    Alert(
        "GrpoNothingToLearn", f"{_step_metric('reward/train/zero_std_share')} > 0.9", "30m", "warning",
        "Nearly all groups of run {{ $labels.run }} have one reward for all completions",
        "The prompts are too hard, too easy, or the verifier gives everything the same score: `grpo inspect group` shows texts "
        "and scores. data.curriculum, filters.exclude_pass_rate, sampling.group_size.",
    ),
    Alert(
        "GrpoPolicyGap", f"{_step_metric('logprob_gap/train/mean')} > 0.2", "15m", "warning",
        "Generators and trainer of run {{ $labels.run }} disagree on logprobs",
        "With little off-policy data (`staleness/trained/off_policy_share`) this means that they do not hold the same weights "
        "or do not compute alike: model.dtype, model.fp32_head, sync.verify, generator.engine_options.",
    ),
    Alert(
        "GrpoLengthDrift", f"{_step_metric('length/drift')} < 0.8", "30m", "warning",
        "Run {{ $labels.run }} trains on shorter completions than it generates",
        "Long groups are dropped: overtaking (admission.overtake = \"drop\"), filters, staleness. docs/metrics.md.",
    ),
    Alert(
        "GrpoTrackerBehind", "max by (run, tracker) (grpo_tracker_backlog_steps) > 20", "10m", "warning",
        "Tracker {{ $labels.tracker }} of run {{ $labels.run }} does not take records",
        "Training is not concerned: 100,000 steps wait in Redis. Look at the log of `tracker-0`; one that hangs is ended by "
        "killing the pod, and goes on where it was.",
    ),
    Alert(
        "GrpoSpansLost", 'sum by (run) (increase(grpo_pod_spans_total{outcome=~"failed|dropped"}[15m])) > 0', "15m", "info",
        "Spans of run {{ $labels.run }} are lost",
        "The collector at tracing.endpoint does not answer or is too slow. Nothing else is concerned. tracing.share makes fewer.",
    ),
)  # fmt: skip


class _Rules(yaml.SafeDumper):
    """Long expressions in one line, in the order of the rule."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def as_yaml() -> str:
    """The rules as Prometheus reads them."""
    head = "# Made by `python -m monitoring` of monitoring/alerts.py; runbooks are in docs/operating.md.\n"
    rules = {"groups": [{"name": GROUP, "rules": [alert.rule() for alert in ALERTS]}]}
    return head + yaml.dump(rules, Dumper=_Rules, sort_keys=False, width=1000, allow_unicode=True)
