"""What the suite measures: every benchmark with its figures, their goals, and what would close a gap."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

BUDGET_S = 8100
"""What all of them may take together on two cores; `planned_s` of each is what it took there, rounded up."""
TOLERANCE = 0.25
"""Share by which a ratio may be worse than the recorded one. Pairs measured in one run on a shared machine lie within a fifth of
their median (docs/log.md: 0.80 to 1.01, 0.46 to 0.67, 3.7 to 4.7), so a quarter is no chance any more."""
COUNTED = 0.05
"""The same where the server counts: how many are handed over together makes a few per cent, a command more makes more."""


@dataclass(frozen=True)
class Figure:
    """One figure of a benchmark's last line."""

    key: str
    what: str
    goal: float | None = None
    better: Literal["higher", "lower"] = "higher"
    ratio: bool = True
    """Taken against something measured in the same run, or counted: these are gated, absolute figures never are."""
    tolerance: float = TOLERANCE

    def met(self, value: float) -> bool:
        """Whether the goal, if there is one, is met."""
        return self.goal is None or (value >= self.goal if self.better == "higher" else value <= self.goal)


@dataclass(frozen=True)
class Axes:
    """Of a plot of the `curves` of a benchmark's last line."""

    x: str
    y: str
    log: bool = False


@dataclass(frozen=True)
class Benchmark:
    """One command of the suite: `python benchmarks/NAME.py --json ARGUMENTS`."""

    name: str
    title: str
    against: str
    planned_s: int
    figures: tuple[Figure, ...]
    arguments: tuple[str, ...] = ()
    script: str = ""
    """Where it is not the name's."""
    gap: str = ""
    """What would close it where a goal is missed."""
    axes: Axes | None = None
    """Where its last line has curves."""

    @property
    def command(self) -> list[str]:
        """What is run, after the interpreter."""
        return [f"benchmarks/{self.script or self.name}.py", "--json", *self.arguments]


def _bandwidth(megabytes: int) -> tuple[Figure, ...]:
    """Of weight-sync rounds with so many MB of weights."""
    plain, verified = "bytes/s of a whole round, `sync.verify = false`", "the same with checksums, the default"
    return tuple(
        Figure(f"{megabytes}mb_{n}.{key}", f"{what}, {n} receivers", 0.8)
        for key, what in (("bandwidth_ratio", plain), ("verified_bandwidth_ratio", verified))
        for n in (1, 2, 4)
    )


REWARD = Axes("seconds from the first completion's beginning", "mean reward of the last 5 steps")
TARGETS = {"05": "0.5", "06": "0.6", "07": "0.7", "08": "0.8"}


def _bound(bound: int) -> tuple[Figure, ...]:
    """Of a run with that `admission.max_staleness`, against bound 0."""
    side = f"staleness_{bound}"
    against = (
        Figure(f"{side}.gain", f"bound {bound}: steps per second over those of bound 0"),
        *(
            Figure(f"{side}.ratio_{key}", f"bound {bound}: seconds of bound 0 to reward {target} over its own")
            for key, target in TARGETS.items()
        ),
    )
    return (
        *(against if bound else ()),
        Figure(f"{side}.steps_per_s", f"bound {bound}: steps per second", ratio=False),
        Figure(f"{side}.lag", f"bound {bound}: mean lag of trained tokens, in versions", None, "lower", ratio=False),
        Figure(f"{side}.idle_share", f"bound {bound}: share of the cores idle", None, "lower", ratio=False),
    )


def _peer(side: str, who: str, goal: float | None, least_goal: float | None, command_goal: float | None) -> tuple[Figure, ...]:
    """Of one of TRL's trainers against ours, with goals at every target, of the least of them, and from the command."""
    first = "" if side == "trl" else f"{side}_"
    least = f"the same at the target where it is least, {who}"
    return (
        *(Figure(f"{first}ratio_{key}", f"seconds to reward {target}, {who} over ours", goal) for key, target in TARGETS.items()),
        Figure(f"{first}ratio", least, least_goal),
        *(
            Figure(f"{first}from_command_ratio_{key}", f"seconds from the command to reward {target}, {who} over ours")
            for key, target in TARGETS.items()
        ),
        Figure(f"{first}from_command_ratio", least, command_goal),
        Figure(f"{first}steps_per_s_ratio", f"our steps per second over those of {who}"),
        Figure(f"{first}tokens_per_s_ratio", f"our tokens generated per second over those of {who}"),
        Figure(f"{first}memory_ratio", f"peak memory of all our processes over that of {who}", better="lower"),
    )


