"""Checks of a run's inputs: model and tokenizer, data, verifiers, trackers, and the endpoints' secrets and certificates."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from services.config import ConfigError, RunConfig
from services.config.data import FileSource, Source
from services.config.model_files import check_model, largest_token_id
from services.console.doctor import Finding, fault, note, ok, told
from services.runtime.http.credentials import api_tokens
from services.runtime.tracking import check_tracking

VERIFIER_PACKAGES = {"math": "math_verify", "reasoning_gym": "reasoning_gym"}


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


def data(config: RunConfig) -> Iterator[Finding]:
    """Check that the first row of every data source is valid."""
    for kind, sources in (("data", config.data.sources), ("evaluation", config.evaluation.sources)):
        for source in sources:
            yield _source(f"{kind} source {source.name}", source)


def _source(what: str, source: Source) -> Finding:
    if not isinstance(source, FileSource):
        if importlib.util.find_spec("reasoning_gym") is None:
            return fault(what, f"task {source.task} needs the package reasoning-gym", "run pip install 'grpo[dataprep]'")
        return ok(what, f"task {source.task} of reasoning-gym")
    if not Path(source.path).is_file():
        return fault(what, f"{source.path} does not exist", "set a path relative to the working directory, or an absolute path")
    try:
        fields = _first_row(source)
    except (OSError, ValueError) as error:
        return fault(what, f"{source.path} cannot be read as {source.kind}: {error}", "fix the file, or set the source's kind")
    missing = [name for name in (source.prompt_field, source.answer_field) if name not in fields]
    if missing:
        there = ", ".join(sorted(fields))
        return fault(
            what, f"{source.path} has no field {', '.join(missing)}", f"set prompt_field and answer_field; existing: {there}"
        )
    return ok(what, f"{source.path}: {source.prompt_field} and {source.answer_field}")


def _first_row(source: FileSource) -> set[str]:
    if source.kind == "parquet":
        import pyarrow.parquet

        return set(pyarrow.parquet.read_schema(source.path).names)
    with open(source.path, encoding="utf-8") as file:
        row = json.loads(next(line for line in file if line.strip()))
    if not isinstance(row, dict):
        raise ValueError("its first line is not a JSON object")
    return set(row)


def verifiers(config: RunConfig) -> Iterator[Finding]:
    """Check that the packages which the verifiers need are installed."""
    for kind in sorted({verifier.kind for verifier in config.verifiers}):
        package = VERIFIER_PACKAGES.get(kind)
        if package and importlib.util.find_spec(package) is None:
            yield fault(f"verifier {kind}", f"needs the package {package}", "run pip install 'grpo[generator]'")
        else:
            yield ok(f"verifier {kind}", "installed")


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
