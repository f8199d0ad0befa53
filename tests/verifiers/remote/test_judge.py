"""The verifier `judge`: its requests, the parsing of verdicts, and the handling of replies that cannot be parsed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.config import ConfigError
from services.protocol.messages import Row
from services.verifiers.base import Job, VerifierFailure
from services.verifiers.results import Verdict
from tests.support.harness import small_config
from tests.verifiers.remote.asking import asking, group
from tests.verifiers.remote.flaky_server import FlakyServer

PROMPT = "{{ question }} Right: {{ answer }}. Level {{ row.level }}. Said: {{ completion }}"
SCHEMA = {"type": "object", "properties": {"score": {"type": "number"}}, "required": ["score"]}


async def judged(service: FlakyServer, job: Job, *says: str, **settings: Any) -> Verdict:
    """Return the verdict on a group of a judge that replies `says`."""
    service.behave(*(say if say.startswith(("cut:", "raw:")) else f"say:{say}" for say in says))
    given = {"model": "tiny", "prompt": PROMPT, "most_requests": 1, **settings}  # one request at a time, in order
    async with asking("judge", f"{service.url}/v1", **given) as pool:
        return (await pool.score(job))["judge"]


async def test_each_completion_is_sent_to_the_model(service: FlakyServer) -> None:
    messages = [{"role": "system", "content": "Judge."}, {"role": "user", "content": PROMPT}]
    settings = {"prompt": messages, "request": {"temperature": 0, "max_tokens": 9}}
    verdict = await judged(service, group("four", "five"), "Score: 1", "I think... **Score:** -0.25 of 1", **settings)
    assert verdict.scores == [1.0, -0.25]
    assert json.loads(verdict.notes[1]) == {"votes": ["I think... **Score:** -0.25 of 1"]}
    first, second = service.requests
    assert first["path"] == "/v1/chat/completions"
    assert first["body"] == {
        "model": "tiny",
        "messages": [
            {"role": "system", "content": "Judge."},
            {"role": "user", "content": "2 + 2? Right: 4. Level 3. Said: four"},
        ],
        "temperature": 0,
        "max_tokens": 9,
    }
    assert second["body"]["messages"][1]["content"].endswith("Said: five")


async def test_the_last_match_counts(service: FlakyServer) -> None:
    verdict = await judged(service, group("four"), "Score: 1 would be wrong. Final score 0.5")
    assert verdict.scores == [0.5]


async def test_votes_have_separate_seeds_and_are_averaged(service: FlakyServer) -> None:
    says = ("score 1", "score 0", "I cannot tell", "score 2")
    verdict = await judged(service, group("four"), *says, votes=4, request={"seed": 7})
    assert verdict.scores == [1.0]
    assert [request["body"]["seed"] for request in service.requests] == [7, 8, 9, 10]
    assert json.loads(verdict.notes[0]) == {"votes": list(says)}


async def test_a_vote_outside_the_range_does_not_count(service: FlakyServer) -> None:
    assert (await judged(service, group("four"), "score 1", "score 11", votes=2, range=[0, 10])).scores == [1.0]


@pytest.mark.parametrize(("bound", "votes"), [(0.1, 3), (0.7, 6), (-0.2, 3)])
async def test_votes_at_a_bound_are_within_the_range(service: FlakyServer, bound: float, votes: int) -> None:
    settings = {"votes": votes, "range": sorted([0, bound])}
    assert (await judged(service, group("four"), *[f"score {bound}"] * votes, **settings)).scores == [bound]


async def test_a_column_may_have_the_name_of_a_method(service: FlakyServer) -> None:
    row = msgspec.json.encode(Row([{"role": "user", "content": "?"}], {"values": "v", "items": [1]})).decode()
    job = Job("main", ["four"], "4", row)
    await judged(service, job, "score 1", prompt="{{ row.values }} {{ row.items[0] }} {{ row.get('values') }} {{ completion }}")
    (asked,) = service.requests
    assert asked["body"]["messages"][-1]["content"] == "v 1 v four"


@pytest.mark.parametrize(
    ("says", "settings", "reason"),
    [
        (["good"], {}, r"0 of 1 votes can be read, fewer than half: no match of `verdict` in 'good'"),
        (["score 1", "good", "bad"], {"votes": 3}, r"1 of 3 votes can be read"),
        (["score 11"], {"range": [0, 10]}, r"score 11, which is outside \[0, 10\]"),
        (["score 1e99999"], {"verdict": r"score (\S+)"}, r"score inf, which is outside"),
        (["score 8/10"], {"verdict": r"score (\S+)"}, r"could not convert string to float: '8/10'"),
        (["score none"], {"verdict": r"score (\d+)?"}, r"score nan"),
        (["cut:Well, "], {}, r"the reply ended early \(finish_reason is length: raise request.max_tokens\)"),
        (['raw:{"choices": []}'], {}, "without choices"),
        (['raw:{"error": "no such model"}'], {}, "something other than a chat completion: .*choices"),
        (['raw:{"choices": [{"message": {}}]}'], {}, "no match"),
        (["score 1"], {"json_schema": SCHEMA}, "JSON is malformed"),
        (['{"score": ' + "[" * 100_000], {"json_schema": SCHEMA}, "maximum recursion depth"),
        (['{"verdict": 1}'], {"json_schema": SCHEMA}, "no 'score'"),
        (['{"score": "1"}'], {"json_schema": SCHEMA}, "Expected `float`, got `str`"),
        (['{"score": 1e999}'], {"json_schema": SCHEMA}, "out of range"),
        (["x"], {"prompt": "{{ row.missing }}"}, r"prompt cannot be rendered: UndefinedError: .*missing"),
        (["x"], {"prompt": "{{ 1 / 0 }}"}, r"prompt cannot be rendered: ZeroDivisionError"),
        (["x"], {"prompt": "{{ ''.__class__.__mro__ }}"}, r"prompt cannot be rendered: SecurityError"),
    ],
)
async def test_an_unparsable_verdict_is_a_failure(
    service: FlakyServer, says: list[str], settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(VerifierFailure, match=f"^verifier 'judge' failed: .*{reason}") as caught:
        await judged(service, group("four"), *says, **settings)
    assert not caught.value.final
    assert len(str(caught.value)) < 600


async def test_a_whole_group_is_judged_at_once(service: FlakyServer) -> None:
    prompt = "{% for text in completions %}{{ loop.index }}: {{ text }}\n{% endfor %}"
    says = ("From best to worst: score 1 ... 1: score 3, 2: score 1", "1: score 4, 2: score 2", "score 9")
    verdict = await judged(service, group("four", "five"), *says, prompt=prompt, scope="group", votes=3)
    assert verdict.scores == [3.5, 1.5]
    assert service.requests[0]["body"]["messages"][0]["content"] == "1: four\n2: five\n"
    assert json.loads(verdict.notes[0]) == {"votes": list(says)}
    assert verdict.notes[1] == ""


async def test_a_schema_constrains_the_reply(service: FlakyServer) -> None:
    assert (await judged(service, group("four"), '{"score": 1, "why": "yes"}', json_schema=SCHEMA)).scores == [1.0]
    (request,) = service.requests
    assert request["body"]["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "verdict", "strict": True, "schema": SCHEMA},
    }
    whole = {"scope": "group", "prompt": "{{ completions }}", "json_schema": {"properties": {"scores": {"type": "array"}}}}
    assert (await judged(service, group("a", "b"), '{"scores": [1, 0.5]}', **whole)).scores == [1.0, 0.5]


async def test_notes_are_bounded(service: FlakyServer) -> None:
    says = ["\x01" * 40_000 + f"score {i}" for i in range(64)]
    verdict = await judged(service, group("four"), *says, votes=64)
    assert verdict.scores == [31.5]
    assert len(verdict.notes[0]) < 16 * 1024
    assert json.loads(verdict.notes[0])["votes"][1].endswith("score 1")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"prompt": "{{ completion"}, r"prompt is not a valid template \(line 1: unexpected end of template"),
        ({"prompt": "{{ completion | shout }}"}, r"prompt is not a valid template \(line 1: No filter named 'shout'"),
        ({"prompt": "{{ completions[0] }}"}, r'unknown variable completions; with scope = "completion" it may use answer, comp'),
        (
            {"prompt": "{{ gold }}", "scope": "group"},
            r'unknown variable gold; with scope = "group" it may use answer, completions',
        ),
    ],
)
async def test_an_invalid_template_is_detected_at_start(settings: dict[str, str], reason: str) -> None:
    with pytest.raises(VerifierFailure, match=f"^verifier 'judge': .*{reason}"):
        async with asking("judge", "http://127.0.0.1:1/v1", model="tiny", **settings):
            pass


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ("request={stream=true}", "request: stream cannot be set here"),
        ('json_schema={type="object"}', "has no property 'score'"),
        ('scope="group", json_schema={properties={score={}}}', "has no property 'scores'"),
        ('verdict="score"', "has no group"),
        ('votes=3, request={seed="a"}', "request: seed = 'a' is not an integer"),
        ("votes=3, request={seed=[1]}", r"request: seed = \[1\] is not an integer"),
        ("json_schema={properties={score={}}}, request={response_format={}}", "response_format would replace json_schema"),
        ('name="mean"', r'verifiers.0.name = "mean" is taken by the metric reward/train/mean: choose another name'),
    ],
)
def test_invalid_settings_are_rejected(tmp_path: Path, settings: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        small_config(tmp_path, None, f'verifiers=[{{kind="judge", url="http://j/v1", model="m", prompt="p", {settings}}}]')


@pytest.mark.parametrize(
    ("url", "reason"), [("http://[::1/v1", "is not an address"), ("http:///v1", "names no host: add it after http://")]
)
def test_the_url_must_be_one(tmp_path: Path, url: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=rf'verifiers.0.url = "{re.escape(url)}" {reason}'):
        small_config(tmp_path, None, f'verifiers=[{{kind="judge", url="{url}", model="m", prompt="p"}}]')


@pytest.mark.parametrize("url", ["http://me:hunter2@/v1", "http://me:hunter2@[::1/v1"])
def test_no_message_repeats_a_password(tmp_path: Path, url: str) -> None:
    with pytest.raises(ConfigError, match=r"verifiers.0.url") as refused:
        small_config(tmp_path, None, f'verifiers=[{{kind="judge", url="{url}", model="m", prompt="p"}}]')
    assert "hunter2" not in str(refused.value)


def test_the_url_must_end_with_the_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has a part after the path: end it with the path, such as …/v1"):
        small_config(tmp_path, None, 'verifiers=[{kind="judge", url="http://j/v1?a=b", model="m", prompt="p"}]')
