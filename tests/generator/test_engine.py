"""`VllmEngine` on a real vLLM: tokens, logprobs, seeds, continuation, interruption and shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import pytest_asyncio
from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from monitoring.__main__ import ROOT
from monitoring.dashboard import VLLM
from services.config import ConfigError
from services.generator.engines.base import make_engine
from services.generator.engines.vllm import VllmEngine
from services.generator.engines.vllm_arguments import check_cpu_arguments, engine_arguments, stop_tokens
from services.generator.metrics import VllmMetrics
from services.groups.generated import Generated, GenerationFailed, SamplingParameters
from services.protocol.messages import Span
from services.runtime.metrics import exposition
from tests.support.models.tiny_vllm import EOS, VOCABULARY, assert_greedy, make_config, make_model, reference_logprobs, until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),  # loading vLLM takes minutes on a busy machine
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("default"),  # importing vLLM emits warnings
]


class Served:
    """An engine, and the same model in transformers.

    It is the only engine of this process, as in a pod: vLLM keeps its metrics and its cache of variables by process.
    """

    def __init__(self, engine: VllmEngine, model: Any) -> None:
        self.engine, self.model = engine, model


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    folder = tmp_path_factory.mktemp("model")
    model = make_model(folder, tied=False)
    engine = VllmEngine()
    await engine.start(make_config(folder))
    yield Served(engine, model)
    sockets = os.environ["VLLM_RPC_BASE_PATH"]
    assert os.listdir(sockets)
    started = time.monotonic()
    await engine.close()
    assert time.monotonic() - started < 12
    with pytest.raises(FileNotFoundError):
        os.listdir(sockets)
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # other processes may exit meanwhile
            assert child.status() == psutil.STATUS_ZOMBIE or "EngineCore" not in " ".join(child.cmdline())


def prompt(number: int, length: int = 12) -> list[int]:
    """Return a different prompt for every number."""
    return [3 + (number * 31 + i * i) % 900 for i in range(length)]


async def test_behaviour_logprobs_match_the_model_at_the_temperature(served: Served) -> None:
    for temperature in (1.0, 0.7):
        sampling = SamplingParameters(64, temperature)
        made = await asyncio.gather(*[served.engine.generate(f"t{i}", prompt(i), i, sampling) for i in range(8)])
        for i, completion in enumerate(made):
            expected = reference_logprobs(served.model, prompt(i), completion.tokens, temperature)
            np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)
            assert completion.tokens.dtype == np.int32
            assert completion.logprobs.dtype == np.float32
            assert completion.spans == [Span(-1, 0, len(completion.tokens))]


async def test_the_vocabulary_is_that_of_the_model(served: Served) -> None:
    assert served.engine.vocabulary == VOCABULARY


async def test_vllms_own_metrics_are_served_with_the_pods_labels(served: Served) -> None:
    registry = CollectorRegistry()
    registry.register(VllmMetrics())

    def generated() -> float:
        families = text_string_to_metric_families(exposition(registry, run="r", pod="generator-0").decode())
        samples = [sample for family in families for sample in family.samples if sample.name == "vllm:generation_tokens_total"]
        assert all((sample.labels["run"], sample.labels["pod"]) == ("r", "generator-0") for sample in samples)
        return sum(sample.value for sample in samples)

    before = generated()
    made = await served.engine.generate("metrics", prompt(2), 1, SamplingParameters(16))
    assert generated() - before == len(made.tokens)
    names = {sample.name for family in REGISTRY.collect() for sample in family.samples}
    charted = {name for panel in VLLM for target, _ in panel.targets for name in re.findall(r"vllm:\w+", target)}
    documented = set(re.findall(r"vllm:\w+", (ROOT / "docs" / "metrics.md").read_text()))
    assert len(charted) == 4
    assert charted == documented <= names


async def test_vllm_reads_its_variables_once(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import envs

    held = envs.VLLM_HOST_IP
    monkeypatch.setenv("VLLM_HOST_IP", "192.0.2.1")
    assert held == envs.VLLM_HOST_IP != "192.0.2.1"


async def test_top_k_logprobs_are_of_the_truncated_distribution(served: Served) -> None:
    made = await served.engine.generate("k", prompt(1), 1, SamplingParameters(32, top_k=1))
    np.testing.assert_allclose(made.logprobs, 0.0, atol=1e-6)
    assert_greedy(served.model, prompt(1), made.tokens)


async def test_sampling_parameters_are_per_completion(served: Served) -> None:
    greedy, nucleus, plain = await asyncio.gather(
        served.engine.generate("greedy", prompt(1), 1, SamplingParameters(32, temperature=0.0)),
        served.engine.generate("nucleus", prompt(1), 1, SamplingParameters(24, temperature=0.6, top_p=0.9)),
        served.engine.generate("plain", prompt(1), 1, SamplingParameters(16)),
    )
    assert_greedy(served.model, prompt(1), greedy.tokens)
    assert (len(nucleus.tokens), len(plain.tokens)) == (24, 16)
    expected = reference_logprobs(served.model, prompt(1), plain.tokens)
    np.testing.assert_allclose(plain.logprobs, expected, atol=1e-4)
    assert (nucleus.logprobs >= reference_logprobs(served.model, prompt(1), nucleus.tokens, 0.6) - 1e-4).all()


async def test_the_same_seed_gives_the_same_tokens_in_any_batch(served: Served) -> None:
    alone = await served.engine.generate("alone", prompt(3), 1234, SamplingParameters(48))
    crowd = await asyncio.gather(
        *[
            served.engine.generate(f"c{i}", prompt(3) if i == 5 else prompt(i), 1234 if i == 5 else i, SamplingParameters(48))
            for i in range(24)
        ]
    )
    other = await served.engine.generate("other", prompt(3), 1235, SamplingParameters(48))
    assert crowd[5].tokens.tolist() == alone.tokens.tolist()
    assert other.tokens.tolist() != alone.tokens.tolist()


async def test_a_completion_ends_with_the_end_token_or_at_its_limit(served: Served) -> None:
    made = await asyncio.gather(*[served.engine.generate(f"e{i}", prompt(i), i, SamplingParameters(190)) for i in range(64)])
    stopped = [completion for completion in made if completion.finish == "stop"]
    full = [completion for completion in made if completion.finish == "length"]
    assert stopped
    assert full
    assert len(stopped) + len(full) == 64
    assert all(completion.tokens[-1] == EOS and EOS not in completion.tokens[:-1] for completion in stopped)
    assert all(len(completion.tokens) == 190 and EOS not in completion.tokens for completion in full)


async def test_a_completion_continues_from_a_prefix(served: Served) -> None:
    sampling = SamplingParameters(150, temperature=0.5)
    running = asyncio.create_task(served.engine.generate("first", prompt(7), 7, sampling))
    await until(served.engine, "first", 10)
    await served.engine.abort(["first"])
    prefix = await running
    assert prefix.finish == "aborted"
    whole = await served.engine.generate("second", prompt(7), 7, sampling, prefix)
    made = len(prefix.tokens)
    assert 10 <= made < len(whole.tokens) <= 150
    assert whole.tokens[:made].tolist() == prefix.tokens.tolist()
    assert whole.logprobs[:made].tolist() == prefix.logprobs.tolist()
    np.testing.assert_allclose(whole.logprobs, reference_logprobs(served.model, prompt(7), whole.tokens, 0.5), atol=1e-4)
    assert whole.spans == [Span(-1, 0, len(whole.tokens))]


async def test_a_prefix_of_another_version_keeps_its_span(served: Served) -> None:
    tokens = np.array([9, 10, 11], dtype=np.int32)
    prefix = Generated(tokens, np.array([-1.0, -2.0, -3.0], dtype=np.float32), [Span(-3, 0, 2), Span(-2, 2, 3)], "aborted")
    whole = await served.engine.generate("spans", prompt(2), 2, SamplingParameters(8), prefix)
    assert whole.spans == [Span(-3, 0, 2), Span(-2, 2, 3), Span(-1, 3, len(whole.tokens))]
    assert whole.logprobs[:3].tolist() == [-1.0, -2.0, -3.0]


async def test_a_finished_or_full_prefix_is_returned_unchanged(served: Served) -> None:
    tokens, logprobs, spans = np.array([9, EOS], dtype=np.int32), np.zeros(2, dtype=np.float32), [Span(0, 0, 2)]
    finished = Generated(tokens, logprobs, spans, "stop")
    assert await served.engine.generate("done", prompt(2), 2, SamplingParameters(8), finished) is finished
    full = await served.engine.generate(
        "full", prompt(2), 2, SamplingParameters(2), Generated(tokens, logprobs, spans, "aborted")
    )
    assert full == Generated(tokens, logprobs, spans, "length")


async def test_a_snapshot_is_a_prefix_of_the_result(served: Served) -> None:
    running = asyncio.create_task(served.engine.generate("s", prompt(4), 4, SamplingParameters(150)))
    partial = await until(served.engine, "s", 20)
    gauges = served.engine.gauges()
    whole = await running
    made = len(partial.tokens)
    assert partial.finish == "aborted"
    assert partial.spans == [Span(-1, 0, made)]
    assert whole.tokens[:made].tolist() == partial.tokens.tolist()
    assert whole.logprobs[:made].tolist() == partial.logprobs.tolist()
    assert served.engine.snapshot() == {}
    assert (gauges.running, gauges.waiting) == (1, 0)
    assert 0 < gauges.kv_usage < 1
    assert served.engine.gauges().tokens - gauges.tokens <= 150


async def test_abort_returns_every_completion_with_its_tokens(served: Served) -> None:
    running = [asyncio.create_task(served.engine.generate(f"a{i}", prompt(i), i, SamplingParameters(190))) for i in range(48)]
    await until(served.engine, "a0", 5)
    await served.engine.abort()
    made = await asyncio.gather(*running)
    assert any(completion.finish == "aborted" for completion in made)
    for i, completion in enumerate(made):
        assert len(completion.tokens) == len(completion.logprobs)
        if len(completion.tokens):
            np.testing.assert_allclose(
                completion.logprobs, reference_logprobs(served.model, prompt(i), completion.tokens), atol=1e-4
            )
    assert served.engine.gauges().running == served.engine.gauges().waiting == 0


async def test_a_cancelled_completion_is_dropped(served: Served) -> None:
    running = asyncio.create_task(served.engine.generate("x", prompt(4), 4, SamplingParameters(190)))
    await until(served.engine, "x", 2)
    before = served.engine.gauges().tokens
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert served.engine.snapshot() == {}
    assert served.engine.gauges().tokens == before, "what was sampled still counts"
    assert (await served.engine.generate("x", prompt(4), 4, SamplingParameters(4))).finish == "length"


async def test_a_pause_stops_sampling_and_does_not_change_tokens(served: Served) -> None:
    expected = await served.engine.generate("p", prompt(6), 6, SamplingParameters(120))
    running = asyncio.create_task(served.engine.generate("p", prompt(6), 6, SamplingParameters(120)))
    await until(served.engine, "p", 10)
    await served.engine.pause()
    await asyncio.sleep(0.3)  # tokens sampled before the pause may still arrive from the engine core
    before = served.engine.snapshot()["p"]
    late = asyncio.create_task(served.engine.generate("late", prompt(8), 8, SamplingParameters(4)))
    await asyncio.sleep(0.3)
    assert len(served.engine.snapshot()["p"].tokens) == len(before.tokens)
    assert served.engine.gauges().waiting == 1
    await served.engine.resume()
    after = await running
    assert after.tokens.tolist() == expected.tokens.tolist()
    np.testing.assert_allclose(after.logprobs, expected.logprobs, atol=1e-4)
    assert len((await late).tokens) == 4


async def test_many_long_prefixes_are_prefilled_together(served: Served) -> None:
    """A seeded request that vLLM prefills in chunks would kill the engine on a CPU."""
    prefixes = [np.full(150, 5, dtype=np.int32) for _ in range(40)]
    made = await asyncio.gather(
        *[
            served.engine.generate(
                f"l{i}",
                prompt(i, 60),
                i,
                SamplingParameters(160),
                Generated(tokens, np.zeros(150, np.float32), [Span(0, 0, 150)], "aborted"),
            )
            for i, tokens in enumerate(prefixes)
        ]
    )
    assert all(150 < len(completion.tokens) <= 160 for completion in made)


async def test_a_prompt_that_does_not_fit_fails_alone(served: Served) -> None:
    with pytest.raises(GenerationFailed, match="long"):
        await served.engine.generate("long", prompt(1, 300), 1, SamplingParameters(8))
    assert (await served.engine.generate("fits", prompt(1), 1, SamplingParameters(8))).finish in ("length", "stop")


OWNER = """
import asyncio, sys
from pathlib import Path
from services.generator.engines.vllm import VllmEngine
from tests.support.models.tiny_vllm import make_config
async def main():
    engine = VllmEngine()
    await engine.start(config)
    print("started", flush=True)
    await asyncio.sleep(600)
    await engine.close()
