"""Writes the trained model as a Hugging Face folder.

Guarantees: the folder appears complete, with `manifest.json` as its completion marker, or not at all; the marker names the run,
the step and the SHA-256 of every file, which `atomic_folders.verify` compares; tied matrices are stored once; the folder loads
with `from_pretrained`, samples by default as the run did, has the run's chat template, and serves in vLLM unchanged. Adapters are
merged into the model. They are also stored next to it in peft's own format, for use on top of `model.path`.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoTokenizer, GenerationConfig

from services.config import RunConfig
from services.config.generation import Sampling
from services.runtime import atomic_folders
from services.runtime.atomic_folders import FolderError, FolderManifest
from services.trainer import ranks
from services.trainer.model import configuration, lora

ADAPTER = "adapter"
"""Folder inside an export that holds its adapters."""
OF_LOADING = ("is_local", "local_files_only")
"""Fields in which transformers would record how a tokenizer was loaded, which depends on the process."""


def write(module: Any, config: RunConfig, step: int, folder: Path, rank: int, zero_stage: int) -> None:
    """Write `module`, trained up to and including `step`, with tokenizer and sampling defaults to `folder`, replacing it.

    Collective; rank 0 writes. Under ZeRO-3 parameters are gathered one at a time. Rank 0 holds all of them in host memory, and
    adapted ones twice. Raises `FolderError` on every rank.
    """
    state = whole_state(module, zero_stage, keep=rank == 0)
    ranks.agree(save(module, state, config, step, folder) if rank == 0 else "", FolderError)


def whole_state(module: nn.Module, zero_stage: int, keep: bool) -> dict[str, Tensor]:
    """Return every parameter and persistent buffer, whole, on the CPU, by name, or {} unless `keep`. Collective under ZeRO-3.

    The names of one tied parameter share one tensor.
    """
    copies: dict[int, Tensor] = {}
    for parameter in module.parameters():  # each once, tied or not
        if zero_stage == 3:
            import deepspeed

            with deepspeed.zero.GatheredParameters([parameter]):
                if keep:
                    copies[id(parameter)] = parameter.detach().cpu().clone()
        elif keep:
            copies[id(parameter)] = parameter.detach().cpu().clone()
    if not keep:
        return {}
    persistent = module.state_dict(keep_vars=True)
    return {name: copies[id(value)] if id(value) in copies else value.detach().cpu() for name, value in persistent.items()}


def save(module: Any, state: dict[str, Tensor], config: RunConfig, step: int, folder: Path, owner: int = 0) -> str:
    """Write the whole `state` of `module`. Returns why that failed, or an empty string.

    `owner`: a number that no other process has which may write to `folder` at the same time.
    """
    try:
        partial = atomic_folders.begin(folder, owner)
        with configuration.as_in_folder(module.config, config.model.path):
            module.save_pretrained(partial, state_dict=lora.merged_state(state, config.lora))
        if config.lora.rank:
            lora.save(module, state, partial / ADAPTER)
        tokenizer = AutoTokenizer.from_pretrained(config.model.path)
        if isinstance(config.data.chat_template, str):  # a template's text, or the name of one of the tokenizer's
            tokenizer.chat_template = tokenizer.get_chat_template(config.data.chat_template)
        for name in OF_LOADING:
            tokenizer.init_kwargs.pop(name, None)
        _save_tokenizer(tokenizer, partial)
        _generation_config(module, tokenizer, config.sampling).save_pretrained(partial)
        facts = {
            "run": config.run.name,
            "step": step,
            "model": type(module).__name__,
            "dtype": str(next(iter(state.values())).dtype).removeprefix("torch."),
        }
        atomic_folders.finish(partial, folder, FolderManifest(atomic_folders.records(partial), facts))
    except FolderError as error:
        return str(error)
    except OSError as error:
        return atomic_folders.explain(folder, error)
    except SafetensorError as error:
        return atomic_folders.explain(folder, _of_the_disk(error))
    except ValueError as error:  # transformers rejects defaults that contradict each other
        return f"cannot write {folder}: {error}"
    finally:
        atomic_folders.discard(atomic_folders.unfinished(folder, owner))  # it may be what fills the disk
    return ""


def _save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write a tokenizer. Raises `OSError`."""
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:  # the Rust library has no class of its own
        if type(error) is not Exception:
            raise
        raise _of_the_disk(error) from error


def _of_the_disk(error: Exception) -> OSError:
    """Return the system error behind one of safetensors or tokenizers, which holds only its text."""
    number = re.search(r"os error (\d+)", str(error))
    return OSError(int(number[1]), os.strerror(int(number[1]))) if number else OSError(str(error))


def _generation_config(module: Any, tokenizer: Any, sampling: Sampling) -> GenerationConfig:
    """Return the model's own defaults, overridden by the run's sampling, with the tokenizer's special tokens where the model has
    none.
    """
    own = module.generation_config.to_dict() if module.generation_config is not None else {}
    missing = {
        name: value
        for name in ("bos_token_id", "eos_token_id", "pad_token_id")
        if own.get(name) is None and (value := getattr(tokenizer, name)) is not None
    }
    ours = {"do_sample": True, "temperature": sampling.temperature, "top_p": 1.0, "top_k": 0}
    return GenerationConfig.from_dict(own | missing | ours)