def _side(side: str, who: str) -> tuple[Figure, ...]:
    """Of one side of the example."""
    return (
        Figure(
            f"{side}.to_generation_s",
            f"seconds from the command to the first completion's beginning, {who}",
            None,
            "lower",
            False,
        ),
        Figure(f"{side}.first_step_s", f"seconds from there to the end of the first step, {who}", None, "lower", ratio=False),
        Figure(f"{side}.steps_per_s", f"steps per second, {who}", ratio=False),
        Figure(f"{side}.tokens_per_s", f"tokens generated per second, {who}", ratio=False),
        Figure(f"{side}.trained_tokens_per_s", f"tokens trained per second, {who}", ratio=False),
        Figure(f"{side}.last_reward", f"mean reward of the last 5 steps, {who}", ratio=False),
        Figure(f"{side}.idle_share", f"share of the cores idle, {who}", None, "lower", ratio=False),
        Figure(f"{side}.peak_mib", f"peak memory, {who}, MiB", None, "lower", ratio=False),
        Figure(f"{side}.load", f"load of the machine before, {who}", None, "lower", ratio=False),
    )


def _power(name: str, what: str) -> tuple[Figure, ...]:
    """Of one cost that grows. Exponents near 0 have no share by which they may be worse; what they come to has."""
    return (
        Figure(f"{name}_exponent", f"exponent of {what}", None, "lower", ratio=False),
        Figure(f"{name}_growth", f"{what}, at the largest size over that at the smallest", None, "lower"),
    )


