"""The two sides of benchmarks/trainer.py, each in its own process: `python trainer_sides.py ours|trl JOB.json`.

A side loads the model and prints `{"base_mib": …}`. For every line on standard input, it takes one optimizer step and prints
`{"seconds": …, "cpu_s": …, "peak_mib": …, "gradient_norm": …}`: wall and CPU seconds of forward, loss, backward, clipping and
optimizer. It imports nothing of the other side's.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent.parent))

import numpy as np

from benchmarks.against_trl.example import Output

LEARNING_RATE, MAX_GRAD_NORM = 1e-5, 1.0
CLIP_LOW, CLIP_HIGH = 0.2, 0.272


class Memory:
    """Measures the resident memory of this process, and its peak since `reset` by the kernel's high-water mark."""

    def __init__(self) -> None:
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        self.base_mib = self._read("VmRSS")

    def reset(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM to VmRSS

    def peak_mib(self) -> float:
        return self._read("VmHWM")

    def _read(self, field: str) -> float:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def read_batch(path: str) -> dict[str, Any]:
    """Read the batch that benchmarks/trainer.py wrote; `prompts` becomes one array per completion."""
    batch = dict(np.load(path))
    ends = np.cumsum(batch["prompt_lengths"])
    batch["prompts"] = [batch["prompts"][end - length : end] for end, length in zip(ends, batch["prompt_lengths"], strict=True)]
    return batch


def ours(job: dict[str, Any], output: Output) -> None:
    """Train our policy on one rank: ZeRO 0, float32, packed rows, one mini-batch."""
    import torch

    from services.config.load import validate
    from services.dataprep.planning.packing import Response, pack
    from services.protocol.messages import RankPlan, Sample, StepPlan
    from services.protocol.payloads import Payload
    from services.runtime.process_tools import free_port
    from services.trainer.ranks import World
    from services.trainer.step import batches
    from services.trainer.step import policy as policy_module
    from services.trainer.step.policy import Policy

    torch.set_num_threads(job["threads"])
    config = validate(
        {
            "model": {"path": job["model"], "dtype": "float32", "max_tokens": 4096},
            "data": {"sources": [{"kind": "jsonl", "path": "unused.jsonl"}], "max_prompt_tokens": 64},
            "sampling": {"max_tokens": job["max_tokens"], "group_size": job["group_size"]},
            "trainer": {"row_tokens": job["row_tokens"]},
            "loss": {"policy": "dapo", "clip_low": CLIP_LOW, "clip_high": CLIP_HIGH, "kl_beta": 0.0},
            "optimizer": {"learning_rate": LEARNING_RATE, "max_grad_norm": MAX_GRAD_NORM},
            "verifiers": [{"kind": "math"}],
        },
        origin="benchmark",
    )
    policy_module.LOGPROB_CHUNK_TOKENS = job["chunk_tokens"]
    policy = Policy(config, World(port=free_port()))
    batch = read_batch(job["batch"])
    lengths, ends = batch["lengths"], np.cumsum(batch["lengths"])
    prompts, size = batch["prompts"], job["group_size"]
    sizes = [len(prompts[i]) + int(lengths[i]) for i in range(len(lengths))]
    [packed] = pack([[Response(i // size, len(prompts[i]), sizes[i]) for i in range(len(sizes))]], job["row_tokens"])

    def rows(behaviour: np.ndarray) -> tuple[list[batches.PackedRow], StepPlan]:
        payloads = {}
        for group in range(len(lengths) // size):
            mine = slice(group * size, (group + 1) * size)
            tokens = slice(int(ends[mine][0] - lengths[mine][0]), int(ends[mine][-1]))
            payloads[f"0-{group}.1"] = Payload(
                prompts[mine][0], lengths[mine], batch["tokens"][tokens], behaviour[tokens], np.zeros((0, 4), np.int32)
            )
        samples = [
            Sample(f"0-{i // size}.1", i % size, float(batch["advantages"][i]), int(lengths[i])) for i in range(len(lengths))
        ]
        count = int(lengths.sum())
        plan = StepPlan(0, [], [], 1, len(packed), [len(packed)], [float(count)], count, sum(sizes), {})
        ranked = RankPlan([[samples[i] for i in row] for row in packed])
        built = batches.build(ranked, payloads, vocabulary=policy.vocabulary, row_tokens=job["row_tokens"])
        return built, plan

    # Behaviour logprobs are the policy's own, as they nearly are in a run: TRL without vLLM has no train/inference correction.
    first, plan = rows(np.zeros(int(lengths.sum()), np.float32))
    behaviour = np.zeros(int(lengths.sum()), np.float32)
    with torch.no_grad():
        for row, numbers in zip(first, packed, strict=True):
            found = policy.engine.module(row)[0].numpy()
            at = 0
            for i in numbers:
                behaviour[ends[i] - lengths[i] : ends[i]] = found[at : at + lengths[i]]
                at += int(lengths[i])
    given, plan = rows(behaviour)
    del first
    memory = Memory()
    output.write(base_mib=memory.base_mib)
    for _ in sys.stdin:
        memory.reset()
        started, cpu = time.perf_counter(), time.process_time()
        metrics = policy.train(given, plan).metrics
        seconds, cpu_s = time.perf_counter() - started, time.process_time() - cpu
        phases = {name: metrics[f"time/train/{name}_s"] for name in ("forward", "backward", "step")}
        output.write(
            seconds=seconds, cpu_s=cpu_s, peak_mib=memory.peak_mib(), gradient_norm=metrics["gradient/train/norm"], **phases
        )


def trl(job: dict[str, Any], output: Output) -> None:
    """Train with TRL's GRPOTrainer in its own loop; a rollout function returns the same completions."""
    import torch
    import trl.trainer.utils as trl_utils  # pyright: ignore[reportMissingImports]
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(job["threads"])
    if job["compact"]:
        trl_utils._use_triton = lambda device: True  # only read where the LM head selects its positions
    batch = read_batch(job["batch"])
    ends = np.cumsum(batch["lengths"])
    prompts = [prompt.tolist() for prompt in batch["prompts"]]
    completions = [batch["tokens"][end - length : end].tolist() for end, length in zip(ends, batch["lengths"], strict=True)]
    count = len(completions)

    def rollout(asked: list[Any], trainer: Any) -> dict[str, Any]:
        assert len(asked) == count
        return {"prompt_ids": prompts, "completion_ids": completions, "logprobs": None}

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return batch["rewards"].tolist()

    class Steps(TrainerCallback):
        """Times a step from start to end, without the preparation of its inputs."""

        inputs_s = inputs_cpu_s = 0.0

        def wait(self, control: Any) -> None:
            if not sys.stdin.readline():
                control.should_training_stop = True

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            output.write(base_mib=memory.base_mib)
            self.wait(control)

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            memory.reset()
            self.inputs_s = self.inputs_cpu_s = 0.0
            self.started, self.cpu = time.perf_counter(), time.process_time()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            seconds = time.perf_counter() - self.started - self.inputs_s
            cpu_s = time.process_time() - self.cpu - self.inputs_cpu_s
            self.answer = {"seconds": seconds, "cpu_s": cpu_s, "peak_mib": memory.peak_mib()}

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
            if "grad_norm" in logs:
                output.write(**self.answer, gradient_norm=float(logs["grad_norm"]))
                self.wait(control)

    class Timed(GRPOTrainer):
        """Times the preparation of a step's inputs, which is not part of the comparison."""

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            started, cpu = time.perf_counter(), time.process_time()
            prepared = super()._generate_and_score_completions(inputs)
            steps.inputs_s += time.perf_counter() - started
            steps.inputs_cpu_s += time.process_time() - cpu
            return prepared

    steps = Steps()
    arguments = GRPOConfig(
        output_dir=job["folder"],
        per_device_train_batch_size=job["micro_batch"],
        gradient_accumulation_steps=count // job["micro_batch"],
        num_generations=job["group_size"],
        max_completion_length=job["max_tokens"],
        max_steps=10_000,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        max_grad_norm=MAX_GRAD_NORM,
        loss_type="dapo",
        epsilon=CLIP_LOW,
        epsilon_high=CLIP_HIGH,
        beta=0.0,
        temperature=1.0,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
    )
    trainer = Timed(
        model=AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32),
        reward_funcs=reward,
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": "t2"}] * count),
        processing_class=AutoTokenizer.from_pretrained(job["model"]),
        rollout_func=rollout,
        callbacks=[steps],
    )
    memory = Memory()
    trainer.train()


if __name__ == "__main__":
    output = Output()  # before importing anything that prints
    {"ours": ours, "trl": trl}[sys.argv[1]](json.loads(Path(sys.argv[2]).read_text()), output)
