"""Mistakes in the configuration: in the file, in the environment and on the command line."""

from __future__ import annotations

from tests.newcomer.world import Mistake, add, put, sub

MISTAKES = [
    Mistake("no_file", "", "other.toml", "grpo init", arguments=["other.toml"], place=""),
    Mistake("not_toml", "", "my.toml", "line 6", [sub('path = "model"', "path = model")], place="my.toml is not valid TOML"),
    Mistake("not_utf8", "", "my.toml", "save it as UTF-8", [put("my.toml", b'[run]\nname = "\xe9"\n')], place="my.toml is not"),
    Mistake("unknown_section", "smapling", "group_size", "did you mean 'sampling'", [sub("[sampling]", "[smapling]")]),
    Mistake("unknown_key", "run.stepz", "3", "did you mean 'steps'", [sub("steps = 3", "stepz = 3")]),
    Mistake(
        "unknown_key_of_source",
        "data.sources.0.promt_field",
        "q",
        "did you mean 'prompt_field'",
        [sub("prompt_field", "promt_field"), sub('"prompt"', '"q"')],
    ),
    Mistake("key_of_trl", "sampling.num_generations", "8", "use sampling.group_size", [add("num_generations = 8\n")]),
    Mistake("old_key", "data.source", "is now a list", "write [[data.sources]]", [sub("[[data.sources]]", "[data.source]")]),
    Mistake("text_for_number", "run.steps", "'many'", "should be a valid integer", [sub("steps = 3", 'steps = "many"')]),
    Mistake("too_small", "sampling.group_size", "1", "greater than or equal to 2", [sub("group_size = 4", "group_size = 1")]),
    Mistake("no_such_choice", "loss.policy", "'ppo'", "must be one of grpo, dapo", [add('[loss]\npolicy = "ppo"\n')]),
    Mistake("no_such_dtype", "model.dtype", "'float16'", "should be 'float32' or 'bfloat16'", [sub("float32", "float16")]),
    Mistake(
        "no_model",
        "",
        "[model]",
        "missing required section",
        [sub('[model]\npath = "model"\ndtype = "float32"\n', "")],
        place="my.toml: ",
    ),
    Mistake("no_path", "model.path", "model.path", "missing required key", [sub('path = "model"\n', "")]),
    Mistake("no_kind_of_source", "data.sources.0", "'csv'", "'jsonl', 'parquet', 'reasoning_gym'", [sub('"jsonl"', '"csv"')]),
    Mistake("no_kind_of_verifier", "verifiers.0", "'gsm8k'", "'math', 'exact', 'regex'", [sub('"python"', '"gsm8k"')]),
    Mistake("bad_run_name", "run.name", "'my run!'", "letters, digits", [sub('"mine"', '"my run!"')]),
    Mistake(
        "two_of_a_name",
        "verifiers.1.name",
        '"v"',
        "give each its own name",
        [sub('"python"', '"python"\nname = "v"'), add('[[verifiers]]\nname = "v"\nkind = "exact"\n')],
    ),
    Mistake(
        "unknown_source",
        "verifiers.0.sources",
        '"gsm8k"',
        "choose from: main",
        [sub("range = [0, 1]", 'range = [0, 1]\nsources = ["gsm8k"]')],
    ),
    Mistake("bad_range", "verifiers.0.range", "[1.0, 0.0]", "two ascending finite numbers", [sub("[0, 1]", "[1.0, 0.0]")]),
    Mistake(
        "too_long",
        "sampling.max_tokens",
        "2024",
        "raise model.max_tokens",
        [add("max_tokens = 1000\n"), sub('dtype = "float32"', 'dtype = "float32"\nmax_tokens = 64')],
    ),
    Mistake(
        "no_effect", "reference.alpha", "0.5", "set loss.kl_beta > 0", [add("[loss]\nkl_beta = 0.0\n[reference]\nalpha = 0.5\n")]
    ),
    Mistake(
        "warm_up_without_end",
        "optimizer.warmup_steps",
        "10",
        "lower optimizer.warmup_steps",
        [add('[optimizer]\nwarmup_steps = 10\nschedule = "cosine"\n')],
    ),
    Mistake("mini_batches", "trainer.mini_batches", "64", "lower trainer.mini_batches", [add("[trainer]\nmini_batches = 64\n")]),
    Mistake("truncated_sampling", "sampling.top_p", "0.9", "set evaluation.top_p instead", [add("top_p = 0.9\n")]),
    Mistake(
        "greedy_pass_at_k",
        "evaluation.temperature",
        "samples = 4",
        "set evaluation.samples = 1",
        [
            add(
                "[evaluation]\nevery_steps = 1\nsamples = 4\ntemperature = 0.0\n"
                'sources = [{ name = "test", kind = "jsonl", path = "rows.jsonl" }]\n'
            )
        ],
    ),
    Mistake(
        "override_without_value",
        "run.steps",
        "'run.steps'",
        "write the key and its value",
        arguments=["my.toml", "run.steps"],
        place="command line",
    ),
    Mistake(
        "unknown_override",
        "optimizer.lr",
        "1e-05",
        "use optimizer.learning_rate",
        arguments=["my.toml", "optimizer.lr=1e-5"],
        place="command line",
    ),
    Mistake(
        "override_of_no_entry",
        "verifiers.3.weight",
        "1",
        "correct the key",
        arguments=["my.toml", "verifiers.3.weight=1"],
        place="command line",
    ),
    Mistake(
        "wrong_variable",
        "run.steps",
        "'lots'",
        "should be a valid integer",
        environ={"GRPO__RUN__STEPS": "lots"},
        place="GRPO__RUN__STEPS",
    ),
    Mistake(
        "unknown_variable", "run.stpes", "5", "did you mean 'steps'", environ={"GRPO__RUN__STPES": "5"}, place="GRPO__RUN__STPES"
    ),
    Mistake(
        "lookalike_variable",
        "GRPO_RUN_STEPS",
        "GRPO_RUN_STEPS",
        "did you mean GRPO__RUN__STEPS",
        environ={"GRPO_RUN_STEPS": "5"},
        place="environment variable",
    ),
]
