"""`grpo inspect` and `grpo replay requeue` on a real Redis: what they show, and that the output is safe for terminals."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tokenizers import Tokenizer

from services.console.commands import inspect, steer
from services.console.commands.__main__ import main
from services.console.errors import EXIT_CONFIG, EXIT_FAILED, EXIT_OK, ConsoleError
from services.console.printable import printable, safe_json
from services.console.run.folder import RunFolder
from services.console.run.redis_server import RedisServer
from services.groups.generated import Generated, Segment, TurnTime
from services.groups.records import make_header, pack_payload
from services.operations.inspection.buffer import deviation, inspect_buffer, mean
from services.operations.inspection.group import inspect_group
from services.operations.inspection.text import TextReader
from services.protocol import codec
from services.protocol.errors import NotFound
from services.protocol.messages import RankPlan, Sample, Span, StepPlan
from services.protocol.payloads import Payload
from services.store import Claim, Settlement, Store
from services.store.records import TableRules
from tests.support import flow
from tests.support.flow import claim, header, issue, prepare, settle, start, submit
from tests.support.harness import save_tokenizer_folder, small_config

PRIORITIZED = TableRules("prioritized", "lowest_priority", 100, 2)
NASTY = "say \x1b[2J\x1b]0;owned\x07 [bold red]5[/] \u202e\x9b31m\n2"
Show = Callable[..., Awaitable[tuple[int, str]]]


@pytest.fixture
def run(store: Store, server: RedisServer, tmp_path: Path) -> Path:
    """Create the folder of a run in `store`."""
    config = small_config(tmp_path, server, f"run.name={store.keys.name}")
    save_tokenizer_folder(tmp_path / "model")
    folder = RunFolder.of(config)
    folder.write(config)
    return folder.path


@pytest.fixture
def show(run: Path, capsys: pytest.CaptureFixture[str]) -> Show:
    """Return a function that runs a command on the run and returns its exit code and output."""

    async def call(command: Callable[..., Awaitable[int]], **options: Any) -> tuple[int, str]:
        if command in (inspect.deadletter, steer.requeue):
            options["words"] = [*options.get("words", []), str(run)]
        else:
            options["run"] = str(run)
        return await command(**options), capsys.readouterr().out

    return call


async def tell(show: Show, command: Callable[..., Awaitable[int]], **options: Any) -> Any:
    """Run a command with --json and return the decoded output."""
    code, text = await show(command, as_json=True, **options)
    assert code == EXIT_OK
    return json.loads(text)


def tokens(run: Path, text: str) -> list[int]:
    return Tokenizer.from_file(str(run.parent / "model" / "tokenizer.json")).encode(text).ids


async def write(store: Store, run: Path, claimed: Claim, prompt: str, completions: Sequence[str], **fields: Any) -> None:
    """Submit a group with these texts, each sampled by two policy versions."""
    ids = [tokens(run, text) for text in completions]
    lengths = [len(one) for one in ids]
    flat = np.array([token for one in ids for token in one], np.int32)
    spans = np.array([(i, v, v, v + 1 if v == 0 else n) for i, n in enumerate(lengths) for v in (0, 1)], np.int32)
    payload = Payload(
        np.array(tokens(run, prompt), np.int32), np.array(lengths, np.int32), flat, np.zeros(len(flat), np.float32), spans
    )
    given = {"lengths": lengths, "newest": [1] * len(ids)} | fields
    assert await store.tickets.submit("generator-1", claimed, header(claimed, **given), codec.encode(payload), 60)


async def one_group(store: Store, run: Path, prompt: str = "say 5", texts: Sequence[str] = ("5", "6", "five", NASTY)) -> None:
    team = await start(store)
    await issue(store, team, 1)
    (claimed,) = await claim(store, "generator-1")
    await write(store, run, claimed, prompt, [f"{text}!" for text in texts], rewards=[1.0, 0.0, 0.0, 0.0])
    await settle(store, team)


async def weighted_table(store: Store, weights: Sequence[float]) -> flow.Team:
    """Fill a prioritized table with one group per weight, named from 0-0; the oldest version of group i is i // 2."""
    team = await start(store, slots=len(weights), table=PRIORITIZED)
    await issue(store, team, len(weights))
    for i, one in enumerate(await claim(store, "g", len(weights))):
        assert await submit(store, "g", one, oldest=i // 2)
    items = await store.replay.read_headers(team.leader, len(weights))
    settlements = [
        Settlement(item, "insert", min(item.header.oldest), weight, 1.0)
        for item, weight in zip(items, weights, strict=True)
        if item.header
    ]
    assert await store.replay.settle(team.leader, settlements) == len(weights)
    return team


async def test_the_buffer_shows_sizes_weights_and_probabilities(store: Store, show: Show) -> None:
    team = await weighted_table(store, [1.0, 2.0, 5.0, 0.0])
    await prepare(store, team, 0, ["0-2"])
    found = await tell(show, inspect.buffer)
    assert (found["size"], found["capacity"], found["sampler"], found["remover"], found["max_uses"]) == (
        4, 100, "prioritized", "lowest_priority", 2,
    )  # fmt: skip
    assert (found["weight_sum"], found["uses"], found["inserted"], found["drawn"]) == (8.0, {"0": 3, "1": 1}, 4, 1)
    assert found["next_step"] == 1
    rows = found["groups"]
    assert [(row["group"], row["seq"], row["oldest"], row["lag"], row["uses"], row["weight"]) for row in rows] == [
        ("0-0", 0, 0, 1, 0, 1.0), ("0-1", 1, 0, 1, 0, 2.0), ("0-2", 2, 1, 0, 1, 5.0), ("0-3", 3, 1, 0, 0, 0.0),
    ]  # fmt: skip
    assert [row["probability"] for row in rows] == [0.125, 0.25, 0.625, 0.0]
    assert (rows[0]["reward_mean"], rows[0]["reward_std"], rows[0]["length_mean"]) == (0.5, 0.5, 2.0)
    assert (rows[0]["source"], rows[0]["generator"]) == ("main", "g")
    _, text = await show(inspect.buffer)
    for expected in ("weight sum  8\n", "uses        0 3, 1 1\n", "0.625", "lowest_priority"):
        assert expected in text


@pytest.mark.parametrize(
    ("sort", "reverse", "offset", "limit", "expected"),
    [
        ("order", False, 1, 2, ["0-1", "0-2"]),
        ("order", True, 0, 3, ["0-5", "0-4", "0-3"]),
        ("version", True, 0, 2, ["0-5", "0-4"]),
        ("weight", False, 0, 3, ["0-3", "0-0", "0-5"]),
        ("weight", True, 0, 1, ["0-2"]),
        ("order", False, 99, 5, []),
    ],
)
async def test_the_buffer_is_paged_and_sorted(
    store: Store, show: Show, sort: str, reverse: bool, offset: int, limit: int, expected: list[str]
) -> None:
    await weighted_table(store, [1.0, 4.0, 9.0, 0.0, 5.0, 2.0])
    found = await tell(show, inspect.buffer, sort=sort, reverse=reverse, offset=offset, limit=limit)
    assert [row["group"] for row in found["groups"]] == expected


async def test_a_page_costs_the_same_for_any_size_of_the_table(store: Store) -> None:
    """Count commands and bytes sent by the server for a page of 5 out of 50 and out of 1,000 groups."""

    async def cost() -> tuple[int, int]:
        before: Any = await store.client.info("stats")
        await inspect_buffer(store, "order", 20, 5)
        after: Any = await store.client.info("stats")
        return tuple(after[name] - before[name] for name in ("total_commands_processed", "total_net_output_bytes"))  # type: ignore[return-value]

    await weighted_table(store, [1.0] * 50)
    small = await cost()
    await store.restores.delete_run()
    await weighted_table(store, [1.0] * 1000)
    large = await cost()
    assert large[0] == small[0]
    assert large[1] < 1.1 * small[1]


async def test_sorting_by_weight_without_weights_is_an_error(store: Store, show: Show) -> None:
    team = await start(store)
    await flow.buffer(store, team, 2)
    (row, _) = (await tell(show, inspect.buffer))["groups"]
    assert (row["weight"], row["probability"]) == (None, None)
    with pytest.raises(
        ConsoleError, match=r"no weights to sort by: replay.sampler is 'fifo'.*sort by order or version"
    ) as caught:
        await show(inspect.buffer, sort="weight", reverse=False, offset=0, limit=20)
    assert caught.value.code == EXIT_CONFIG


async def test_a_malformed_header_affects_only_its_row(store: Store, show: Show) -> None:
    team = await start(store)
    await flow.buffer(store, team, 2)
    await store.client.hset(store.keys.group("0-0"), "header", b"\xc1 no header")  # type: ignore[misc]
    rows = (await tell(show, inspect.buffer))["groups"]
    assert [row["readable"] for row in rows] == [False, True]
    assert "readable" in (await show(inspect.buffer))[1]
    assert "unreadable header" in (await show(inspect.group, ticket="0-0"))[1]


async def test_a_group_shows_text_scores_advantages_and_versions(store: Store, run: Path, show: Show) -> None:
    await one_group(store, run)
    found = await tell(show, inspect.group, ticket="0-0")
    assert (found["place"], found["prompt"]["text"], found["uses"], found["size"]) == ("replay", "say 5", 0, 4)
    first = found["completions"][0]
    assert (first["segments"][0]["parts"][0]["passage"]["text"], first["reward"], first["truncated"]) == ("5!", 1.0, False)
    assert first["scores"] == {"exact": 0.0}
    assert first["advantage"] == pytest.approx(
        0.75 / np.sqrt(3 / 16)
    )  # (1 - 1/4) divided by the population standard deviation of 1, 0, 0, 0
    assert first["segments"][0]["spans"] == [
        {"version": 0, "start": 0, "end": 1},
        {"version": 1, "start": 1, "end": first["length"]},
    ]
    assert [one["segments"][0]["parts"][0]["passage"]["text"] for one in found["completions"]][3] == f"{NASTY}!"
    _, text = await show(inspect.group, ticket="0-0")
    for expected in (
        "in the replay table",
        "say 5",
        "completion index 0, length 2, reward 1, scores exact 0, advantage 1.732",
        "versions 0 [0, 1), 1 [1,",
        "five!",
    ):
        assert expected in text


async def test_a_rollout_lists_its_segments(store: Store, run: Path, show: Show) -> None:
    team = await start(store)
    await issue(store, team, 1)
    (claimed,) = await claim(store, "e")
    assert claimed.ticket is not None
    texts = [[("5", ""), ("6!", "say six")], [("five", "")], [("no", "say six")], [("!", "")]]
    rollouts = [[sampled(run, text, context) for text, context in rollout] for rollout in texts]
    body = pack_payload(claimed.ticket, rollouts)
    made = make_header(
        claimed.ticket, rollouts, {}, [1.0, 0.0, 0.0, 0.0], [], payload=claimed.payload, payload_bytes=len(body), generator="e",
        generate_s=1.0, score_s=0.0, truncated=[True, False, False, False], turns=[3, 1, 1, 1], tool_s=[1.5, 0.0, 0.0, 0.0],
        tool_calls=[1, 0, 0, 0], malformed_calls=[2, 0, 0, 0],
    )  # fmt: skip
    assert await store.tickets.submit("e", claimed, made, body, 60)
    await settle(store, team)
    found = await tell(show, inspect.group, ticket="0-0")
    first, _, third, _ = found["completions"]
    assert (found["size"], first["turns"], first["tool_s"], first["truncated"]) == (4, 3, 1.5, True)
    assert (first["tool_calls"], first["malformed_calls"], third["tool_calls"]) == (1, 2, 0)
    assert first["length"] == sum(len(tokens(run, text)) for text, _ in texts[0])
    assert [segment["index"] for segment in first["segments"] + third["segments"]] == [0, 1, 3]
    assert [segment["parts"][0]["passage"]["text"] for segment in first["segments"]] == ["5", "6!"]
    assert [segment["context"] and segment["context"]["text"] for segment in first["segments"]] == [None, "say six"]
    _, text = await show(inspect.group, ticket="0-0")
    for expected in ("truncated yes", "turns 3, tool s 1.5, tool calls 1, malformed calls 2", "say six", "segment index 1, "):
        assert expected in text
    assert text.count("segment index") == 2, "the others have one segment"
    assert text.count("context, ") == 2
    assert [one["index"] for one in (await tell(show, inspect.group, ticket="0-0", offset=1, limit=1))["completions"]] == [1]


async def test_a_conversation_shows_each_turn_with_its_cost(store: Store, run: Path, show: Show) -> None:
    team = await start(store)
    await issue(store, team, 1)
    (claimed,) = await claim(store, "e")
    assert claimed.ticket is not None
    pieces = [tokens(run, text) for text in ("5", "say six", "five!", "6!")]
    ends = np.cumsum([len(piece) for piece in pieces]).tolist()
    ids = np.array([token for piece in pieces for token in piece], np.int32)
    generated = Generated(ids, np.zeros(len(ids), np.float32), [Span(0, 0, len(ids))], "stop", ((ends[0], ends[1]),))
    times = (TurnTime(ends[0], 0.001, 1.0), TurnTime(ends[2], 2.0, 3.0), TurnTime(ends[3], 0.0, 4.0))
    rollouts = [[Segment(generated, np.zeros(0, np.int32), times)]] * 4
    body = pack_payload(claimed.ticket, rollouts)
    made = make_header(
        claimed.ticket, rollouts, {}, [1.0, 0.0, 0.0, 0.0], [], payload=claimed.payload, payload_bytes=len(body), generator="e",
        generate_s=1.0, score_s=0.0, turns=[3] * 4, tool_s=[2.5] * 4,
    )  # fmt: skip
    assert await store.tickets.submit("e", claimed, made, body, 60)
    await settle(store, team)
    [segment] = (await tell(show, inspect.group, ticket="0-0", offset=0, limit=1))["completions"][0]["segments"]
    parts = [(part["sampled"], part["passage"]["text"], part["waited_s"], part["sampled_s"]) for part in segment["parts"]]
    wanted = [
        (True, "5", pytest.approx(0.001), 1.0),
        (False, "say six", None, None),
        (True, "five!", 2.0, 3.0),
        (True, "6!", 0.0, 4.0),
    ]
    assert parts == wanted
    _, text = await show(inspect.group, ticket="0-0", offset=0, limit=1)
    policy = [line for line in text.splitlines() if "policy, " in line]
    assert [line.partition(" in ")[2].strip() for line in policy] == [
        "1.0 s, after 0.0 s in its environment",
        "3.0 s, after 2.0 s in its environment",
        "4.0 s, after 0.0 s in its environment",
    ]
    for expected in ("environment, ", "say six", f"tool s 2.5, versions 0 [0, {len(ids)})"):
        assert expected in text, text
    assert "segment" not in text, "it has one"


def sampled(run: Path, text: str, context: str) -> Segment:
    ids = np.array(tokens(run, text), np.int32)
    generated = Generated(ids, np.zeros(len(ids), np.float32), [Span(0, 0, len(ids))], "stop")
    return Segment(generated, np.array(tokens(run, context), np.int32))


async def test_completions_are_paged(store: Store, run: Path, show: Show) -> None:
    await one_group(store, run)
    found = await tell(show, inspect.group, ticket="0-0", offset=1, limit=2)
    assert ([one["index"] for one in found["completions"]], found["size"], found["offset"]) == ([1, 2], 4, 1)
    assert "completion index 2, " in (await show(inspect.group, ticket="0-0", offset=1, limit=2))[1]


async def test_untrusted_text_is_escaped(store: Store, run: Path, show: Show) -> None:
    """Prompt, completions, a dead letter's reason and a generator's name contain escape sequences, markup and bidi marks."""
    team = await start(store, slots=4)
    await issue(store, team, 2)
    one, two = await claim(store, NASTY, 2)
    assert await store.tickets.fail(NASTY, two, NASTY, max_attempts=1)
    (letter,) = await store.dead_letters.page()
    held = await show(inspect.group, ticket=one.ticket_id)
    ids = tokens(run, NASTY)
    payload = Payload(
        np.array(ids, np.int32), np.full(4, len(ids), np.int32), np.array(ids * 4, np.int32), np.zeros(4 * len(ids), np.float32),
        np.array([(i, 0, 0, len(ids)) for i in range(4)], np.int32),
    )  # fmt: skip
    nasty = header(one, lengths=[len(ids)] * 4, scores={NASTY: [0.0] * 4}, generator=NASTY, source=NASTY)
    assert await store.tickets.submit(NASTY, one, nasty, codec.encode(payload), 60)
    await settle(store, team)
    shown = [
        held,
        await show(inspect.group, ticket=one.ticket_id),
        await show(inspect.buffer),
        await show(inspect.deadletter, limit=20, before=""),
        await show(inspect.deadletter, words=[letter.id]),
        await show(steer.requeue, words=[letter.id]),
        await show(inspect.group, ticket=one.ticket_id, offset=0, limit=16, as_json=True),
        await show(inspect.deadletter, limit=20, before="", as_json=True),
    ]
    for _, text in shown:
        assert all(c.isprintable() or c == "\n" for c in text), text
    assert "\\e[2J" in shown[1][1]
    assert "[bold red]5[/]" in shown[1][1], "markup is shown, not interpreted"
    assert json.loads(shown[6][1])["completions"][0]["segments"][0]["parts"][0]["passage"]["text"] == NASTY


def test_escapes_follow_python_and_json() -> None:
    assert printable("a\x1b\n\t\x9b\u202e\U000e0001ü漢\ud800") == "a\\e\\n\\t\\x9b\\u202e\\U000e0001ü漢\\ud800"
    assert printable("a\n\x00b", keep_lines=True) == "a\n\\x00b"
    for text in ("ü漢 \x7f\x9b\u202e\U000e0001", NASTY):
        encoded = safe_json(msgspec.json.encode(text).decode())
        assert encoded.isprintable()
        assert json.loads(encoded) == text


async def test_without_a_tokenizer_token_ids_and_a_reason_are_shown(store: Store, run: Path, show: Show) -> None:
    await one_group(store, run)
    (run.parent / "model" / "tokenizer.json").unlink()
    found = await tell(show, inspect.group, ticket="0-0", offset=0, limit=1)
    assert found["prompt"] == {
        "tokens": len(found["prompt"]["token_ids"]),
        "text": None,
        "token_ids": found["prompt"]["token_ids"],
    }
    assert "has no tokenizer.json on this machine" in found["notes"][0]
    (run.parent / "model" / "tokenizer.json").write_text("{}")
    assert "is not a valid tokenizer" in (await show(inspect.group, ticket="0-0", offset=0, limit=1))[1]


async def test_without_the_run_folder_data_in_redis_is_shown(
    store: Store, server: RedisServer, run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    await one_group(store, run)
    monkeypatch.setenv("GRPO_REDIS_PASSWORD", server.password)
    assert await inspect.group("0-0", store.keys.name, server.url, limit=1, as_json=True) == EXIT_OK
    found = json.loads(capsys.readouterr().out)
    assert (found["completions"][0]["advantage"], found["completions"][0]["reward"]) == (None, 1.0)
    assert found["completions"][0]["segments"][0]["parts"][0]["passage"]["token_ids"] == tokens(run, "5!")
    assert len(found["notes"]) == 2


def encoded(prompt: Any, segments: list[int], tokens: list[int], spans: Any) -> bytes:
    """Return a payload whose arrays may be inconsistent."""
    one, two, three, four = (np.array(values, np.int32) for values in (prompt, segments, tokens, spans))
    return codec.encode(Payload(one, two, three, np.zeros(len(tokens), np.float32), four))


@pytest.mark.parametrize(
    ("payload", "shown"),
    [
        (b"\xc1", "its tokens are damaged"),
        (codec.encode([1, 2]), "its tokens are damaged"),
        (encoded([], [], [], np.zeros((0, 4))), "its tokens do not match its header"),
        (encoded([[0, 0], [0, 0]], [-1, 3, 0, 0], [0, 0], [[0, 0, 0]]), "its tokens do not match its header"),
        (encoded([-5, 2**31 - 1], [1, 1, 0, 0], [-1, 9_999_999], [[9, 9, 9, 9]]), "9999999"),
    ],
)
async def test_damaged_tokens_are_reported(store: Store, run: Path, show: Show, payload: bytes, shown: str) -> None:
    await one_group(store, run)
    (name,) = [key async for key in store.client.scan_iter(match="*:payload:*")]
    await store.client.set(name, codec.seal(payload))
    code, text = await show(inspect.group, ticket="0-0")
    assert code == EXIT_OK
    assert shown in text


async def place(store: Store, ticket: str) -> tuple[str, str]:
    found = await inspect_group(store, ticket, TextReader(None), "standard")
    return found.place, found.where


async def test_a_ticket_is_found_in_every_place(store: Store) -> None:
    """Follow one ticket from its issue to the checkpoint that covers its step, and others to every other outcome."""
    team = await start(store, slots=12)
    with pytest.raises(NotFound, match="unknown ticket 0-0: it was not issued yet"):
        await place(store, "0-0")
    await issue(store, team, 8)
    assert (await place(store, "0-7"))[0] == "waiting"
    claims = await claim(store, "generator-7", 7)
    found = await inspect_group(store, "0-0", TextReader(None), "standard")
    assert (found.place, found.answer, found.seq) == ("generating", "0", 0)
    assert found.holder is not None
    assert (found.holder.consumer, found.holder.fence) == ("generator-7", claims[0].fence)
    assert found.prompt is not None
    assert found.prompt.token_ids == [5, 6, 7]
    for one in claims[:6]:
        await submit(store, "generator-7", one)
    found = await inspect_group(store, "0-0", TextReader(None), "standard")
    assert (found.place, len(found.completions), found.completions[1].advantage) == ("finished", 4, pytest.approx(1.0))
    items = await store.replay.read_headers(team.leader, 100)
    for item, action in zip(items, ["insert"] * 3 + ["filtered:solved", "stale", "failed:rewards are not finite"], strict=True):
        await store.replay.settle(team.leader, [Settlement(item, action)])
    assert await place(store, "0-0") == ("replay", "in the replay table")
    assert await place(store, "0-3") == (
        "dropped", "dropped: every completion is solved, with the same reward, so there is nothing to learn from it",
    )  # fmt: skip
    assert (await inspect_group(store, "0-4", TextReader(None), None)).outcome == "stale"
    (letter,) = await store.dead_letters.page()
    assert await place(store, "0-5") == ("failed", f"failed: see dead letter {letter.id}")
    await store.dead_letters.requeue([letter.id])
    assert (await place(store, "0-5"))[0] == "requeued"
    await prepare(store, team, 0, ["0-0"])
    found = await inspect_group(store, "0-0", TextReader(None), "standard")
    assert (found.place, found.trained, [(step.step, step.committed) for step in found.steps]) == ("drawn", False, [(0, False)])
    await store.steps.commit(team.trainer, 0)
    found = await inspect_group(store, "0-0", TextReader(None), "standard")
    assert (found.place, found.outcome, [(step.step, step.committed) for step in found.steps]) == (
        "drawn",
        "trained",
        [(0, True)],
    )
    assert len(found.completions) == 4
    await store.steps.publish(team.trainer, 1)
    await store.steps.checkpointed(team.trainer, 0)
    await store.steps.retire()
    assert (await place(store, "0-0"))[0] == "trained"


async def test_a_ticket_between_two_places_is_shown_as_moving(store: Store) -> None:
    """The ticket was issued but is in neither stream, as if it were settled between the two reads."""
    team = await start(store)
    await issue(store, team, 1)
    await store.client.xtrim(store.keys.tickets, 0)
    assert (await place(store, "0-0"))[0] == "moving"


async def test_a_header_with_empty_columns_is_shown(store: Store) -> None:
    team = await start(store)
    await issue(store, team, 1)
    (one,) = await claim(store, "g")
    nothing: dict[str, Any] = {name: [] for name in ("rewards", "truncated", "newest", "tool_tokens")}
    assert await store.tickets.submit("g", one, header(one, **nothing), flow.payload_bytes(one), 60)
    found = await inspect_group(store, "0-0", TextReader(None), "standard")
    assert (found.place, found.completions[3].reward, found.completions[3].length) == ("finished", None, 2)
    assert "no advantages: its header has no rewards" in found.notes


async def test_an_evicted_group_is_shown_as_evicted(store: Store) -> None:
    team = await start(store, table=TableRules(capacity=1))
    await flow.buffer(store, team, 2)
    assert await place(store, "0-0") == ("dropped", "dropped: evicted from a full replay table before it was trained")


async def test_a_replayed_group_lists_all_its_steps(store: Store, show: Show) -> None:
    team = await start(store, table=TableRules(max_uses=3))
    await flow.buffer(store, team, 2)
    for step, groups in enumerate((["0-0"], ["0-1"], ["0-0"])):
        await prepare(store, team, step, groups)
    await store.steps.commit(team.trainer, 0)
    found = await tell(show, inspect.group, ticket="0-0")
    assert (found["place"], found["uses"], [step["step"] for step in found["steps"]]) == ("replay", 2, [0, 2])
    assert "steps\nstep  committed\n   0  yes\n   2  no" in (await show(inspect.group, ticket="0-0"))[1]


@pytest.mark.parametrize("ticket", ["", "17", "0-", "a-b", "0-17.5", "-1-2", "0-99999999999", "0-1 0-2", "٠-١"])
async def test_a_malformed_ticket_is_a_one_line_error(store: Store, show: Show, ticket: str) -> None:
    await start(store)
    with pytest.raises(ConsoleError, match=r"is not a ticket: give <epoch>-<row>, e\.g\. 0-17") as caught:
        await show(inspect.group, ticket=ticket)
    assert caught.value.code == EXIT_CONFIG


async def two_ranks(store: Store) -> flow.Team:
    """Prepare step 0 with 0-0 and 0-1 on two ranks, with weights and a masked completion, and step 1 with 0-0 again."""
    team = await start(store, table=TableRules(max_uses=2))
    names = await flow.buffer(store, team, 2)
    payloads = [(await store.inspection.group_records([name]))[name].payload for name in names]
    rows = [
        [[Sample(payloads[0], i, i - 1.5, 2, 0.5) for i in range(4)], []],
        [[Sample(payloads[1], i, 1.0, 2 if i else 0, 1.0) for i in range(3)], [Sample(payloads[1], 3, -1.0, 2, 1.0)]],
    ]
    plan = StepPlan(0, names, names, 2, 2, [2], [14.0], 14, 32, {"reward/train/mean": 0.5})
    await store.steps.prepare(team.leader, plan, [RankPlan(rank) for rank in rows])
    again = StepPlan(1, names[:1], [], 1, 1, [1], [8.0], 8, 16, {})
    await store.steps.prepare(team.leader, again, [RankPlan([rows[0][0]])])
    return team


async def test_a_step_shows_its_groups_and_row_usage(store: Store, show: Show) -> None:
    await two_ranks(store)
    found = await tell(show, inspect.step, number=0, offset=0, limit=100)
    plan = found["plan"]
    assert (found["state"], plan["size"], plan["fresh"], plan["denominators"], plan["response_tokens"]) == (
        "prepared", 2, 2, [14.0], 14,
    )  # fmt: skip
    assert plan["advantage"] == {"min": -1.5, "mean": 0.25, "max": 1.5}
    assert plan["weight"] == {"min": 0.5, "mean": 0.75, "max": 1.0}
    assert [(r["rows"], r["empty"], r["responses"], r["tokens"], r["fill"]) for r in plan["ranks"]] == [
        (2, 1, 4, 10, 10 / 256), (2, 0, 4, 12, 12 / 512),
    ]  # fmt: skip
    first, second = plan["groups"]
    assert (first["group"], first["fresh"], first["uses"], first["lag"], first["weight"]) == ("0-0", True, 2, 0, 0.5)
    assert (second["responses"], second["masked"], second["trained_tokens"]) == (4, 1, 6)
    assert plan["stats"] == {"reward/train/mean": 0.5}
    replayed = (await tell(show, inspect.step, number=1, offset=0, limit=100))["plan"]["groups"]
    assert [(row["fresh"], row["lag"]) for row in replayed] == [(False, 1)]
    _, text = await show(inspect.step, number=0, offset=0, limit=1)
    for expected in ("prepared", "denominators     14", "min -1.5, mean 0.25, max 1.5"):
        assert expected in text


async def test_a_step_counts_rollouts_and_shared_contexts_once(store: Store, show: Show) -> None:
    team = await start(store)
    await issue(store, team, 1)
    (one,) = await claim(store, "e")
    columns = {"rollout": [0, 0, 1, 2, 3], "contexts": [0, 1, 1, 0, 0], "context_tokens": [0, 10, 10, 0, 0]}
    s = {"lengths": [2] * 5, "oldest": [0] * 5, "newest": [0] * 5, "tool_tokens": [0] * 5}
    assert await store.tickets.submit("e", one, msgspec.structs.replace(header(one), **columns, **s), flow.payload_bytes(one), 60)
    await settle(store, team)
    samples = [
        Sample(one.payload, i, float(owner), 0 if owner == 3 else 2, 1.0, rollout=owner, context=columns["contexts"][i])
        for i, owner in enumerate(columns["rollout"])
    ]
    plan = StepPlan(0, ["0-0"], ["0-0"], 1, 1, [1], [8.0], 8, 36, {})
    await store.steps.prepare(team.leader, plan, [RankPlan([samples])])
    found = (await tell(show, inspect.step, number=0, offset=0, limit=100))["plan"]
    (group,) = found["groups"]
    assert (group["responses"], group["segments"], group["masked"], group["trained_tokens"]) == (4, 5, 1, 8)
    assert found["advantage"] == {"min": 0.0, "mean": 1.5, "max": 3.0}
    assert found["ranks"][0]["tokens"] == 2 + 10 + 5 * 2  # the prompt, the context that two segments share, and the completions


async def test_a_retired_step_shows_its_metrics(store: Store, show: Show) -> None:
    team = await two_ranks(store)
    for step in range(2):
        await store.steps.commit(team.trainer, step)
        await store.steps.publish(team.trainer, step + 1)
        await store.monitor.record({"step": float(step), "reward/train/mean": 0.25 + step})
    await store.steps.checkpointed(team.trainer, 0)
    await store.steps.retire()
    found = await tell(show, inspect.step, number=0, offset=0, limit=100)
    assert (found["state"], found["plan"], found["record"]["reward/train/mean"]) == ("retired", None, 0.25)
    _, text = await show(inspect.step, number=0, offset=0, limit=100)
    assert "retired" in text
    assert "reward/train/mean  0.25" in text
    assert (await tell(show, inspect.step, number=1, offset=0, limit=100))["record"]["reward/train/mean"] == 1.25


@pytest.mark.parametrize(
    ("step", "message"), [(2, "step 2 is not prepared yet: the last one is step 1"), (9, "step 9 is not prepared")]
)
async def test_an_unprepared_step_is_an_error(store: Store, show: Show, step: int, message: str) -> None:
    await two_ranks(store)
    with pytest.raises(ConsoleError, match=message):
        await show(inspect.step, number=step, offset=0, limit=100)


async def test_the_latest_record_of_a_step_is_found(store: Store) -> None:
    """There are 3,000 steps with a restore from 2,000 to 1,995, interspersed evaluations, and entries in the same millisecond."""
    steps = [*range(2000), *range(1995, 3000)]
    async with store.client.pipeline(transaction=False) as pipe:
        for i, step in enumerate(steps):
            record = {"step": float(step), "n": float(i)}
            pipe.xadd(store.keys.metrics, {"m": msgspec.json.encode(record)}, id=f"{1000 + i // 3}-{2 * (i % 3) + 1}")
            if i % 500 == 7:
                pipe.xadd(
                    store.keys.metrics,
                    {"m": msgspec.json.encode({"eval/accuracy": 0.5})},
                    id=f"{1000 + i // 3}-{2 * (i % 3) + 2}",
                )
        await pipe.execute()
    for step in (0, 1, 2, 7, 8, 499, 1234, 1994, 1995, 1999, 2000, 2998, 2999):
        record = await store.inspection.step_record(step)
        assert record is not None
        assert record["step"] == step
        assert record["n"] in [i for i, s in enumerate(steps) if s == step]
    assert await store.inspection.step_record(3000) is None


async def test_the_record_of_a_step_is_of_the_incarnation_that_trained_it_last(store: Store) -> None:
    """Restores to 1,499, to 2,499, and to 599, of long histories; after the first a trainer that hung records its step."""
    lives = [(5, range(2000)), (7, range(1500, 3000)), (8, range(2500, 2700)), (9, range(600, 1000))]
    async with store.client.pipeline(transaction=False) as pipe:
        for life, steps in lives:
            if life > 5:
                pipe.hset(store.keys.samples_state, f"begun:{life}", steps.start)
            for step in steps:
                record = {"step": float(step), "run/incarnation": float(life)}
                pipe.xadd(store.keys.metrics, {"m": msgspec.json.encode(record)}, id=f"{10_000 * life + step}-1")
                if (life, step) == (7, 1600):
                    late = {"step": 2000.0, "run/incarnation": 5.0}
                    pipe.xadd(store.keys.metrics, {"m": msgspec.json.encode(late)}, id=f"{10_000 * life + step}-2")
        await pipe.execute()
    expected = {0: 5, 1: 5, 300: 5, 599: 5, 600: 9, 601: 9, 800: 9, 999: 9}
    for step, life in expected.items():
        record = await store.inspection.step_record(step)
        assert record is not None
        assert (record["step"], record["run/incarnation"]) == (step, life)
    for step in (1000, 1499, 1500, 1700, 2500, 2999, 5000):
        assert await store.inspection.step_record(step) is None, "a restore has undone it"
    await store.client.hdel(store.keys.samples_state, "begun:9")  # type: ignore[misc]
    ids = [entry for entry, _ in await store.client.xrange(store.keys.metrics, "90000")]
    await store.client.xdel(store.keys.metrics, *ids)
    for step, life in {0: 5, 1499: 5, 1500: 7, 1501: 7, 1650: 7, 1999: 7, 2000: 7, 2499: 7, 2500: 8, 2699: 8}.items():
        record = await store.inspection.step_record(step)
        assert record is not None
        assert (record["step"], record["run/incarnation"]) == (step, life)
    assert await store.inspection.step_record(2700) is None


async def test_the_record_of_a_step_that_a_restore_has_undone_is_not_its_record(store: Store) -> None:
    """A trainer that hung while its successor restored the run still records the step that it trained."""
    for step, life, loss in ((0, 5.0, 1.0), (1, 5.0, 2.0), (1, 7.0, 3.0), (2, 7.0, 4.0), (2, 7.0, 5.0)):
        await store.monitor.record({"step": step, "run/incarnation": life, "loss": loss})
    found = [await store.inspection.step_record(step) for step in range(3)]
    assert [record and record["loss"] for record in found] == [1.0, 3.0, 4.0]


async def test_the_ledger_matches_the_audit(store: Store, show: Show) -> None:
    team = await start(store)
    await flow.buffer(store, team, 2)
    found = await tell(show, inspect.ledger)
    assert (found["issued"], found["places"]["buffered"], found["lost"]) == (2, 2, 0)
    assert "in the replay table, not yet trained" in (await show(inspect.ledger))[1]


async def bury(store: Store, team: flow.Team, reasons: Sequence[str]) -> list[str]:
    """Create dead letters; return their ids, oldest first."""
    await issue(store, team, len(reasons))
    for one, reason in zip(await claim(store, "g", len(reasons)), reasons, strict=True):
        assert await store.tickets.fail("g", one, reason, max_attempts=1)
    return [letter.id for letter in reversed(await store.dead_letters.page(len(reasons)))]


async def test_dead_letters_are_paged_or_shown_whole(store: Store, show: Show) -> None:
    team = await start(store)
    ids = await bury(store, team, ["one broke", "two broke", "three broke"])
    page = await tell(show, inspect.deadletter, limit=2, before="")
    assert ([row["id"] for row in page["letters"]], page["total"], page["next"]) == ([ids[2], ids[1]], 3, ids[1])
    rest = await tell(show, inspect.deadletter, limit=2, before=page["next"])
    assert ([row["reason"] for row in rest["letters"]], rest["next"]) == (["one broke"], None)
    assert f"next   {ids[1]}" in (await show(inspect.deadletter, limit=2, before=""))[1]
    found = await tell(show, inspect.deadletter, words=[ids[0]])
    assert (found["kind"], found["fields"]["id"], found["fields"]["prompt"]) == ("ticket", "0-0", [5, 6, 7])
    assert "answer  " in (await show(inspect.deadletter, words=[ids[0]]))[1]
    several = await tell(show, inspect.deadletter, words=ids[1:])
    assert [(one["id"], one["reason"]) for one in several] == [(ids[1], "two broke"), (ids[2], "three broke")]
    _, text = await show(inspect.deadletter, words=ids[1:])
    assert text.index("two broke") < text.index("three broke")


@pytest.mark.parametrize("body", [b"", b"\x00\xff\x1b[2J", b"x" * 100_000])
async def test_an_undecodable_body_is_shown_as_hex(store: Store, show: Show, body: bytes) -> None:
    await start(store)
    id = (await store.client.xadd(store.keys.deadletter, {"ticket": b"\xff\x1b", "reason": "?", "body": body})).decode()
    found = await tell(show, inspect.deadletter, words=[id])
    assert (found["kind"], bytes.fromhex(found["hex"]), found["failed"]) == ("bytes", body, False)
    _, text = await show(inspect.deadletter, words=[id])
    assert len(text) < 2000


async def test_a_header_with_nonfinite_numbers_is_shown(store: Store, show: Show) -> None:
    team = await start(store)
    await issue(store, team, 1)
    (one,) = await claim(store, "g")
    bad = header(one, rewards=[float("nan"), float("inf"), 0.0, 1.0], scores={"exact": [float("nan")]})
    assert await store.tickets.submit("g", one, bad, flow.payload_bytes(one), 60)
    waiting = await tell(show, inspect.group, ticket="0-0")
    assert waiting["completions"][0]["reward"] is None
    assert any("rewards must be finite" in note for note in waiting["notes"])
    await settle(store, team, "failed:rewards are not finite")
    (letter,) = await store.dead_letters.page()
    found = await tell(show, inspect.deadletter, words=[letter.id])
    assert (found["kind"], found["fields"]["rewards"]) == ("header", [None, None, 0.0, 1.0])


@pytest.mark.parametrize("id", ["nothing", "5-", "99999999999999999999999-0"])
async def test_an_invalid_id_is_an_error(store: Store, show: Show, id: str) -> None:
    await start(store)
    with pytest.raises(ConsoleError, match="is not the id of a dead letter"):
        await show(inspect.deadletter, before=id)
    with pytest.raises(ConsoleError, match="there is no dead letter 1790000000000-5: it was requeued or trimmed"):
        await show(inspect.deadletter, words=["1790000000000-5"])


async def test_requeue_takes_ids_a_reason_or_all(store: Store, show: Show) -> None:
    team = await start(store)
    ids = await bury(store, team, ["math broke", "math broke", "its lease ran out", "out of memory"])
    code, text = await show(steer.requeue, words=[ids[0], "1790000000000-7"])
    assert (code, "1 requeued, 1 refused" in text, "there is no such dead letter" in text) == (EXIT_OK, True, True)
    code, text = await show(steer.requeue, words=[ids[0]])
    assert (code, "before" in text, "1 requeued, 0 refused" in text) == (EXIT_OK, True, True)
    found = await tell(show, steer.requeue, reason="math")
    assert ([row["ticket"] for row in found["requeued"]], found["refused"]) == (["0-1"], [])
    found = await tell(show, steer.requeue, everything=True)
    assert {row["ticket"] for row in found["requeued"]} == {"0-2", "0-3"}
    assert await show(steer.requeue, everything=True) == (
        EXIT_OK,
        f"run {store.keys.name}: 0 requeued, 0 refused\n",
    )
    assert (await show(steer.requeue, words=["1790000000000-7"]))[0] == EXIT_FAILED
    assert (await store.run.audit())["requeued"] == 4


@pytest.mark.parametrize(
    ("ids", "everything", "reason"), [([], False, ""), (["1790000000000-0"], True, ""), (["1790000000000-0"], False, "x")]
)
async def test_requeue_takes_exactly_one_way_to_choose(
    store: Store, show: Show, ids: list[str], everything: bool, reason: str
) -> None:
    with pytest.raises(ConsoleError, match="give exactly one of: ids of dead letters"):
        await show(steer.requeue, words=ids, everything=everything, reason=reason)


async def test_a_finished_run_rejects_a_requeue(store: Store, show: Show) -> None:
    team = await start(store)
    ids = await bury(store, team, ["broke"])
    await store.run.finish("trained 4 of 4 steps")
    with pytest.raises(ConsoleError, match="the run is over: trained 4 of 4 steps"):
        await show(steer.requeue, words=ids)
    assert await store.dead_letters.count() == 1


def test_every_command_is_reachable_from_the_command_line(
    server: RedisServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"t-{uuid.uuid4().hex[:12]}"
    config = small_config(tmp_path, server, f"run.name={name}")
    folder = RunFolder.of(config)
    folder.write(config)

    async def begin() -> str:
        store = await Store.connect(server.url, name, server.password)
        team = await start(store)
        await flow.buffer(store, team, 1)
        await prepare(store, team, 0, ["0-0"])
        (id,) = await bury(store, team, ["broke"])
        await store.close()
        return id

    async def end() -> None:
        store = await Store.connect(server.url, name, server.password)
        await store.restores.delete_run()
        await store.close()

    def grpo(*arguments: str) -> tuple[int, str, str]:
        code = main([*arguments, str(folder.path)])
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    id = asyncio.run(begin())
    try:
        for arguments, expected in (
            (("inspect", "buffer", "--sort", "version", "--reverse", "--limit", "3", "--offset", "0"), "fifo"),
            (("inspect", "group", "0-0"), "removed from the replay table after use"),
            (("inspect", "step", "0"), "prepared"),
            (("inspect", "ledger"), "dead letters"),
            (("inspect", "sync"), "published"),
            (("inspect", "deadletter"), "broke"),
            (("inspect", "deadletter", id), "kind"),
            (("inspect", "deadletter", id, id), "kind"),
            (("replay", "requeue", "--reason", "broke"), "1 requeued, 0 refused"),
        ):
            code, text, errors = grpo(*arguments)
            assert (code, errors) == (0, ""), arguments
            assert expected in text, arguments
            if arguments[0] == "inspect":
                assert json.loads(grpo(*arguments, "--json")[1]) if arguments[-1] != id else True
        code, _, errors = grpo("inspect", "group", "3-3")
        assert (code, errors.startswith(f"error: run {name}: unknown ticket 3-3"), errors.count("\n")) == (2, True, 1)
        assert grpo("inspect", "step", "-1")[0] == 2
        assert grpo("inspect", "buffer", "--sort", "colour")[0] == 2
    finally:
        asyncio.run(end())


def test_mean_and_deviation_of_large_rewards() -> None:
    assert mean([0.25, 0.75]) == 0.5
    assert deviation([1.0, 2.0, 3.0, 4.0]) == pytest.approx(1.25**0.5)
    assert deviation([1e200, -1e200]) == pytest.approx(1e200)
    assert mean([1.7e308] * 5) == 1.7e308
    assert deviation([1.7e308, -1.7e308] * 5) == pytest.approx(1.7e308)
