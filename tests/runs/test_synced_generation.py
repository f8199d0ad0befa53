"""Generators sample from the trainer's weights: real DeepSpeed steps, real vLLM, weights in files, checked with transformers.

For gloo, see tests/weights/test_weight_transfer.py.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from services.dataprep.planning.plan import Layout, PlanGroup, plan_step
from services.generator.engines.vllm import VllmEngine
from services.groups.generated import SamplingParameters
from services.protocol.messages import Round
from services.runtime.process_tools import free_port
from services.trainer.model import export
from services.trainer.ranks import World
from services.trainer.step import batches
from services.trainer.step.policy import Policy
from tests.support.models.tiny_model import make_payloads
from tests.support.models.tiny_vllm import assert_greedy, make_config, make_model, reference_logprobs
from tests.support.senders import sender_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400), pytest.mark.filterwarnings("default")]  # vLLM and DeepSpeed warn

STEPS = 4
CHECKED = (0, 2, STEPS)  # versions after the first sync, a middle step and the last step
PROMPTS = [[5, 17, 33], [6, 40, 80, 12], [90, 3, 3, 7, 50]]


async def test_greedy_completions_match_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    make_model(tmp_path / "model", tied=True)
    config = make_config(
        tmp_path / "model", sampling={"max_tokens": 40}, loss={"kl_beta": 0.0}, optimizer={"learning_rate": 3e-3},
        trainer={"row_tokens": 256}, sync={"backend": "store", "folder": str(tmp_path / "volume")},
    )  # fmt: skip
    engine = VllmEngine()
    await engine.start(config)
    policy = Policy(config, World(port=free_port()))
    sender = sender_of(config, policy.module)
    host, port = sender.open(1)
    await engine.join(Round(1, 0, "join", {"g": 1}, 2, "store", host, port, 1, 1), 1)
    payloads = make_payloads(4, 4)
    groups = [
        PlanGroup(name, name, len(one.prompt), one.lengths, np.linspace(-1, 1, 4), np.ones(4, bool), np.zeros(4, int))
        for name, one in payloads.items()
    ]
    moved = []
    for version in range(STEPS + 1):
        if version > 0:
            plan, rank_plans = plan_step(version - 1, groups, Layout(ranks=1, row_tokens=256))
            rows = batches.build(rank_plans[0], payloads, vocabulary=policy.vocabulary, row_tokens=256)
            policy.train(rows, plan)
        sender.send(version, 1)
        await engine.stage(version)
        await engine.pause()
        await engine.receive(version)
        await engine.resume()
        if version in CHECKED:
            export.write(policy.module, policy.config, version - 1, tmp_path / f"v{version}", 0, policy.zero_stage)
            judge = AutoModelForCausalLM.from_pretrained(tmp_path / f"v{version}").eval()
            for i, prompt in enumerate(PROMPTS):
                completion = await engine.generate(f"{version}-{i}", prompt, 0, SamplingParameters(40, top_k=1))
                assert {span.version for span in completion.spans} == {version}
                assert_greedy(judge, prompt, completion.tokens)
                moved.append(float(reference_logprobs(judge, PROMPTS[0], np.arange(10, 20, dtype=np.int32)).sum()))
    await engine.close()
    assert len(set(moved)) == len(CHECKED), "training did not change the weights, so equality proves nothing"
