"""A group's prompt includes the tools of its environment, so the first turns of its rollouts continue the prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.chat.errors import DataError
from services.chat.format import ChatFormat
from services.config import RunConfig
from services.config.load import validate
from services.console.doctor.rows import data
from services.console.run.redis_server import RedisServer
from services.dataprep.prompts.catalogue import PromptSource
from services.environment.programs.loaded import LoadedProgram
from services.environment.recording.recorder import Recorder
from services.protocol.messages import Row, Ticket
from tests.environment.support.programs import Adder
from tests.environment.support.templates import FAMILIES, Family, save_family
from tests.environment.test_pod import N, environment, fleet, groups, overrides
from tests.support.harness import ticket

PROGRAMS = Path(__file__).parents[1] / "support" / "programs.py"


def config_of(folder: Path, program: str, **data: Any) -> RunConfig:
    rows = [{"prompt": "say é\n 1", "answer": "1"}, {"prompt": [{"role": "user", "content": " 2 "}], "answer": "2"}]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"kind": "jsonl", "path": str(folder / "data.jsonl"), "environment": "world"}
    return validate(
        {
            "model": {"path": str(folder)},
            "data": {"sources": [source], **data},
            "environments": [{"name": "world", "kind": "python", "function": f"{PROGRAMS}:{program}"}],
            "run": {"name": "tools", "steps": 1},
        },
        "the test",
    )


@pytest.mark.parametrize("family", [each for each in FAMILIES if each.tools], ids=lambda family: family.name)
async def test_the_first_context_of_a_rollout_is_its_groups_prompt(family: Family, tmp_path: Path) -> None:
    save_family(family, tmp_path)
    config = config_of(tmp_path, "Adder", system_prompt="Be brief." if family.system else "")
    source = PromptSource(config)
    chat = ChatFormat(tmp_path, config.data)
    tools = (await LoadedProgram(Adder()).start({}))["tools"]
    for number in range(2):
        prompt = source.prompt(number)
        messages = msgspec.json.decode(prompt.row, type=Row).messages
        call = Recorder(chat, prompt.tokens).plan(messages, tools)
        assert call.tokens == prompt.tokens
        assert ("only this object knows" in chat.decode(prompt.tokens)) == ("tools" in family.template)


def test_prompts_show_only_tools_common_to_all_rows(tmp_path: Path) -> None:
    save_family(FAMILIES[0], tmp_path)
    digests = {name: PromptSource(config_of(tmp_path, name)).digest for name in ("Adder", "Unlisted", "Digits")}
    assert digests["Unlisted"] == digests["Digits"] != digests["Adder"]


def test_a_template_without_tools_is_reported(tmp_path: Path) -> None:
    save_family(FAMILIES[0], tmp_path)
    [remark] = PromptSource(_plain(tmp_path)).remarks
    assert remark.what == "the chat template does not show the environment's tools to the model: add"
    found = [each for each in data(_plain(tmp_path)) if each.state == "note"]
    assert [(each.what, each.detail, each.remedy) for each in found] == [("data source main", remark.what, remark.remedy)]


def _plain(folder: Path) -> RunConfig:
    config = config_of(folder, "Adder", chat_template=False)
    rows = [{"prompt": "say 1", "answer": "1"}]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return config


@pytest.mark.parametrize(("program", "why"), [("Missing", "has no attribute 'absent'"), ("Nothing", "has no 'Nothing'")])
def test_unloadable_code_is_named_before_the_run_starts(program: str, why: str, tmp_path: Path) -> None:
    save_family(FAMILIES[0], tmp_path)
    with pytest.raises(DataError, match=f"environment 'world' cannot be used: .*{why}"):
        PromptSource(config_of(tmp_path, program))


def test_environment_code_is_loaded_without_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SOME_API_TOKEN", "hidden")
    (tmp_path / "own.py").write_text(
        "import os\nprint('loading')\nassert 'SOME_API_TOKEN' not in os.environ\nclass Own:\n    tools = []\n"
    )
    save_family(FAMILIES[0], tmp_path)
    config = config_of(tmp_path, "Adder")
    own = config.environments[0].model_copy(update={"function": f"{tmp_path / 'own.py'}:Own"})
    PromptSource(config.model_copy(update={"environments": [own]}))
    assert "loading" in capfd.readouterr().err, "its output is not taken for the answer"


async def test_rollouts_share_a_prompt_or_context_with_their_tools(tmp_path: Path, server: RedisServer) -> None:
    given = [*overrides(tmp_path, "python", "Adder"), f"sampling.group_size={N}", "data.max_prompt_tokens=1024"]
    async with fleet(tmp_path, server, *given) as (service, _), environment(service.config):
        (tmp_path / "data.jsonl").write_text('{"prompt": "say 0", "answer": "0"}\n')
        prompt = PromptSource(service.config).prompt(0)
        tickets = [_ticket(0, prompt.tokens, more=False), _ticket(1, prompt.tokens, more=True)]
        fence = await service.store.run.lead("test", 60_000)
        assert await service.store.tickets.issue(fence, 0, tickets, b"order", {}, 0, {"main"}) == 2
        found = {header.ticket: (header, payload) for header, payload in await groups(service.store, 2)}
        header, payload = found["0-0"]
        assert (header.contexts, len(payload.context)) == ([], 0)
        header, payload = found["0-1"]
        assert header.contexts == [1] * N, "both rollouts share a context, which a row stores once"
        assert min(header.context_tokens) > len(prompt.tokens)
        assert len(payload.context) == sum(header.context_tokens)


def _ticket(row: int, prompt: list[int], more: bool) -> Ticket:
    encoded = msgspec.json.encode(Row([{"role": "user", "content": "say 0"}], {"more": more})).decode()
    return msgspec.structs.replace(ticket(row, row=encoded, group_size=N), prompt=prompt)
