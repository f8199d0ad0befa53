"""Each verifier against hand-made completions."""

from __future__ import annotations

import json
from fractions import Fraction
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.config.data import FileSource, ReasoningGymSource, Source
from services.config.verifiers import OWN, VerifierConfig, verifier_names
from services.protocol.entries import decode_entry, encode_entry
from services.verifiers.base import combine
from services.verifiers.builtin.answers import final_statement, marked_answer
from services.verifiers.builtin.statements import Number, Relation, Statement, read
from services.verifiers.loaded import BUILTIN, builtin
from tests.support.verifiers import verifier

FILE = FileSource(kind="jsonl", path="prompts.jsonl")


def _verifier(kind: str, source: Source = FILE, **settings: object) -> Any:
    return builtin(verifier(kind, **settings), source)


@pytest.fixture(scope="module")
def math() -> Any:
    return _verifier("math")


@pytest.mark.parametrize(
    ("gold", "completion"),
    [
        ("72", r"First 3, then \boxed{72}"),
        ("72", r"\boxed{71} no, \boxed{\text{72 clips}}."),
        ("72", "48 + 24 = <<48+24=72>>72 clips\n#### 72"),
        ("72", "The answer is 72 clips, sold in 2 months."),
        ("72", "The answer is: **72**"),
        ("72", r"$x = 72$"),
        ("72", r"\boxed{x = 72}"),
        ("72", r"\boxed{3 + 69}"),
        ("72", r"\boxed{72.0}"),
        ("72", r"an area of 72 cm^2"),
        ("72", r"\boxed{72\text{ cm}^2}"),
        ("1,234", r"\boxed{1234}"),
        ("1234", r"\boxed{1{,}234}"),
        ("1234", r"\boxed{1\,234}"),
        ("1234.5", r"it costs \$1,234.50"),
        ("5000000", r"\boxed{5 million}"),
        ("-47", "so it is -47"),
        ("-47", r"\boxed{-47}"),
        ("-47", "= − 47"),
        ("6", "10-4 leaves 10-4"),
        ("50", r"\boxed{50\%}"),
        ("50%", r"\boxed{0.5}"),
        ("0.5", r"\boxed{50\%}"),
        ("0.5", r"\boxed{\frac{1}{2}}"),
        ("0.5", "about 1/2"),
        ("0.333333", r"\boxed{\frac13}"),
        ("1.5", r"\boxed{1\frac{1}{2}}"),
        ("1.5", r"\boxed{\dfrac{3}{2}}"),
        (r"\frac{1}{2}", r"\boxed{0.5}"),
        (r"\frac{\sqrt{2}}{2}", r"\boxed{\frac{1}{\sqrt{2}}}"),
        (r"\frac{\sqrt{2}}{2}", r"The final answer is $\frac{\sqrt{2}}{2}$."),
        ("x^2+2x+1", r"\boxed{(x+1)^2}"),
        ("(1, 2)", r"\boxed{(1,2)}"),
        (r"\text{blue}", r"\boxed{Blue}"),
        (r"2\pi", r"\boxed{2\pi}"),
        ("1024", r"\boxed{2^{10}}"),
        ("120", r"\boxed{5!}"),
        ("2^{1000}", r"\boxed{4^{500}}"),
        ("x^{2024}", r"\boxed{x^{2024}}"),
        ("72", "#### Step 1\nThere are 48.\n#### Step 2\nTogether 72"),
        ("0.5", "The answer is 1 / 2."),
        ("3", "The answer is the 3rd."),
        ("5", "The answer is 5cm, not 5 m."),
        ("5", "The answer is $5 \\quad \\blacksquare$"),
        ("5", "The answer is $5/hour."),
    ],
)
def test_math_accepts_equivalent_answers(math: Any, gold: str, completion: str):
    assert math.score(completion, gold) == 1.0


