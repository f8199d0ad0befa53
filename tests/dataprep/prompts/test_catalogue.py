"""Prompts from files and tasks are tokenised without torch, and every problem is reported before a run starts."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from services.chat.errors import DataError
from services.config import ConfigError, RunConfig, load, to_toml
from services.config.data import FileSource
from services.config.load import validate
from services.dataprep.prompts.catalogue import PromptSource
from services.dataprep.prompts.order import PromptOrder, SourceSpan
from services.dataprep.prompts.rows import Needs, read_rows
from services.protocol.entries import decode_entry

TEMPLATE = """{%- if messages[0].role == 'assistant' %}{{ raise_exception('an assistant cannot begin') }}{% endif %}
{{- bos_token }}
{%- for message in messages %}
{% if message.role == 'assistant' %}<|{{ message.role }}|>{% generation %}
{% set said = message.content | trim %}
{{ said }}{% endgeneration %}{% if said is defined %}outside{% endif %}
{% else %}<|{{ message.role }}|>{{ message.content | trim }}{% endif %}
{%- if think is defined %}{{ {"think": think} | tojson }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
GSM8K = Path(__file__).parents[2] / "data" / "gsm8k" / "test.jsonl.gz"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a small byte-level tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["how many clips did she sell in all"], trainer)
    tokenizer.add_special_tokens([AddedToken(token) for token in ("<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>")])
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "bos_token": {"__type": "AddedToken", "content": "<s>"},
        "eos_token": "</s>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    return folder


def _config(model: Path, path: Path | str, **data: Any) -> RunConfig:
    source = {"kind": "jsonl", "path": str(path)} | data.pop("source", {})
    if source["kind"] == "reasoning_gym":
        del source["path"]
    return _mixture(model, [source], **data)


def _mixture(model: Path, sources: list[dict[str, Any]], seed: int = 0, **data: Any) -> RunConfig:
    return validate(
        {
            "run": {"seed": seed},
            "model": {"path": str(model)},
            "data": {"sources": sources, **data},
            "verifiers": [{"kind": "exact"}],
        },
        origin="test",
    )


def _write(folder: Path, *lines: Any, name: str = "prompts") -> Path:
    path = folder / f"{name}.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def _decode(model: Path, ids: list[int]) -> str:
    tokens = Tokenizer.from_file(str(model / "tokenizer.json"))
    return tokens.decode(ids, skip_special_tokens=False)


def test_a_prompt_is_rendered_by_the_chat_template(model: Path, tmp_path: Path):
    path = _write(tmp_path, {"prompt": " How many? ", "answer": "4"})
    source = PromptSource(_config(model, path, system_prompt="Be brief.", user_template="Q: {prompt}"))
    ids, answer, _ = source.prompt(0)
    assert _decode(model, ids) == "<s><|system|>Be brief.<|user|>Q:  How many?<|assistant|>"
    assert answer == "4"
    assert source.longest == len(ids)