SUITE = (
    Benchmark(
        "end_to_end",
        "The example, end to end",
        "TRL 1.16: `GRPOTrainer` with transformers' `generate` and with vLLM in its process, and `AsyncGRPOTrainer` with a vLLM "
        "server; same model, prompts, reward, batch, loss and, step by step, learning rate. A clock starts when a side begins to "
        "sample its first completion",
        2400,
        (
            *_peer("trl", "TRL with `generate`", 1.5, None, 1.0),
            *_peer("trl_vllm", "TRL with vLLM in its process", None, None, None),
            *_peer("trl_async", "TRL's asynchronous trainer", None, 1.2, None),
            *_side("ours", "ours"),
            *_side("trl", "TRL with `generate`"),
            *_side("trl_vllm", "TRL with vLLM in its process"),
            *_side("trl_async", "TRL's asynchronous trainer"),
        ),
        ("--seeds", "0", "1", "2"),
        gap="On two cores generators and trainer share what one process of TRL has to itself, and the model is so small that a "
        "step is mostly the cost of calls. Larger models, and a device for either side. Before it: what six processes load.",
        axes=REWARD,
    ),
    Benchmark(
        "staleness",
        "What a bound of staleness gains, and costs",
        "the same run with `admission.max_staleness` 0, 1, 2 and 4: the larger the bound, the more steps a second, and the more "
        "of them to a reward",
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
        (Figure("ratio", "tokens/s through claims, verifiers and Redis over bare vLLM", 0.9),),
        gap="Verifiers and the loop share the cores with vLLM here; with a GPU they have cores of their own.",
    ),
    Benchmark(
        "rewards",
        "Rewards of one's own",
        "the bare function; the same generator with a verifier that takes no time; nothing lost",
        240,
        (
            Figure("overhead_us", "cost of a Python function for a completion beside its call, µs", 200, "lower", ratio=False),
            Figure("seats_idle_share", "share of an engine's seats that idle because a verifier takes 2 s", 0.05, "lower"),
            Figure("lost", "tickets lost under a judge that hangs, fails, hangs up and dies", 0, "lower"),
            Figure("zeros", "scores that it did not give", 0, "lower"),
        ),
        gap="Frames to the confined process and back; more groups that may wait for their scores (`SCORING_TIMES`).",
    ),
    Benchmark(
        "datapath",
        "The data path",
        "raw pipelined SET and GET of the same bytes",
        60,
        (
            Figure("ratio", "groups/s from claim to commit over raw SET and GET", 0.5),
            Figure("dataprep_us_per_group", "CPU of dataprep a group, µs", None, "lower", ratio=False),
            Figure("calls_per_group", "functions called for a group: by how many go together", None, "lower"),
            Figure("commands_per_group", "commands for a group, those inside functions too", None, "lower", tolerance=COUNTED),
            Figure("wire_over_payload", "bytes in and out of Redis over the payload's", None, "lower", tolerance=COUNTED),
        ),
        gap="Each group is acknowledged, counted and written down as it is handed over; fewer commands in `submit` and `settle`.",
    ),
    Benchmark(
        "stream",
        "The data path against plain streams",
        "a PipelineRL-style path: pickled groups, XADD and XREAD, one entry at a time",
        90,
        (
            Figure("ratio", "groups/s over theirs", 5.0),
            Figure("dataprep_ratio", "their CPU a group in the preprocessor over ours in dataprep"),
            Figure("left_ratio", "bytes they leave in Redis over ours"),
        ),
        gap="The same as of the data path.",
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
            Figure("sample_each_uniform_ratio", "draws of payloads of any shape, uniform", 2),
            Figure("sample_each_prioritised_ratio", "draws of payloads of any shape, prioritised", 2),
            Figure("sample_uniform_ratio", "draws against Reverb's batches of one shape, uniform", 2),
            Figure("sample_prioritised_ratio", "draws against Reverb's batches of one shape, prioritised", 2),
            Figure("bare_sample_uniform_ratio", "the server's plain MGET against those batches, uniform", None),
            Figure("bare_sample_prioritised_ratio", "the server's plain MGET against those batches, prioritised", None),
            Figure("draw_p50_ratio", "one draw of 64 when it is wanted, median latency", 0.5, "lower"),
        ),
        ("--limit-s", "180"),
        gap="Every group goes to an append-only file, which Reverb has not. The server's plain SET and MGET of the same bytes, "
        "among the figures, bound any table that is kept in it.",
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
        gap="Leaders of several tables: a header costs little beside its decoding.",
    ),
    Benchmark(
        "snapshot",
        "Snapshots",
        "fetching the same payloads by the same client",
        90,
        (
            Figure("index/longest_command_ms", "longest command, 100,000 groups, index alone, ms", 50, "lower", ratio=False),
            Figure("whole/longest_command_ms", "the same with payloads, ms", 50, "lower", ratio=False),
            Figure("restore/longest_command_ms", "the same of a restore, ms", 50, "lower", ratio=False),
            Figure("read_ratio", "seconds of a snapshot with payloads over fetching them", None, "lower"),
        ),
        gap="Smaller pieces a command.",
    ),
    Benchmark(
        "sync",
        "Weight sync",
        "a bare `torch.distributed` broadcast of the same bytes, gloo, 100 MB",
        75,
        (
            *_bandwidth(100),
            *(
                Figure(f"100mb_{n}.pause_share", f"pause of a generator over the round without them, {n} receivers", 0.3, "lower")
                for n in (1, 2, 4)
            ),
            *(
                Figure(f"100mb_{n}.verified_{key}", f"{what}, with checksums, {n} receivers, s", None, "lower", ratio=False)
                for key, what in (("first_s", "the first round of a group"), ("round_s", "a round"), ("pause_s", "its pause"))
                for n in (1, 2, 4)
            ),
        ),
        gap="Members hold all weights before they apply them, a copy after the last byte. Trainer and receivers share two cores "
        "with the broadcast itself, so checksums add a quarter to a third here, and little over a network (docs/sync.md).",
    ),
    Benchmark(
        "weights",
        "Weights as versions",
        "all weights, the training step, plain reads of the same files, loopback, KV computed again",
        660,
        (
            Figure("delta_share", "bytes of a delta over those of the weights", 0.03, "lower"),
            Figure("encode_share", "seconds of encoding over those of the training step", 0.05, "lower"),
            Figure("versions_identical", "versions that a receiver holds to the bit", 1.0, tolerance=0.0),
            Figure("versions_sampled", "versions with which vLLM samples as the trainer's weights would", 1.0, tolerance=0.0),
            Figure("late_join_ratio", "an empty receiver's seconds over those of reading the same files", 1.5, "lower"),
            Figure("slow_link_ratio", "steps/s over 100 Mbit/s and 80 ms against loopback", 0.9),
            Figure("lora_share", "bytes of a version of adapters over those of the model", 0.01, "lower"),
            Figure("merged_speed", "vLLM's tokens/s with an adapter merged over those with it served beside the weights"),
            Figure("kv_keep_gain", "seconds until all sequences sample again, recompute over keep", 5.0),
            Figure("pause_s_per_gb", "vLLM's pause, s per GB of weights", 0.25, "lower", ratio=False),
        ),
        ("--sequences", "8"),
        gap="A reload of vLLM repacks all weights for oneDNN in the pause, on one thread; a second copy of the model, or writing "
        "only what changed, would not. A late joiner decodes deltas after it has read the anchor, and could do both at once.",
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
        gap="To one receiver what follows the last byte weighs most: checking the last bucket, applying, acknowledgements.",
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
        axes=Axes("size over the smallest", "cost over that at the smallest", log=True),
    ),
    Benchmark(
        "recovery",
        "Recovery",
        "a run that nothing happens to: its weights, to the bit",
        240,
        (
            Figure("astray", "tickets lost, doubled, skipped, leaked or dropped", 0, "lower"),
            *(
                Figure(f"{kind}.recovery_s", f"kill -9 of {what} to a steady run, s", None, "lower", ratio=False)
                for kind, what in (
                    ("generator", "a generator"), ("dataprep", "the leading dataprep"), ("trainer", "the trainer"),
                    ("redis", "Redis"), ("console", "`grpo run` with all it started"),
                )
            ),
        ),
        gap="There is no such ticket to be: a fault of ours, which `python -m tests.faults` finds again by its seed.",
    ),
    Benchmark(
        "cold_start",
        "Cold start of a generator",
        "the start of its process; real vLLM, beside a run at work",
        120,
        (
            Figure("registered_s", "its first heartbeat, s", None, "lower", ratio=False),
            Figure("loaded_s", "its engine can take weights, s", None, "lower", ratio=False),
            Figure("synced_s", "it holds the published weights, s", None, "lower", ratio=False),
            Figure("token_s", "it samples its first tokens, s", None, "lower", ratio=False),
            Figure("group_s", "its first group is settled, s", None, "lower", ratio=False),
            Figure("registered_to_group_s", "from registered to that, s", None, "lower", ratio=False),
        ),
    ),
    Benchmark(
        "trainer",
        "An optimizer step",
        "TRL 1.16 on the same batch, in micro-batches of 2, 8 and all 16, with its output layer as released and restricted to "
        "the tokens in the loss: the fastest of the six",
        360,
        (
            Figure("tokens_per_s_ratio", "tokens/s over those of TRL's fastest", 1.5),
            Figure("peak_memory_ratio", "memory of the step over that of TRL's fastest", 0.7, "lower"),
            Figure("peak_memory_ratio_leanest", "memory of the step over that of TRL's leanest", None, "lower"),
        ),
        gap="Attention over packed rows without flash-attn moves every row once; on a GPU it does not.",
    ),
    Benchmark(
        "agents",
        "Agents",
        "the ids that the policy sampled; the policy's own time; plain HSETs of the same bytes",
        260,
        (
            Figure("token_identity", "turns whose trained ids are those that were sampled, least of all templates", 1.0),
            Figure("segments_per_turn", "segments that a turn opens", None, "lower"),
            Figure("door_ms", "what the door adds to a turn, median, ms", 3, "lower", ratio=False),
            Figure("door_cpu_ms", "CPU time of that, the client's included, ms", None, "lower", ratio=False),
            Figure("door_p99_ms", "the same, 99th percentile, ms", None, "lower", ratio=False),
            Figure("turns_per_s", "turns committed through one Redis, of 10,000 open rollouts", 5000, ratio=False),
            Figure("turn_p99_ms", "a commit with 64 under way, 99th percentile, ms", 20, "lower", ratio=False),
            Figure("turn_server_of_plain", "the server's CPU time of a commit over that of a plain HSET", None, "lower"),
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
        gap="Each call sends, reads and renders its whole conversation again; the tokens of what is recorded are not made again.",
    ),
    Benchmark(
        "observing",
        "Being watched",
        "a run that nobody watches",
        60,
        (
            Figure("hung_share_of_a_second", "a tracker that hangs, over a step of one second", 0.01, "lower", ratio=False),
            Figure("group_us", "everything counted of a group, µs", None, "lower", ratio=False),
            Figure("trace_off_us", "spans of a group without tracing, µs", None, "lower", ratio=False),
            Figure("trace_on_us", "spans of a group with tracing, µs", None, "lower", ratio=False),
            Figure("scrape_ms", "one read of a generator's metrics, ms", None, "lower", ratio=False),
        ),
        gap="No step waits for a tracker: what is beyond the goal is the machine's noise.",
    ),
    Benchmark(
        "cli",
        "Commands",
        "their goal",
        90,
        (
            Figure("cpu_ms_p90", "CPU of a command without torch, p90 over verbs, ms", 150, "lower", ratio=False),
            Figure("cpu_ms_p50", "the same, median over verbs, ms", None, "lower", ratio=False),
        ),
        gap="What commands cannot do without (Python, typer, asyncio, hiredis, msgspec) takes 119 ms on a quiet machine. What is "
        "left above it is pydantic, where a whole configuration is read (`config`, `init`, `score`), and pyarrow (`cost`).",
    ),
    Benchmark(
        "seeing",
        "The sample log",
        "none; a log of 1,000,000 completions of 48 tokens",
        160,
        (
            Figure("search_ms", "p50 of a filter on numbers through the page's endpoint, ms", 200, "lower", ratio=False),
            Figure("search_cpu_ms", "CPU of one, server and client, ms", None, "lower", ratio=False),
            Figure("first_search_s", "the first one, which reads the log, s", None, "lower", ratio=False),
            Figure("text_search_s", "a word in all texts, s", None, "lower", ratio=False),
            Figure("sample_log_share", "CPU that the log adds, over steps of the example", 0.01, "lower", ratio=False),
            Figure("tracker_share", "CPU of the whole tracker over that time", None, "lower", ratio=False),
            Figure("step_s", "seconds of such a step, of 256 completions", None, "lower", ratio=False),
            Figure("us_a_logged_completion", "what the log adds, by completion, µs", None, "lower", ratio=False),
            Figure("us_a_completion", "CPU of rows, texts and files alone, by completion, µs", None, "lower", ratio=False),
            Figure("bytes_a_completion", "of the files, of 48 tokens in some 170 characters", None, "lower", ratio=False),
        ),
        gap="The example's steps take 0.6 s and bring 256 completions; a completion costs some 33 µs of a busy core, of which 20 "
        "are texts, rows and files and the rest reads from Redis. Steps of more than 0.85 s meet the goal.",
    ),
    Benchmark(
        "browsing",
        "The page of the sample log",
        "none; Chromium and a log of 1,000,000 completions",
        180,
        (
            Figure("page_ms", "from a key or a click to the rows of a filter, an order or a page, ms", 200, "lower", ratio=False),
            Figure("page_cpu_ms", "processor time of server and browser for one, ms", None, "lower", ratio=False),
            Figure("sample_ms", "to a completion with its tokens, ms", None, "lower", ratio=False),
            Figure("same_prompt_ms", "from there to the same prompt at all steps, ms", None, "lower", ratio=False),
            Figure("first_page_s", "the first page, for which the log is read, s", None, "lower", ratio=False),
            Figure("text_page_s", "a word in all texts, s", None, "lower", ratio=False),
        ),
        gap="The rows themselves are read from their files, and drawn by the browser, on the cores that search.",
    ),
    Benchmark(
        "engine_stats",
        "vLLM's own metrics",
        "the same engine without them",
        60,
        (
            Figure("stats_share", "processor time that they add, tiny model", None, "lower", ratio=False),
            Figure("wall_ratio", "time with them over that without", None, "lower", ratio=False),
        ),
    ),
    Benchmark(
        "replaying",
        "Bundles and the account of devices",
        "what was recorded; start and end of processes by the kernel",
        550,
        (
            Figure("replay_equal", "share of bundles all of whose stages replay bit-equal", 1.0, ratio=False),
            Figure("account_closes", "account against device-seconds seen from outside", 0.01, "lower", ratio=False),
            Figure("record_share", "of a step's time, that Redis spends on a recorder of the step", 0.01, "lower", ratio=False),
            Figure("bundle_bytes", "of a bundle that refers to its weights", None, "lower", ratio=False),
        ),
        gap="A process that dies before its first heartbeat, as the last of its pod.",
    ),
    Benchmark(
        "samplers",
        "Samplers",
        "float64, as the trainer defines logprobs",
        90,
        (
            Figure("worst_gap", "largest difference of a token, samplers that may be set, nats", 1e-4, "lower", ratio=False),
            Figure("worst_refused_response_ratio", "mean product of ratios, worst refused sampler; 1: no bias", ratio=False),
        ),
        gap="A sampler whose logprobs the trainer cannot compute is refused.",
    ),
    Benchmark(
        "architectures",
        "Architectures",
        "the model alone, on packed rows",
        90,
        (
            Figure("proven", "types of transformers that are proven on loading", 90.0, ratio=False),
            Figure("silent", "types that would be trained wrongly", 0, "lower", ratio=False),
            Figure("crashes", "types whose loading crashes", 0, "lower", ratio=False),
            Figure("worst_proven_gap", "largest gap of a proven type", None, "lower", ratio=False),
        ),
        gap="docs/models.md names each type with its verdict.",
    ),
)  # fmt: skip
"""In the order run: what wants a quiet machine most comes first."""
