"""Every service responds to any request as its OpenAPI document says: a short run of `python -m tests.api_fuzz`."""

from __future__ import annotations

from pathlib import Path

import httpx
from fastapi import FastAPI
from fastapi.routing import APIRoute

from services.console.run.redis_server import RedisServer
from services.runtime.portal import Portal
from tests.api_fuzz.world import ENDLESS, endpoints

SECONDS = 12.0


def test_responses_to_any_request_match_the_openapi_document(tmp_path: Path) -> None:
    from tests.api_fuzz.__main__ import fuzzed  # which imports schemathesis: not for every worker

    reached = {"200", "401", "403"}
    answers = fuzzed(tmp_path, SECONDS, seed=0, wanted=reached)
    assert reached <= answers.keys(), "the fuzzer reached nothing"


def test_every_endpoint_is_protected_and_documented(tmp_path: Path, server: RedisServer) -> None:
    """Without a token: 401 everywhere under /v1. With the read scope: 403 on every endpoint that changes something."""
    portal = Portal()
    try:
        served = endpoints(tmp_path, server, "guarded-routes")
        found = portal.call(served.__aenter__())
        try:
            with httpx.Client(timeout=60) as http:
                for url, app in found.values():
                    for method, path in _routes(app):
                        _guarded(http, url, method, path)
                        if path.startswith("/v1/") and path != "/v1/generate":  # used between services, and not part of the API
                            _described(app.openapi()["paths"][path][method.lower()])
        finally:
            portal.call(served.__aexit__(None, None, None))
    finally:
        portal.close()


def _guarded(http: httpx.Client, url: str, method: str, path: str) -> None:
    place, inner = url + path.replace("{id}", "0-0").replace("{n}", "0"), path.startswith("/v1/")
    assert http.request(method, place).status_code == (401 if inner else 200), (method, path)
    wrong = http.request(method, place, headers={"Authorization": "Bearer guessed"})
    assert wrong.status_code == (401 if inner else 200), (method, path)
    reading = http.request(method, place, headers={"Authorization": "Bearer read-token"})
    assert (reading.status_code == 403) == (inner and method != "GET"), (method, path, reading.text)


def _routes(app: FastAPI) -> list[tuple[str, str]]:
    routes = [route for route in app.routes if isinstance(route, APIRoute) and route.path != ENDLESS]
    found = [(method, route.path) for route in routes for method in route.methods]
    assert len(found) >= 6
    return found


def _described(operation: dict[str, object]) -> None:
    assert operation["description"], "an endpoint needs a description"
    responses: dict[str, dict[str, dict[str, object]]] = operation["responses"]  # type: ignore[assignment]
    assert {"200", "401", "503"} <= responses.keys()
    assert "application/json" in responses["200"]["content"]
    assert all("application/problem+json" in answer["content"] for status, answer in responses.items() if int(status) >= 400)
