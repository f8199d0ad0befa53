"""The catalogue of the suite: every benchmark with its figures, their goals, and what would close a gap."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

BUDGET_S = 8100
"""Time limit for all of them together on two cores; `planned_s` of each is its time there, rounded up."""
TOLERANCE = 0.25
"""Share by which a ratio may be worse than the recorded one. Pairs measured in one run on a shared machine lie within a fifth of
their median (measured: 0.80 to 1.01, 0.46 to 0.67, 3.7 to 4.7), so a quarter is beyond chance."""
COUNTED = 0.05
"""The same for counts by the server: batching varies them by a few per cent, an additional command by more."""


@dataclass(frozen=True)
class Figure:
    """One figure of a benchmark's last line."""

    key: str
    what: str
    goal: float | None = None
    better: Literal["higher", "lower"] = "higher"
    ratio: bool = True
    """Relative to something measured in the same run, or counted: only these are gated, never absolute figures."""
    tolerance: float = TOLERANCE

    def met(self, value: float) -> bool:
        """Return whether the goal, if there is one, is met."""
        return self.goal is None or (value >= self.goal if self.better == "higher" else value <= self.goal)


@dataclass(frozen=True)
class Axes:
    """Axis labels for a plot of the `curves` in a benchmark's last line."""

    x: str
    y: str
    log: bool = False


@dataclass(frozen=True)
class Benchmark:
    """One command of the suite: `python -m benchmarks.NAME --json ARGUMENTS`."""

    name: str
    title: str
    against: str
    planned_s: int
    figures: tuple[Figure, ...]
    arguments: tuple[str, ...] = ()
    script: str = ""
    """Name of the module, if it differs from `name`."""
    gap: str = ""
    """What would close the gap where a goal is missed."""
    axes: Axes | None = None
    """Axes, if its last line has curves."""

    @property
    def command(self) -> list[str]:
        """Return the command line after the interpreter."""
        return ["-m", f"benchmarks.{self.script or self.name}", "--json", *self.arguments]


def _bandwidth(megabytes: int) -> tuple[Figure, ...]:
    """Return the figures of weight-sync rounds with this many MB of weights."""
    return tuple(
        Figure(f"{megabytes}mb_{n}.verified_bandwidth_ratio", f"bytes/s of a whole round, {n} receiver{'s' * (n > 1)}", 0.8)
        for n in (1, 2, 4)
    )


REWARD = Axes("seconds from the start of the first completion", "mean reward of the last 5 steps")
TARGETS = {"05": "0.5", "06": "0.6", "07": "0.7", "08": "0.8"}


def _bound(bound: int) -> tuple[Figure, ...]:
    """Return the figures of a run with this `admission.max_staleness`, against bound 0."""
    side = f"staleness_{bound}"
    against = (
        Figure(f"{side}.gain", f"bound {bound}: steps per second ÷ those of bound 0"),
        *(
            Figure(f"{side}.ratio_{key}", f"bound {bound}: time of bound 0 to reward {target} ÷ its own")
            for key, target in TARGETS.items()
        ),
    )
    return (
        *(against if bound else ()),
        Figure(f"{side}.steps_per_s", f"bound {bound}: steps per second", ratio=False),
        Figure(f"{side}.lag", f"bound {bound}: mean lag of trained tokens, in versions", None, "lower", ratio=False),
        Figure(f"{side}.idle_share", f"bound {bound}: idle share of the cores", None, "lower", ratio=False),
    )


def _peer(side: str, who: str, goal: float | None, least_goal: float | None, command_goal: float | None) -> tuple[Figure, ...]:
    """Return the figures of a TRL trainer against ours, with goals for every target, the lowest ratio, and from the command."""
    first = "" if side == "trl" else f"{side}_"
    least = f"the same at the target with the lowest ratio, {who}"
    return (
        *(Figure(f"{first}ratio_{key}", f"time to reward {target}, {who} ÷ ours", goal) for key, target in TARGETS.items()),
        Figure(f"{first}ratio", least, least_goal),
        *(
            Figure(f"{first}from_command_ratio_{key}", f"time from the command to reward {target}, {who} ÷ ours")
            for key, target in TARGETS.items()
        ),
        Figure(f"{first}from_command_ratio", least, command_goal),
        Figure(f"{first}steps_per_s_ratio", f"our steps per second ÷ those of {who}"),
        Figure(f"{first}tokens_per_s_ratio", f"our tokens generated per second ÷ those of {who}"),
        Figure(f"{first}memory_ratio", f"peak memory of all our processes ÷ that of {who}", better="lower"),
    )


