"""Prompts from files and tasks, tokenised without torch, with every fault named before a run starts."""

from __future__ import annotations

import gzip
import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from services.dataprep.errors import DataError
from services.dataprep.order import PromptOrder, permutation
from services.dataprep.prompts import PromptSource
from services.protocol.config import RunConfig
from services.protocol.entries import decode_entry

TEMPLATE = """{%- if messages[0].role == 'assistant' %}{{ raise_exception('an assistant cannot begin') }}{% endif %}
{{- bos_token }}
{%- for message in messages %}
{% if message.role == 'assistant' %}<|{{ message.role }}|>{% generation %}{{ message.content | trim }}{% endgeneration %}
{% else %}<|{{ message.role }}|>{{ message.content | trim }}{% endif %}
{%- if think is defined %}{{ {"think": think} | tojson }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
GSM8K = Path(__file__).parents[1] / "data" / "gsm8k" / "test.jsonl.gz"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small byte-level tokenizer and a chat template."""
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
    return RunConfig.model_validate(
        {"model": {"path": str(model)}, "data": {"source": source, **data}, "verifiers": [{"kind": "exact"}]}
    )


def _write(folder: Path, *lines: Any) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def _decode(model: Path, ids: list[int]) -> str:
    tokens = Tokenizer.from_file(str(model / "tokenizer.json"))
    return tokens.decode(ids, skip_special_tokens=False)


def test_a_prompt_goes_through_the_chat_template(model: Path, tmp_path: Path):
    path = _write(tmp_path, {"prompt": " How many? ", "answer": "4"})
    source = PromptSource(_config(model, path, system_prompt="Be brief.", user_template="Q: {prompt}"))
    ids, answer = source.prompt(0)
    assert _decode(model, ids) == "<s><|system|>Be brief.<|user|>Q:  How many?<|assistant|>"
    assert answer == "4"
    assert source.longest == len(ids)


def test_messages_are_rendered_as_they_are(model: Path, tmp_path: Path):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    path = _write(tmp_path, {"prompt": messages, "answer": 4})
    source = PromptSource(_config(model, path, system_prompt="not used", chat_template_options={"think": True}))
    ids, answer = source.prompt(0)
    text = '<s><|user|>a{"think": true}<|assistant|>b{"think": true}<|user|>c{"think": true}<|assistant|>'
    assert _decode(model, ids) == text
    assert answer == "4"


def test_without_a_template_the_text_stands_as_it_is(model: Path, tmp_path: Path):
    path = _write(tmp_path, {"prompt": "how many", "answer": "4"})
    source = PromptSource(_config(model, path, chat_template=False, user_template="{prompt} =", system_prompt="not used"))
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    assert source.prompt(0)[0] == tokenizer.encode("how many =").ids
    assert source.prompt(0)[0][0] == tokenizer.token_to_id("<s>")


@pytest.mark.slow
def test_ids_equal_those_of_the_model_s_own_tokenizer(model: Path, tmp_path: Path):
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


def test_gsm8k_by_its_pattern(model: Path, tmp_path: Path):
    path = tmp_path / "test.jsonl"
    path.write_bytes(gzip.decompress(GSM8K.read_bytes()))
    fields = {"prompt_field": "question", "answer_pattern": r"####\s*(.+)"}
    source = PromptSource(_config(model, path, source=fields, max_prompt_tokens=2048, chat_template=False))
    assert len(source) == 1319
    answers = [source.prompt(row)[1] for row in range(len(source))]
    assert answers[:3] == ["18", "3", "70000"]
    assert all(answer.replace(",", "").lstrip("-").isdigit() for answer in answers)


def test_parquet_and_jsonl_are_the_same_data(model: Path, tmp_path: Path):
    rows = [{"prompt": f"how many {i}", "answer": f"{i}", "other": i} for i in range(10)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "prompts.parquet")
    jsonl = PromptSource(_config(model, _write(tmp_path, *rows)))
    parquet = PromptSource(_config(model, tmp_path / "prompts.parquet", source={"kind": "parquet"}))
    assert jsonl.digest == parquet.digest
    assert [jsonl.prompt(i) for i in range(10)] == [parquet.prompt(i) for i in range(10)]


