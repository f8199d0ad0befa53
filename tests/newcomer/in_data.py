"""Mistakes in the data."""

from __future__ import annotations

import gzip

from tests.newcomer.world import Mistake, add, drop, put, row, sub

PATH, FIELD = "data.sources.0.path", "data.sources.0.prompt_field"

MISTAKES = [
    Mistake("no_data", PATH, "'rows.jsonl'", "correct the path", [drop("rows.jsonl")]),
    Mistake(
        "no_data_nor_tokenizer", PATH, "'rows.jsonl'", "correct the path", [drop("rows.jsonl"), drop("model/tokenizer.json")]
    ),
    Mistake(
        "not_json_nor_tokenizer",
        PATH,
        "rows.jsonl:3",
        "fix or remove the line",
        [row(3, '{"prompt": "say 3"'), drop("model/tokenizer.json")],
    ),
    Mistake("data_is_a_folder", PATH, "'model'", "correct the path", [sub('"rows.jsonl"', '"model"')]),
    Mistake("empty", PATH, "'rows.jsonl'", "add prompts", [put("rows.jsonl", "")]),
    Mistake("blank_lines", PATH, "'rows.jsonl'", "add prompts", [put("rows.jsonl", "\n\n")]),
    Mistake("not_json", PATH, "rows.jsonl:3", "fix or remove the line", [row(3, '{"prompt": "say 3"')]),
    Mistake("not_an_object", PATH, "rows.jsonl:2", "fix or remove the line", [row(2, '["say 2", "2"]')]),
    Mistake(
        "latin_1", PATH, "rows.jsonl:4", "save the file as UTF-8", [row(4, b'{"prompt": "caf\xe9 is what I say", "answer": "1"}')]
    ),
    Mistake(
        "zipped",
        PATH,
        "rows.jsonl:1",
        "fix or remove the line",
        [put("rows.jsonl", gzip.compress(b'{"prompt": "say 1"}\n', mtime=0))],
    ),
    Mistake("other_field", FIELD, "'question'", "answer, prompt", [sub('prompt_field = "prompt"', 'prompt_field = "question"')]),
    Mistake(
        "field_missing_once",
        FIELD,
        "rows.jsonl:5",
        "set prompt_field to one of its fields",
        [row(5, '{"question": "say 5", "answer": "5"}')],
    ),
    Mistake("prompt_is_a_number", FIELD, "rows.jsonl:6", "fix the row", [row(6, '{"prompt": 6, "answer": "6"}')]),
    Mistake("prompt_is_empty", FIELD, "rows.jsonl:7", "fill in or remove the row", [row(7, '{"prompt": "", "answer": "7"}')]),
    Mistake(
        "messages_without_role",
        FIELD,
        "rows.jsonl:1",
        "`role` and `content`",
        [row(1, '{"prompt": [{"content": "say 1"}], "answer": "1"}')],
    ),
    Mistake(
        "no_answer",
        "data.sources.0.answer_field",
        "rows.jsonl:2",
        "answer_field",
        [row(2, '{"prompt": "say 2"}'), sub('"python"\nfunction = "reward.py:score"\nrange = [0, 1]', '"exact"')],
    ),
    Mistake(
        "answer_is_null",
        "data.sources.0.answer_field",
        "rows.jsonl:2",
        "fix the row",
        [row(2, '{"prompt": "say 2", "answer": null}'), sub('"python"\nfunction = "reward.py:score"\nrange = [0, 1]', '"exact"')],
    ),
    Mistake(
        "answer_without_pattern",
        "data.sources.0.answer_pattern",
        "####",
        "fix the pattern or the row",
        [sub('prompt_field = "prompt"', "prompt_field = \"prompt\"\nanswer_pattern = '#### (.+)'")],
    ),
    Mistake(
        "pattern_without_group",
        "data.sources.0.answer_pattern",
        "####",
        "put the part that is the answer in parentheses",
        [sub('prompt_field = "prompt"', 'prompt_field = "prompt"\nanswer_pattern = "####.+"')],
    ),
    Mistake(
        "long_prompt",
        "data.max_prompt_tokens",
        "rows.jsonl:3",
        "raise data.max_prompt_tokens",
        [
            row(3, '{"prompt": "' + "say 1 " * 60 + '", "answer": "1"}'),
            sub("user_template", "max_prompt_tokens = 32\nuser_template"),
        ],
    ),
    Mistake(
        "template_without_prompt",
        "data.user_template",
        "'Answer:'",
        "add it where the question goes",
        [sub('"{prompt}"', '"Answer:"')],
    ),
    Mistake("not_parquet", PATH, "'rows.jsonl'", "correct the path or the kind", [sub('"jsonl"', '"parquet"')]),
    Mistake(
        "missing_column",
        "data.sources.0.columns",
        "'tests'",
        "its fields",
        [sub('prompt_field = "prompt"', 'prompt_field = "prompt"\ncolumns = ["tests"]')],
    ),
    Mistake(
        "no_such_task",
        "data.sources.0.task",
        "'gsm8k'",
        "did you mean",
        [sub('kind = "jsonl"\npath = "rows.jsonl"\nprompt_field = "prompt"', 'kind = "reasoning_gym"\ntask = "gsm8k"')],
    ),
    Mistake(
        "evaluation_data",
        "evaluation.sources.0.path",
        "'test.jsonl'",
        "correct the path",
        [add('[evaluation]\nevery_steps = 1\nsources = [{ name = "test", kind = "jsonl", path = "test.jsonl" }]\n')],
    ),
]
