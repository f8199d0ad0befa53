"""Prometheus metrics of an environment pod."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prometheus_client import Counter, Gauge, Histogram

from services.environment.rollout import FinishedRollout
from services.protocol.messages import Header
from services.runtime.holding import FAILURES
from services.runtime.metrics import Metrics, counter, gauge, histogram


class EnvironmentMetrics(Metrics):
    """The metrics of an environment pod."""

    held: Gauge = gauge("grpo_environment_tickets", "tickets", "Tickets whose rollouts run in this pod.")
    running: Gauge = gauge("grpo_environment_running_rollouts", "", "Rollouts that run in this pod.")
    claimed: Counter = counter("grpo_environment_claimed_tickets_total", "tickets", "Tickets claimed.")
    rollouts: Counter = counter("grpo_environment_rollouts_total", "", "Rollouts finished.")
    truncated: Counter = counter(
        "grpo_environment_truncated_rollouts_total", "", "Rollouts that ended at a limit of turns or tokens."
    )
    turns: Counter = counter("grpo_environment_turns_total", "", "Turns of finished rollouts.")
    program_s: Counter = counter(
        "grpo_environment_program_seconds_total", "seconds", "Time that environments took to reply, over finished rollouts."
    )
    policy_s: Counter = counter(
        "grpo_environment_policy_seconds_total", "seconds", "Time that rollouts waited for the policy, over finished rollouts."
    )
    tool_calls: Counter = counter("grpo_environment_tool_calls_total", "", "Tool calls of finished rollouts.")
    malformed_calls: Counter = counter(
        "grpo_environment_malformed_calls_total",
        "",
        "Replies of the policy whose tool calls could not be parsed; the policy got the reason.",
    )
    restarts: Counter = counter(
        "grpo_environment_restarted_rollouts_total", "", "Rollouts started again after a failure or a loss."
    )
    continued: Counter = counter("grpo_environment_continued_rollouts_total", "", "Rollouts continued from another pod's turns.")
    left_out: Counter = counter(
        "grpo_environment_left_out_rollouts_total", "", "Rollouts left out of their group because they failed for good."
    )
    refused: Counter = counter(
        "grpo_environment_refused_submits_total", "tickets", "Groups refused on submission because their lease was lost."
    )
    lost: Counter = counter("grpo_environment_lost_leases_total", "tickets", "Tickets whose lease was lost to another pod.")
    failures: Mapping[str, Counter] = counter(
        "grpo_environment_failures_total",
        "tickets",
        "Failed tickets, by cause: a verifier, rollouts, Redis, or another.",
        "reason",
        FAILURES,
    )
    given_up: Counter = counter(
        "grpo_environment_given_up_tickets_total", "tickets", "Tickets moved to the dead letters after their last attempt."
    )
    rollout_s: Histogram = histogram(
        "grpo_environment_group_seconds", "seconds", "Time from the claim to the last turn of a group."
    )
    score_s: Histogram = histogram("grpo_environment_score_seconds", "seconds", "Duration of scoring a group by verifiers.")
    submit_s: Histogram = histogram("grpo_environment_submit_seconds", "seconds", "Duration of submitting a group to Redis.")

    def observe(self, header: Header, finished: Sequence[FinishedRollout]) -> None:
        """Count a finished group and its rollouts."""
        self.rollout_s.observe(header.generate_s)
        self.score_s.observe(header.score_s)
        for each in finished:
            self.rollouts.inc()
            self.truncated.inc(each.truncated)
            self.turns.inc(each.turns)
            self.program_s.inc(each.environment_s)
            self.policy_s.inc(each.policy_s)
            self.tool_calls.inc(each.tool_calls)
            self.malformed_calls.inc(each.malformed_calls)