def test_the_digest_is_that_of_content_and_order(model: Path, tmp_path: Path):
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


def test_reasoning_gym(model: Path):
    task = {"kind": "reasoning_gym", "task": "basic_arithmetic", "size": 5, "seed": 3, "options": {"max_terms": 3}}
    source = PromptSource(_config(model, "", source=task))
    assert len(source) == 5
    ids, answer = source.prompt(4)
    entry = decode_entry(answer)
    assert _decode(model, ids) == f"<s><|user|>{entry['question']}<|assistant|>"
    assert PromptSource(_config(model, "", source=task)).digest == source.digest
    assert PromptSource(_config(model, "", source={**task, "seed": 4})).digest != source.digest


GOOD = {"prompt": "how many", "answer": "#### 4"}


@pytest.mark.parametrize(
    ("lines", "data", "message"),
    [
        ([GOOD, "{not json"], {}, r"prompts\.jsonl:2: not JSON"),
        ([GOOD, "", "[1]"], {}, r"prompts\.jsonl:3: a JSON object is expected, not list"),
        (
            [GOOD, {"question": "?"}],
            {},
            r"prompts\.jsonl:2: has no field 'prompt' \(data\.source\.prompt_field\); fields: question",
        ),
        ([{"prompt": "?"}], {}, r"has no field 'answer' \(data\.source\.answer_field\)"),
        ([{"prompt": 3, "answer": "4"}], {}, r"field 'prompt' must be a string or a list of messages .*, not 3"),
        ([{"prompt": [{"role": "user"}], "answer": "4"}], {}, "must be a string or a list of messages"),
        ([{"prompt": "?", "answer": None}], {}, "field 'answer' must be a string or a number, not None"),
        (
            [GOOD, {"prompt": "?", "answer": "4"}],
            {"source": {"answer_pattern": "#### (.+)"}},
            r":2: data\.source\.answer_pattern",
        ),
        (["", "  "], {}, r"data\.source has no rows"),
        ([GOOD], {"user_template": "What?"}, r"data\.user_template = 'What\?' has no \{prompt\}"),
        (
            [{"prompt": [{"role": "user", "content": "?"}], "answer": ""}],
            {"chat_template": False},
            "needs data.chat_template = true",
        ),
        (
            [{"prompt": [{"role": "assistant", "content": "?"}], "answer": ""}],
            {},
            "refuses the prompt: an assistant cannot begin",
        ),
        ([{"prompt": "", "answer": ""}], {"chat_template": False, "max_prompt_tokens": 1}, None),  # the BOS token alone
        (
            [GOOD, {"prompt": "x" * 90, "answer": ""}, {"prompt": "x" * 99, "answer": ""}],
            {"max_prompt_tokens": 50},
            r"prompts\.jsonl:2: the prompt of row 1 has \d\d tokens, more than data\.max_prompt_tokens = 50; "
            r"2 rows are too long, the longest has 1\d\d \(.*prompts\.jsonl:3\): raise",
        ),
    ],
)
def test_faults_are_named(model: Path, tmp_path: Path, lines: list[Any], data: dict[str, Any], message: str | None):
    config = _config(model, _write(tmp_path, *lines), **data)
    if message is None:
        assert len(PromptSource(config)) == 1
        return
    with pytest.raises(DataError, match=message) as caught:
        PromptSource(config)
    assert "\n" not in str(caught.value)