def test_another_chat_template_can_be_set(model: Path, tmp_path: Path):
    """It is the name of one of the tokenizer's templates, or a file, whose text is stored in the configuration."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((model / name).read_bytes())
    path = _write(tmp_path, {"prompt": "How many?", "answer": "4"})
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "short.jinja").write_text("S {{ messages[0].content }}")
    named = PromptSource(_config(tmp_path, path, chat_template="short"))
    assert _decode(model, named.prompt(0)[0]) == "S How many?"
    with pytest.raises(DataError, match=r"'long': .* of that name; it has default, short. To use a file"):
        PromptSource(_config(tmp_path, path, chat_template="long"))
    file = tmp_path / "mine.jinja"
    file.write_text("M {{ messages[0].content }}")
    (tmp_path / "run.toml").write_text(
        f'[model]\npath = "{tmp_path}"\n[data]\nchat_template = "mine.jinja"\n'
        f'sources = [{{kind = "jsonl", path = "{path}"}}]\n[[verifiers]]\nkind = "exact"\n'
    )
    config = load(tmp_path / "run.toml", environ={})
    file.unlink()
    assert _decode(model, PromptSource(validate(tomllib.loads(to_toml(config)), "kept")).prompt(0)[0]) == "M How many?"
    with pytest.raises(ConfigError, match=r"data\.chat_template = 'mine\.jinja': .*mine\.jinja cannot be read: No such file"):
        load(tmp_path / "run.toml", environ={})
    with pytest.raises(DataError, match=r"data\.chat_template is invalid: "):
        PromptSource(_config(tmp_path, path, chat_template="{% if %}"))


def test_messages_are_rendered_unchanged(model: Path, tmp_path: Path):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    path = _write(tmp_path, {"prompt": messages, "answer": 4})
    source = PromptSource(_config(model, path, system_prompt="not used", chat_template_options={"think": True}))
    ids, answer, _ = source.prompt(0)
    text = '<s><|user|>a{"think": true}<|assistant|>b{"think": true}<|user|>c{"think": true}<|assistant|>'
    assert _decode(model, ids) == text
    assert answer == "4"
    (remark,) = source.remarks
    assert remark.what == "data.system_prompt without effect: every prompt is a list of messages"
    path = _write(tmp_path, {"prompt": messages, "answer": 4}, {"prompt": "d", "answer": 4})
    assert PromptSource(_config(model, path, system_prompt="used")).remarks == []


def test_a_reply_that_the_prompt_begins_is_continued(model: Path, tmp_path: Path):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "Let me add: "}]
    source = PromptSource(_config(model, _write(tmp_path, {"prompt": messages, "answer": "4"})))
    assert _decode(model, source.prompt(0)[0]).endswith("<|user|>a<|assistant|>Let me add:"), "as the template writes it"
    given = {"environment": "e"}
    with pytest.raises(DataError, match="ends with a message of the assistant, which only a rollout without an environment"):
        list(read_rows(FileSource(kind="jsonl", path=str(tmp_path / "prompts.jsonl"), **given), Needs()))


def test_fields_of_objects_and_a_byte_order_mark_are_read(tmp_path: Path):
    path = tmp_path / "prompts.jsonl"
    row = {"prompt": [{"role": "user", "content": [{"type": "text", "text": "?"}]}], "reward_model": {"ground_truth": "4"}}
    path.write_text("\ufeff" + json.dumps(row) + "\n" + json.dumps(row | {"reward_model.ground_truth": "5"}))
    rows = read_rows(FileSource(kind="jsonl", path=str(path), answer_field="reward_model.ground_truth"), Needs())
    assert [(row.prompt, row.answer) for row in rows] == [([{"role": "user", "content": "?"}], answer) for answer in ("4", "5")]


CLOCK = """{%- set today = date_string if date_string is defined else strftime_now("%d %B %Y") -%}
Today is {{ today }}.{% for message in messages %}<|user|>{{ message.content }}{% endfor %}"""


def test_the_clock_of_a_template_stands_still(model: Path, tmp_path: Path):
    path = _write(tmp_path, {"prompt": "Hi", "answer": "4"})

    def text(**options: Any) -> str:
        config = _config(model, path, chat_template=CLOCK, chat_template_options=options)
        return _decode(model, PromptSource(config).prompt(0)[0])

    assert text() == "Today is 01 January 2026.<|user|>Hi"
    assert text(date="2026-11-28") == "Today is 28 November 2026.<|user|>Hi"
    assert text(date_string="1 May 2030") == "Today is 1 May 2030.<|user|>Hi"
    own = _config(model, path, chat_template="On {{ date }}", chat_template_options={"date": "a Monday"})
    assert _decode(model, PromptSource(own).prompt(0)[0]) == "On a Monday", "a template without a clock reads what it likes"
    with pytest.raises(DataError, match=r"chat_template_options\.date = '28\.11\.' is not a date: write it as 2026-01-01"):
        text(date="28.11.")


def test_an_option_that_the_template_does_not_read_is_refused(model: Path, tmp_path: Path):
    path = _write(tmp_path, {"prompt": "Hi", "answer": "4"})
    with pytest.raises(DataError, match=r"options\.thinkng = True has no effect: .* It reads these options: said, think$"):
        PromptSource(_config(model, path, chat_template_options={"thinkng": True}))
    with pytest.raises(DataError, match=r"options\.date = '2026-11-28' has no effect"):
        PromptSource(_config(model, path, chat_template_options={"date": "2026-11-28"}))
    with pytest.raises(DataError, match=r"It reads these options: date, date_string$"):
        PromptSource(_config(model, path, chat_template=CLOCK, chat_template_options={"today": "1 May"}))


def test_without_a_template_the_text_is_unchanged(model: Path, tmp_path: Path):
    path = _write(tmp_path, {"prompt": "how many", "answer": "4"})
    source = PromptSource(_config(model, path, chat_template=False, user_template="{prompt} ="))
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    assert source.prompt(0)[0] == tokenizer.encode("how many =").ids
    assert source.prompt(0)[0][0] == tokenizer.token_to_id("<s>")


@pytest.mark.slow
def test_ids_match_the_models_own_tokenizer(model: Path, tmp_path: Path):
    code = """
