"""Checks of a run's model and tokenizer, its trackers, and the endpoints' secrets and certificates."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from services.config import ConfigError, RunConfig
from services.config.model_files import check_model, largest_token_id
from services.console.doctor import Finding, fault, note, ok, told
from services.runtime.http.credentials import api_tokens
from services.runtime.tracking import check_tracking


def model(config: RunConfig) -> Iterator[Finding]:
    """Check that the model's folder is complete and its tokenizer fits."""
    folder = Path(config.model.path)
    if not folder.is_dir():
        offline = os.environ.get("HF_HUB_OFFLINE") == "1"
        detail = f"model.path = {config.model.path!r} is not a folder here, so it is used as the name of a Hugging Face Hub model"
        if offline:
            yield fault("model", f"{detail}, but HF_HUB_OFFLINE=1 prevents the download", "set a folder, or unset HF_HUB_OFFLINE")
        else:
            yield note("model", detail, "set model.path to a folder if that is not intended")
        return
    missing = [name for name in ("config.json", "tokenizer.json") if not (folder / name).is_file()]
    if not any(folder.glob("*.safetensors")):
        missing.append("*.safetensors")
    if missing:
        remedy = "save model and tokenizer there with save_pretrained"
        yield fault("model", f"{folder} has no {', '.join(missing)}", remedy)
        return
    try:
        check_model(config)
    except ConfigError as error:
        yield told("model", error)
        return
    yield ok("model", f"{folder}: weights, and a tokenizer with {largest_token_id(folder) + 1} tokens")


def secrets(config: RunConfig, environ: Mapping[str, str], own: bool) -> Iterator[Finding]:
    """Check trackers' keys and the endpoints' tokens and certificates; `grpo run` creates the tokens of its `own` runs."""
    from services.runtime.http.certificate import load_certificate

    try:
        check_tracking(config, environ)
        if config.api.certificate_file:
            load_certificate(config.api)
        if config.api.token_file or not own:
            api_tokens(config)
    except ConfigError as error:
        yield told("secrets", error)
        return
    speaks = "TLS" if config.api.certificate_file else "plain HTTP"
    if not config.api.certificate_file and config.api.host not in ("127.0.0.1", "::1", "localhost"):
        yield note(
            "endpoints", f"plain HTTP on {config.api.host}", "set api.certificate_file and api.key_file (docs/security.md)"
        )
    else:
        yield ok("endpoints", f"{speaks} on {config.api.host}")