if __name__ == "__main__":
    config = make_config(Path(sys.argv[1]))
    asyncio.run(main())
"""


async def test_the_engine_ends_when_its_owner_is_killed(served: Served, tmp_path: Path) -> None:
    script = tmp_path / "owner.py"
    script.write_text(OWNER)
    command = [sys.executable, str(script), served.engine._config.model.path]
    environ = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}  # as set by `grpo run`
    owner = await asyncio.create_subprocess_exec(*command, env=environ, stdout=subprocess.PIPE)
    assert owner.stdout is not None
    async with asyncio.timeout(120):
        await owner.stdout.readuntil(b"started\n")  # vLLM logs to the same pipe
    children = psutil.Process(owner.pid).children(recursive=True)
    owner.kill()
    await owner.wait()
    assert children
    _, alive = await asyncio.to_thread(psutil.wait_procs, children, 60)
    assert not alive


async def test_stop_tokens_come_from_tokenizer_and_generation_config(served: Served) -> None:
    assert stop_tokens(served.engine._config.model.path) == [EOS]


async def test_invalid_options_are_configuration_errors(tmp_path: Path) -> None:
    config = make_config(tmp_path, generator={"engine_options": {"max_num_seq": 3}})
    with pytest.raises(ConfigError, match=r"engine_options\.max_num_seq .* did you mean 'max_num_seqs'"):
        engine_arguments(config, gpu=False)
    with pytest.raises(ConfigError, match=r"sync\.backend"):
        engine_arguments(make_config(tmp_path, sync={"backend": "nccl"}), gpu=False)
    chunked = make_config(tmp_path, generator={"engine_options": {"enable_chunked_prefill": True}})
    with pytest.raises(ConfigError, match="max_num_batched_tokens"):
        check_cpu_arguments(engine_arguments(chunked, gpu=False))
    with pytest.raises(ConfigError, match=r"generator\.engine"):
        make_engine(make_config(tmp_path, generator={"engine": "nowhere:Engine"}))


async def test_a_float32_head_is_passed_to_vllm(tmp_path: Path) -> None:
    from vllm import AsyncEngineArgs

    make_model(tmp_path, tied=False)
    model = {"dtype": "bfloat16", "fp32_head": True}
    config = make_config(tmp_path, model=model, generator={"engine_options": {"hf_overrides": {"tie_word_embeddings": False}}})
    made = AsyncEngineArgs(**engine_arguments(config, gpu=False)).create_model_config()
    assert (str(made.dtype), str(made.head_dtype)) == ("torch.bfloat16", "torch.float32")
    assert made.hf_config.tie_word_embeddings is False
    plain = AsyncEngineArgs(
        **engine_arguments(make_config(tmp_path, model={"dtype": "bfloat16"}), gpu=False)
    ).create_model_config()
    assert str(plain.head_dtype) == "torch.bfloat16"
    other = make_config(tmp_path, model=model, generator={"engine_options": {"hf_overrides": {"head_dtype": "model"}}})
    with pytest.raises(ConfigError, match=r"head_dtype = 'model' contradicts model\.fp32_head = true"):
        engine_arguments(other, gpu=False)


async def test_engine_options_take_precedence(tmp_path: Path) -> None:
    config = make_config(tmp_path, generator={"engine_options": {"max_num_seqs": 7, "enforce_eager": False}})
    arguments = engine_arguments(config, gpu=False)
    assert (arguments["max_num_seqs"], arguments["enforce_eager"]) == (7, False)
    assert engine_arguments(config, gpu=True)["weight_transfer_config"] == {"backend": "grpo_nccl"}
    given = make_config(tmp_path, generator={"engine_options": {"gpu_memory_utilization": 0.5}})
    assert [engine_arguments(one, gpu=True)["gpu_memory_utilization"] for one in (config, given)] == [0.9, 0.5]