def _side(side: str, who: str) -> tuple[Figure, ...]:
    """Return the figures of one side of the example."""
    return (
        Figure(
            f"{side}.to_generation_s",
            f"seconds from the command to the start of the first completion, {who}",
            None,
            "lower",
            False,
        ),
        Figure(f"{side}.first_step_s", f"seconds from there to the end of the first step, {who}", None, "lower", ratio=False),
        Figure(f"{side}.steps_per_s", f"steps per second, {who}", ratio=False),
        Figure(f"{side}.tokens_per_s", f"tokens generated per second, {who}", ratio=False),
        Figure(f"{side}.trained_tokens_per_s", f"tokens trained per second, {who}", ratio=False),
        Figure(f"{side}.last_reward", f"mean reward of the last 5 steps, {who}", ratio=False),
        Figure(f"{side}.idle_share", f"idle share of the cores, {who}", None, "lower", ratio=False),
        Figure(f"{side}.peak_mib", f"peak memory, {who}, MiB", None, "lower", ratio=False),
        Figure(f"{side}.load", f"machine load before the run, {who}", None, "lower", ratio=False),
    )


def _power(name: str, what: str) -> tuple[Figure, ...]:
    """Return the figures of a growing cost. Exponents near 0 have no meaningful tolerance; the growth they lead to has."""
    return (
        Figure(f"{name}_exponent", f"exponent of {what}", None, "lower", ratio=False),
        Figure(f"{name}_growth", f"{what}, at the largest size ÷ at the smallest", None, "lower"),
    )


