"""Parsing the tool calls of every family: well-formed, truncated and garbled."""

from __future__ import annotations

import contextlib
import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.chat.calls import MalformedCall
from services.chat.format import PARSERS, family_of, message_of
from services.config import ConfigError
from tests.environment.support.conversations import TOOL
from tests.environment.support.templates import FAMILIES, chat_of

DEEPSEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
WRITTEN = {
    "hermes": ('<tool_call>\n{"name": "add", "arguments": {"a": 2, "note": "x"}}\n</tool_call>',),
    "qwen3_coder": (
        "<tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n<parameter=note>\nx\n</parameter>\n</function>\n</tool_call>",
    ),
    "llama3_json": (
        '{"name": "add", "parameters": {"a": 2, "note": "x"}}',
        '<|python_tag|>{"name": "add", "parameters": {"a": 2, "note": "x"}}',
        '{"type": "function", "function": {"name": "add", "parameters": {"a": 2, "note": "x"}}}',
    ),
    "mistral": (
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 2, "note": "x"}, "id": "012345678"}]',
        '[TOOL_CALLS]add{"a": 2, "note": "x"}',
        '[TOOL_CALLS]add[CALL_ID]012345678[ARGS]{"a": 2, "note": "x"}',
    ),
    "deepseek": (
        DEEPSEEK.format('function<｜tool▁sep｜>add\n```json\n{"a": 2, "note": "x"}\n```'),
        DEEPSEEK.format('add<｜tool▁sep｜>{"a": 2, "note": "x"}'),
    ),
    "pythonic": ('[add(a=2, note="x")]',),
    "glm4": (
        "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>2</arg_value>\n<arg_key>note</arg_key><arg_value>x</arg_value></tool_call>",
        '<tool_call>add\n{"a": 2, "note": "x"}\n</tool_call>',
    ),
}
CASES = [(family, text) for family, texts in WRITTEN.items() for text in texts]
MALFORMED = {
    "hermes": (
        "<tool_call>{}</tool_call>",
        "<tool_call>[1]</tool_call>",
        '<tool_call>{"name": "add", "arguments": NaN}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": 1e999}}</tool_call>',
    ),
    "qwen3_coder": ("<tool_call><function=add>a</function></tool_call>", "<tool_call>add</tool_call>"),
    "llama3_json": ('{"name": "add", "parameters": [1]}', "<|python_tag|>"),
    "mistral": (
        "[TOOL_CALLS]",
        '[TOOL_CALLS][{"name": "add"}] and',
        "[TOOL_CALLS]add",
        "[TOOL_CALLS][1]",
        '[TOOL_CALLS]add{"a": -1e999}',
    ),
    "deepseek": ("<｜tool▁calls▁begin｜>", DEEPSEEK.format("add"), DEEPSEEK.format("<｜tool▁sep｜>{}")),
    "pythonic": ("[add(2)]", "[add(a=open)]", "[add(a=1)", "[add(a=1), 2]", "[add(a={1})]", "[add(a=1e999)]", "[add(a=1)(b=2)]"),
    "glm4": ("<tool_call></tool_call>", "<tool_call>add 2</tool_call>", '<tool_call>add {"a"</tool_call>'),
}


def test_every_family_has_cases() -> None:
    assert set(WRITTEN) == set(MALFORMED) == set(PARSERS)


@pytest.mark.parametrize(("family", "text"), CASES)
def test_a_call_is_parsed(family: str, text: str) -> None:
    (call,) = PARSERS[family](text, [TOOL]).calls
    assert call == ("add", {"a": 2, "note": "x"})


@pytest.mark.parametrize(("family", "text"), [(family, text) for family, texts in MALFORMED.items() for text in texts])
def test_a_malformed_call_is_reported(family: str, text: str) -> None:
    with pytest.raises(MalformedCall) as caught:
        PARSERS[family](text, [TOOL])
    assert str(caught.value)


