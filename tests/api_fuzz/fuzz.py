"""The fuzzer: every endpoint in turn until time is up, with valid and invalid requests, with and without a valid token."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import Counter
from collections.abc import Collection
from typing import Any

import hypothesis
import requests
import schemathesis
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from tests.api_fuzz.world import ENDLESS

CHECKS = [
    content_type_conformance, not_a_server_error, response_headers_conformance, response_schema_conformance,
    status_code_conformance, unsupported_method,
]  # fmt: skip
ROUND = 20  # requests to an endpoint in each turn
LONGEST_WAIT_S = 0.05
LIMIT_S = 120.0  # for a response, in place of schemathesis' 10 s: all services and this client share one interpreter

SESSION = requests.Session()
HEADERS = ({}, {"Authorization": "Bearer read-token"}, {"Authorization": "Bearer operate-token"})


def fuzz(urls: dict[str, str], seconds: float, seed: int = 0, wanted: Collection[str] = ()) -> Counter[str]:
    """Send requests to services by kind, for at least this long and until each wanted status has occurred.

    Returns how many responses had each status. Raises on the first response that does not match its description, and on every
    5xx.
    """
    schemas = {kind: schemathesis.openapi.from_url(f"{url}/openapi.json", timeout=LIMIT_S) for kind, url in urls.items()}
    operations = [
        (kind, found.ok())
        for kind, schema in schemas.items()
        for found in schema.get_all_operations()
        if isinstance(found, Ok) and found.ok().path != ENDLESS
    ]
    answers = Counter[str]()
    turns = itertools.cycle((kind, one, mode) for kind, one in operations for mode in GenerationMode)
    deadline = time.monotonic() + seconds
    for turn, (kind, operation, mode) in enumerate(turns):
        if time.monotonic() > deadline and answers.keys() >= set(wanted):
            break
        _turn(operation, mode, urls[kind], seed + turn, answers)
    return answers


def _turn(operation: Any, mode: GenerationMode, url: str, seed: int, answers: Counter[str]) -> None:
    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=ROUND, deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate],
    )  # fmt: skip
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        query = case.query or {}
        if "wait_s" in query:
            try:
                long = float(query["wait_s"]) > LONGEST_WAIT_S
            except (TypeError, ValueError):
                long = False
            if long:
                query["wait_s"] = LONGEST_WAIT_S
        for headers in HEADERS:
            answer = case.call(base_url=url, headers=headers, session=SESSION, timeout=LIMIT_S)
            answers[str(answer.status_code)] += 1
            if answer.status_code >= 500 and not operation.path.startswith("/health"):
                raise AssertionError(f"{operation.label}: {answer.status_code} {answer.text}\n{case.as_curl_command(headers)}")
            case.validate_response(answer, checks=CHECKS)

    with contextlib.suppress(hypothesis.errors.Unsatisfiable):  # no request to this endpoint can be invalid
        send()
