"""Weights as versions: size, cost and correctness of deltas (`sync.backend = "store"`, docs/sync.md).

    python -m benchmarks.weights --json
    python -m benchmarks.weights --parts encoding versions

The model is a Qwen3 of 113 MB in bfloat16 with random weights. Real steps of AdamW at 1e-6 train it on random tokens: master
weights, forward and backward are in float32 (bfloat16 is slower on CPUs), and the rounded master weights are published, as in
DeepSpeed. The first `WARM` steps are not counted, since Adam's first steps are larger. Parts:

`encoding`: `delta_share`, bytes of a delta over those of the weights (goal 0.03); `changed_share`; `encode_share`, encoding time
over that of the training step of `--tokens` (goal 0.05); `send_share`, time of the whole `send`, with fsync, over the same.
`late`: `late_join_ratio`, time in which an empty receiver takes an anchor and `STEPS` deltas over that of reading the same bytes,
each from a cold disk cache and in its own process (goal 1.5). `late_join_used_ratio` is the same after another process has used
half of the free memory: the host of a virtual machine allocates memory at its first use.
`versions`: `versions_identical`, the share of the versions taken by a receiver, out of `VERSIONS` of 1 MB, after which the
blake2b digest of its weights equals that of the trainer's; it misses some and catches up. Also `versions_compared`, `versions_s`.
`sampled`: `versions_sampled`, the share of 1,000 versions of 1.6 MB, applied by a real vLLM, whose completions have the logprobs
that `transformers` computes from the trainer's weights; `versions_told_apart`, the share where the previous weights give others.
`pause`: `pause_s_per_gb`, from vLLM's pause until it resumes with the new weights, per GB of weights; on a CPU it repacks them.
`lora`: `lora_share`, bytes of a version of adapters of rank 8 over those of the model (goal 0.01).
`adapters`: `merged_speed`, vLLM's tokens/s with an adapter merged into its weights over those with an adapter served separately
(adapters.py); `served_update_s`, time to replace a served adapter. Replacing a merged one takes as long as a pause.
`link`: rounds over a link of 100 Mbit/s and 80 ms (slow_link.py; Redis and an S3 server behind it) and over loopback:
`slow_link_ratio`, steps/s on the link over those on loopback, with rounds during the steps (goal 0.9); `slow_round_s`,
`slow_join_s`.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import statistics
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

if __name__ == "__main__":  # `python benchmarks/weights` from the repository's root
    sys.path.insert(0, str(Path(__file__).parent.parent.parent))

import torch
from safetensors.torch import save_file

from benchmarks.common import arguments, report, run
from benchmarks.weights import adapters, engine, late
from services.weights.deadline import Deadline
from services.weights.versions.encoder import ShardEncoder
from services.weights.versions.mirror import WeightMirror
from services.weights.versions.reader import VersionReader
from tests.support.senders import sender_of

FENCE, WARM, STEPS, RATE, VERSIONS, RANK, LATE = 1, 2, 4, 1e-6, 1500, 8, 7
PARTS = ("encoding", "late", "versions", "sampled", "lora", "adapters", "pause", "link")


class Trained:
    """A model with float32 master weights; rounded weights are published."""

    def __init__(self, folder: Path, tokens: int, lora: int = 0) -> None:
        self.folder, self._tokens = folder, tokens
        self.master = engine.make_model(folder)
        sections: dict[str, Any] = {"lora": {"rank": lora, "alpha": 16.0}} if lora else {}
        config = engine.make_config(folder, **sections)
        self.published: Any = self.master
        if lora:
            from services.trainer.model.lora import attach

            self.master.bfloat16().requires_grad_(False)
            attach(self.master, config.lora, str(folder))
        else:
            import copy

            self.published = copy.deepcopy(self.master).bfloat16()
        trained = [weight for weight in self.master.parameters() if weight.requires_grad]
        self._optimizer = torch.optim.AdamW(trained, lr=RATE if not lora else 10 * RATE, betas=(0.9, 0.95), weight_decay=0.0)
        self.sender = sender_of(config, self.published)
        self.version = -1

    def step(self) -> float:
        """Train, and round the weights; return the seconds of training."""
        began = time.perf_counter()
        ids = torch.randint(0, self.master.config.vocab_size, (self._tokens // 512, 512))
        self.master(input_ids=ids, labels=ids).loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        took_s = time.perf_counter() - began
        if self.published is not self.master:
            with torch.no_grad():
                for rounded, master in zip(self.published.parameters(), self.master.parameters(), strict=True):
                    rounded.copy_(master)
        return took_s

    def send(self) -> float:
        """Publish the next version; return the seconds."""
        began = time.perf_counter()
        self.version += 1
        if self.version == 0:
            self.sender.open(FENCE)
        self.sender.send(self.version, FENCE)
        return time.perf_counter() - began

    @property
    def nbytes(self) -> int:
        """Return the bytes of the weights."""
        return sum(weight.numel() * 2 for weight in engine.distinct(self.published))


def encoding(model: Trained, samples: dict[str, list[float]]) -> None:
    """Measure real steps, each published."""
    model.send()
    spent: list[float] = []
    encode = ShardEncoder.encode

    def timed(encoder: ShardEncoder) -> Any:
        began = time.perf_counter()
        made = encode(encoder)
        spent.append(time.perf_counter() - began)
        return made

    for i in range(WARM + STEPS):
        with mock.patch.object(ShardEncoder, "encode", timed):
            step_s, send_s = model.step(), model.send()
        if i < WARM:
            continue
        sent = model.sender.stats
        assert sent["delta"], "a version was written as an anchor"
        for name, value in {
            "delta_share": sent["share"], "changed_share": sent["changed"], "encode_share": spent[-1] / step_s,
            "send_share": send_s / step_s, "encode_s": spent[-1], "step_s": step_s, "model_mb": model.nbytes / 1e6,
        }.items():  # fmt: skip
            samples.setdefault(name, []).append(value)


def late_join(model: Trained, samples: dict[str, list[float]]) -> None:
    """Compare an empty receiver with plain reads of the same files: an anchor, and deltas of a fiftieth of the weights."""
    folder = model.folder / "volume" / str(FENCE)
    for version in range(STEPS + 1):
        if version:
            with torch.no_grad():
                for weight in engine.distinct(model.published):
                    weight.mul_(torch.where(torch.rand(weight.shape) < 0.02, 1.01, 1.0).to(weight.dtype))
        model.send()
    expected = model.folder / "expected.safetensors"
    save_file({name: weight.detach().clone() for name, weight in model.published.named_parameters()}, expected)
    for _ in range(LATE):
        read_s, join_s = (late.seconds(side, folder, model.version, expected) for side in ("read", "join"))
        samples.setdefault("late_join_ratio", []).append(join_s / read_s)
        samples.setdefault("late_join_s", []).append(join_s)
    late.use_memory()
    for _ in range(LATE):
        read_s, join_s = (late.seconds(side, folder, model.version, expected) for side in ("read", "join"))
        samples.setdefault("late_join_used_ratio", []).append(join_s / read_s)


def versions(folder: Path, samples: dict[str, list[float]]) -> None:
    """Check many versions of few weights, of which up to a fiftieth change by one unit in the last place."""
    torch.manual_seed(5)
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512, dtype=torch.bfloat16) for _ in range(2)))
    config = engine.make_config(folder)
    sender = sender_of(config, model)
    mirror, same, compared = WeightMirror(), 0, 0
    began = time.perf_counter()
    for version in range(VERSIONS):
        with torch.no_grad():
            for weight in model.parameters():
                bits = weight.view(torch.int16)
                bits += torch.where(torch.rand(weight.shape) < 0.02, torch.randint(-1, 2, weight.shape), 0).to(torch.int16)
        if version == 0:
            sender.open(FENCE)
        sender.send(version, FENCE)
        sender.sweep(list)
        if version % 7 in (3, 4) and version != VERSIONS - 1:
            continue  # the receiver misses some, and catches up with several deltas
        held = dict(VersionReader(str(folder / "volume" / str(FENCE)), mirror).take(Deadline(60), version))
        compared += 1
        same += digest(held) == digest({name: weight.detach() for name, weight in model.named_parameters()})
    samples["versions_identical"] = [same / compared]
    samples["versions_compared"] = [float(compared)]
    samples["versions_s"] = [time.perf_counter() - began]


def digest(weights: dict[str, torch.Tensor]) -> str:
    """Return a digest by a function that the transfer itself does not use."""
    hashed = hashlib.blake2b(digest_size=16)
    for name, weight in sorted(weights.items()):
        hashed.update(name.encode())
        hashed.update(weight.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


def lora(folder: Path, tokens: int, samples: dict[str, list[float]]) -> None:
    """Measure adapters of rank 8 on every linear layer."""
    model = Trained(folder, tokens, RANK)
    full = sum(w.numel() * 2 for n, w in model.master.named_parameters() if ".lora_" not in n)
    model.send()
    for _ in range(3):
        model.step()
        model.send()
        samples.setdefault("lora_share", []).append(model.sender.stats["bytes"] / full)


async def measure(options: argparse.Namespace, folder: Path) -> None:
    """Measure the chosen parts, and report."""
    samples: dict[str, list[float]] = {}
    torch.manual_seed(1)
    parts = set(options.parts)
    model: Trained | None = None
    if parts & {"encoding", "link"}:
        model = Trained(folder / "trained", options.tokens)
        encoding(model, samples)
    if "late" in parts:
        late_join(Trained(folder / "late", options.tokens), samples)
    if "versions" in parts:
        versions(folder / "many", samples)
    if "sampled" in parts:
        await engine.sampled(folder / "sampled", samples)
    if "lora" in parts:
        lora(folder / "lora", options.tokens, samples)
    if "adapters" in parts:
        await adapters.adapters(folder / "adapters", samples)
    if "pause" in parts:
        await engine.pause(folder / "pause", samples)
    if model is not None and "link" in parts:
        from benchmarks.weights import link

        await asyncio.to_thread(link.link, folder / "link", model.published, statistics.median(samples["step_s"]), samples)
    report({"benchmark": "weights", "tokens": options.tokens, "threads": torch.get_num_threads()}, samples)


def main() -> int:
    """Parse the command line and run."""
    parser = arguments(__doc__)
    parser.add_argument("--tokens", type=int, default=4096, help="tokens per training step, a multiple of 512")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to measure")
    return run(measure, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
