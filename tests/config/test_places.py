"""Each key that a configuration sets has a place: a line of the file, an environment variable or the command line."""

from __future__ import annotations

import tomllib

import pytest

from services.config.places import KeyPlaces

TEXT = '''\
# [commented]
top = 1
[run]  # the first section
name = "[model]"
"steps" = 3
[model]
options = [
  [1, "]", "}"],  # ]
  { b = 2 },
]
path = "m # not a comment"
[data]
system_prompt = """
[run]
seed = 4
"""
template.options = { x = 1 }
long = \'\'\'one""" line\'\'\'
[[data.sources]]
name = "first"
columns = [
  "name = 1",
  [2],
]
[data.sources.rows]
limit = 5
[[data.sources]]
name = "second"
[ data . 'sources' . rows ]
limit = 6
[last]
escaped = "\\"["
end = 1
'''
LINES = {
    "top": 2, "run": 3, "run.name": 4, "run.steps": 5, "model": 6, "model.options": 7, "model.path": 11, "data": 12,
    "data.system_prompt": 13, "data.template.options": 17, "data.long": 18, "data.sources.0": 19, "data.sources.0.name": 20,
    "data.sources.0.columns": 21, "data.sources.0.rows": 25, "data.sources.0.rows.limit": 26, "data.sources.1": 27,
    "data.sources.1.name": 28, "data.sources.1.rows": 29, "data.sources.1.rows.limit": 30, "last": 31, "last.escaped": 32,
    "last.end": 33,
}  # fmt: skip


def test_keys_and_tables_of_a_file_have_the_lines_that_set_them() -> None:
    assert tomllib.loads(TEXT)["model"].keys() == {"options", "path"}, "the file is valid"
    places = KeyPlaces("run.toml", TEXT)
    assert {key: places.of(key) for key in LINES} == {key: f"run.toml:{line}" for key, line in LINES.items()}


@pytest.mark.parametrize(
    ("key", "place"),
    [
        ("model.options.1.b", "run.toml:7"),  # within an inline table or a list: the line of the table or list
        ("data.sources.0.columns.1", "run.toml:21"),
        ("data.sources.0.answer", "run.toml:19"),
        ("run.seed", "run.toml:3"),  # texts and comments set nothing
        ("commented", ""),
        ("trainer.ranks", ""),
    ],
)
def test_a_key_without_a_line_has_that_of_what_holds_it(key: str, place: str) -> None:
    assert KeyPlaces("run.toml", TEXT).of(key) == place


def test_other_places_come_before_the_file() -> None:
    places = KeyPlaces("run.toml", TEXT)
    places.put("run.steps", "environment variable GRPO__RUN__STEPS")
    places.put("run.steps", "command line")
    places.put("trainer.ranks", "command line")
    assert (places.of("run.steps"), places.of("run.name")) == ("command line", "run.toml:4")
    assert (places.of("trainer"), places.of("train")) == ("command line", "")


@pytest.mark.parametrize(
    ("message", "place"),
    [
        ("run.name = 'x': may have only letters", "run.toml:4"),
        ("replay.capacity = 15 cannot hold a step of run.steps = 3", "run.toml:5"),  # the first key that is set
        ("data.sources.3 exceeds model.path", "run.toml:11"),
        ("data.sources.3 is wrong", "run.toml:12"),
        ("run = 4 is no section", "run.toml:3"),
        ("trainer.ranks = 4 is too many", "run.toml"),  # a default value has the file as its place
        ("the words run and data name no key", "run.toml"),
    ],
)
def test_a_message_begins_with_the_place_of_a_key_that_it_names(message: str, place: str) -> None:
    assert KeyPlaces("run.toml", TEXT).told(message) == f"{place}: {message}"


def test_a_table_that_is_set_elsewhere_takes_its_keys_along() -> None:
    places = KeyPlaces("run.toml", TEXT)
    places.put("run.steps", "variable")
    places.put("run", "command line")
    places.put("data.sources", "command line")
    assert {places.of(key) for key in ("run.name", "run.steps", "data.sources.0.name")} == {"command line"}
    places.put("run.steps", "another variable")
    assert (places.of("run.steps"), places.of("run.name")) == ("another variable", "command line")
    assert places.of("data.long") == "run.toml:18"
