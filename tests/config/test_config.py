"""The configuration means the same from all three sources, and each problem is a line with the key, value and remedy."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import tomli_w
from pydantic import BaseModel

from services.config import ConfigError, RunConfig, digest, load, load_resolved, to_toml
from services.config.base import Section
from services.config.docstrings import docstrings
from services.config.faults import IN_WORDS, REPLACED, models_of

SMALLEST = """
[model]
path = "some/model"
[[data.sources]]
kind = "jsonl"
path = "data.jsonl"
[[verifiers]]
kind = "exact"
"""

ROWS = '{kind="jsonl", path="x"}'
LENGTHS = ("data.max_prompt_tokens=1024", "sampling.max_tokens=512")
TURNS = ("environments=[{kind='agent', name='e', run=['true']}]", "data.sources.0.environment=e")
TASK = '{kind="reasoning_gym", name="task", task="gcd"}'


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(SMALLEST)
    return path


def settings(file: Path, *overrides: str, **environ: str) -> RunConfig:
    return load(file, overrides, environ)


def fault(file: Path, *overrides: str, **environ: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(file, overrides, environ)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_smallest_file_is_a_complete_run(file: Path) -> None:
    config = settings(file)
    assert (config.run.name, config.sampling.group_size, config.slots) == ("run", 8, 2 * 16)
    assert config.max_sequence_tokens == 1024 + 512


def test_command_line_overrides_environment_overrides_file(file: Path) -> None:
    file.write_text("[run]\nsteps = 1\nseed = 1\nname = 'a'\n" + SMALLEST)
    config = settings(file, "run.steps=3", GRPO__RUN__STEPS="2", GRPO__RUN__SEED="2")
    assert (config.run.steps, config.run.seed, config.run.name) == (3, 2, "a")


def test_values_need_no_quotes_and_have_toml_types(file: Path) -> None:
    config = settings(
        file, "run.name=my-run", "optimizer.learning_rate=3e-5", "data.curriculum=in_order", 'sampling.stop=["a", "b"]',
        "verifiers.0.weight=0.5", "generator.engine_options.dtype=float32", GRPO__DATA__SYSTEM_PROMPT="be brief = yes",
    )  # fmt: skip
    assert (config.run.name, config.optimizer.learning_rate, config.data.shuffle) == ("my-run", 3e-5, False)
    assert (config.sampling.stop, config.verifiers[0].weight) == (["a", "b"], 0.5)
    assert config.generator.engine_options == {"dtype": "float32"}
    assert config.data.system_prompt == "be brief = yes"


@pytest.mark.parametrize("text", ['"{prompt}"\nanswer = 5', "1\n[other]", "first\nsecond", "1\n2", '"a"\r\nvalue.b = 1'])
def test_text_of_several_lines_is_kept_whole(file: Path, text: str) -> None:
    """Its first line may look like a value, and the other lines like keys."""
    config = settings(file, f"data.system_prompt={text}", GRPO__DATA__SYSTEM_PROMPT="of the environment")
    assert config.data.system_prompt == text
    assert f"run.steps = {text!r}: input should be a valid integer" in fault(file, f"run.steps={text}")


def test_a_toml_value_may_have_several_lines(file: Path) -> None:
    config = settings(file, 'sampling.stop=[\n"a",\n"b",\n]\n', 'data.system_prompt="""be\nbrief"""')
    assert (config.sampling.stop, config.data.system_prompt) == (["a", "b"], "be\nbrief")


def test_other_environment_variables_are_ignored(file: Path) -> None:
    assert settings(file, GRPO_CONFIG="x", GRPO_REDIS_PASSWORD="y", PATH="/bin") == settings(file)


@pytest.mark.parametrize("source", ["file", "environment", "command line"])
@pytest.mark.parametrize(
    ("key", "nearest"),
    [("run.stepz", "steps"), ("optimizer.learning_rates", "learning_rate"), ("verifiers.0.wieght", "weight"),
     ("smapling.seed", "sampling")],
)  # fmt: skip
def test_unknown_keys_are_rejected_with_the_nearest_name(file: Path, source: str, key: str, nearest: str) -> None:
    if source == "command line":
        message = fault(file, f"{key}=1")
    elif source == "environment":
        message = fault(file, **{f"GRPO__{key.replace('.', '__').upper()}": "1"})
    elif key.startswith("verifiers"):
        file.write_text(SMALLEST + f"{key.split('.')[-1]} = 1\n")
        message = fault(file)
    else:
        section, name = key.split(".")
        file.write_text(f"[{section}]\n{name} = 1\n" + SMALLEST)
        message = fault(file)
    unknown = key.split(".")[0] if nearest == "sampling" else key
    assert f"{unknown} = " in message
    assert f"is not a known key; did you mean {nearest!r}?" in message


def test_unknown_keys_of_a_source_are_compared_with_its_kind(file: Path) -> None:
    message = fault(file, "data.sources.0.promt_field=q")
    assert "data.sources.0.promt_field = 'q' is not a known key; did you mean 'prompt_field'?" in message


def test_the_former_key_data_source_is_rejected_with_a_remedy(file: Path) -> None:
    file.write_text(SMALLEST.replace("[[data.sources]]", "[data.source]"))
    for message in (fault(file), fault(file, "data.source.path=x")):
        assert "data.source is now a list, data.sources: write [[data.sources]] for [data.source]" in message


def test_keys_of_older_versions_are_rejected_with_a_remedy(file: Path) -> None:
    tables = {
        "verifiers": 'verifiers=[{kind="exact", NAME=1}]',
        "environments": "environments=[{kind='agent', name='e', run=['true'], NAME=1}]",
        "data.sources": 'data.sources=[{kind="reasoning_gym", task="gcd", NAME=1}]',
        "evaluation.sources": 'evaluation.sources=[{kind="reasoning_gym", task="gcd", NAME=1}]',
    }
    wrong: list[str] = []
    for key in REPLACED.keys() - {"data.source"}:
        section, _, name = key.rpartition(".")
        override = tables[section].replace("NAME", name) if section in tables else f"{key}=1"
        place = f"{section}.0.{name}" if section in tables else key
        if f": {place} = 1 {REPLACED[key]}" not in fault(file, override) and f"{place} = " not in fault(file, override):
            wrong.append(fault(file, override))
    assert wrong == []


def test_only_verifiers_that_can_decide_have_thresholds(file: Path) -> None:
    verifiers = (
        '[{kind="exact", weight=2}, {kind="math", solved_at=0.5, sources=["b"]}, {kind="regex", pattern="!", weight=-1}, '
        '{kind="length", soft_tokens=8}, {kind="python", function="m:f"}, {kind="python", function="m:f", range=[-2, 3]}]'
    )
    config = settings(file, f'data.sources=[{ROWS}, {{name="b", {ROWS[1:]}]', f"verifiers={verifiers}")
    assert config.thresholds("main") == {"exact": 1.0, "python-2": 3.0}
    assert config.thresholds("b") == {"exact": 1.0, "math": 0.5, "python-2": 3.0}


@pytest.mark.parametrize(
    ("name", "meant"),
    [("GRPO_RUN_STEPS", "GRPO__RUN__STEPS"), ("GRPO_SAMPLING_TEMPRATURE", "GRPO__SAMPLING__TEMPERATURE")],
)
def test_a_variable_that_only_looks_like_a_key_is_rejected(file: Path, name: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"environment variable {name} is not read: did you mean {meant}"):
        load(file, environ={name: "1"})


def test_variables_of_services_are_not_keys(file: Path) -> None:
    ours = (
        "GRPO_API_TOKEN",
        "GRPO_API_READ_TOKEN",
        "GRPO_REDIS_PASSWORD",
        "GRPO_CONFIG",
        "GRPO_POD",
        "GRPO_NODES",
        "GRPO_STOP_S",
        "GRPO_SET",
        "GRPO_SET_KIND",
        "GRPO_SET_REPLICAS",
    )
    assert load(file, environ=dict.fromkeys(ours, "x")) == load(file, environ={})


def test_a_name_without_a_near_match_lists_the_valid_ones(file: Path) -> None:
    assert "fleet.xyzzy = 1 is not a known key; valid: scaling, ttl_s" in fault(file, "fleet.xyzzy=1")


@pytest.mark.parametrize(
    "override",
    [
        "redis.password=hunter2", "redis.password=42", 'api={token="hunter2"}', 'judges=[{api_key="hunter2"}]',
        "redis.adress=redis://me:hunter2@host/0", "redis.ca_file=redis://:hunter2@host/0", "model.path.secret=hunter2",
        "verifiers.7.api_key=hunter2", "redis.ca_file=redis://host/0?db=1&password=hunter2",
    ],
)  # fmt: skip
def test_no_message_repeats_a_secret(file: Path, override: str) -> None:
    message = fault(file, override, "redis.url=redis://:hunter2@host/0")
    assert "hunter2" not in message
    assert "42" not in message
    assert "(hidden)" in message


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.steps=0", "run.steps = 0: input should be greater than or equal to 1"),
        ("run.seed=4294967296", "run.seed = 4294967296: input should be less than 4294967296"),
        ("run.steps=many", "run.steps = 'many': input should be a valid integer"),
        ("run.name=a b", "run.name = 'a b': must begin with a letter or digit and have up to 63 letters, digits"),
        ("optimizer.learning_rate=nan", "optimizer.learning_rate = nan: input should be a finite number"),
        ("loss.policy=ppo", "loss.policy = 'ppo': must be one of grpo, dapo"),
        ("verifiers=[]", 'no verifier scores the prompt source "main"'),
        ("data.sources.0.kind=csv", "'jsonl', 'parquet', 'reasoning_gym'"),
        ("steps", "override 'steps' is not of the form section.key=value"),
        ("=", "override '=' is not of the form section.key=value"),
        ("learning_rate=1e-4", "learning_rate = 0.0001 is not a known key; did you mean optimizer.learning_rate?"),
        ("verifiers.7.weight=1", "'7' does not name a section or an entry"),
        ("model.path.deeper=1", "model.path is not a section"),
        ("model.path.deeper.still=1", "'deeper' does not name a section or an entry"),
        ("run=1", "run = 1: "),
        ('sampling.stop=["a", ""]', "sampling.stop.1 = '': string should have at least 1 character"),
    ],
)
def test_an_invalid_value_names_key_value_and_expectation(file: Path, override: str, message: str) -> None:
    assert message in fault(file, override)


def test_every_pattern_is_described_in_words() -> None:
    sections, left = set[type[Section]](), [Section]
    while left:
        sections |= {*left}
        left = [kind for each in left for kind in each.__subclasses__()]
    limits = [limit for section in sections for field in section.model_fields.values() for limit in field.metadata]
    patterns = {limit.pattern for limit in limits if getattr(limit, "pattern", None)}
    assert patterns == IN_WORDS.keys()


def test_a_fault_of_a_section_does_not_print_all_of_it(file: Path) -> None:
    assert fault(file, "evaluation.temperature=0", "evaluation.samples=2") == (
        "command line: evaluation.temperature = 0 makes all evaluation.samples = 2 completions of a prompt identical: "
        "set evaluation.samples = 1, or a temperature above 0"
    )
    message = fault(file, 'environments=[{name = "a", kind = "python"}]')
    assert 'environments.0: needs function, a class, or tools = ["python"]: set one of them' in message


def test_all_problems_are_named_at_once(file: Path) -> None:
    file.write_text("[run]\nsteps = 0\n[fleet]\nttl = 3\n")
    message = fault(file)
    for part in ("run.steps = 0", "fleet.ttl = 3", "section [model]", "section [data]"):
        assert message.count(part) == 1


@pytest.mark.parametrize("wrong", ["sampling.temprature=1", "verifiers.0.weight=x", "nosuch=1", "run.steps=0"])
def test_a_faulty_key_hides_no_broken_rule(file: Path, wrong: str) -> None:
    message = fault(file, "trainer.mini_batches=17", wrong)
    assert f"{wrong.partition('=')[0]} = " in message
    assert "trainer.mini_batches = 17 exceeds admission.prompts_per_step = 16" in message


def test_an_unknown_section_is_reported_where_its_keys_are_set(file: Path) -> None:
    message = fault(file, "trainer.mini_batches=17", "nosuch.x=1", GRPO__OTHER__Y="2")
    for part in ("command line: nosuch = {'x': 1} is not", "environment variable GRPO__OTHER__Y: other = ", "= 17 exceeds"):
        assert part in message


def test_a_rule_is_not_applied_to_what_stands_in_for_a_faulty_value(file: Path) -> None:
    message = fault(file, "admission.prompts_per_step=x", "trainer.mini_batches=17")
    assert "admission.prompts_per_step = 'x': " in message
    assert "exceeds" not in message


@pytest.mark.parametrize("wrong", ["data.sources.0.path=3", "model.path=[]"])
def test_a_required_key_with_an_invalid_value_is_not_called_missing(file: Path, wrong: str) -> None:
    message = fault(file, wrong)
    assert f"{wrong.replace('=', ' = ')}: input should be a valid string" in message
    assert "missing" not in message


def test_an_unreadable_file_is_reported(tmp_path: Path) -> None:
    assert "nowhere.toml does not exist" in fault(tmp_path / "nowhere.toml")
    assert "cannot be read" in fault(tmp_path)
    (tmp_path / "bad.toml").write_text("[run\n")
    assert "bad.toml is not valid TOML" in fault(tmp_path / "bad.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    assert "bytes.toml is not valid TOML" in fault(tmp_path / "bytes.toml")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            [*LENGTHS, "model.max_tokens=1535"],
            "= 1536 exceeds model.max_tokens = 1535: lower one of the two or raise model.max_tokens",
        ),
        (["trainer.row_tokens=1535"], "trainer.row_tokens = 1535 is shorter than the longest sequence"),
        (
            [*LENGTHS, *TURNS, "model.max_tokens=1600", "trainer.row_tokens=1599"],
            "is shorter than the longest segment of a rollout in an environment, model.max_tokens = 1600: raise",
        ),
        (["sampling.min_group_size=1"], "sampling.min_group_size = 1 must be from 2"),
        (
            ["sampling.group_size=4", "sampling.min_group_size=5"],
            "rollouts of a group are compared, to sampling.group_size = 4; or 0, which requires all of them",
        ),
        (
            ["generator.engine_options.logprobs_mode=raw_logprobs"],
            "generator.engine_options.logprobs_mode = 'raw_logprobs' cannot be set: the trainer recomputes the logprobs",
        ),
        (["generator.engine_options.max_model_len=64"], "set model.max_tokens instead"),
        (["replay.capacity=15"], "replay.capacity = 15 cannot hold a step of admission.prompts_per_step = 16 groups"),
        (["replay.max_uses=3"], "replay.max_uses = 3 cannot be reached"),
        (["admission.max_staleness=0", "replay.max_uses=2"], "lower replay.max_uses to 1 or raise admission.max_staleness"),
        (
            ["sync.backend=filesystem"],
            "sync.backend = 'filesystem': was removed: set \"store\", which needs the same shared volume",
        ),
        (["sampling.top_p=0.9"], "sampling.top_p = 0.9 was removed, since only the whole distribution can be trained on"),
        (["sampling.top_k=50"], "remove the key, and lower sampling.temperature or set evaluation.top_p instead"),
        (
            ["admission.overtake=drop"],
            "admission.overtake = 'drop' was removed, and a step waits ten minutes for an older ticket: remove the key",
        ),
        (["trainer.offload=true"], "trainer.offload needs trainer.zero_stage 1, 2 or 3"),
        (["trainer.ranks=3", "trainer.sequence_parallel=2"], "trainer.ranks = 3 cannot be divided into teams"),
        (["model.fp32_head=true", "model.dtype=float32"], 'model.fp32_head = True has no effect with model.dtype = "float32"'),
        (["reference.kind=polyak"], "reference.kind = 'polyak' was removed: remove the key, and for an average"),
        (["reference.alpha=0.1", "loss.kl_beta=0"], "reference.alpha = 0.1 has no effect with loss.kl_beta = 0"),
        (["optimizer.schedule=cosine", "optimizer.warmup_steps=100"], "leaves no step of run.steps = 100"),
        (["trainer.mini_batches=17"], "trainer.mini_batches = 17 exceeds admission.prompts_per_step = 16"),
        (["verifiers.0.kind=reasoning_gym"], 'only scores prompts of kind "reasoning_gym", but source "main" is "jsonl"'),
        (["verifiers.0.kind=regex"], "missing required key verifiers.0.pattern"),
        (["verifiers.0.extract=(open"], "is not a valid regular expression"),
        (["verifiers.0.extract=open"], "has no group; put the part that is the answer in parentheses"),
        (["verifiers.0.kind=regex", "verifiers.0.pattern=("], "is not a valid regular expression"),
        (["data.sources.0.answer_pattern=####.+"], "has no group"),
        (["data.sources=[]"], "data.sources = []: list should have at least 1 item"),
        (["data.sources.0.name=a b"], "data.sources.0.name = 'a b': may have only letters, digits"),
        (["data.sources.0.weight=0"], "data.sources.0.weight = 0: input should be greater than 0"),
        (["data.curriculum=easy_first"], "data.curriculum = 'easy_first': must be in_order or module:function"),
        ([f"data.sources=[{ROWS}, {ROWS}]"], 'two prompt sources have name = "main": give each source its own name'),
        (['verifiers.0.sources=["other"]'], 'verifiers.0.sources names "other", which is not a prompt source; choose from: main'),
        (
            [f'data.sources=[{ROWS}, {{name="b", {ROWS[1:]}]', 'verifiers.0.sources=["b"]'],
            'no verifier scores the prompt source "main": add it to the `sources` of one',
        ),
        (
            [f"data.sources=[{TASK}, {ROWS}]", 'verifiers=[{kind="reasoning_gym"}, {kind="exact"}]'],
            'source "main" is "jsonl": use another kind, or leave the source out of verifiers.0.sources',
        ),
        (
            ["trainer.compile=true", "trainer.gradient_checkpointing=selective"],
            'trainer.compile = true and trainer.gradient_checkpointing = "selective" are incompatible: set trainer.compile',
        ),
        (["trainer.compile=true", "trainer.deterministic=true"], "trainer.deterministic = true are incompatible"),
        (["trainer.compile=true", "trainer.zero_stage=3"], "trainer.zero_stage = 3 are incompatible"),
        (
            ["trainer.compile=true", "trainer.ranks=2", "trainer.sequence_parallel=2"],
            "trainer.sequence_parallel = 2 are incompatible",
        ),
        (
            ["lora.rank=4", "reference.alpha=0.1", "loss.kl_beta=0.1"],
            "lora.rank = 4 and reference.alpha = 0.1 are incompatible: averaging adapters does not average the weights",
        ),
        (
            ["verifiers.0.weight=0"],
            'every verifier that scores the prompt source "main" has weight = 0, so that every reward would be 0: give one of',
        ),
        (
            ['verifiers=[{kind="exact"}, {kind="length", soft_tokens=513}]', "sampling.max_tokens=512"],
            "verifiers.1.soft_tokens = 513 exceeds sampling.max_tokens = 512, so that even an empty completion would be",
        ),
        (
            ["filters.exclude_pass_rate=0.9", "verifiers.0.weight=-1"],
            'filters.exclude_pass_rate = 0.9 is meaningless for the prompt source "main", since no verifier says when a',
        ),
    ],
)
def test_incompatible_settings_are_rejected(file: Path, overrides: list[str], message: str) -> None:
    assert message in fault(file, *overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        [*LENGTHS, "model.max_tokens=1536"], ["trainer.row_tokens=1536"], ["replay.capacity=16"], ["replay.max_uses=2"],
        ["loss.denominator=constant"],
        ["trainer.mini_batches=16"], ["trainer.offload=true", "trainer.zero_stage=1"],
        ["trainer.ranks=4", "trainer.sequence_parallel=2"], ["loss.kl_beta=0.1"],
        ["reference.alpha=1", "loss.kl_beta=0.1"],
        ["optimizer.schedule=cosine", "optimizer.warmup_steps=99"],
        ["model.fp32_head=true"], ["trainer.compile=true"], ["lora.rank=4"],
        ["verifiers.0.kind=regex", "verifiers.0.pattern=x"],
        [f"data.sources=[{TASK}, {ROWS}]", 'verifiers=[{kind="reasoning_gym", sources=["task"]}, {kind="exact"}]'],
        ["data.curriculum=services.dataprep.prompts.curriculum:easy_first"], ["filters.exclude_pass_rate=1"],
        ["verifiers.0.kind=reasoning_gym", 'data.sources=[{kind="reasoning_gym", task="basic_arithmetic"}]'],
        ["sync.backend=store", "sync.folder=s3://b/p"], ['verifiers=[{kind="exact", weight=0}, {kind="exact", weight=-1}]'],
        ["verifiers.0.weight=0", *TURNS], ['verifiers=[{kind="length", soft_tokens=8}]', "sampling.max_tokens=8"],
    ],
)  # fmt: skip
def test_edge_cases_of_every_rule_are_allowed(file: Path, overrides: list[str]) -> None:
    assert settings(file, *overrides) != settings(file)


def test_the_resolved_configuration_round_trips(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings(
        file, "data.sources.0.answer_pattern='####\\s*(.+)'", 'sampling.stop=["\\n", "é"]', "generator.engine_options.a={b=[1,2]}"
    )  # fmt: skip
    resolved = tmp_path / "resolved.toml"
    resolved.write_text(to_toml(config))
    monkeypatch.setenv("GRPO__RUN__STEPS", "999")
    assert load_resolved(resolved) == config
    assert to_toml(load_resolved(resolved)) == to_toml(config)
    keys = tomllib.loads(resolved.read_text())
    assert keys.keys() == RunConfig.model_fields.keys(), "every key is written, so no other version's default applies"


def test_a_run_with_a_formerly_accepted_option_stays_readable(file: Path, tmp_path: Path) -> None:
    tree = tomllib.loads(to_toml(settings(file)))
    tree["generator"]["engine_options"] = {"max_model_len": 96}
    resolved = tmp_path / "resolved.toml"
    resolved.write_text(tomli_w.dumps(tree))
    assert load_resolved(resolved).generator.engine_options == {"max_model_len": 96}
    with pytest.raises(ConfigError, match=r"engine_options\.max_model_len = 96 cannot be set"):
        load(resolved, [], environ={})


def test_the_digest_covers_the_run_but_not_its_addresses(file: Path) -> None:
    config = settings(file)
    assert digest(config) == digest(settings(file, "redis.url=redis://elsewhere:1/0", "api.port=7"))
    assert digest(config) != digest(settings(file, "run.seed=7"))
    options = "generator.engine_options."
    assert digest(config) == digest(settings(file, f"{options}gpu_memory_utilization=0.5"))
    assert digest(config) != digest(settings(file, f"{options}quantization=fp8"))
    assert len(digest(config)) == 16


def test_the_digest_covers_code_by_its_content_wherever_it_is(tmp_path: Path) -> None:
    def made(folder: str, code: str, name: str = "score", interpreter: str = "python3") -> RunConfig:
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "mine.py").write_text(code)
        (tmp_path / folder / "run.toml").write_text(SMALLEST)
        environment = f"kind='python', name='e', function='mine.py:Env', interpreter='{interpreter}'"
        verifiers = f"verifiers=[{{kind='python', function='mine.py:{name}'}}]"
        return settings(tmp_path / folder / "run.toml", verifiers, f"environments=[{{{environment}}}]", TURNS[1])

    here, there = made("a", "x = 1"), made("b", "x = 1", interpreter="venv/bin/python")
    assert here.verifiers[0].function == f"{tmp_path}/a/mine.py:score"
    assert here.environments[0].function == f"{tmp_path}/a/mine.py:Env"
    assert (here.environments[0].interpreter, there.environments[0].interpreter) == ("python3", f"{tmp_path}/b/venv/bin/python")
    assert digest(here) == digest(there)
    assert len({digest(config) for config in (here, made("b", "x = 1", "other"), made("b", "x = 2"))}) == 3
    (tmp_path / "a" / "mine.py").unlink()
    with pytest.raises(ConfigError, match=r"the file of a function, .*/a/mine\.py, cannot be read \(No such file .*correct the"):
        digest(here)


def test_a_chat_template_is_read_from_its_file(file: Path) -> None:
    template = file.parent / "chat.jinja"
    template.write_text("{{ messages }}")
    assert settings(file, "data.chat_template=chat.jinja").data.chat_template == "{{ messages }}"
    template.write_bytes(b"\xff")
    for given, reason in (("chat.jinja", "it is not UTF-8"), ("none.jinja", "No such file or directory")):
        message = f"data.chat_template = '{given}': {file.parent / given} cannot be read: {reason}; correct the path"
        assert fault(file, f"data.chat_template={given}") == f"command line: {message}"


def sections(model: type[BaseModel]) -> set[type[BaseModel]]:
    inner = {part for field in model.model_fields.values() for part in models_of(field.annotation)}
    return {model}.union(*(sections(part) for part in inner))


def leaves(model: type[BaseModel]) -> set[type[BaseModel]]:
    return set().union(*(leaves(part) for part in model.__subclasses__())) or {model}


def test_every_key_and_section_is_documented() -> None:
    found = sections(RunConfig)
    assert found == leaves(Section)
    for section in found:
        assert section.__doc__, section
        assert section.model_config["extra"] == "forbid"
        helps = docstrings(section)
        for name in section.model_fields:
            assert helps.get(name), f"{section.__name__}.{name}"
            assert helps[name].endswith("."), f"{section.__name__}.{name}"


def test_a_loaded_configuration_is_frozen(file: Path) -> None:
    config = settings(file)
    with pytest.raises(ValueError, match="frozen"):
        config.run.steps = 3  # type: ignore[misc]


def test_store_and_config_import_nothing_heavy() -> None:
    code = (
        "import sys, services.store, services.config;"
        "print(*{'torch', 'vllm', 'deepspeed', 'transformers', 'tokenizers', 'fastapi', 'pyarrow', 'rich'} & sys.modules.keys())"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == ""


def test_row_tokens_default_to_the_longest_segment(file: Path) -> None:
    config = load(file, [*LENGTHS, *TURNS, "model.max_tokens=9000"], environ={})
    assert (config.trainer.row_tokens, config.max_sequence_tokens) == (9000, 1536)
    assert load(file, [*LENGTHS, "model.max_tokens=9000"], environ={}).trainer.row_tokens == 4096


@pytest.mark.parametrize(
    ("override", "named"),
    [("environments=[{kind='agent', name='e', run=['true'], timeout=5}]",
      "environments.0.timeout = 5 is not a known key; did you mean 'timeout_s'?"),
     ("environments=[{kind='python', name='std', tools=['python']}]",
      'environments.0.name = "std" is taken by the metric reward/train/std: choose another name'),
     ("environments=[{kind='mcp', name='e', server='ftp://tools'}]",
      "environments.0.server = 'ftp://tools': must begin with http:// or https://"),
     ("environments=[{kind='verifiers', name='a b'}]", "environments.0.name = 'a b': "),
     ("trainer.gradient_checkpointing=full", "trainer.gradient_checkpointing = 'full': "),
     ("data.chat_template=5", "data.chat_template = 5: "),
     ("verifiers.1.weight=2",
      "verifiers.1.weight = 2: '1' does not name a section or an entry (verifiers has 1 entries, from 0): correct the key"),
     ("model.path.a.b=1", "model.path.a.b = 1: 'a' does not name a section or an entry: correct the key"),
     ("model.path.a=1", "model.path.a = 1: model.path is not a section: correct the key")],
)  # fmt: skip
def test_a_fault_names_the_key_and_not_the_kind_or_the_type(file: Path, override: str, named: str) -> None:
    assert named in fault(file, override)
