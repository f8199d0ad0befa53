"""The typed client against real endpoints of every service: each endpoint has a method, each response a model."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from fastapi.routing import APIRoute

from services.console.__main__ import main
from services.console.run.redis_server import RedisServer
from services.http.client import ApiError, Client
from services.runtime.portal import Portal
from tests.api_fuzz.world import endpoints

OPERATE = "operate-token"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, server: RedisServer) -> Iterator[dict[str, str]]:
    """Serve one service of each kind; yield their addresses by kind."""
    portal = Portal()
    world = endpoints(tmp_path_factory.mktemp("served"), server, "served")
    found = portal.call(world.__aenter__())
    source = inspect.getsource(Client)
    for _, app in found.values():
        for route in app.routes:
            if (
                isinstance(route, APIRoute) and route.include_in_schema and not route.path.startswith("/v1/console/")
            ):  # endpoints that only the page uses
                assert f'"{route.path.partition("{")[0]}' in source, f"the client has no method for {route.path}"
    yield {kind: url for kind, (url, _) in found.items()}
    portal.call(world.__aexit__(None, None, None))
    portal.close()


@pytest.mark.parametrize("token", ["secretA\nsecretB", "sécret", "secret\x1b[A"])
def test_a_token_that_cannot_be_sent_is_not_quoted(token: str) -> None:
    with pytest.raises(ApiError, match="not one line of printable ASCII") as refused:
        Client("http://127.0.0.1:1", token)
    assert "cret" not in str(refused.value)


def test_every_endpoint_has_a_client_method(served: dict[str, str]) -> None:
    with Client(served["generator"], OPERATE) as pod:
        assert pod.live().alive
        assert pod.ready().ready
        assert "# HELP" in pod.metrics()
        assert pod.state().pod.kind == "generator"
        wanted = pod.pause(mode="drain", why="night", who="tester")
        assert (wanted.role, wanted.mode, wanted.why, wanted.waiting_for) == ("generator", "drain", "tester: night", [])
        state = pod.state().state
        assert state is not None
        assert state.pause_modes == {"generator": "drain"}
        resumed = pod.resume(why="morning", who="tester")
        assert (resumed.paused, resumed.why) == (False, "tester: morning")
        assert pod.state().state.last_resume == "tester: morning"  # type: ignore[union-attr]
        assert pod.scale(2, "more").replicas == 2
        with pytest.raises(ApiError, match="at most 200 characters"):
            pod.scale(2, "x" * 201)
        assert pod.drain("a new driver", "ada").draining
        assert pod.state().pod.draining == "ada: a new driver"
    with Client(served["dataprep"], OPERATE) as data:
        assert data.pause_run("abort", why="night").desired == "paused"
        assert data.resume_run("dawn", "ada").desired == "running"
        assert data.state().state.last_resume == "ada: dawn"  # type: ignore[union-attr]
        assert data.ledger()["ledger:issued"] == data.audit().issued == 10
        assert data.buffer(limit=2).size == 4
        assert len(data.group("0-0").completions) == 4
        assert data.step(0).step == 0
        assert data.sync().published == data.state().state.published_version  # type: ignore[union-attr]
        (letter,) = data.dead_letters().letters
        assert data.dead_letter(letter.id).ticket == letter.ticket
        assert [one.id for one in data.requeue([letter.id]).requeued] == [letter.id]
        assert data.requeue("all").requeued == []
        with pytest.raises(ApiError, match="unknown ticket 0-99") as refused:
            data.group("0-99")
        assert refused.value.status == 404
    with Client(served["trainer"], OPERATE) as trainer:
        assert trainer.checkpoints().checkpoints == []
        assert trainer.checkpoint("now", wait_s=0.1).saved is False
        with pytest.raises(ApiError, match="does not exist"):
            trainer.restore(3)


def test_an_id_is_not_part_of_the_address(served: dict[str, str]) -> None:
    with Client(served["dataprep"], OPERATE) as data:
        for strange in ("../ledger", "0-0?limit=1#x", "0-0\n", "..%2fledger"):
            with pytest.raises(ApiError, match=r"groups|ticket|Not Found") as refused:
                data.group(strange)
            assert refused.value.status in (404, 422), strange
        with pytest.raises(ApiError, match="is not a valid address"):
            data.group("9" * 70_000)


class _Garbled(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Encoding", "gzip")
        self.end_headers()
        self.wfile.write(b"not compressed")

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


def test_a_response_that_cannot_be_decoded_is_an_error() -> None:
    with HTTPServer(("127.0.0.1", 0), _Garbled) as server:
        threading.Thread(target=server.handle_request).start()
        with Client(f"http://127.0.0.1:{server.server_port}") as client, pytest.raises(ApiError, match="check the proxies"):
            client.ready()


def test_forbidden_calls_and_unreachable_pods_are_errors(served: dict[str, str]) -> None:
    with Client(served["tracker"], "read-token") as reader:
        assert reader.state().run == "served"
        with pytest.raises(ApiError, match="this token is read-only") as refused:
            reader.pause("trainer")
        assert refused.value.status == 403
    with Client(served["tracker"]) as nobody, pytest.raises(ApiError, match="there is no token: send the header"):
        nobody.state()
    with Client(served["tracker"], OPERATE) as client, pytest.raises(ApiError, match="a tracker cannot be paused"):
        client.pause()
    with Client("http://127.0.0.1:1", OPERATE) as away, pytest.raises(ApiError, match="check its address"):
        away.ready()


def test_commands_work_through_the_api(
    served: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "token").write_text(OPERATE)
    given = ["--api", served["dataprep"], "--token-file", str(tmp_path / "token")]
    assert main(["pause", "--mode", "abort", "--wait", "0.2", *given]) == 0
    assert capsys.readouterr().out == "generator, dataprep, trainer paused\n"
    with Client(served["dataprep"], OPERATE) as client:
        state = client.state().state
    assert state is not None
    assert state.pause_modes == {"generator": "abort", "dataprep": "keep", "trainer": "keep"}
    assert main(["resume", "--why", "day", *given]) == main(["scale", "generators", "3", *given]) == 0
    with Client(served["dataprep"], OPERATE) as client:
        state = client.state().state
    assert state is not None
    assert (state.paused, state.last_resume.partition(": ")[2]) == ({}, "day")
    assert main(["pause", *given[:2]]) == 2
    assert "no token: give --token-file" in capsys.readouterr().err
    assert main(["stop", "--api", served["trainer"], *given[2:]]) == 2
    assert "Not Found" in capsys.readouterr().err