@pytest.mark.parametrize(
    ("gold", "completion"),
    [
        ("72", ""),
        ("72", "I do not know."),
        ("72", r"\boxed{}"),
        ("72", r"\boxed{73}"),
        ("72", r"72, no: \boxed{-72}"),
        ("72", r"\boxed{72x}"),
        ("2", r"\boxed{2xy}"),
        ("2", r"\boxed{2pi}"),
        ("2", r"\boxed{2\pi}"),
        ("23", r"\boxed{2**3}"),
        ("5", r"\boxed{5!}"),
        ("5", r"\boxed{5 million}"),
        ("5", r"\boxed{5 or 6}"),
        ("5", r"\boxed{(x+1)^{2024}}"),
        ("5", r"\boxed{7^{7^{7^7}}}"),
        ("5", r"\boxed{10^{10^{10}}}"),
        ("5", r"\boxed{2**(3**400)}"),
        ("5", r"\boxed{100000!}"),
        ("x^2+1", r"\boxed{\frac{x^{2024}-1}{x-1}}"),
        ("5", r"\boxed{5 sin x}"),
        ("5", r"\boxed{5 log n}"),
        ("5", r"\boxed{5 plus six}"),
        ("2", r"The answer is $2\sqrt{3}$."),
        ("3", r"The answer is $2\sqrt{3}$."),
        ("2", "The answer is 2^10."),
        ("2", "So it is 2x"),
        ("2", "The answer is 2π"),
        ("2", r"The answer is $\frac{2}{\sqrt{3}}$"),
        ("1", "The answer is 1e-7"),
        ("1", "The answer is 1 / 2"),
        ("10", r"The answer is $10^{-3}$"),
        ("5", "The answer is 5x^2 + 1"),
        ("5", r"\boxed{5, 6}"),
        ("1234", r"\boxed{1.234}"),
        ("0.5", r"\boxed{0.51}"),
        ("0.3333", r"\boxed{\frac13}"),
        ("50", r"\boxed{0.5}"),
        ("4", r"\boxed{-4}"),
        ("-4", "10 - 4"),
        ("72", "72 of 100"),
        ("72", r"\boxed{1/0}"),
        ("72", r"\boxed{" + "7" * 5000 + "}"),
        ("72", r"\boxed{" * 500),
        ("72", "\\boxed{" + "{" * 3000 + "72"),
        (r"\frac{1}{2}", r"\boxed{\frac{1}{3}}"),
        (r"\text{blue}", r"\boxed{red}"),
    ],
)
def test_math_rejects_wrong_answers(math: Any, gold: str, completion: str):
    assert math.score(completion, gold) == 0.0


def test_math_rejects_an_unreadable_gold_answer(math: Any):
    with pytest.raises(ValueError, match="use the verifier `exact`"):
        math.score("72", "")


def test_marked_answer_takes_the_later_mark():
    assert marked_answer(r"#### 5 and then \boxed{6}") == ("box", "6")
    assert marked_answer("\\boxed{6}\n#### 5") == ("heading", "5")
    assert marked_answer("<answer>\n5 </answer>") == ("tag", "5")
    assert marked_answer("\\boxed 7") == ("box", "7")
    assert marked_answer("nothing marked") is None
    assert marked_answer("\\boxed{" + "1+" * 1000 + "1}") == ("box", "")
    assert marked_answer("\\boxed{6} or \\boxed{7") == ("box", "")
    assert marked_answer("\\boxed{6} or \\boxed{7}") == ("box", "6, 7")
    assert marked_answer("\\boxed{6} apples, later \\boxed{7}") == ("box", "7")


def _number(text: str) -> Number:
    """Return the number that a text states, alone or as the value of an equation."""
    found = read(text)
    if isinstance(found, Relation) and found.assigned is not None:
        found = found.assigned[1]
    assert isinstance(found, Number)
    return found


@given(
    st.integers(-(10**12), 10**12),
    st.sampled_from(["{:d}", "{:,d}", "${:,d}", "{:d}.0", "{:d} km", r"\${:d}", "x = {:d}", "{:d}."]),
)
def test_every_whole_number_is_read(value: int, form: str):
    assert _number(form.format(value)).value == value


@given(st.fractions(max_denominator=10**6))
def test_every_fraction_is_read(value: Fraction):
    assert _number(f"{value.numerator}/{value.denominator}").value == value


@given(st.text(max_size=300))
def test_any_text_is_read_or_rejected(text: str):
    assert all(found is None or isinstance(found, Statement) for found in (read(text), final_statement(text)))
    marked = marked_answer(text)
    assert marked is None or marked[1] in text


def test_exact_compares_stripped_text():
    whole = _verifier("exact")
    assert [whole.score(text, "blue") for text in (" blue\n", "Blue", "light blue", "")] == [1.0, 0.0, 0.0, 0.0]
    tagged = _verifier("exact", extract=r"<answer>(.*?)</answer>")
    assert tagged.score("<answer>red</answer> no, <answer> blue </answer>", "blue") == 1.0
    assert tagged.score("blue", "blue") == 0.0


