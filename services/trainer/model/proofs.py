"""Records which models are verified: verifies an unknown one, and stores results by digest.

Guarantees: a model passes if it was proven on this software, or is now; otherwise it is refused with the figures. A model in
bfloat16 is proven in float32, where a mistake cannot hide in rounding, and in bfloat16, with the kernels of attention that train
it. If it is to be compiled, it is also proven with its blocks and output layer compiled.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from services.trainer.model.attention import UnsupportedModel, flash4, is_out_of_memory
from services.trainer.model.proof import OwnLogprobs, Proof, ProofRow, Score, alone, compare
from services.trainer.model.support import named

FLOAT32_BYTES = 4
ROOM = 1.5
"""Memory for a proof in float32, as a multiple of the parameters: the largest gradients and activations besides."""


class Proofs:
    """Results of verification, in files of `folder` named by digest."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def known(self, digest: str) -> bool:
        """Return whether a model of this digest was proven."""
        return (self._folder / f"{digest}.json").is_file()

    def keep(self, digest: str, proofs: Sequence[Proof]) -> None:
        """Keep the proofs of a model. A folder that cannot be written costs only another proof at the next start."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            text = json.dumps([asdict(proof) for proof in proofs])
            (self._folder / f"{digest}.json").write_text(text, encoding="utf-8")
        except OSError:
            return


def prove(
    model: Any,
    path: str,
    attach: Callable[[], Score],
    compilation: Callable[[], None] | None,
    settings: Sequence[object],
    proofs: Proofs,
    device: torch.device,
) -> None:
    """Call `attach`, which gives the model its logprob head and returns what scores packed rows, and prove the model; then again
    after `compilation`, if given.

    Tries it on `device` if it fits there. Raises `UnsupportedModel` if it fails or differs.
    """
    key = digest(model, (*settings, device.type))
    if proofs.known(key):
        attach()
        return
    model.to(_place(model, device))
    row = ProofRow.of(model.config.get_text_config().vocab_size, model.device)
    with _blamed(f"{named(model, path)} fails in packed rows, use another model"):
        as_is = alone(model, row)
        score, found = _try(model, attach, row, as_is)
    if compilation is not None and model.device.type == device.type:  # otherwise other code would be compiled
        with _blamed(f"{named(model, path)} fails when it is compiled, set trainer.compile = false"), _forgotten():
            compilation()
            found.append(replace(compare(model, score, row, as_is), compiled=True))
    model.to("cpu")
    for proof in found:
        _refuse(model, path, proof)
    proofs.keep(key, found)


@contextmanager
def _forgotten() -> Iterator[None]:
    """Forget what is compiled inside the block: it suits the few tokens of a proof, and training would find it in caches."""
    import torch._inductor.config as inductor

    with inductor.patch(force_disable_caches=True):
        yield
    torch._dynamo.reset()


@contextmanager
def _blamed(what: str) -> Iterator[None]:
    """Raise whatever fails inside the block as `UnsupportedModel`, except a lack of memory."""
    try:
        yield
    except UnsupportedModel:
        raise
    except Exception as error:  # a model's code may raise anything for rows that it was not written for
        if is_out_of_memory(error):
            raise
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UnsupportedModel(f"{what}: {reason}") from error


def _try(model: Any, attach: Callable[[], Score], row: ProofRow, as_is: OwnLogprobs) -> tuple[Score, list[Proof]]:
    wide = model.dtype != torch.float32 and _fits(model)
    exact = None
    if wide:
        with _widened(model):
            exact = alone(model, row)
    score = attach()
    found = [compare(model, score, row, as_is)]
    if exact is not None:
        with _widened(model):
            found.append(compare(model, score, row, exact))
    return score, found


@contextmanager
def _widened(model: nn.Module) -> Iterator[None]:
    """Inside the block, compute in float32, from which the weights return without a change."""
    narrow = [
        (value, value.dtype)
        for value in (*model.parameters(), *model.buffers())
        if value.is_floating_point() and value.dtype != torch.float32
    ]
    for value, _ in narrow:
        value.data = value.data.float()
    try:
        yield
    finally:
        for value, dtype in narrow:
            value.data = value.data.to(dtype)


def _fits(model: nn.Module) -> bool:
    """Return whether there is memory for the model in float32 where it is."""
    need = ROOM * FLOAT32_BYTES * sum(parameter.numel() for parameter in model.parameters())
    device = next(model.parameters()).device
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] > need
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") > need


def _place(model: nn.Module, device: torch.device) -> torch.device:
    """Return `device`, or the CPU if it lacks memory."""
    if device.type != "cuda":
        return device
    need = ROOM * sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    return device if torch.cuda.mem_get_info(device)[0] > need else torch.device("cpu")


def digest(model: nn.Module, settings: Sequence[object]) -> str:
    """Return the SHA-256 (16 hex digits) of the model, the software that computes it, and `settings`.

    Of each parameter, name, shape and the first numbers count: reading all of a large model would take as long as the proof.
    """
    import transformers

    computed = torch.__version__, transformers.__version__, _gpu()
    found = hashlib.sha256(repr((*computed, *settings)).encode())
    for file in computed_by():
        found.update(file.read_bytes())
    config: Any = model.config
    found.update(config.to_json_string(use_diff=False).encode())
    for name, parameter in model.named_parameters():
        first = parameter.detach().reshape(-1)[:64].float().cpu().numpy()
        found.update(repr((name, tuple(parameter.shape), parameter.dtype)).encode() + first.tobytes())
    return found.hexdigest()[:16]


def computed_by() -> list[Path]:
    """Return the files of the code that computes a model."""
    return sorted(Path(__file__).parent.rglob("*.py"))


def _gpu() -> str:
    """Return what determines which kernels a GPU computes with; empty without one."""
    return f"{torch.cuda.get_device_name()} {flash4.installed()}" if torch.cuda.is_available() else ""


def _refuse(model: Any, path: str, proof: Proof) -> None:
    """Raise `UnsupportedModel` with the figures unless the proof holds."""
    if not proof.holds:
        when, remedy = (" when it is compiled", "set trainer.compile = false") if proof.compiled else ("", "use another model")
        raise UnsupportedModel(
            f"{named(model, path)} gives different results in packed rows than alone{when}: logprobs differ by up to "
            f"{proof.gap:.2g} nats and the gradient's norm by {proof.norm_gap:.1%} in {proof.dtype}, where rounding explains "
            f"{proof.rounding:.1g} nats and {proof.norm_rounding:.1%}: {remedy} (docs/models.md)"
        )
