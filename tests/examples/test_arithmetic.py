"""The demo's starting point: its task, tokenizer, model folder and configuration."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from examples.arithmetic.tokenizer import ASSISTANT, END, END_ID, PAD, PAD_ID, USER, render
from examples.arithmetic.warmstart import main
from examples.arithmetic.worked import make_examples, make_task, solve
from services.config import RunConfig, load
from services.config.data import ReasoningGymSource
from services.dataprep.prompts.rows import PromptRow
from services.dataprep.prompts.tokenizer import PromptTokenizer

CONFIG = Path(__file__).parents[2] / "examples/arithmetic/config.toml"
SMALL = ["--steps", "6", "--examples", "64", "--held-out", "4", "--threads", "1"]


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return load(CONFIG, environ={})


@pytest.fixture(scope="module")
def source(config: RunConfig) -> ReasoningGymSource:
    (only,) = config.data.sources
    assert isinstance(only, ReasoningGymSource)
    return only


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a briefly trained model."""
    made = tmp_path_factory.mktemp("model") / "arithmetic"
    assert main(["--out", str(made), *SMALL]) == 0
    return made


def digest(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def test_solve_takes_one_operation_at_a_time() -> None:
    assert solve("5 - 3 - 6") == "5 - 3 = 2, 2 - 6 = -4"
    assert solve("0 + 10 - 10 + 7") == "0 + 10 = 10, 10 - 10 = 0, 0 + 7 = 7"
    with pytest.raises(ValueError, match=r"operators contains '\*'"):
        solve("5 * 3")


def test_both_answers_of_an_example_pass_the_tasks_scorer(config: RunConfig, source: ReasoningGymSource) -> None:
    held_out, worked = make_examples(source, held_out=50, worked=200, seed=3)
    task, pattern = make_task(source, 1, 0), re.compile(config.verifiers[0].extract)
    assert (len(held_out), len(worked)) == (50, 200)
    for example in held_out + worked:
        for completion in (example.step_by_step, example.at_a_glance):
            assert task.score_answer(pattern.findall(completion)[-1], example.entry) == 1.0
    assert not {example.question for example in held_out} & {example.question for example in worked}


def test_the_demo_fits_the_longest_prompt_and_answer(config: RunConfig, folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompt = tokenizer.encode(render("Calculate 10 - 10 - 10 - 10.")).ids
    completion = tokenizer.encode(solve("10 - 10 - 10 - 10") + END).ids
    longest = tokenizer.encode(solve("10 + 10 + 10 - 10") + END).ids
    assert len(prompt) <= config.data.max_prompt_tokens
    assert max(len(completion), len(longest)) <= config.sampling.max_tokens


def test_the_demo_configuration_matches_its_description(config: RunConfig) -> None:
    assert (config.run.name, config.generator.count, config.model.dtype) == ("demo", 2, "float32")
    assert config.model.path == "build/arithmetic"  # where the Makefile makes it


@pytest.mark.parametrize("text", ["Calculate 5 - 3 - 6.", "5 - 3 = 2, 2 - 6 = -4", "Grüße, 数学 🙂\n\tx  y ", ""])
def test_text_round_trips_through_its_tokens(folder: Path, text: str) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_digits_are_single_tokens_and_separators_one_token(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert [tokenizer.decode([i]) for i in tokenizer.encode("Calculate 10 - 3 + 7.").ids] == [
        "Calculate ", "1", "0", " - ", "3", " + ", "7", ".",
    ]  # fmt: skip
    assert (tokenizer.token_to_id(PAD), tokenizer.token_to_id(END)) == (PAD_ID, END_ID)


def test_transformers_dataprep_and_lessons_render_the_same_prompt(folder: Path, config: RunConfig) -> None:
    from transformers import AutoTokenizer

    question = "Calculate 5 - 3 - 6."
    theirs = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": question}]
    assert theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == f"{USER}{question}{END}{ASSISTANT}"
    ids = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert ids == Tokenizer.from_file(str(folder / "tokenizer.json")).encode(render(question)).ids
    assert [ids] == PromptTokenizer(folder, config.data).encode([PromptRow(prompt=question, answer="", where="row 0")])
    assert (theirs.eos_token_id, theirs.pad_token_id) == (END_ID, PAD_ID)
    assert theirs.decode(theirs("5 - 3 = 2")["input_ids"] + [END_ID], skip_special_tokens=True) == "5 - 3 = 2"


def test_transformers_loads_the_model(folder: Path, config: RunConfig) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    shape = AutoConfig.from_pretrained(folder)
    assert (shape.model_type, shape.head_dim, shape.tie_word_embeddings) == ("qwen3", 32, False)
    assert shape.num_key_value_heads < shape.num_attention_heads
    assert shape.max_position_embeddings == config.model.max_tokens
    assert shape.vocab_size == Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    assert GenerationConfig.from_pretrained(folder).eos_token_id == END_ID
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert 0.8e6 < sum(weight.numel() for weight in model.parameters()) < 1.2e6


def test_completing_is_greedy_decoding_one_prompt_at_a_time(folder: Path) -> None:
    import torch
    from transformers import Qwen3ForCausalLM

    from examples.arithmetic.model import complete

    model = Qwen3ForCausalLM.from_pretrained(folder).eval()
    prompts = [[3, 40, 41, 4], [3, 60, 4], [3, 50, 51, 4]]
    for prompt, completion in zip(prompts, complete(model, prompts, 8, None), strict=True):
        tokens = list(prompt)
        while len(tokens) < len(prompt) + 8:
            with torch.no_grad():
                following = int(model(torch.tensor([tokens])).logits[0, -1].argmax())
            if following == END_ID:
                break
            tokens.append(following)
        assert completion == tokens[len(prompt) :]


def test_the_same_seed_makes_the_same_weights(folder: Path, tmp_path: Path) -> None:
    again, other = tmp_path / "again", tmp_path / "other"
    assert main(["--out", str(again), *SMALL]) == 0
    assert main(["--out", str(other), "--seed", "1", *SMALL]) == 0
    assert digest(again) == digest(folder)
    assert digest(other) != digest(folder)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "other"]


def test_the_model_is_kept_until_the_arguments_change(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert main(["--out", str(folder), *SMALL]) == 0
    assert "already made" in capsys.readouterr().out
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    stamp = json.loads((folder / "warmstart.json").read_text())
    stamp["made_from"]["arguments"]["seed"] = 7
    (folder / "warmstart.json").write_text(json.dumps(stamp))
    assert main(["--out", str(folder), *SMALL]) == 0
    assert (folder / "model.safetensors").stat().st_mtime_ns != before


def test_a_folder_with_other_files_is_never_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    assert main(["--out", str(tmp_path), *SMALL]) == 2
    assert f"--out = {tmp_path} contains files" in capsys.readouterr().err
    assert (tmp_path / "thesis.txt").read_text() == "mine"
