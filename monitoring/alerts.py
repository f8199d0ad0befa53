"""Alert rules, each with instructions for the operator.

A rule's expression yields one sample per run or per pod; its runbook is a section of docs/operating.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import yaml

GROUP = "grpo"
RUNBOOKS = "docs/operating.md"
LOOK_BACK = "1d"
"""How long the last state of a run counts, whether it was paused or finished, while no dataprep pod exports it."""


@dataclass(frozen=True)
class Alert:
    """One rule."""

    name: str
    expression: str
    duration: str
    """How long the expression must hold before the alert fires."""
    severity: Literal["critical", "warning", "info"]
    """critical: the run is stopped or losing work; warning: it is slower or worse than it could be."""
    summary: str
    runbook: str
    """What to check, and what to do."""

    @property
    def anchor(self) -> str:
        """Return the anchor of the runbook's section."""
        return f"{RUNBOOKS}#{self.name.lower()}"

    def rule(self) -> dict[str, Any]:
        """Return the rule in Prometheus' format."""
        return {
            "alert": self.name,
            "expr": self.expression,
            "for": self.duration,
            "labels": {"severity": self.severity},
            "annotations": {"summary": self.summary, "runbook": self.anchor},
        }


def _last(expression: str) -> str:
    """Return the value of the expression, or its last one within `LOOK_BACK` if no dataprep pod exports it now."""
    return f"last_over_time({expression}[{LOOK_BACK}:1m])"


def _while_active(expression: str) -> str:
    """Restrict the expression to runs that are neither paused nor finished."""
    return f"({expression}) unless on (run) {_last('max by (run) (grpo_run_ended or grpo_run_paused)')} == 1"


def _step_metric(name: str) -> str:
    return f'max by (run) (grpo_trainer_step_metric{{name="{name}"}})'


def _of_holders(counter: str) -> str:
    """Return by how much a counter of generators and one of environment pods have risen."""
    return f"increase(grpo_generator_{counter}[15m]) or increase(grpo_environment_{counter}[15m])"


def _risen(gauge: str) -> str:
    """Restrict a gauge of the run to values above its lowest one within half an hour.

    If its pods differ, the lowest value counts, since one shows a fall a little later than another.
    """
    return f"min by (run) ({gauge}) > min by (run) (min_over_time({gauge}[30m]))"


FAILED = 'grpo_run_outcome_tickets{outcome="failed"}'
RUN, POD = "Run {{ $labels.run }}", "{{ $labels.pod }} of run {{ $labels.run }}"

