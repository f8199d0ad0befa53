"""Proves a model before it is trained: packed rows with shared prompts against the model alone, one sequence at a time.

Guarantees: a proof holds only if logprobs and the norm of their gradient agree up to rounding, which is measured. A model passes
if it was proven on this software, or is now; otherwise it is refused with the figures. A model in bfloat16 is proven in float32,
where a mistake cannot hide in rounding, and in bfloat16, with the kernels of attention that train it. If it is to be compiled, it
is also proven with its blocks and output layer compiled.

The model alone is transformers' own forward pass in evaluation mode, with its own attention, output layer and logits. It knows
nothing of this package, so whatever packed training leaves out shows: a mask, a cap, dropout, state that leaks between responses.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from services.config import ConfigError
from services.trainer.model.attention import NAME, UnsupportedModel, flash4, is_out_of_memory
from services.trainer.model.attention.packing import Packing, RowTokens
from services.trainer.model.support import named

GROUPS = ((9, (14, 6, 11)), (5, (16,)), (12, (8, 10)))
"""Tokens of the prompt and of the responses of each group of the batch."""

LONG_GROUP = (40, (270, 130))
"""Another group on a GPU, whose kernels of attention compute 64 to 128 tokens at a time, and differ for sequences of fewer."""

LARGEST_GAP = {torch.float32: 1e-4, torch.bfloat16: 0.05}
"""Gap of logprobs, in nats, that always counts as rounding."""

LARGEST_NORM_GAP = {torch.float32: 1e-3, torch.bfloat16: 0.05}
"""The same for the norm of the gradient, as a share of it."""

ROUNDINGS = 5.0
"""A gap may be this many times what one rounding of the embeddings causes. In bfloat16 it is 0.1 to 1.4 times that, also for
models with experts, where a rounding sends tokens to others.
"""

IMPLEMENTATION = "eager"
"""Attention of the model alone: transformers' simplest, which every model has."""

FLOAT32_BYTES = 4
ROOM = 1.5
"""Memory for a proof, as a multiple of the parameters: the largest gradients and activations besides."""

