"""The trained model as a Hugging Face folder.

Guarantees: the folder appears whole, with a manifest of hashes as its completion marker, or not at all; tied matrices are
stored once; it loads with `from_pretrained` and serves in vLLM as it stands.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import AutoTokenizer

from services.trainer import folders, ranks
from services.trainer.folders import FolderError, Manifest


def write(module: Any, tokenizer_path: str, folder: Path, rank: int, zero_stage: int) -> None:
    """Write `module` and the tokenizer of `tokenizer_path` to `folder`, replacing it. Collective; rank 0 writes.

    Under ZeRO-3 one parameter at a time is gathered; rank 0 holds all of them in host memory. Raises `FolderError` on
    every rank.
    """
    state = whole_state(module, zero_stage, keep=rank == 0)
    ranks.agree(_write(module, state, tokenizer_path, folder) if rank == 0 else "", FolderError)


def whole_state(module: nn.Module, zero_stage: int, keep: bool) -> dict[str, Tensor]:
    """Every parameter and persistent buffer, whole, on the CPU, by name. Collective under ZeRO-3; {} where not `keep`.

    Names of one tied parameter share one tensor.
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


def _write(module: Any, state: dict[str, Tensor], tokenizer_path: str, folder: Path) -> str:
    try:
        partial = folders.begin(folder)
        module.save_pretrained(partial, state_dict=state)
        AutoTokenizer.from_pretrained(tokenizer_path).save_pretrained(partial)
        facts = {"model": type(module).__name__, "dtype": str(next(iter(state.values())).dtype).removeprefix("torch.")}
        folders.finish(partial, folder, Manifest(folders.digests(partial, 0, 1), facts))
    except FolderError as error:
        return str(error)
    except OSError as error:
        return folders.explain(folder, error)
    return ""