ALERTS = (
    Alert(
        "GrpoLoopStuck", "max by (run, pod) (grpo_pod_loop_silent_seconds > grpo_pod_loop_limit_seconds)", "1m", "critical",
        f"A loop of {POD} makes no progress",
        "`/health/live` of the pod names the loop; its log shows what it did last. Kubernetes restarts the pod on its own; "
        "`grpo run` does not: kill the process, and it is replaced without losing anything. A `tracker-0` that hangs blocks "
        "nothing else.",
    ),
    Alert(
        "GrpoLoopFails", "sum by (run, pod) (increase(grpo_pod_loop_failures_total[15m])) > 5", "0m", "warning",
        f"A loop of {POD} keeps failing",
        "The pod's log has the traceback under `loop failed, restarting it`. While Redis is unavailable this is expected of "
        "all pods.",
    ),
    Alert(
        "GrpoNoLeader", _while_active("max by (run) (grpo_dataprep_leads) == 0"), "2m", "critical",
        f"{RUN} has no dataprep leader",
        "No step is prepared and no ticket issued. Check dataprep's log and exit code; `grpo status` names the leader. A leader "
        "that died is replaced after `fleet.ttl_s`; during a restore there is no leader.",
    ),
    Alert(
        "GrpoNoDataprep",
        f"group by (run) (grpo_pod_ready) and on (run) present_over_time(grpo_dataprep_leads[{LOOK_BACK}]) "
        f"unless on (run) grpo_dataprep_leads unless on (run) {_last('max by (run) (grpo_run_ended)')} == 1", "5m", "critical",
        f"{RUN} has no dataprep pod",
        "No step is prepared and no ticket issued. Alerts about the run's state and Redis are silent, because dataprep exports "
        "their metrics. Check its pods: one that exits names the cause in the last line of its log (the table of exit codes is "
        "below); one that has just started reads the prompts first.",
    ),
    Alert(
        "GrpoNoTrainer", _while_active('max by (run) (grpo_run_pods{kind="trainer"}) == 0'), "5m", "critical",
        f"{RUN} has no trainer",
        "Check the exit code and the last line of the trainer's log (the table of exit codes is below). The next trainer resumes "
        "the run from its last checkpoint and retrains the same plans.",
    ),
    Alert(
        "GrpoTooFewGenerators",
        _while_active('max by (run) (grpo_run_pods{kind="generator"}) < max by (run) (grpo_run_wanted_generators)'), "10m",
        "warning", f"{RUN} has fewer generators than desired",
        "The run continues with the ones it has. Look for pods that cannot be scheduled (GPUs), take long to load, or exit; "
        "`grpo scale N` changes the desired number.",
    ),
    Alert(
        "GrpoPodNotReady", _while_active("max by (run, pod) (grpo_pod_ready) == 0"), "15m", "warning",
        f"{POD} is not ready",
        "`/health/ready` of the pod says why: weights other than the published ones (see GrpoGeneratorBehind), a full Redis "
        "(see GrpoRedisFull), a model that is still loading.",
    ),
    Alert(
        "GrpoNoStep", _while_active("sum by (run) (increase(grpo_trainer_steps_total[15m])) == 0"), "30m", "critical",
        f"{RUN} has trained no step in half an hour",
        "`grpo_trainer_phase_seconds_total` shows what the trainer does, `grpo_dataprep_wait_seconds_total` why no step is "
        "prepared: `groups` - generators are too slow or missing; `older_ticket` - one long completion delays a step, for "
        "up to ten minutes; `ahead` - the trainer is the bottleneck. If steps take longer than half an hour, raise this rule's "
        "`for`.",
    ),
    Alert(
        "GrpoTrainerStarves",
        _while_active('sum by (run) (rate(grpo_trainer_phase_seconds_total{phase="waiting for data"}[15m])) > 0.5'), "30m",
        "info", "The trainer of run {{ $labels.run }} waits for data more than half of the time",
        "To speed it up, add generators (`grpo scale`), shorten completions (sampling.max_tokens), or use groups more "
        "often (replay.max_uses). Nothing is wrong.",
    ),
    Alert(
        "GrpoGeneratorBehind",
        _while_active("max by (run, pod) (grpo_generator_versions_behind unless grpo_generator_evaluating == 1) > 1"),
        "10m", "warning", f"{POD} does not get the current weights",
        "Until it catches up, it claims no tickets. Its log says why rounds fail there (`weight-sync round failed on this pod`): "
        "a port of the trainer that it cannot reach, or a deadline that is too short "
        "(sync.deadline_s). Delete the pod to have it replaced.",
    ),
    Alert(
        "GrpoSyncFails", "sum by (run) (increase(grpo_trainer_sync_failures_total[15m])) > 3", "0m", "warning",
        "Weight syncs of run {{ $labels.run }} keep failing",
        "The trainer's log names the members it excludes (`excluded members from a weight-sync round`). For a pod that is always "
        "among them, see GrpoGeneratorBehind. Pods that come and go all the time cause a new group each time.",
    ),
    Alert(
        "GrpoSyncSlow", _while_active('sum by (run) (rate(grpo_trainer_phase_seconds_total{phase="syncing"}[15m])) > 0.3'),
        "30m", "warning", "Run {{ $labels.run }} spends more than 30 % of its time on weight syncs",
        "`grpo_trainer_sync_seconds` shows the phase, and the trainer's log the last member to answer (`slow sync phase`). "
        "`grpo_generator_sync_seconds` shows which generator waits least in `paused` and `joined`: the others wait for that one. "
        "`join` is the cost of fleet changes, `transfer` is bandwidth.",
    ),
    Alert(
        "GrpoTicketsDoubled", "max by (run) (grpo_run_doubled_tickets) > 0", "0m", "critical",
        f"{RUN} trained a ticket twice in one epoch",
        "This should be impossible: keep the run's Redis and its logs, run `grpo audit`, and report it.",
    ),
    Alert(
        "GrpoLagBeyondBound",
        f'{_step_metric("staleness/trained/max")} > max by (run) (grpo_dataprep_lag_bound_steps)', "0m", "critical",
        f"{RUN} trained a group older than admission.max_staleness",
        "This should be impossible: proceed as for GrpoTicketsDoubled.",
    ),
    Alert(
        "GrpoStaleGroups",
        'sum by (run) (increase(grpo_dataprep_stale_groups_total[30m])) '
        '+ sum by (run) (increase(grpo_dataprep_settled_groups_total{action="stale"}[30m])) > 0', "0m", "warning",
        "Groups of run {{ $labels.run }} are dropped as stale",
        "With a FIFO table and no overtaking this does not happen. Otherwise the causes are overtaken tickets, "
        "samplers that pass groups over, or a long standstill with full tables.",
    ),
    Alert(
        "GrpoTicketStuck", _while_active("max by (run) (grpo_run_oldest_ticket_seconds) > 3600"), "5m", "warning",
        "A ticket of run {{ $labels.run }} has been unsettled for more than an hour",
        "`grpo inspect ledger` and `grpo inspect group` show which pod has claimed it. A prompt that kills its generator becomes "
        "a dead letter after 16 expired leases; a verifier that hangs is stopped at its time limit.",
    ),
    Alert(
        "GrpoDeadLetters", f"{_risen(FAILED)} or {_risen('grpo_run_dead_letters')}", "0m", "warning",
        "Tickets of run {{ $labels.run }} became dead letters",
        "`grpo inspect deadletter` shows the reasons. After fixing the cause, `grpo replay requeue --all` issues them again. If "
        "one after another fails, dataprep pauses itself; `grpo resume` resumes it.",
    ),
    Alert(
        "GrpoRolloutsFail", f"sum by (run, reason) ({_of_holders('failures_total')}) > 5", "0m", "warning",
        "Rollouts of run {{ $labels.run }} fail: {{ $labels.reason }}",
        "`verifier`: its message is in the log of the generator or environment pod and, after four attempts, in the "
        "dead letters; `generation`: the engine rejected or aborted completions, or rollouts in an environment failed; `store`: "
        "Redis was unavailable; `other`: the log has a traceback.",
    ),
    Alert(
        "GrpoLeasesLost", f"sum by (run, pod) ({_of_holders('lost_leases_total')}) > 5", "0m", "warning",
        f"{POD} loses its leases",
        "It renews too late: the machine stalls or is overloaded, or fleet.ttl_s is too short for it. Other pods redo its "
        "work.",
    ),
    Alert(
        "GrpoKvCacheFull", "max by (run, pod) (grpo_generator_kv_usage_ratio) > 0.95", "15m", "info",
        f"The KV cache of {POD} is full",
        "The pod takes fewer tickets automatically. More memory (engine_options.gpu_memory_utilization, kv_cache_memory_bytes), "
        "fewer sequences (generator.max_num_seqs) or more pods make it faster.",
    ),
    Alert(
        "GrpoRedisFull",
        "max by (run) (grpo_redis_used_memory_bytes / (grpo_redis_memory_limit_bytes > 0)) > 0.85", "1m", "critical",
        "Redis of run {{ $labels.run }} is nearly full",
        "Above 0.7 the trainer saves early so that Redis can drop old steps; above 0.9 no prompt is issued. Lower "
        "replay.capacity or checkpoint.every_steps, or raise the server's maxmemory. If checkpoints "
        "fail (see GrpoCheckpointFails), fix those first.",
    ),
    Alert(
        "GrpoRedisSlow",
        "histogram_quantile(0.9, sum by (run, le) (rate(grpo_redis_answer_seconds_bucket[5m]))) > 0.5", "5m", "warning",
        "Redis of run {{ $labels.run }} answers slowly",
        "Check `SLOWLOG GET` and `LATENCY DOCTOR` on the server, its disk (append-only file), its core and its network. Our own "
        "commands take a few milliseconds each, except replay's recency at 100,000 groups.",
    ),
    Alert(
        "GrpoRedisNotPersisting", "min by (run) (grpo_redis_persists) == 0", "1m", "critical",
        "Redis of run {{ $labels.run }} cannot write its append-only file",
        "Its disk is full or broken. Unwritten data is lost when the server stops; the run would return to its last checkpoint.",
    ),
    Alert(
        "GrpoCheckpointFails", "max by (run) (grpo_trainer_failed_checkpoints) > 0", "0m", "critical",
        "Run {{ $labels.run }} cannot write its checkpoint",
        "`grpo status` and the trainer's log say why, usually a full disk. The run continues and retries when the next "
        "checkpoint is due; meanwhile Redis keeps all plans, so it fills up.",
    ),
    Alert(
        "GrpoNothingToLearn", _while_active(f"{_step_metric('reward/train/zero_std_share')} > 0.9"), "30m", "warning",
        "Nearly all groups of run {{ $labels.run }} have the same reward for all completions",
        "The prompts are too hard or too easy, or the verifier gives everything the same score: `grpo inspect group` shows texts "
        "and scores. Consider data.curriculum, filters.exclude_pass_rate, sampling.group_size.",
    ),
    Alert(
        "GrpoPolicyGap", _while_active(f"{_step_metric('logprob_gap/train/mean')} > 0.2"), "15m", "warning",
        "Generators and trainer of run {{ $labels.run }} disagree on logprobs",
        "With little off-policy data (`staleness/trained/off_policy_share`) this means that they have different weights or "
        "compute differently: check model.dtype, model.fp32_head, generator.engine_options.",
    ),
    Alert(
        "GrpoLengthDrift", _while_active(f"{_step_metric('length/drift')} < 0.8"), "30m", "warning",
        "Run {{ $labels.run }} trains on shorter completions than it generates",
        "Long groups are dropped by overtaking, filters or staleness; see docs/metrics.md.",
    ),
    Alert(
        "GrpoTrackerBehind", "max by (run, tracker) (grpo_tracker_backlog_steps) > 20", "10m", "warning",
        "Tracker {{ $labels.tracker }} of run {{ $labels.run }} does not accept records",
        "Training is not affected: Redis keeps records of 100,000 steps. Check the log of `tracker-0`. If it hangs, kill the "
        "pod; the next one continues where it stopped.",
    ),
    Alert(
        "GrpoSpansLost", 'sum by (run) (increase(grpo_pod_spans_total{outcome=~"failed|dropped"}[15m])) > 0', "15m", "info",
        "Spans of run {{ $labels.run }} are lost",
        "The collector at tracing.endpoint does not answer or is too slow. Nothing else is affected. A lower samples.share sends "
        "fewer spans.",
    ),
)  # fmt: skip


class _Rules(yaml.SafeDumper):
    """Writes long expressions on one line and keeps the key order."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def as_yaml() -> str:
    """Return the rules in Prometheus' format."""
    head = "# Generated by `python -m monitoring` from monitoring/alerts.py; runbooks are in docs/operating.md.\n"
    rules = {"groups": [{"name": GROUP, "rules": [alert.rule() for alert in ALERTS]}]}
    return head + yaml.dump(rules, Dumper=_Rules, sort_keys=False, width=1000, allow_unicode=True)
