"""Completions continue through an update with their KV cache, which no other request uses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from services.generator.engines.vllm import VllmEngine
from services.groups.generated import SamplingParameters
from services.protocol.messages import Span
from tests.support.models.tiny_vllm import make_config, make_model, perturb, reference_logprobs
from tests.weights.test_weight_transfer import Pair, generated, until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),  # loading vLLM takes minutes on a busy machine
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("default"),  # importing vLLM warns
]

PROMPT = [5, 17, 33, 65, 129]
RUNNING = 8


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def keeping(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    folder = tmp_path_factory.mktemp("keeping")
    model = make_model(folder, tied=False)
    engine = VllmEngine()
    config = make_config(
        folder,
        generator={"max_num_seqs": RUNNING},
        sync={"deadline_s": 30.0},
    )
    await engine.start(config)
    yield Pair(engine, model, config)
    await engine.close()


def mixed_logprobs(old: Any, new: Any, prompt: list[int], tokens: np.ndarray, cut: int) -> np.ndarray:
    """Return the logprobs of tokens[cut:] under `new`, with KV from `old` for all but the last token before the cut."""
    import torch

    whole = torch.tensor([prompt + tokens.tolist()])
    kept = len(prompt) + cut - 1
    with torch.no_grad():
        cache = old(whole[:, :kept], use_cache=True).past_key_values
        logits = new(whole[:, kept:-1], past_key_values=cache).logits[0]
        logprobs = torch.log_softmax(logits.float(), dim=-1)
        return logprobs.gather(1, whole[0, kept + 1 :, None])[:, 0].numpy()


async def test_completions_continue_with_their_kv(keeping: Pair) -> None:
    await keeping.make_group()
    await keeping.update()
    old, before = deepcopy(keeping.model), keeping.version
    running = [
        asyncio.create_task(keeping.engine.generate(f"kept-{i}", [*PROMPT, 3 + i], 50 + i, SamplingParameters(150)))
        for i in range(RUNNING)
    ]
    await until(lambda: all(task.done() or generated(keeping.engine, f"kept-{i}") >= 20 for i, task in enumerate(running)))
    perturb(keeping.model, 7)
    await keeping.update()
    lived = 0
    for i, completion in enumerate(await asyncio.gather(*running)):
        if len(completion.spans) < 2:
            continue
        lived += 1
        prompt, cut = [*PROMPT, 3 + i], completion.spans[0].end
        assert completion.spans == [Span(before, 0, cut), Span(keeping.version, cut, len(completion.tokens))]
        by_old = reference_logprobs(old, prompt, completion.tokens)
        np.testing.assert_allclose(completion.logprobs[:cut], by_old[:cut], atol=1e-4)
        expected = mixed_logprobs(old, keeping.model, prompt, completion.tokens, cut)
        np.testing.assert_allclose(completion.logprobs[cut:], expected, atol=1e-4)
        by_new = reference_logprobs(keeping.model, prompt, completion.tokens)
        assert np.abs(completion.logprobs[cut:] - by_new[cut:]).max() > 1e-3, "it was prefilled again"
    assert lived > 3


async def test_later_requests_never_see_kv_of_older_weights(keeping: Pair) -> None:
    prompt = [3 + i % 300 for i in range(200)]  # longer than a block of the prefix cache
    await keeping.make_group()
    for step in range(3):
        perturb(keeping.model, 300 + step)
        await keeping.update()
        answer = await keeping.engine.generate(f"salted-{step}", prompt, step, SamplingParameters(8))
        np.testing.assert_allclose(answer.logprobs, reference_logprobs(keeping.model, prompt, answer.tokens), atol=1e-4)


async def test_waiting_requests_do_not_use_their_groups_kv(keeping: Pair) -> None:
    """They were sent before the update, with a prompt whose KV from older weights is in use."""
    prompt = [11 + i % 300 for i in range(150)]
    await keeping.make_group()
    tasks = [
        asyncio.create_task(keeping.engine.generate(f"group-{i}", prompt, i, SamplingParameters(100))) for i in range(2 * RUNNING)
    ]
    await until(lambda: all(task.done() or generated(keeping.engine, f"group-{i}") for i, task in enumerate(tasks[:RUNNING])))
    perturb(keeping.model, 400)
    await keeping.update()
    completions = await asyncio.gather(*tasks)
    waited = [completion for completion in completions if completion.spans[0].version == keeping.version]
    assert len(waited) >= RUNNING
    for completion in waited:
        assert completion.finish != "aborted"
        assert completion.spans == [Span(keeping.version, 0, len(completion.tokens))]
        np.testing.assert_allclose(completion.logprobs, reference_logprobs(keeping.model, prompt, completion.tokens), atol=1e-4)


async def cached_tokens(engine: VllmEngine, prompt: list[int], request_id: str) -> int:
    """Return how many tokens of `prompt` vLLM finds in its prefix cache, and leave the prompt there."""
    from vllm import SamplingParams
    from vllm.inputs.engine import tokens_input

    salted = tokens_input(prompt, cache_salt=f"weights {engine._loaded.loads}")
    outputs = [output async for output in engine._llm.generate(salted, SamplingParams(max_tokens=1), request_id)]
    return outputs[-1].num_cached_tokens or 0


async def test_requests_of_one_version_still_share_their_prompt(keeping: Pair) -> None:
    prompt = [7 + i % 200 for i in range(230)]
    await keeping.engine.generate("first", prompt, 0, SamplingParameters(1))
    assert await cached_tokens(keeping.engine, prompt, "second") >= 128, "a block of the prefix cache"


async def test_a_pause_keeps_kv(keeping: Pair) -> None:
    prompt = [9 + i % 250 for i in range(240)]
    await cached_tokens(keeping.engine, prompt, "before")
    await keeping.engine.pause()
    await keeping.engine.resume()
    assert await cached_tokens(keeping.engine, prompt, "after") >= 128