ENDLESS = (" ", "<tool_call>", "<arg_key>a</arg_key><arg_value>", "<parameter=a>", "[TOOL_CALLS]", "</function> ", "[f(")


@pytest.mark.parametrize("family", PARSERS)
def test_parsing_time_is_linear_in_repetitive_text(family: str) -> None:
    for piece in ENDLESS:
        for begin in ("", "<tool_call>f", "<tool_call><function=f>", "[", "<|python_tag|>"):
            began = time.process_time()
            with contextlib.suppress(MalformedCall):
                PARSERS[family](begin + piece * (200_000 // len(piece)) + "</tool_call>", [TOOL])
            assert time.process_time() - began < 2.0, (begin, piece)


def arguments(family: str, text: str, **properties: object) -> dict[str, object] | str:
    """Return the arguments of the call of `act` in a text, or why it is malformed."""
    schema = {"type": "object", "properties": properties, "$defs": {"Word": {"type": "string"}, "Odd": {"$ref": "#/nowhere"}}}
    tool = {"type": "function", "function": {"name": "act", "parameters": schema}}
    try:
        (call,) = PARSERS[family](text, [tool]).calls
    except MalformedCall as error:
        return str(error)
    return call.arguments


TEXT, NULL = {"type": "string"}, {"type": "null"}
TYPED: tuple[tuple[str, dict[str, object], object], ...] = (
    ("0451", TEXT, "0451"),
    ('"quoted"', TEXT, '"quoted"'),
    ("None", TEXT, "None"),
    ("1e999", TEXT, "1e999"),
    ("42", {"anyOf": [TEXT, NULL]}, "42"),
    ("null", {"anyOf": [TEXT, NULL]}, None),
    ("1.10", {"oneOf": [TEXT]}, "1.10"),
    ("42", {"allOf": [TEXT, {"minLength": 1}]}, "42"),
    ("42", {"$ref": "#/$defs/Word"}, "42"),
    ("42", {"$ref": "#/properties/other"}, "42"),
    ("true", {"enum": ["true", "auto"]}, "true"),
    ('"auto"', {"enum": ["true", "auto"]}, "auto"),
    ("2", {"enum": [1, 2]}, 2),
    ("7", {"const": "7"}, "7"),
    ("12.0", {"type": "integer"}, 12),
    ("12.0", {"type": "number"}, 12.0),
    ("+5", {"type": "number"}, 5),
    (" 5 ", {"type": ["integer", "string"]}, 5),
    ("True", {"type": "boolean"}, True),
    ("None", {"type": ["boolean", "null"]}, None),
    ("{'a': 1, 'b': (True, None)}", {"type": "object"}, {"a": 1, "b": [True, None]}),
    ('{"n": 12.0}', {"type": "object", "properties": {"n": {"type": "integer"}}}, {"n": 12}),
    ("2024", {"description": "a year"}, "2024"),
    ("[2024]", {"description": "years"}, [2024]),
    ("5", {"type": "no type"}, "5"),
    ("5", {"$ref": "#/$defs/Odd"}, "5"),
)
UNFIT = (
    ("about ten", {"type": "integer"}),
    ("12.5", {"type": "integer"}),
    ("NaN", {"type": "number"}),
    ("1e999", {"type": "number"}),
    ("yes", {"type": "boolean"}),
    ("c", {"enum": ["a", "b"]}),
    ("[1]", {"type": "object"}),
    ("42", {"allOf": [TEXT, {"minLength": 3}]}),
)


@pytest.mark.parametrize(
    ("family", "form"),
    [
        ("qwen3_coder", "<tool_call><function=act><parameter=it>\n{}\n</parameter></function></tool_call>"),
        ("glm4", "<tool_call>act<arg_key>it</arg_key><arg_value>{}</arg_value></tool_call>"),
    ],
)
def test_values_that_are_written_as_text_get_the_types_of_their_schemas(family: str, form: str) -> None:
    wrong = list[tuple[object, ...]]()
    for text, schema, right in TYPED:
        found = arguments(family, form.format(text), it=schema, other=TEXT)
        wrong += [(text, schema, found)] * (found != {"it": right} or repr(found) != repr({"it": right}))
    for text, schema in UNFIT:
        found = arguments(family, form.format(text), it=schema, other=TEXT)
        reason = f"the argument it of act is {text!r}, which does not fit its schema {json.dumps(schema, sort_keys=True)}"
        wrong += [(text, schema, found)] * (found != reason)
    assert wrong == []


EMBEDDED = (
    ("hermes", '<tool_call>{"name": "act", "arguments": {"it": "MARK"}}</tool_call>'),
    ("mistral", '[TOOL_CALLS][{"name": "act", "arguments": {"it": "MARK"}}]'),
    ("mistral", '[TOOL_CALLS]act[CALL_ID]c1[ARGS]{"it": "MARK"}'),
    ("deepseek", DEEPSEEK.format('act<｜tool▁sep｜>{"it": "MARK"}')),
    ("deepseek", DEEPSEEK.format('function<｜tool▁sep｜>act\n```json\n{"it": "MARK"}\n```')),
    ("llama3_json", 'I call it.\n{"name": "act", "parameters": {"it": "MARK"}}'),
    ("llama3_json", '<|python_tag|>{"name": "act", "parameters": {"it": "MARK"}}'),
    ("pythonic", '[act(it="MARK")]'),
    ("qwen3_coder", "<tool_call><function=act><parameter=it>\nMARK\n</parameter></function></tool_call>"),
    ("glm4", "<tool_call>act<arg_key>it</arg_key><arg_value>MARK</arg_value></tool_call>"),
    ("glm4", '<tool_call>act {"it": "MARK"}</tool_call>'),
)
TAGS = (
    "<tool_call>", "</tool_call>", "</parameter>", "</function>", "</arg_value>", "[TOOL_CALLS]", "[ARGS]", ")]", "```", "; {",
    "}", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "<parameter=it>", "<function=act>",
)  # fmt: skip


def test_a_tag_inside_of_a_value_ends_nothing() -> None:
    wrong = list[tuple[object, ...]]()
    for family, form in EMBEDDED:
        for tag in TAGS:
            found = arguments(family, form.replace("MARK", f"a {tag} b"), it=TEXT)
            wrong += [(family, form, tag, found)] * (found != {"it": f"a {tag} b"})
    assert wrong == []


def test_only_offered_names_are_calls() -> None:
    for family, form in EMBEDDED:
        text = form.replace("MARK", "x").replace("act", "other")
        tool = {"type": "function", "function": {"name": "act", "parameters": {}}}
        with pytest.raises(MalformedCall, match="there is no tool 'other': the tools are act"):
            PARSERS[family](text, [tool])
    answers = ('{"name": "Ada", "age": 36}', '{"name": "act", "age": 36}', '{"a": 1} and {"name": 2', "[search (see note)]")
    for answer in answers:
        for family in ("llama3_json", "pythonic"):
            assert PARSERS[family](answer, [TOOL]) == (answer, [])


def test_a_reason_is_the_same_in_every_run() -> None:
    for text in ("[act(it=open)]", "[act(it={1, 2})]", "[act(it=lambda: 1)]"):
        assert arguments("pythonic", text, it=TEXT) == "the argument it of act must be a constant that JSON has"
    assert arguments("pythonic", "[act(it=[true, null, False])]", it={}) == {"it": [True, None, False]}


def test_a_first_tag_may_be_missing_before_an_offered_tool() -> None:
    call = "<function=act>\n<parameter=it>\n1\n</parameter>\n</function>"
    for text in (call, f"{call}\n</tool_call>", f"I act.\n{call}"):
        assert arguments("qwen3_coder", text, it=TEXT) == {"it": "1"}
    with pytest.raises(MalformedCall, match="there is no tool 'act'"):
        PARSERS["qwen3_coder"](call, [TOOL])
    assert PARSERS["qwen3_coder"]("Write <function=act> first.", [TOOL]).calls == []


def test_a_name_with_surrogates_is_replaced() -> None:
    with pytest.raises(MalformedCall, match=r"there is no tool '\?'"):
        PARSERS["hermes"]('<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>', [TOOL])


@pytest.mark.parametrize("family", PARSERS)
def test_plain_text_has_no_calls(family: str) -> None:
    for text in ("", "four", "[1] is a list", "{curly}", "a < b > c", "[TOOL", "f(a=1)"):
        assert PARSERS[family](text, [TOOL]) == (text, [])


def test_several_calls_and_text_are_parsed() -> None:
    call = '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>'
    found = PARSERS["hermes"](f"First.{call}\n{call}", [TOOL])
    assert [each.arguments for each in found.calls] == [{"a": 1}] * 2
    assert found.content.strip() == "First."
    found = PARSERS["llama3_json"]('{"name": "add", "parameters": {}}; {"name": "add"}', [TOOL])
    assert [each.arguments for each in found.calls] == [{}, {}]
    dotted = {"type": "function", "function": {"name": "math.add"}}
    found = PARSERS["pythonic"]("[add(a=1), math.add(a=[1, {'b': None}])]", [TOOL, dotted])
    assert [each.name for each in found.calls] == ["add", "math.add"]


PIECES = [
    "<tool_call>",
    "</tool_call>",
    "<function=add>",
    "</function>",
    "<parameter=a>",
    "</parameter>",
    "<arg_key>",
    "</arg_key>",
]
PIECES += [
    "<arg_value>",
    "</arg_value>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<|python_tag|>",
    "<think>",
    "</think>",
    "[add(",
    "a=",
    ")]",
    "f",
]
PIECES += [
    '{"name": ',
    '"add"',
    ', "arguments": ',
    "{}",
    "}",
    "[",
    "]",
    "{",
    "\n",
    "add",
    "\\ud800",
    '"',
    "9" * 5000,
    "-",
    "(" * 300,
]
PIECES += [
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "```json",
    "NaN",
    "\x00",
    "[" * 3000,
]


@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=12).map("".join), st.sampled_from(sorted(PARSERS)))
def test_any_text_parses_or_is_malformed(text: str, family: str) -> None:
    try:
        found = PARSERS[family](text, [TOOL])
    except MalformedCall:
        return
    for call in found.calls:
        assert call.name
        json.dumps(call.arguments, allow_nan=False)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_the_notation_is_detected_from_the_template(family) -> None:
    assert chat_of(family).family == family.notation


def test_the_notation_can_be_set() -> None:
    assert family_of("<tool_call>", "pythonic") == "pythonic"
    with pytest.raises(ConfigError, match=r"data\.chat_template_options\.tool_format = 'other' is unknown: choose from hermes"):
        family_of("", "other")
    assert family_of("{% if tools %}<function_calls>{% endif %}") == ""
    assert family_of("{{ messages }}") == "hermes"


def test_reasoning_is_separated_from_content() -> None:
    chat = chat_of(FAMILIES[1])
    assert chat.thinks
    assert chat.parse("<think>\nhm\n</think>\n\nfour")[:2] == ("four", "hm")
    assert chat.parse("hm</think>four", thinking=True)[:2] == ("four", "hm")
    assert chat.parse("<think>cut off")[:2] == ("", "cut off")
    assert chat_of(FAMILIES[0]).parse("<think>hm</think>four")[:2] == ("<think>hm</think>four", "")
    cut = chat.parse('<think>a</think><tool_call>{"name"', [TOOL])
    assert message_of(cut, []) == {
        "role": "assistant", "content": '<tool_call>{"name"', "reasoning_content": "a", "error": "a tool call has no </tool_call>"
    }  # fmt: skip
