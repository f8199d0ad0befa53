"""Sends single requests to services of a run.

Guarantees: the certificate is checked as `[api]` says; every wait has a limit; no message contains a token.
"""

from __future__ import annotations

import ssl
from typing import Any

import httpx
import msgspec

from services.config.root import Api
from services.http.certificate import shared_name

ANSWER_LIMIT_S = 30.0  # in addition to the time that a request asks the service to wait


class Unanswered(Exception):
    """A service cannot be reached or refused the request. `status` is 0 when there was no response."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


def ask(
    api: Api,
    method: str,
    url: str,
    *,
    token: str = "",
    body: Any = None,
    wait_s: float = 0.0,
    accepted: int = 0,
    server_name: str = "",
) -> dict[str, Any]:
    """Return the JSON object that a service answers. Raise `Unanswered` otherwise.

    `url`: address and path. `wait_s`: how long the service is asked to wait. `accepted`: an error status that is an answer, too.
    `server_name`: name in the certificate; default: the first in the pods' own, if it is on this machine.
    """
    if not (token.isascii() and token.isprintable()):  # httpx would quote it
        raise Unanswered("the API token is not one line of printable ASCII characters: correct it where it is stored")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    name = server_name or shared_name(api)
    extensions = {"sni_hostname": name} if name else {}
    try:
        trusted = ssl.create_default_context(cafile=api.ca_file) if api.ca_file else True
    except (OSError, ssl.SSLError) as error:
        raise Unanswered(f"api.ca_file = {api.ca_file!r} cannot be used: {error}; set it to a PEM file of certificates") from None
    try:
        with httpx.Client(verify=trusted, timeout=ANSWER_LIMIT_S + wait_s, trust_env=False) as http:  # past any proxy
            params = {"wait_s": wait_s} if wait_s else {}
            answer = http.request(method, url, json=body, headers=headers, params=params, extensions=extensions)
            found = msgspec.json.decode(answer.content, type=dict[str, Any])
    except (httpx.InvalidURL, httpx.RequestError) as error:
        raise Unanswered(f"{url} cannot be reached ({error}): check its address and that the service is running") from None
    except msgspec.MsgspecError:
        raise Unanswered(f"{url} did not answer JSON: check that it is a service of a run") from None
    if answer.is_success or answer.status_code == accepted:
        return found
    raise Unanswered(f"{url}: {found.get('detail', f'status {answer.status_code}')}", answer.status_code)