SUITE = (
    Benchmark(
        "end_to_end",
        "The example, end to end",
        "TRL 1.16: `GRPOTrainer` with transformers' `generate` and with in-process vLLM, and `AsyncGRPOTrainer` with a vLLM "
        "server; same model, prompts, reward, batch, loss and learning rate at every step. Each side's clock "
        "starts when it begins to sample its first completion",
        2400,
        (
            *_peer("trl", "TRL with `generate`", 1.5, None, 1.0),
            *_peer("trl_vllm", "TRL with in-process vLLM", None, None, None),
            *_peer("trl_async", "TRL's asynchronous trainer", None, 1.2, None),
            *_side("ours", "ours"),
            *_side("trl", "TRL with `generate`"),
            *_side("trl_vllm", "TRL with in-process vLLM"),
            *_side("trl_async", "TRL's asynchronous trainer"),
        ),
        ("--seeds", "0", "1", "2"),
        gap="Under a bound of 1 a step takes half of the time from a group's claim to the end of its training, which is mostly "
        "call overhead for so small a model, while a quarter of the two cores is idle (howto/scale.md). Larger models, and a "
        "device for each side, would help; before the first step, loading less in six processes.",
        axes=REWARD,
    ),
    Benchmark(
        "staleness",
        "Benefit and cost of the staleness bound",
        "the same run with `admission.max_staleness` 0, 1, 2 and 4: a larger bound gives more steps per second, but needs more "
        "steps to a reward",
        780,
        (*_bound(0), *_bound(1), *_bound(2), *_bound(4)),
        ("--staleness", "0", "1", "2", "4", "--steps", "40", "--seeds", "0", "1", "2"),
        script="end_to_end",
        axes=REWARD,
    ),
    Benchmark(
        "overhead",
        "Generation through the service",
        "bare vLLM, same prompts and seeds, in the same process",
        150,
        (Figure("ratio", "tokens/s through claims, verifiers and Redis ÷ bare vLLM", 0.9),),
        gap="Verifiers and the loop share the cores with vLLM here; with a GPU they would have cores of their own.",
    ),
    Benchmark(
        "rewards",
        "Custom rewards",
        "the bare function; the same generator with an instant verifier; nothing lost",
        240,
        (
            Figure("overhead_us", "overhead of a Python function call, per completion, µs", 200, "lower", ratio=False),
            Figure("seats_idle_share", "share of an engine's seats idle because a verifier takes 2 s", 0.05, "lower"),
            Figure("lost", "tickets lost with a judge that hangs, fails, disconnects and dies", 0, "lower"),
            Figure("zeros", "scores that the judge did not give", 0, "lower"),
        ),
        gap="Cheaper frames to the confined process and back; more groups waiting for scores (`SCORING_TIMES`).",
    ),
    Benchmark(
        "datapath",
        "The data path",
        "raw pipelined SET and GET of the same bytes",
        60,
        (
            Figure("ratio", "groups/s from claim to commit ÷ raw SET and GET", 0.4),
            Figure("dataprep_us_per_group", "dataprep CPU per group, µs", None, "lower", ratio=False),
            Figure("calls_per_group", "functions called per group (depends on batching)", None, "lower"),
            Figure("commands_per_group", "commands per group, including inside functions", None, "lower", tolerance=COUNTED),
            Figure("wire_over_payload", "bytes in and out of Redis ÷ the payload's", None, "lower", tolerance=COUNTED),
        ),
        gap="Each group is acknowledged, counted and stored at each hand-over; fewer commands in `submit` and `settle`.",
    ),
    Benchmark(
        "stream",
        "The data path against plain streams",
        "a PipelineRL-style path: pickled groups, XADD and XREAD, one entry at a time",
        90,
        (
            Figure("ratio", "groups/s ÷ theirs", 5.0),
            Figure("dataprep_ratio", "CPU per group: their preprocessor ÷ our dataprep"),
            Figure("left_ratio", "bytes left in Redis: theirs ÷ ours"),
        ),
        gap="As for the data path.",
    ),
    Benchmark(
        "replay",
        "The replay table",
        "dm-reverb 0.14, 40 KB groups, N = 10,000",
        240,
        (
            Figure("insert_each_ratio", "inserts, each acknowledged", 3),
            Figure("insert_ratio", "inserts against Reverb's streams", 3),
            Figure("bare_insert_each_ratio", "the server's plain SET, each acknowledged", None),
            Figure("bare_insert_ratio", "the server's plain SET against Reverb's streams", None),
            Figure("sample_each_uniform_ratio", "draws of payloads of variable shape, uniform", 2),
            Figure("sample_each_prioritised_ratio", "draws of payloads of variable shape, prioritised", 2),
            Figure("sample_uniform_ratio", "draws against Reverb's fixed-shape batches, uniform", 2),
            Figure("sample_prioritised_ratio", "draws against Reverb's fixed-shape batches, prioritised", 2),
            Figure("bare_sample_uniform_ratio", "the server's plain MGET against those batches, uniform", None),
            Figure("bare_sample_prioritised_ratio", "the server's plain MGET against those batches, prioritised", None),
            Figure("draw_p50_ratio", "a draw of 64 on demand, median latency", 0.5, "lower"),
        ),
        ("--limit-s", "180"),
        gap="Every group is written to an append-only file, which Reverb does not have. The server's plain SET and MGET of the "
        "same bytes, among the figures, bound any table stored in it.",
    ),
    Benchmark(
        "settling",
        "Dataprep alone",
        "its goals",
        60,
        (
            Figure("headers_per_cpu_s", "headers settled per second of one core", 5000, ratio=False),
            Figure("rss_mib", "memory with 100,000 groups in the table, MiB", 200, "lower", ratio=False),
        ),
        gap="Several tables, each with its own leader: a header costs little beyond its decoding.",
    ),
    Benchmark(
        "snapshot",
        "Snapshots",
        "fetching the same payloads with the same client",
        90,
        (
            Figure("index/longest_command_ms", "longest command, 100,000 groups, index only, ms", 50, "lower", ratio=False),
            Figure("whole/longest_command_ms", "the same with payloads, ms", 50, "lower", ratio=False),
            Figure("restore/longest_command_ms", "the same during a restore, ms", 50, "lower", ratio=False),
            Figure("read_ratio", "time of a snapshot with payloads ÷ fetching them", None, "lower"),
        ),
        gap="Smaller pieces per command.",
    ),
    Benchmark(
        "sync",
        "Weight sync",
        "a bare `torch.distributed` broadcast of the same bytes, gloo, 100 MB",
        75,
        (
            *_bandwidth(100),
            *(
                Figure(f"100mb_{n}.verified_pause_share", f"pause ÷ round, {n} receiver{'s' * (n > 1)}", 0.3, "lower")
                for n in (1, 2, 4)
            ),
            *(
                Figure(
                    f"100mb_{n}.verified_{key}",
                    f"{what}, {n} receiver{'s' * (n > 1)}, s",
                    None,
                    "lower",
                    ratio=False,
                )
                for key, what in (("first_s", "the first round of a group"), ("round_s", "a round"), ("pause_s", "its pause"))
                for n in (1, 2, 4)
            ),
        ),
        gap="Members apply weights only once all have arrived, so a copy follows the last byte. Trainer and receivers share two "
        "cores with the broadcast itself, so checksums add a quarter to a third here, and little over a network (docs/sync.md).",
    ),
    Benchmark(
        "weights",
        "Weights as versions",
        "all weights, the training step, plain reads of the same files, loopback",
        660,
        (
            Figure("delta_share", "bytes of a delta ÷ bytes of the weights", 0.03, "lower"),
            Figure("encode_share", "encoding time ÷ training step time", 0.05, "lower"),
            Figure("versions_identical", "share of versions that a receiver holds bit-identically", 1.0, tolerance=0.0),
            Figure("versions_sampled", "share of versions with which vLLM samples like the trainer", 1.0, tolerance=0.0),
            Figure("late_join_ratio", "time of a receiver without weights ÷ reading the same bytes", 1.5, "lower"),
            Figure("late_join_used_ratio", "the same in memory that the machine has used before", 1.5, "lower"),
            Figure("slow_link_ratio", "steps/s over 100 Mbit/s and 80 ms ÷ loopback", 0.9),
            Figure("lora_share", "bytes of an adapter version ÷ bytes of the model", 0.01, "lower"),
            Figure("merged_speed", "vLLM's tokens/s with a merged adapter ÷ with an unmerged one"),
            Figure("pause_s_per_gb", "vLLM's pause, s per GB of weights", None, "lower", ratio=False),
        ),
        gap="A late joiner decodes and compares while it reads, so the ratio depends on how fast a core is: 1.17 and 1.38 "
        "were measured on an AMD EPYC, 1.4 to 1.9 on an Intel Xeon.",
    ),
    Benchmark(
        "sync_1gb",
        "Weight sync, 1 GB",
        "a bare `torch.distributed` broadcast of the same bytes, gloo, 1 GB",
        80,
        _bandwidth(1000),
        ("--megabytes", "1000", "--sets", "1", "--repeats", "3"),
        script="sync",
        gap="As for 100 MB.",
    ),
    Benchmark(
        "sync_10g",
        "Weight sync over 10 Gbit/s",
        "a bare `torch.distributed` broadcast of the same bytes, gloo, 100 MB, over the same link",
        45,
        _bandwidth(100),
        ("--gbit", "10", "--sets", "1"),
        script="sync",
        gap="With one receiver, the work after the last byte weighs most: checking the last bucket, applying, acknowledgements.",
    ),
    Benchmark(
        "growth",
        "Growth",
        "itself, smaller: 1 to 1,000 simulated generators, 1,000 to 1,000,000 groups in a prioritised table, 1 to 64 ranks",
        300,
        (
            *_power("fleet.ticket", "the server's CPU for a ticket, by generators"),
            *_power("fleet.round", "the server's CPU for a round without weights, by generators"),
            *_power("table.settle", "the server's time to settle a group, by groups in the table"),
            *_power("table.draw", "the server's time to draw a group, by groups in the table"),
            *_power("ranks.plan", "time to plan a step, by ranks"),
            Figure("1000.ticket_cpu_us", "CPU of Redis for a ticket, 1,000 generators, µs", None, "lower", ratio=False),
            Figure("1000.claim_p99_ms", "a claim, 1,000 generators, p99, ms", None, "lower", ratio=False),
            Figure("1000.round_s", "a round without weights, 1,000 generators, s", None, "lower", ratio=False),
        ),
        axes=Axes("size ÷ smallest size", "cost ÷ cost at the smallest size", log=True),
    ),
    Benchmark(
        "recovery",
        "Recovery",
        "a run without faults: bit-identical weights",
        240,
        (
            Figure("astray", "tickets lost, doubled, skipped, leaked or dropped", 0, "lower"),
            *(
                Figure(f"{kind}.recovery_s", f"from kill -9 of {what} to a steady run, s", None, "lower", ratio=False)
                for kind, what in (
                    ("generator", "a generator"), ("dataprep", "the leading dataprep"), ("trainer", "the trainer"),
                    ("redis", "Redis"), ("console", "`grpo run` with all its processes"),
                )
            ),
        ),
        gap="Any such ticket is a bug, which `python -m tests.faults` reproduces from its seed.",
    ),
    Benchmark(
        "cold_start",
        "Cold start of a generator",
        "the start of its process; real vLLM, during an active run",
        120,
        (
            Figure("registered_s", "first heartbeat, s", None, "lower", ratio=False),
            Figure("loaded_s", "engine ready for weights, s", None, "lower", ratio=False),
            Figure("synced_s", "published weights loaded, s", None, "lower", ratio=False),
            Figure("token_s", "first tokens sampled, s", None, "lower", ratio=False),
            Figure("group_s", "first group settled, s", None, "lower", ratio=False),
            Figure("registered_to_group_s", "from the first heartbeat to that, s", None, "lower", ratio=False),
        ),
    ),
    Benchmark(
        "trainer",
        "An optimizer step",
        "TRL 1.16 on the same batch, in micro-batches of 2, 8 and all 16, with its output layer as released and restricted to "
        "the tokens in the loss: the fastest of the six",
        360,
        (
            Figure("tokens_per_s_ratio", "tokens/s ÷ those of TRL's fastest", 1.5),
            Figure("peak_memory_ratio", "memory of the step ÷ that of TRL's fastest", 0.7, "lower"),
            Figure("peak_memory_ratio_leanest", "memory of the step ÷ that of TRL's leanest", None, "lower"),
        ),
        gap="Attention over packed rows on a CPU moves every row once; on a GPU, queries stay where they are.",
    ),
    Benchmark(
        "agents",
        "Agents",
        "the sampled token ids; the policy's own time; plain HSETs of the same bytes",
        260,
        (
            Figure("token_identity", "share of turns whose trained ids equal the sampled ones, lowest of all templates", 1.0),
            Figure("segments_per_turn", "segments opened per turn", None, "lower"),
            Figure("door_ms", "latency that the endpoint adds to a turn, median, ms", 3, "lower", ratio=False),
            Figure("door_cpu_ms", "CPU time of that, including the client's, ms", None, "lower", ratio=False),
            Figure("door_p99_ms", "the same, 99th percentile, ms", None, "lower", ratio=False),
            Figure("turns_per_s", "turns committed per second through one Redis, 10,000 open rollouts", 5000, ratio=False),
            Figure("turn_p99_ms", "a commit with 64 in flight, 99th percentile, ms", 20, "lower", ratio=False),
            Figure("turn_server_of_plain", "server CPU time of a commit ÷ that of a plain HSET", None, "lower"),
            *(
                Figure(name, f"after 60 kills of pods: {what}", 0, "lower", ratio=False)
                for name, what in (
                    ("lost", "tickets lost"), ("doubled", "tickets doubled"), ("tools_twice", "tool calls made twice"),
                    ("resampled_turns", "committed turns sampled again"),
                    ("leaked", "processes, folders, turns and claims left behind"),
                )
            ),
        ),
        ("--kills", "60", "--run", ""),
        gap="Each call resends, rereads and rerenders its whole conversation; only recorded tokens are reused.",
    ),
    Benchmark(
        "observing",
        "Monitoring",
        "an unmonitored run",
        60,
        (
            Figure("hung_share_of_a_second", "cost of a hanging tracker ÷ a step of one second", 0.01, "lower", ratio=False),
            Figure("group_us", "all counters of a group, µs", None, "lower", ratio=False),
            Figure("trace_off_us", "spans of a group without tracing, µs", None, "lower", ratio=False),
            Figure("trace_on_us", "spans of a group with tracing, µs", None, "lower", ratio=False),
            Figure("scrape_ms", "a scrape of a generator's metrics, ms", None, "lower", ratio=False),
        ),
        gap="No step waits for a tracker: anything beyond the goal is noise.",
    ),
    Benchmark(
        "cli",
        "Commands",
        "their goal",
        90,
        (
            Figure("cpu_ms_p90", "CPU of a command without torch, p90 over commands, ms", 600, "lower", ratio=False),
            Figure("cpu_ms_p50", "the same, median over commands, ms", None, "lower", ratio=False),
        ),
        gap="Every command imports pydantic, rich, redis and httpx, which take two thirds of it.",
    ),
    Benchmark(
        "seeing",
        "The sample log",
        "no other system, with a log of 1,000,000 completions of 48 tokens",
        320,
        (
            Figure("search_ms", "numeric filter through the web console's endpoint, p50, ms", 200, "lower", ratio=False),
            Figure("search_cpu_ms", "CPU of such a filter, server and client, ms", None, "lower", ratio=False),
            Figure("first_search_s", "the first filter, which reads the log, s", None, "lower", ratio=False),
            Figure("text_search_s", "search for a word in all texts, s", None, "lower", ratio=False),
            Figure("sample_log_share", "CPU added by the log ÷ time of the example's steps", 0.01, "lower", ratio=False),
            Figure("tracker_share", "CPU of the whole tracker ÷ that time", None, "lower", ratio=False),
            Figure("step_s", "duration of such a step, 256 completions, s", None, "lower", ratio=False),
            Figure("us_a_logged_completion", "CPU added by the log, per completion, µs", None, "lower", ratio=False),
            Figure("us_a_completion", "CPU of rows, texts and files alone, per completion, µs", None, "lower", ratio=False),
            Figure("bytes_a_completion", "file bytes per completion (48 tokens, 170 characters)", None, "lower", ratio=False),
        ),
        gap="The example's steps take 0.6 s and produce 256 completions; a completion costs about 24 µs of a busy core: 16 for "
        "texts, rows and files, the rest for reading from Redis. Steps of less than 0.6 s miss the goal.",
    ),
    Benchmark(
        "browsing",
        "The *Samples* page",
        "no other system, in Chromium with a log of 1,000,000 completions",
        180,
        (
            Figure("page_ms", "from a key press or click to the rows of a filter, sort or page, ms", 200, "lower", ratio=False),
            Figure("page_cpu_ms", "CPU time of server and browser for one, ms", None, "lower", ratio=False),
            Figure("sample_ms", "to a completion with its tokens, ms", None, "lower", ratio=False),
            Figure("same_prompt_ms", "from there to the same prompt at all steps, ms", None, "lower", ratio=False),
            Figure("first_page_s", "the first page, which reads the log, s", None, "lower", ratio=False),
            Figure("text_page_s", "search for a word in all texts, s", None, "lower", ratio=False),
        ),
        gap="The rows are read from their files and rendered by the browser on the same cores as the search.",
    ),
    Benchmark(
        "engine_stats",
        "vLLM's own metrics",
        "the same engine without them",
        60,
        (
            Figure("stats_share", "CPU time that they add, tiny model", None, "lower", ratio=False),
            Figure("wall_ratio", "time with them ÷ without", None, "lower", ratio=False),
        ),
    ),
    Benchmark(
        "accounting",
        "The account of device time",
        "the kernel's start and end times of processes",
        300,
        (Figure("account_closes", "error of the account against measured device-seconds", 0.01, "lower", ratio=False),),
        gap="A process that dies before its first heartbeat as the last of its pod is not counted.",
    ),
    Benchmark(
        "samplers",
        "Samplers",
        "float64, as the trainer defines logprobs",
        90,
        (
            Figure("worst_gap", "largest difference for a token, allowed samplers, nats", 1e-4, "lower", ratio=False),
            Figure("worst_refused_response_ratio", "mean product of ratios, worst rejected sampler (1: no bias)", ratio=False),
        ),
        gap="A sampler whose logprobs the trainer cannot compute is rejected.",
    ),
    Benchmark(
        "architectures",
        "Architectures",
        "the model alone, on packed rows",
        90,
        (
            Figure("proven", "types of transformers verified on loading", 90.0, ratio=False),
            Figure("silent", "types that would be trained incorrectly", 0, "lower", ratio=False),
            Figure("crashes", "types whose loading crashes", 0, "lower", ratio=False),
            Figure("worst_proven_gap", "largest gap of a verified type", None, "lower", ratio=False),
        ),
        gap="docs/models.md names each type with its verdict.",
    ),
)  # fmt: skip
"""In execution order: benchmarks that most need a quiet machine come first."""