Score = Callable[[RowTokens], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Proof:
    """How far packed rows are from the model alone, and how far rounding alone would take them."""

    gap: float  # nats, the largest of any token
    norm_gap: float  # of the gradient's norm, as a share of it
    rounding: float  # nats, the largest change of a logprob when embeddings change by one unit in the last place
    norm_rounding: float  # of the gradient's norm, as a share of it
    dtype: str = "float32"
    compiled: bool = False

    @property
    def holds(self) -> bool:
        """Return whether the differences are rounding."""
        dtype = getattr(torch, self.dtype)
        return self.gap <= max(LARGEST_GAP[dtype], ROUNDINGS * self.rounding) and self.norm_gap <= max(
            LARGEST_NORM_GAP[dtype], ROUNDINGS * self.norm_rounding
        )


@dataclass(frozen=True)
class ProofRow(RowTokens):
    """The batch as one packed row and as whole sequences."""

    factors: Tensor  # [R], a weight of each logprob, so that errors do not cancel in the gradient
    sequences: tuple[tuple[Tensor, int], ...]  # each whole sequence, and the length of its prompt

    @classmethod
    def of(cls, vocabulary: int, device: torch.device) -> ProofRow:
        """Build the batch from tokens of the middle of the vocabulary, where no special ones are."""
        random = np.random.default_rng(0)
        ids: list[int] = []
        positions, predictors, targets, lengths, prompts, sequences = [], [], [], [], [], []
        for before, responses in (*GROUPS, LONG_GROUP) if device.type == "cuda" else GROUPS:
            begin, prompt = len(ids), random.integers(vocabulary // 8, vocabulary // 2, before).tolist()
            for number, count in enumerate(responses):
                response = random.integers(vocabulary // 8, vocabulary // 2, count).tolist()
                shared = before if number else 0
                own = response if number else prompt + response
                predictors += [begin + before - 1, *range(len(ids) + len(own) - count, len(ids) + len(own) - 1)]
                positions += range(shared, shared + len(own))
                lengths.append(len(own))
                prompts.append((begin, shared))
                targets += response
                sequences.append((torch.tensor(prompt + response, device=device), before))
                ids += own
        tensors = (torch.tensor(values, device=device) for values in (ids, positions, predictors, targets))
        input_ids, places, predict, target = tensors
        factors = torch.from_numpy(random.choice([-1.0, 1.0], len(targets))).float().to(device)
        packing = Packing.of(lengths, prompts).to(device)
        return cls(input_ids, places, packing, predict, target, factors, tuple(sequences))


@dataclass(frozen=True)
class OwnLogprobs:
    """Results of the model alone, and how much one rounding of its embeddings changes."""

    logprobs: Tensor  # [R]
    norm: float
    rounding: float  # of a logprob, the largest
    norm_rounding: float  # as a share of the norm


def alone(model: Any, row: ProofRow) -> OwnLogprobs:
    """Return the results of the model alone for the sequences of the row.

    Leaves `model` with `IMPLEMENTATION` and in evaluation mode. Raises whatever the model raises.
    """
    model.set_attn_implementation(IMPLEMENTATION)
    model.eval()

    def score() -> Tensor:
        parts = []
        for ids, before in row.sequences:
            logits = model(input_ids=ids[None], use_cache=False).logits[0].float()
            parts.append(logits[before - 1 : -1].log_softmax(-1).gather(-1, ids[before:, None]).squeeze(-1))
        return torch.cat(parts)

    logprobs, norm = _with_norm(model, row, score)
    unit = torch.finfo(model.dtype).eps
    signs = torch.Generator().manual_seed(0)

    def rounded(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        return output * (1 + unit * (2 * torch.randint(0, 2, output.shape, generator=signs).to(output) - 1))

    handle = model.get_input_embeddings().register_forward_hook(rounded)
    try:
        moved, moved_norm = _with_norm(model, row, score)
    finally:
        handle.remove()
    return OwnLogprobs(logprobs, norm, float((moved - logprobs).abs().max()), abs(moved_norm - norm) / max(norm, 1e-30))


def compare(model: Any, score: Score, row: ProofRow, expected: OwnLogprobs) -> Proof:
    """Compare `score` of the row, in training mode, with what `alone` returned for the same parameters."""
    model.set_attn_implementation(NAME)
    model.train()
    packed, packed_norm = _with_norm(model, row, lambda: score(row)[0])
    gap = float((packed - expected.logprobs).abs().max())
    gap = gap if math.isfinite(gap) else math.inf
    norm_gap = abs(packed_norm - expected.norm) / max(expected.norm, 1e-30)
    norm_gap = norm_gap if math.isfinite(norm_gap) else math.inf
    return Proof(gap, norm_gap, expected.rounding, expected.norm_rounding, str(model.dtype).removeprefix("torch."))


def _with_norm(model: nn.Module, row: ProofRow, score: Callable[[], Tensor]) -> tuple[Tensor, float]:
    """Return the logprobs that `score` computes, and the norm of the gradient of their weighted sum.

    Frees the gradient of a parameter as soon as it is known: all of them would need as much memory as the model.
    """
    squares: list[Tensor] = []

    def take(parameter: Tensor) -> None:
        assert parameter.grad is not None
        squares.append(parameter.grad.detach().double().square().sum())
        parameter.grad = None

    handles = [p.register_post_accumulate_grad_hook(take) for p in model.parameters() if p.requires_grad]
    try:
        logprobs = score()
        (logprobs * row.factors).sum().backward()
    finally:
        for handle in handles:
            handle.remove()
        model.zero_grad(set_to_none=True)
    return logprobs.detach(), float(torch.stack(squares).sum().sqrt()) if squares else 0.0


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
    model.to(device if device.type == "cpu" or _fits(model, device) else torch.device("cpu"))
    row = ProofRow.of(model.config.get_text_config().vocab_size, model.device)
    with blamed(f"{named(model, path)} fails in packed rows, use another model"):
        as_is = alone(model, row)
        score, found = _try(model, attach, row, as_is)
    if compilation is not None and model.device.type == device.type:  # otherwise other code would be compiled
        with blamed(f"{named(model, path)} fails when it is compiled, set trainer.compile = false"), _forgotten():
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
def blamed(what: str) -> Iterator[None]:
    """Raise whatever fails inside the block as `UnsupportedModel`, except a lack of memory and faults of the configuration."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # a model's code may raise anything for rows that it was not written for
        if is_out_of_memory(error):
            raise
        reason = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]
        raise UnsupportedModel(f"{what}: {reason}") from error


def _try(model: Any, attach: Callable[[], Score], row: ProofRow, as_is: OwnLogprobs) -> tuple[Score, list[Proof]]:
    wide = model.dtype != torch.float32 and _fits(model, model.device, FLOAT32_BYTES)
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


def _fits(model: nn.Module, device: torch.device, element_bytes: int = 0) -> bool:
    """Return whether a device has memory for the proof of a model, as it is or with elements of another size."""
    need = ROOM * sum(each.numel() * (element_bytes or each.element_size()) for each in model.parameters())
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] > need
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") > need


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
