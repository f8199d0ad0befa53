"""Shared by stages: the device, sizes for a GPU and for a dry run, timing, peak memory, and models with random weights."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

Figures = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """Sizes of a model with Qwen3's architecture and tied embeddings."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    vocabulary: int = 151_936


QWEN3_06B = Shape(1024, 3072, 28, 16, 8, 128)
QWEN3_17B = Shape(2048, 6144, 28, 16, 8, 128)
TOY = Shape(48, 64, 2, 4, 2, 32, 96)


@dataclass(frozen=True)
class Bench:
    """Where a stage runs. `dry`: at toy sizes on the CPU."""

    folder: Path
    dry: bool

    @property
    def device(self) -> torch.device:
        """Return the measured device."""
        return torch.device("cpu") if self.dry else torch.device("cuda", 0)

    @property
    def dtype(self) -> torch.dtype:
        """Return the data type of training."""
        return torch.float32 if self.dry else torch.bfloat16

    @property
    def gpu(self) -> str | None:
        """Return the name of the GPU: stages of different commands may run on different GPUs."""
        return None if self.dry else torch.cuda.get_device_name(0)

    def size(self, real: int, toy: int) -> int:
        """Return the size for this device."""
        return toy if self.dry else real

    def timed(self, call: Callable[[], Any], repeats: int = 5) -> float:
        """Return the minimum seconds of several calls after a warm-up."""
        call()
        found = []
        for _ in range(1 if self.dry else repeats):
            self.wait()
            started = time.perf_counter()
            call()
            self.wait()
            found.append(time.perf_counter() - started)
        return min(found)

    def wait(self) -> None:
        """Wait for the device to finish."""
        if not self.dry:
            torch.cuda.synchronize()

    def forget_peak(self) -> None:
        """Reset the peak memory."""
        if not self.dry:
            torch.cuda.reset_peak_memory_stats()

    def peak_mib(self) -> float:
        """Return the peak memory in MiB: the device's since `forget_peak`, or on a CPU the process's since its start."""
        if self.dry:
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        return torch.cuda.max_memory_allocated() / 2**20

    def model(self, shape: Shape) -> Path:
        """Return the folder of a model with random weights and a tokenizer."""
        from tokenizers import Tokenizer, models
        from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

        shape = TOY if self.dry else shape
        folder = self.folder / f"model-{shape.hidden}"
        if (folder / "tokenizer.json").exists():
            return folder
        torch.manual_seed(0)
        config = Qwen3Config(
            vocab_size=shape.vocabulary, hidden_size=shape.hidden, intermediate_size=shape.intermediate,
            num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
            head_dim=shape.head, max_position_embeddings=40_960, tie_word_embeddings=True, pad_token_id=0, eos_token_id=1,
        )  # fmt: skip
        with self.device:
            model: Any = Qwen3ForCausalLM(config)
        model.to(self.dtype).save_pretrained(folder)
        words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(shape.vocabulary)}, unk_token="t2"))
        PreTrainedTokenizerFast(tokenizer_object=words, unk_token="t2", pad_token="t0", eos_token="t1").save_pretrained(folder)
        return folder


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest expected value."""
    wide = expected.double().cpu()
    return float((found.double().cpu() - wide).abs().max() / wide.abs().max().clamp_min(1e-30))