def test_faults_of_places_and_tasks_are_named(model: Path, tmp_path: Path):
    task = {"kind": "reasoning_gym", "size": 3}
    path = _write(tmp_path, GOOD)
    table = pyarrow.Table.from_pylist([{"question": "?", "answer": "4"}])
    pyarrow.parquet.write_table(table, tmp_path / "p.parquet")
    for config, message in [
        (_config(model, tmp_path / "none.jsonl"), r"data\.source\.path = .*none\.jsonl' is not a file"),
        (_config(model, path, source={"kind": "parquet"}), "is not a parquet file"),
        (
            _config(model, tmp_path / "p.parquet", source={"kind": "parquet"}),
            "row 0: has no field 'prompt' .*fields: answer, question",
        ),
        (
            _config(model, "", source={**task, "task": "basic_arithmetik"}),
            r"not a task of reasoning-gym; did you mean 'basic_arith",
        ),
        (
            _config(model, "", source={**task, "task": "countdown", "options": {"numbers": 3}}),
            r"data\.source\.options = .*'countdown'",
        ),
        (_config(tmp_path, path), r"model\.path: .*tokenizer\.json does not exist"),
    ]:
        with pytest.raises(DataError, match=message):
            PromptSource(config)


def test_a_tokenizer_without_a_template_is_named(model: Path, tmp_path: Path):
    (tmp_path / "tokenizer.json").write_bytes((model / "tokenizer.json").read_bytes())
    path = _write(tmp_path, GOOD)
    with pytest.raises(DataError, match=r"has no chat template: set data\.chat_template = false"):
        PromptSource(_config(tmp_path, path))
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}{% if %}")
    with pytest.raises(DataError, match=r"chat template in .* cannot be read"):
        PromptSource(_config(tmp_path, path))
    (tmp_path / "chat_template.jinja").write_text("{{ ''.__class__.__mro__ }}{{ messages[0].content }}")
    with pytest.raises(DataError, match="refuses the prompt: access to attribute '__class__'"):
        PromptSource(_config(tmp_path, path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="is not a tokenizer"):
        PromptSource(_config(tmp_path, path))


def test_a_source_of_many_chunks(model: Path, tmp_path: Path):
    path = _write(tmp_path, *({"prompt": f"how many clips did she sell in {i}", "answer": f"{i}"} for i in range(5_000)))
    source = PromptSource(_config(model, path))
    assert len(source) == 5_000
    assert source.prompt(4_999)[1] == "4999"


def _slow_permutation(seed: int, epoch: int, n: int) -> list[int]:
    """SplitMix64 in Python's own integers."""
    mask = 2**64 - 1
    start = int.from_bytes(hashlib.sha256(f"order {seed} {epoch}".encode()).digest()[:8], "little")

    def key(row: int) -> int:
        z = (start + (row + 1) * 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    return sorted(range(n), key=key)


def test_the_order_is_a_permutation_fixed_for_all_time():
    assert permutation(0, 0, 10).tolist() == [5, 3, 2, 4, 8, 6, 1, 0, 7, 9]
    for seed, epoch in [(0, 0), (0, 1), (123456789, 40)]:
        assert permutation(seed, epoch, 200).tolist() == _slow_permutation(seed, epoch, 200)
    assert permutation(0, 0, 10).tolist() != permutation(0, 1, 10).tolist() != permutation(1, 1, 10).tolist()
    assert np.array_equal(np.sort(permutation(3, 7, 1000)), np.arange(1000))


def test_positions_run_through_all_epochs():
    order = PromptOrder(rows=7, seed=5, shuffle=True)
    run = [order.at(position) for position in range(35)]
    for epoch in range(5):
        rows = [row for e, row in run if e == epoch]
        assert rows == permutation(5, epoch, 7).tolist()
    assert [order.at(position) for position in reversed(range(35))] == run[::-1]
    assert [PromptOrder(3, 0, shuffle=False).at(p) for p in range(5)] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]


def test_every_row_is_equally_likely_to_come_first():
    first = np.bincount([permutation(1, epoch, 10)[0] for epoch in range(5000)], minlength=10)
    chi_square = float(((first - 500) ** 2 / 500).sum())
    assert chi_square < 27.9  # 9 degrees of freedom, p = 0.001
