"""Mistakes in the model's folder."""

from __future__ import annotations

from pathlib import Path

from tests.newcomer.world import Edit, Mistake, drop, put, sub, write_weights

CONFIG, WEIGHTS, TOKENIZER = "model/config.json", "model/model.safetensors", "model/tokenizer.json"
INDEX = '{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}'


def shorten(file: str, size: int) -> Edit:
    """Return the edit that truncates a file."""
    return lambda folder: (folder / file).write_bytes((folder / file).read_bytes()[:size])


def enormous(folder: Path) -> None:
    """Write weights that exceed any machine's memory."""
    write_weights(folder / WEIGHTS, {"embed.weight": [10**7, 10**5]}, sparse=True)


MISTAKES = [
    Mistake(
        "absolute_path", "model.path", "/nowhere/model", "correct the path", [sub('path = "model"', 'path = "/nowhere/model"')]
    ),
    Mistake("relative_path", "model.path", "./modle", "correct the path", [sub('path = "model"', 'path = "./modle"')]),
    Mistake("path_is_a_file", "model.path", "rows.jsonl", "correct the path", [sub('path = "model"', 'path = "rows.jsonl"')]),
    Mistake(
        "hub_offline",
        "model.path",
        "Qwen/Qwen3-0.6B",
        "unset HF_HUB_OFFLINE",
        [sub('path = "model"', 'path = "Qwen/Qwen3-0.6B"')],
        environ={"HF_HUB_OFFLINE": "1", "HF_HOME": "nothing"},
    ),
    Mistake("no_config", "model.path", "config.json", "save_pretrained", [drop(CONFIG)]),
    Mistake("no_tokenizer", "model.path", "tokenizer.json", "save_pretrained", [drop(TOKENIZER)]),
    Mistake("no_weights", "model.path", "*.safetensors", "save_pretrained", [drop(WEIGHTS)]),
    Mistake("broken_config", "model.path", "config.json", "not valid JSON", [put(CONFIG, "{")]),
    Mistake("no_type", "model.path", "no model_type", "save_pretrained", [sub('"model_type": "qwen3", ', "", CONFIG)]),
    Mistake("broken_tokenizer", "model.path", "tokenizer.json", "not a valid tokenizer", [put(TOKENIZER, '{"model": {}}')]),
    Mistake("cut_weights", "model.path", "20000 bytes", "copy or download the file again", [shorten(WEIGHTS, 20000)]),
    Mistake("empty_weights", "model.path", "0 bytes", "copy or download the file again", [put(WEIGHTS, "")]),
    Mistake(
        "weights_of_lfs",
        "model.path",
        "no complete header",
        "copy or download the file again",
        [put(WEIGHTS, "version https://git-lfs.github.com/spec/v1\n")],
    ),
    Mistake(
        "missing_shard",
        "model.path",
        "model-00001-of-00002.safetensors",
        "copy or download the file again",
        [put("model/model.safetensors.index.json", INDEX)],
    ),
    Mistake(
        "other_tokenizer",
        "model.path",
        "vocab_size = 20",
        "use the tokenizer that the model was trained with",
        [sub('"vocab_size": 320', '"vocab_size": 20', CONFIG)],
    ),
    Mistake(
        "short_context",
        "model.max_tokens",
        "512",
        "lower it to 64",
        [sub('dtype = "float32"', 'dtype = "float32"\nmax_tokens = 512')],
    ),
    Mistake(
        "no_chat_template",
        "model.path",
        "'model'",
        "set data.chat_template to the path of one, or to false",
        [drop("model/chat_template.jinja"), put("model/tokenizer_config.json", "{}")],
    ),
    Mistake(
        "broken_chat_template",
        "model.path",
        "'model'",
        "the chat template in model is invalid",
        [put("model/chat_template.jinja", "{% for %}")],
    ),
    Mistake(
        "heads",
        "trainer.sequence_parallel",
        "3",
        "set a divisor",
        [put("extra", ""), sub("[sampling]", "[trainer]\nranks = 3\nsequence_parallel = 3\n\n[sampling]")],
    ),
    Mistake("no_memory", "model.path", "1,000,000,000,000 parameters", "use a smaller model", [enormous]),
]
