"""Looks at what a run works with: model and tokenizer, data, verifiers, trackers, the endpoints' secrets and certificates."""

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
    """Whether the model's folder is whole, and its tokenizer fits."""
    folder = Path(config.model.path)
    if not folder.is_dir():
        offline = os.environ.get("HF_HUB_OFFLINE") == "1"
        detail = (
            f"model.path = {config.model.path!r} is no folder here: it is taken for the name of a model of the Hugging Face hub"
        )
        if offline:
            yield fault("model", f"{detail}, and HF_HUB_OFFLINE=1 forbids to fetch it", "give a folder, or unset HF_HUB_OFFLINE")
        else:
            yield note("model", detail, "give a folder, if it is not")
        return
    missing = [name for name in ("config.json", "tokenizer.json") if not (folder / name).is_file()]
    if not any(folder.glob("*.safetensors")):
        missing.append("*.safetensors")
    if missing:
        yield fault("model", f"{folder} has no {', '.join(missing)}", "save model and tokenizer there as Hugging Face formats")
        return
    try:
        check_model(config)
    except ConfigError as error:
        yield told("model", error)
        return
    yield ok("model", f"{folder}: weights and a tokenizer of {largest_token_id(folder) + 1} tokens")


def data(config: RunConfig) -> Iterator[Finding]:
    """Whether the first row of every source is one."""
    for kind, sources in (("data", config.data.sources), ("evaluation", config.evaluation.sources)):
        for source in sources:
            yield _source(f"{kind} source {source.name}", source)


def _source(what: str, source: Source) -> Finding:
    if not isinstance(source, FileSource):
        if importlib.util.find_spec("reasoning_gym") is None:
            return fault(what, f"task {source.task} needs the package reasoning-gym", "pip install 'grpo[dataprep]'")
        return ok(what, f"task {source.task} of reasoning-gym")
    if not Path(source.path).is_file():
        return fault(what, f"{source.path} is not there", "give its path from the working directory, or an absolute one")
    try:
        fields = _first_row(source)
    except (OSError, ValueError) as error:
        return fault(what, f"{source.path} cannot be read as {source.kind}: {error}", "mend the file, or set the source's kind")
    missing = [name for name in (source.prompt_field, source.answer_field) if name not in fields]
    if missing:
        there = ", ".join(sorted(fields))
        return fault(
            what, f"{source.path} has no field {', '.join(missing)}", f"set prompt_field and answer_field; there: {there}"
        )
    return ok(what, f"{source.path}: {source.prompt_field} and {source.answer_field}")


def _first_row(source: FileSource) -> set[str]:
    if source.kind == "parquet":
        import pyarrow.parquet

        return set(pyarrow.parquet.read_schema(source.path).names)
    with open(source.path, encoding="utf-8") as file:
        row = json.loads(next(line for line in file if line.strip()))
    if not isinstance(row, dict):
        raise ValueError("its first line is no JSON object")
    return set(row)


def verifiers(config: RunConfig) -> Iterator[Finding]:
    """Whether what they need is installed."""
    for kind in sorted({verifier.kind for verifier in config.verifiers}):
        package = VERIFIER_PACKAGES.get(kind)
        if package and importlib.util.find_spec(package) is None:
            yield fault(f"verifier {kind}", f"needs the package {package}", "pip install 'grpo[generator]'")
        else:
            yield ok(f"verifier {kind}", "can be used")


def secrets(config: RunConfig, environ: Mapping[str, str], own: bool) -> Iterator[Finding]:
    """Trackers' keys; tokens and certificates of the endpoints, which `grpo run` makes for its `own` run."""
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