def test_regex_escapes_the_answer():
    verifier = _verifier("regex", pattern=r"^<think>.*</think>\s*{answer}$")
    assert verifier.score("<think>1+1</think> 2.5", "2.5") == 1.0
    assert verifier.score("<think>1+1</think> 2x5", "2.5") == 0.0


def test_a_tasks_scorer_needs_prompts_of_a_task():
    with pytest.raises(ValueError, match=r"needs a source of kind \"reasoning_gym\", but \"main\" is \"jsonl\""):
        _verifier("reasoning_gym", FILE)


def test_reasoning_gym_uses_the_tasks_own_scorer():
    from reasoning_gym.factory import create_dataset

    source = ReasoningGymSource(kind="reasoning_gym", task="basic_arithmetic", options={"size": 4, "seed": 7})
    entry = create_dataset("basic_arithmetic", size=4, seed=7)[2]
    answer = encode_entry(entry)
    plain = _verifier("reasoning_gym", source)
    assert plain.score(entry["answer"], answer) == 1.0
    assert plain.score("no number", answer) == 0.0
    tagged = _verifier("reasoning_gym", source, extract=r"<answer>(.*?)</answer>")
    assert tagged.score(f"so <answer>{entry['answer']}</answer>", answer) == 1.0
    assert tagged.score(entry["answer"], answer) == 0.0


@pytest.mark.parametrize(
    ("task", "completion"), [("prime_factorization", "I do not know."), ("game_of_life", "{}"), ("boxnet", "5")]
)
def test_an_answer_on_which_a_tasks_scorer_fails_scores_zero(task: str, completion: str, monkeypatch: pytest.MonkeyPatch):
    from reasoning_gym.factory import create_dataset

    tasks = create_dataset(task, size=2, seed=7)
    verifier = _verifier("reasoning_gym", ReasoningGymSource(kind="reasoning_gym", task=task, options={"size": 2, "seed": 7}))
    assert verifier.score(completion, encode_entry(tasks[0])) == 0.0

    def broken(*_: object) -> float:
        raise RuntimeError("the task itself")

    monkeypatch.setattr(type(verifier._task), "score_answer", broken)
    with pytest.raises(RuntimeError, match="the task itself"):
        verifier.score(completion, encode_entry(tasks[0]))


@pytest.mark.parametrize("task", ["rearc", "countdown", "sudoku", "word_ladder", "knights_knaves", "game_of_life"])
def test_entries_round_trip(task: str):
    from reasoning_gym.factory import create_dataset

    tasks = create_dataset(task, size=1, seed=3)
    entry = tasks[0]
    decoded = decode_entry(encode_entry(entry))
    assert decoded == entry
    assert tasks.score_answer(entry["answer"], decoded) == tasks.score_answer(entry["answer"], entry)


_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.sampled_from(["__tuple__", "__items__"]), inner)
    ),
    max_leaves=20,
)


@given(st.dictionaries(st.text(), _values))
def test_any_entry_round_trips(entry: dict[str, object]):
    decoded = decode_entry(encode_entry(entry))
    assert decoded == entry
    assert repr(decoded) == repr(entry)  # because True == 1


def test_an_entry_must_be_an_object():
    with pytest.raises(ValueError, match="not a reasoning-gym entry"):
        decode_entry(json.dumps([1]))


def test_names_are_unique_and_weights_combine_scores():
    verifiers = [
        verifier("math", weight=1.0),
        verifier("regex", pattern="a", weight=0.25),
        verifier("regex", pattern="b", weight=-0.5),
    ]
    assert verifier_names(verifiers) == ["math", "regex", "regex-2"]
    scores = {"regex-2": [0.0, 1.0], "math": [1.0, 0.5], "regex": [1.0, 1.0]}
    assert combine(scores, verifiers) == [1.25, 0.25]  # 1 + 0.25 - 0; 0.5 + 0.25 - 0.5
    assert combine({"regex-2": [0.0, 1.0], "math": [1.0, 0.5]}, verifiers) == [1.0, 0.0], "regex does not score this source"


def test_every_kind_of_the_configuration_has_a_verifier():
    kinds = [get_args(model.model_fields["kind"].annotation)[0] for model in get_args(get_args(VerifierConfig)[0])]
    assert sorted(kinds) == sorted([*BUILTIN, *OWN])
