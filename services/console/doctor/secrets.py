"""Checks of a run's trackers and traces, and of the endpoints' secrets and certificates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from services.config import ConfigError, RunConfig
from services.console.doctor import Finding, note, ok, told
from services.http.credentials import API_TOKEN_ENV, api_tokens
from services.runtime.process_tools import CONFIG_ENV
from services.runtime.tracing import check_tracing
from services.runtime.tracking import check_tracking


def secrets(config: RunConfig, environ: Mapping[str, str], own: bool) -> Iterator[Finding]:
    """Check trackers' keys and the endpoints' tokens and certificates. `own`: `grpo run` starts all services, and creates tokens,
    which no pod does.
    """
    from services.http.certificate import load_certificate

    given = bool(config.api.token_file or environ.get(API_TOKEN_ENV, "").strip())

    def needed() -> None:
        if config.api.certificate_file:
            load_certificate(config.api)
        if config.api.token_file or (not own and (given or CONFIG_ENV in environ)):
            api_tokens(config)

    faults = list[Finding]()
    for check in (lambda: check_tracking(config, environ), lambda: check_tracing(config), needed):
        try:
            check()
        except ConfigError as error:
            faults.append(told("secrets", error))
    if faults:
        yield from faults
        return
    if not own and not given:
        detail = "none; grpo run creates them, but services that are started in another way do not"
        yield note("API tokens", detail, f"for these, set api.token_file or {API_TOKEN_ENV}")
    speaks = "TLS" if config.api.certificate_file else "plain HTTP"
    if not config.api.certificate_file and config.api.host not in ("127.0.0.1", "::1", "localhost"):
        yield note("endpoints", f"plain HTTP on {config.api.host}", "set api.certificate_file (docs/security.md)")
    else:
        yield ok("endpoints", f"{speaks} on {config.api.host}")
