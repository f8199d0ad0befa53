"""Checks of the model's folder: its configuration, its weights as their headers describe them, its tokenizer and chat template.

Guarantees: no weights are read, only headers; every file that the run needs has been opened.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.config import ConfigError, RunConfig
from services.config.derived import context_of
from services.config.model_files import check_model, check_path, largest_token_id
from services.console.doctor import Finding, fault, note, ok, told

HEADER_LIMIT_BYTES = 100 * 2**20  # that of the safetensors library
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Weights:
    """The contents of the headers of a model's files."""

    shapes: Mapping[str, Sequence[int]]
    """Sizes of each tensor by its name."""
    files: int

    @property
    def parameters(self) -> int:
        """Number of all parameters."""
        return sum(map(math.prod, self.shapes.values()))


def model(config: RunConfig) -> Iterator[Finding]:
    """Check that the model's folder is complete, whole, and fits the run."""
    given = f"model.path = {config.model.path!r}"
    try:
        check_path(config.model.path)
    except ConfigError as error:
        yield told("model", error)
        return
    folder = folder_of(config.model.path)
    if folder is None:
        if (offline := os.environ.get("HF_HUB_OFFLINE", "")).upper() in ("1", "ON", "YES", "TRUE"):  # as huggingface_hub reads it
            detail = f"{given} is not a folder here, and HF_HUB_OFFLINE={offline} prevents the download of a model of that name"
            yield fault("model", detail, "set a folder, or unset HF_HUB_OFFLINE")
        else:
            yield note("model", f"{given} is downloaded from the Hugging Face Hub", "set a folder if that is not intended")
        return
    faults = [*_files(given, folder), *_fits(config, given, folder)]
    yield from faults
    if not faults:
        found = weights_of(folder)
        assert not isinstance(found, str)
        yield ok(
            "model",
            f"{folder}: {found.parameters:,} parameters, context {context_of(folder) or 'unknown'}, "
            f"{largest_token_id(folder) + 1} tokens",
        )


def folder_of(path: str) -> Path | None:
    """Return the folder of a model: the named one, or that of an earlier download from the hub; None if there is none."""
    if Path(path).is_dir():
        return Path(path)
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    cache = Path(os.environ.get("HF_HUB_CACHE", home / "hub")) / f"models--{path.replace('/', '--')}"
    try:
        snapshot = cache / "snapshots" / (cache / "refs" / "main").read_text().strip()
    except OSError:
        return None
    return snapshot if _complete(snapshot) else None


def _complete(snapshot: Path) -> bool:
    """Return whether a download has all that a run needs. One that was interrupted continues when services load the model."""
    wanted = all((snapshot / name).is_file() for name in ("config.json", "tokenizer.json"))
    return wanted and any(snapshot.glob("*.safetensors")) and not isinstance(weights_of(snapshot), str)


def weights_of(folder: Path) -> Weights | str:
    """Return the contents of the headers of the model's files, or the fault of one of them."""
    index = folder / INDEX
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    if index.is_file():
        try:
            listed = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError):
            return f"{index.name} is not valid"
        if missing := [name for name in listed if name not in names]:
            return (
                f"{', '.join(missing[:3])} of {len(listed)} files in {index.name} {'is' if len(missing) == 1 else 'are'} missing"
            )
        names = listed
    shapes: dict[str, Sequence[int]] = {}
    for name in names:
        found = _shapes(folder / name)
        if isinstance(found, str):
            return f"{name} {found}"
        shapes |= found
    return Weights(shapes, len(names))


def _shapes(file: Path) -> dict[str, Sequence[int]] | str:
    """Return the sizes of the tensors in a safetensors file, or what is wrong with it."""
    size = file.stat().st_size
    with file.open("rb") as body:
        length = int.from_bytes(body.read(8), "little")
        if size < 8 or length > min(HEADER_LIMIT_BYTES, size - 8):
            return f"has {size} bytes and no complete header"
        try:
            header: dict[str, Any] = json.loads(body.read(length))
        except ValueError:
            return "has a header that is not valid"
    header.pop("__metadata__", None)
    described = 8 + length + max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
    if described != size:
        return f"has {size} bytes, but its header describes {described}"
    return {name: tensor["shape"] for name, tensor in header.items()}


def _files(given: str, folder: Path) -> Iterator[Finding]:
    """Find files that are missing, and weights that are not whole."""
    missing = [name for name in ("config.json", "tokenizer.json") if not (folder / name).is_file()]
    if not any(folder.glob("*.safetensors")):
        missing.append("*.safetensors")
    if missing:
        yield fault("model", f"{given} has no {', '.join(missing)}", "save model and tokenizer there with save_pretrained")
    found = weights_of(folder)
    if isinstance(found, str):
        yield fault("model", f"{given}: {found}", "copy or download the file again")


def _fits(config: RunConfig, given: str, folder: Path) -> Iterator[Finding]:
    """Find mismatches of context, vocabulary, heads and chat template."""
    try:
        check_model(config)
    except ConfigError as error:
        yield told("model", error)
        return
    if (folder / "config.json").is_file() and "model_type" not in json.loads((folder / "config.json").read_text()):
        yield fault("model", f"{given}: its config.json has no model_type", "save the model with save_pretrained")
    context = context_of(folder)
    if context is not None and config.model.max_tokens > context:
        detail = f"model.max_tokens = {config.model.max_tokens} exceeds the model's context of {context} tokens"
        yield fault("model", detail, f"lower it to {context}, or remove it")
    yield from _adapted(config, weights_of(folder))
    if not (folder / "tokenizer.json").is_file():
        return
    from services.dataprep.prompts.tokenizer import PromptTokenizer

    try:
        PromptTokenizer(folder, config.data)
    except ConfigError as error:
        yield told("tokenizer", with_model_path(error, config))


def _adapted(config: RunConfig, weights: Weights | str) -> Iterator[Finding]:
    """Find targets of adapters that are no matrix of the model's numbered blocks, where its linear layers are."""
    if isinstance(weights, str) or not weights.shapes:
        return
    matrices = [name.split(".") for name, shape in weights.shapes.items() if name.endswith(".weight") and len(shape) == 2]
    layers = {parts[-2] for parts in matrices if any(map(str.isdigit, parts))}
    if layers and (unknown := sorted(set(config.lora.targets) - layers)):
        detail = f"lora.targets names {unknown}, which model.path = {config.model.path!r} lacks"
        yield fault("model", detail, f"choose among its linear layers {sorted(layers)}")


def with_model_path(error: Exception, config: RunConfig) -> ConfigError:
    """Return an error of the tokenizer with the value of the key that it names."""
    return ConfigError(str(error).replace("model.path:", f"model.path = {config.model.path!r}:", 1))