import json, sys, transformers
tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(sys.argv[1])
rows = json.loads(sys.argv[2])
chat = [tokenizer.apply_chat_template(row, add_generation_prompt=True, return_dict=False, think="ä<b>") for row in rows]
print(json.dumps([chat, tokenizer(rows[0][0]["content"])["input_ids"]]))
"""
    rows = [
        [{"role": "user", "content": "How many <|user|> clips?\n\nÄ 漢字 🙂 "}],
        [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}],
    ]
    call = [sys.executable, "-c", code, str(model), json.dumps(rows)]
    found = subprocess.run(call, capture_output=True, text=True, check=True)
    chat, bare = json.loads(found.stdout.splitlines()[-1])
    path = _write(tmp_path, *({"prompt": row, "answer": ""} for row in rows))
    source = PromptSource(_config(model, path, chat_template_options={"think": "ä<b>"}))
    assert [source.prompt(i)[0] for i in range(2)] == chat
    path = _write(tmp_path, {"prompt": rows[0][0]["content"], "answer": ""})
    assert PromptSource(_config(model, path, chat_template=False)).prompt(0)[0] == bare


def test_gsm8k_answers_are_extracted_by_a_pattern(model: Path, tmp_path: Path):
    path = tmp_path / "test.jsonl"
    path.write_bytes(gzip.decompress(GSM8K.read_bytes()))
    fields = {"prompt_field": "question", "answer_pattern": r"####\s*(.+)"}
    source = PromptSource(_config(model, path, source=fields, max_prompt_tokens=2048, chat_template=False))
    assert len(source) == 1319
    answers = [source.prompt(row)[1] for row in range(len(source))]
    assert answers[:3] == ["18", "3", "70000"]
    assert all(answer.replace(",", "").lstrip("-").isdigit() for answer in answers)


def test_gsm8k_in_a_mixture_is_asked_once_per_epoch(model: Path, tmp_path: Path):
    path = tmp_path / "test.jsonl"
    path.write_bytes(gzip.decompress(GSM8K.read_bytes()))
    gsm8k = {"kind": "jsonl", "path": str(path), "prompt_field": "question", "answer_pattern": r"####\s*(.+)", "weight": 3.0}
    task = {"kind": "reasoning_gym", "name": "gcd", "task": "gcd", "options": {"size": 50}}
    source = PromptSource(_mixture(model, [gsm8k, task], max_prompt_tokens=2048))
    picks = PromptOrder(source.spans, 0, True, 32).draft(1760, 0, {}).picks
    assert all(source.name_of(pick.row) == pick.source for pick in picks)
    first = [pick.row for pick in picks if pick.source == "main" and pick.epoch == 0]
    assert sorted(first) == list(range(1319))
    assert sum(pick.source == "gcd" for pick in picks) == 440
    asked = [decode_entry(source.prompt(pick.row)[1])["question"] for pick in picks if pick.source == "gcd" and pick.epoch == 7]
    assert len(set(asked)) == 50


def test_parquet_and_jsonl_give_the_same_data(model: Path, tmp_path: Path):
    rows = [{"prompt": f"how many {i}", "answer": f"{i}", "other": i} for i in range(10)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "prompts.parquet")
    jsonl = PromptSource(_config(model, _write(tmp_path, *rows)))
    parquet = PromptSource(_config(model, tmp_path / "prompts.parquet", source={"kind": "parquet"}))
    assert jsonl.digest == parquet.digest
    assert [jsonl.prompt(i) for i in range(10)] == [parquet.prompt(i) for i in range(10)]


@pytest.mark.parametrize(
    ("answer", "text"), [(["x", "ü"], '["x", "ü"]'), (True, "true"), ({"a": 1}, '{"a": 1}'), (4, "4"), ("4", "4"), (None, "")]
)
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_an_answer_that_nothing_compares_with_may_have_any_type(kind: str, answer: Any, text: str, tmp_path: Path):
    path = _write(tmp_path, {"prompt": "how many", "answer": answer})
    if kind == "parquet":
        path = tmp_path / "prompts.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"prompt": "how many", "answer": answer}]), path)
    source = FileSource.model_validate({"kind": kind, "path": str(path)})
    [row] = read_rows(source, Needs(answer=False, columns=True))
    assert row.answer == text
    assert row.columns is not None
    assert row.columns["answer"] == answer
    if not isinstance(answer, str | int) or isinstance(answer, bool):
        with pytest.raises(DataError, match="field 'answer' must be a string or a number"):
            list(read_rows(source, Needs(answer=True)))


def test_the_digest_covers_content_and_order(model: Path, tmp_path: Path):
    def digest(*rows: tuple[str, str], **data: Any) -> str:
        path = _write(tmp_path, *({"prompt": prompt, "answer": answer} for prompt, answer in rows))
        return PromptSource(_config(model, path, **data)).digest

    first, second = ("how many", "1"), ("clips", "2")
    digests = [
        digest(first, second),
        digest(second, first),
        digest(first, ("clips", "3")),
        digest(first, ("clips?", "2")),
        digest(first),
        digest(("how many", "12"), ("clips", "")),
        digest(first, second, system_prompt="Be brief."),
    ]
    assert len(set(digests)) == len(digests)
    assert digest(first, second) == digests[0]
    assert len(digests[0]) == 64


def test_reasoning_gym_tasks_are_generated(model: Path):
    task = {"kind": "reasoning_gym", "task": "basic_arithmetic", "options": {"size": 5, "seed": 3, "max_terms": 3}}
    source = PromptSource(_config(model, "", source=task))
    assert len(source) == 5
    ids, answer, _ = source.prompt(4)
    entry = decode_entry(answer)
    assert _decode(model, ids) == f"<s><|user|>{entry['question']}<|assistant|>"
    assert PromptSource(_config(model, "", source=task)).digest == source.digest
    assert PromptSource(_config(model, "", source={**task, "options": {**task["options"], "seed": 4}})).digest != source.digest


GOOD = {"prompt": "how many", "answer": "#### 4"}


@pytest.mark.parametrize(
    ("lines", "data", "message"),
    [
        ([GOOD, "{not json"], {}, r"prompts\.jsonl:2: not valid JSON"),
        ([GOOD, "[" * 5000 + "]" * 5000], {}, r"prompts\.jsonl:2: not valid JSON \(maximum recursion depth"),
        ([GOOD, "", "[1]"], {}, r"prompts\.jsonl:3: expected a JSON object, not list"),
        (
            [GOOD, {"question": "?"}],
            {},
            r"prompts\.jsonl:2: no field 'prompt' \(prompt_field of its source\); set prompt_field to one of",
        ),
        ([{"prompt": "?"}], {}, r"no field 'answer' \(answer_field of its source\)"),
        ([{"prompt": 3, "answer": "4"}], {}, r"field 'prompt' must be a string or a list of messages .*, not 3"),
        ([{"prompt": [{"role": "user"}], "answer": "4"}], {}, "must be a string or a list of messages"),
        ([{"prompt": "?", "answer": None}], {}, "field 'answer' must be a string or a number, not None"),
        (
            [GOOD, {"prompt": "?", "answer": "4"}],
            {"source": {"answer_pattern": "#### (.+)"}},
            r":2: answer_pattern of source \"main\" = '#### \(\.\+\)' does not match '4': fix",
        ),
        (["", "  "], {}, r'source "main" has no rows \(path = .*prompts\.jsonl\'\): add prompts'),
        ([GOOD], {"user_template": "What?"}, r"data\.user_template = 'What\?' has no \{prompt\}"),
        (
            [{"prompt": [{"role": "user", "content": "?"}], "answer": ""}],
            {"chat_template": False},
            "needs data.chat_template = true",
        ),
        (
            [{"prompt": [{"role": "assistant", "content": "?"}, {"role": "user", "content": "?"}], "answer": ""}],
            {},
            "rejects the prompt: an assistant cannot begin",
        ),
        (
            [{"prompt": [{"role": "user", "content": "?"}, {"role": "assistant", "content": " "}], "answer": ""}],
            {},
            r":1: the prompt ends with a message of the assistant that cannot be continued: remove it",
        ),
        ([{"prompt": "", "answer": ""}], {"chat_template": False, "max_prompt_tokens": 1}, None),  # only the BOS token
        (
            [GOOD, {"prompt": "x" * 90, "answer": ""}, {"prompt": "x" * 99, "answer": ""}],
            {"max_prompt_tokens": 50},
            r"prompts\.jsonl:2: the prompt has \d\d tokens, more than data\.max_prompt_tokens = 50; 2 rows have more than "
            r"data\.max_prompt_tokens = 50 tokens, the longest 1\d\d \(.*prompts\.jsonl:3\): raise .* data\.long_prompts = ",
        ),
    ],
)
def test_problems_of_rows_are_named(model: Path, tmp_path: Path, lines: list[Any], data: dict[str, Any], message: str | None):
    config = _config(model, _write(tmp_path, *lines), **data)
    if message is None:
        assert len(PromptSource(config)) == 1
        return
    with pytest.raises(DataError, match=message) as caught:
        PromptSource(config)
    assert "\n" not in str(caught.value)


def test_problems_of_paths_and_tasks_are_named(model: Path, tmp_path: Path):
    task = {"kind": "reasoning_gym", "options": {"size": 3}}
    path = _write(tmp_path, GOOD)
    table = pyarrow.Table.from_pylist([{"question": "?", "answer": "4"}])
    pyarrow.parquet.write_table(table, tmp_path / "p.parquet")
    for config, message in [
        (_config(model, tmp_path / "none.jsonl"), r"path of source \"main\" = .*none\.jsonl' is not a file"),
        (_config(model, path, source={"kind": "parquet"}), "is not a parquet file"),
        (
            _config(model, tmp_path / "p.parquet", source={"kind": "parquet"}),
            "row 0: no field 'prompt' .*fields: answer, question",
        ),
        (
            _config(model, "", source={**task, "task": "basic_arithmetik"}),
            r"not a task of reasoning-gym; did you mean 'basic_arith",
        ),
        (
            _config(model, "", source={**task, "task": "countdown", "options": {"numbers": 3}}),
            r"options of source \"main\" = .*'countdown'",
        ),
        (_config(tmp_path, path), r"model\.path: .*tokenizer\.json does not exist"),
    ]:
        with pytest.raises(DataError, match=message):
            PromptSource(config)


def test_rows_of_several_sources_are_concatenated(model: Path, tmp_path: Path):
    first = _write(tmp_path, *({"prompt": f"how many {i}", "answer": f"{i}"} for i in range(3)), name="first")
    second = _write(tmp_path, *({"prompt": f"clips {i}", "answer": f"{i}"} for i in range(2)), name="second")
    sources = [
        {"kind": "jsonl", "path": str(first), "name": "a", "weight": 2.5},
        {"kind": "reasoning_gym", "name": "b", "task": "gcd", "options": {"size": 4}},
        {"kind": "jsonl", "path": str(second), "name": "c"},
    ]
    config = _mixture(model, sources)
    mixed = PromptSource(config)
    assert mixed.spans == (SourceSpan("a", 2.5, 0, 3), SourceSpan("b", 1.0, 3, 4), SourceSpan("c", 1.0, 7, 2))
    assert [mixed.name_of(row) for row in range(len(mixed))] == ["a"] * 3 + ["b"] * 4 + ["c"] * 2
    alone = [PromptSource(config, [source]) for source in config.data.sources]
    assert [mixed.prompt(row) for row in range(9)] == [source.prompt(i) for source in alone for i in range(len(source))]
    assert [source.spans[0].first for source in alone] == [0, 0, 0]


def test_the_digest_covers_the_mixture(model: Path, tmp_path: Path):
    path = str(_write(tmp_path, GOOD, GOOD))
    a, b = ({"kind": "jsonl", "path": path, "name": name} for name in "ab")
    configs = [
        _mixture(model, [a, b]),
        _mixture(model, [b, a]),
        _mixture(model, [a]),
        _mixture(model, [b]),
        _mixture(model, [a, {**b, "weight": 2.0}]),
        _mixture(model, [a, b], seed=1),
        _mixture(model, [a, b], curriculum="in_order"),
    ]
    digests = [PromptSource(config).digest for config in configs]
    assert len(set(digests)) == len(digests)
    assert PromptSource(configs[0]).digest == digests[0]


def test_long_prompts_can_be_dropped(model: Path, tmp_path: Path):
    lines = [{"prompt": "x" * (90 if i % 3 == 1 else 3), "answer": f"{i}"} for i in range(7)]
    kept = [line for line in lines if len(line["prompt"]) == 3]
    limits = {"max_prompt_tokens": 50, "long_prompts": "drop"}
    source = PromptSource(_config(model, _write(tmp_path, *lines), **limits))
    assert [source.prompt(row)[1] for row in range(len(source))] == [line["answer"] for line in kept]
    (remark,) = source.remarks
    assert remark.source == "main"
    assert remark.what.startswith("prompts skipped: 2 rows have more than data.max_prompt_tokens = 50 tokens, the longest ")
    assert source.digest == PromptSource(_config(model, _write(tmp_path, *kept), **limits)).digest


def test_a_source_with_only_long_prompts_is_an_error(model: Path, tmp_path: Path):
    long = {"kind": "jsonl", "name": "long", "path": str(_write(tmp_path, {"prompt": "x" * 90, "answer": ""}, name="long"))}
    good = {"kind": "jsonl", "path": str(_write(tmp_path, GOOD))}
    with pytest.raises(
        DataError, match=r'source "long" has no rows left: 1 row has more than data\.max_prompt_tokens = 50 tokens'
    ):
        PromptSource(_mixture(model, [good, long], max_prompt_tokens=50, long_prompts="drop"))


def test_a_tokenizer_without_a_template_is_named(model: Path, tmp_path: Path):
    (tmp_path / "tokenizer.json").write_bytes((model / "tokenizer.json").read_bytes())
    path = _write(tmp_path, GOOD)
    with pytest.raises(DataError, match=r"has no chat template: set data\.chat_template to the path of one, or to false"):
        PromptSource(_config(tmp_path, path))
    with pytest.raises(DataError, match=r"data\.chat_template = 'short': .* of that name; it has none"):
        PromptSource(_config(tmp_path, path, chat_template="short"))
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}{% if %}")
    with pytest.raises(DataError, match=r"chat template in .* is invalid"):
        PromptSource(_config(tmp_path, path))
    (tmp_path / "chat_template.jinja").write_text("{{ ''.__class__.__mro__ }}{{ messages[0].content }}")
    with pytest.raises(DataError, match="rejects the prompt: access to attribute '__class__'"):
        PromptSource(_config(tmp_path, path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="is not a valid tokenizer"):
        PromptSource(_config(tmp_path, path))


def test_a_large_source_is_read_in_chunks(model: Path, tmp_path: Path):
    path = _write(tmp_path, *({"prompt": f"how many clips did she sell in {i}", "answer": f"{i}"} for i in range(5_000)))
    source = PromptSource(_config(model, path))
    assert len(source) == 5_000
    assert source.prompt(4_999)[1] == "4999"


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    source = FileSource(kind="jsonl", path="/proc/self/mem")
    with pytest.raises(DataError, match=r'path of source "main" = .* cannot be read \(Input/output error\): correct the path'):
        list(read_rows(source))
    table = pyarrow.table({"prompt": [f"say {i}" for i in range(5000)], "answer": [str(i) for i in range(5000)]})
    pyarrow.parquet.write_table(table, path := tmp_path / "damaged.parquet")
    body = bytearray(path.read_bytes())
    body[100:2000] = bytes(1900)
    path.write_bytes(body)
    with pytest.raises(DataError, match=r"damaged\.parquet' cannot be read"):
        list(read_rows(FileSource(kind="parquet", path=str(path))))


def _undecodable() -> pyarrow.Array:
    """Return a text that is not UTF-8, as a damaged writer may store it."""
    offsets = pyarrow.array([0, 2], pyarrow.int32()).buffers()[1]
    return pyarrow.Array.from_buffers(pyarrow.string(), 1, [None, offsets, pyarrow.py_buffer(b"\xff\xfe")])


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (_undecodable(), "can't decode byte 0xff"),
        (pyarrow.array([1], pyarrow.timestamp("ns")), "not safely convertible to microseconds"),
        (pyarrow.array([2**62], pyarrow.timestamp("us")), "date value out of range"),
        (pyarrow.array([0], pyarrow.timestamp("us", "Nowhere/Land")), "Nowhere/Land"),
        (pyarrow.StructArray.from_arrays([pyarrow.array([1]), pyarrow.array([2])], ["x", "x"]), "duplicate field names"),
    ],
)
def test_a_value_that_cannot_be_read_is_named(values: pyarrow.Array, reason: str, tmp_path: Path) -> None:
    table = pyarrow.table({"prompt": ["say 1"], "answer": ["1"], "more": values})
    pyarrow.parquet.write_table(table, path := tmp_path / "odd.parquet")
    source = FileSource(kind="parquet", path=str(path))
    with pytest.raises(DataError, match=rf"odd\.parquet, rows 0 to 0: a value cannot be read \(.*{reason}.*\): correct it"):
        list(read_rows(source, Needs(columns=True)))
    assert len(list(read_rows(source))) == 1


def test_a_parquet_codec_that_is_not_built_in_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["say 1"], "answer": ["1"]}), path := tmp_path / "p.parquet")

    def refuse(*given: object, **options: object) -> None:
        raise pyarrow.ArrowNotImplementedError("Support for codec 'lzo' not built")

    monkeypatch.setattr(pyarrow.parquet.ParquetFile, "iter_batches", refuse)
    with pytest.raises(DataError, match=r"p\.parquet' is not a parquet file that can be read \(Support for codec"):
        list(read_rows(FileSource(kind="parquet", path=str(path))))
