"""Weights from `WeightSender` over gloo into a real vLLM: equality after every update, in-flight updates, broken rounds."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from services.config import RunConfig
from services.generator.engines.base import Gauges
from services.generator.engines.vllm import VllmEngine
from services.protocol.messages import Round, Span
from services.rollouts.generated import SamplingParameters
from services.weights.receiver import TransferFailed, WeightsChanged
from tests.support.models.tiny_vllm import BUCKET_BYTES, assert_greedy, make_config, make_model, perturb, reference_logprobs
from tests.support.models.two_ranks import address, two_ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),  # loading vLLM takes minutes on a busy machine
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("default"),  # importing vLLM warns
]

ROOT = str(Path(__file__).parents[2])
PROMPT = [5, 17, 33, 65, 129]


class Pair:
    """An engine, and the trainer's model and sender."""

    def __init__(self, engine: VllmEngine, model: Any, config: RunConfig) -> None:
        from services.trainer.weight_sender import make_weight_sender

        self.engine, self.model, self.config = engine, model, config
        self.sender = make_weight_sender(config, model, 0, BUCKET_BYTES)
        self.epoch = 0
        self.version = -1

    def round(self, host: str, port: int, world_size: int = 2) -> Round:
        self.epoch += 1
        return Round(self.epoch, self.version + 1, "join", {"generator-0:x": 1}, world_size, "gloo", host, port, self.epoch, 1)

    async def make_group(self) -> None:
        host, port = self.sender.open()
        await asyncio.gather(asyncio.to_thread(self.sender.connect, 2), self.engine.join(self.round(host, port), 1))

    async def update(self) -> None:
        """Send the model's weights as the next version."""
        await self.engine.pause()
        self.version += 1
        self.sender.label(self.version, 1)
        self.sender.members_hold(self.engine.version)
        await asyncio.gather(asyncio.to_thread(self.sender.send), self.engine.receive(self.version))
        await self.engine.resume()

    @contextmanager
    def deltas(self) -> Iterator[None]:
        """Send the changes made inside this block."""
        from services.trainer.weight_sender import make_weight_sender

        before, sync = self.sender, self.config.sync.model_copy(update={"encoding": "delta"})
        self.sender = make_weight_sender(self.config.model_copy(update={"sync": sync}), self.model, 0, BUCKET_BYTES)
        try:
            yield
        finally:
            self.sender.close_group()
            self.sender = before

    async def follow_by_deltas(self) -> None:
        """Form a group and send a whole version, then two that change a few weights."""
        await self.make_group()
        await self.update()
        assert not self.sender.sent["delta"]
        await self.assert_equal()
        for seed in range(2):
            perturb(self.model, 400 + seed, share=0.02)
            await self.update()
            assert self.sender.sent["delta"]
            assert self.sender.sent["share"] < 0.12, "float32: four bytes per change, plus its position"
            await self.assert_equal()

    async def assert_equal(self) -> None:
        """Check that the engine samples like `transformers`."""
        tag = f"{self.epoch}-{self.version}"
        sampled = await asyncio.gather(
            *[self.engine.generate(f"{tag}-{i}", [*PROMPT, 3 + i], i, SamplingParameters(32)) for i in range(4)]
        )
        for i, completion in enumerate(sampled):
            expected = reference_logprobs(self.model, [*PROMPT, 3 + i], completion.tokens)
            np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)
            assert completion.spans == [Span(self.engine.version, 0, len(completion.tokens))]
        greedy = await self.engine.generate(f"{tag}-greedy", PROMPT, 0, SamplingParameters(48, top_k=1))
        assert_greedy(self.model, PROMPT, greedy.tokens)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["tied, loaded beside sampling", "untied"])
async def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    folder = tmp_path_factory.mktemp("model")
    beside = request.param != "untied"
    model = make_model(folder, tied=beside, bias=beside)
    worker = {"engine_options": {"worker_extension_cls": "tests.weights.buffered_worker.WorkerExtension"}} if beside else {}
    config = make_config(folder, generator=worker, sync={"join_deadline_s": 8.0, "transfer_deadline_s": 30.0})
    engine = VllmEngine()
    await engine.start(config)
    yield Pair(engine, model, config)
    await engine.close()


async def test_the_engine_matches_transformers_after_every_update(pair: Pair) -> None:
    for group in range(2):
        await pair.make_group()
        for step in range(3):
            perturb(pair.model, 100 * group + step)
            await pair.update()
            assert pair.engine.version == pair.version
            await pair.assert_equal()
    pair.sender.close_group()


def damage_deltas(patch: pytest.MonkeyPatch) -> None:
    """Flip a bit in the data of every delta encoded from here on."""
    from services.weights.versions.broadcast import BroadcastEncoder

    honest = BroadcastEncoder.encode

    def damaging(self: BroadcastEncoder, *given: Any) -> Any:
        delta = honest(self, *given)
        delta.payload[-1] ^= 1
        return delta

    patch.setattr(BroadcastEncoder, "encode", damaging)


async def test_the_engine_applies_deltas_and_rejects_a_damaged_one(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    from copy import deepcopy

    with pair.deltas():
        await pair.follow_by_deltas()
        old, version = deepcopy(pair.model), pair.version
        perturb(pair.model, 402, share=0.02)
        damage_deltas(monkeypatch)
        with pytest.raises(TransferFailed):
            await pair.update()
        monkeypatch.undo()
        assert (pair.engine.version, pair.engine.whole) == (version, True)
        await pair.engine.resume()
        new, pair.model, pair.version = pair.model, old, version
        await pair.assert_equal()
        pair.model = new
        await pair.make_group()
        await pair.update()
        assert not pair.sender.sent["delta"], "the engine acknowledged a version other than the last one sent"
        await pair.assert_equal()


async def test_completions_continue_through_an_update(pair: Pair) -> None:
    """Tokens before the cut come from the old weights, later ones from the new; the spans mark the cut."""
    from copy import deepcopy

    await pair.make_group()
    await pair.update()
    old = deepcopy(pair.model)
    before = pair.version
    running = [
        asyncio.create_task(pair.engine.generate(f"live-{i}", [*PROMPT, 3 + i], 50 + i, SamplingParameters(150)))
        for i in range(12)
    ]
    await until(lambda: all(task.done() or generated(pair.engine, f"live-{i}") >= 20 for i, task in enumerate(running)))
    perturb(pair.model, 7)
    await pair.update()
    completions = await asyncio.gather(*running)
    lived = 0
    for i, completion in enumerate(completions):
        prompt = [*PROMPT, 3 + i]
        cut = completion.spans[0].end
        by_old = reference_logprobs(old, prompt, completion.tokens)
        by_new = reference_logprobs(pair.model, prompt, completion.tokens)
        np.testing.assert_allclose(completion.logprobs[:cut], by_old[:cut], atol=1e-4)
        np.testing.assert_allclose(completion.logprobs[cut:], by_new[cut:], atol=1e-4)
        if len(completion.spans) == 2:
            lived += 1
            assert completion.spans == [Span(before, 0, cut), Span(pair.version, cut, len(completion.tokens))]
            assert np.abs(completion.logprobs[cut:] - by_old[cut:]).max() > 1e-2
    assert lived > 6


def generated(engine: VllmEngine, request_id: str) -> int:
    """Return the tokens so far of a running completion."""
    partial = engine.snapshot([request_id]).get(request_id)
    return 0 if partial is None else len(partial.tokens)


async def until(condition: Callable[[], bool]) -> None:
    """Poll every millisecond, as in-flight states of a tiny model are short."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.001)


async def test_a_prefix_of_older_weights_is_continued_with_new_ones(pair: Pair) -> None:
    await pair.make_group()
    await pair.update()
    version = pair.version
    running = asyncio.create_task(pair.engine.generate("drained", PROMPT, 9, SamplingParameters(120)))
    await until(lambda: generated(pair.engine, "drained") >= 15)
    await pair.engine.abort()
    prefix = await running
    perturb(pair.model, 11)
    await pair.update()
    whole = await pair.engine.generate("claimed", PROMPT, 9, SamplingParameters(120), prefix)
    cut = len(prefix.tokens)
    assert whole.spans == [Span(version, 0, cut), Span(version + 1, cut, len(whole.tokens))]
    np.testing.assert_allclose(whole.logprobs[cut:], reference_logprobs(pair.model, PROMPT, whole.tokens)[cut:], atol=1e-4)


async def test_later_requests_do_not_reuse_kv_of_older_weights(pair: Pair) -> None:
    prompt = [3 + i % 300 for i in range(200)]  # longer than a block of the prefix cache
    await pair.make_group()
    for step in range(2):
        perturb(pair.model, 300 + step)
        await pair.update()
        answer = await pair.engine.generate(f"kv-{step}", prompt, step, SamplingParameters(8))
        np.testing.assert_allclose(answer.logprobs, reference_logprobs(pair.model, prompt, answer.tokens), atol=1e-4)


DYING_SENDER = """
import os, signal, sys
from pathlib import Path
from services.trainer.weight_sender import make_weight_sender
from services.weights.transports import gloo
from tests.support.models.tiny_vllm import BUCKET_BYTES, make_config, make_model
folder = Path(sys.argv[1])
sender = make_weight_sender(make_config(folder), make_model(folder, tied=sys.argv[2] == "tied", seed=99), 0, BUCKET_BYTES)
sent, honest = [], gloo.begin_broadcast
def dying(group, buffer, deadline):
    for work in sent:
        work.wait()
        os.kill(os.getpid(), signal.SIGKILL)
    sent.append(honest(group, buffer, deadline))
    return sent[0]
gloo.begin_broadcast = dying
print(*sender.open(), flush=True)
sender.connect(2)
sys.stdin.readline()
sender.send()
"""


async def test_a_sender_killed_in_mid_broadcast_leaves_old_weights(
    pair: Pair, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    await pair.make_group()
    await pair.update()
    running = asyncio.create_task(pair.engine.generate("kept", PROMPT, 5, SamplingParameters(150)))
    tied = "tied" if pair.model.config.tie_word_embeddings else "untied"
    script = tmp_path / "sender.py"
    script.write_text(DYING_SENDER)
    environment = os.environ | {"PYTHONPATH": ROOT}
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(script),
        str(tmp_path),
        tied,
        env=environment,
        stdin=pipe,
        stdout=pipe,
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert process.stdout is not None
    assert process.stdin is not None
    async with asyncio.timeout(60):
        host, port = await address(process)
    await pair.engine.join(pair.round(host, port), 1)
    await pair.engine.pause()
    process.stdin.write(b"go\n")
    started = time.monotonic()
    with pytest.raises(TransferFailed, match=f"version {pair.version + 1}"):
        await pair.engine.receive(pair.version + 1)
    assert time.monotonic() - started < pair.config.sync.transfer_deadline_s * 0.8
    await process.communicate()
    assert pair.engine.whole
    assert pair.engine.version == pair.version
    await pair.engine.resume()
    await running
    await pair.assert_equal()

    perturb(pair.model, 55)
    await pair.make_group()
    await pair.update()
    await pair.assert_equal()


async def test_corrupted_weights_are_not_applied(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    from services.weights.transports import gloo

    honest = gloo.begin_broadcast  # of buckets, not of checksums

    def flipping(group: Any, buffer: Any, deadline: Any) -> Any:
        buffer[5] ^= 1
        return honest(group, buffer, deadline)

    await pair.make_group()
    await pair.update()
    version = pair.engine.version
    monkeypatch.setattr(gloo, "begin_broadcast", flipping)
    with pytest.raises(WeightsChanged) as raised:
        await pair.update()
    assert raised.value.tensor == next(name for name, _ in pair.model.named_parameters())
    assert (pair.engine.version, pair.engine.whole) == (version, True)
    monkeypatch.undo()
    pair.version = version
    await pair.engine.resume()
    await pair.assert_equal()
    await pair.make_group()
    await pair.update()
    await pair.assert_equal()


async def test_a_round_with_a_missing_member_fails_in_time(pair: Pair) -> None:
    from services.weights.sender import SendFailed

    running = asyncio.create_task(pair.engine.generate("busy", PROMPT, 5, SamplingParameters(150)))
    host, port = pair.sender.open()
    before: Gauges = pair.engine.gauges()
    started = time.monotonic()
    results = await asyncio.gather(
        asyncio.to_thread(pair.sender.connect, 3), pair.engine.join(pair.round(host, port, 3), 1), return_exceptions=True
    )
    assert isinstance(results[0], SendFailed)
    assert isinstance(results[1], TransferFailed)
    assert time.monotonic() - started < 30
    assert pair.engine.gauges().tokens > before.tokens, "sampling must continue while the member waits"
    assert (await asyncio.wait_for(running, 60)).finish != "aborted"
    await pair.make_group()
    await pair.update()
    await pair.assert_equal()


async def test_joining_fails_if_nothing_listens(pair: Pair) -> None:
    with pytest.raises(TransferFailed, match="epoch"):
        await pair.engine.join(pair.round("127.0.0.1", 1), 1)


async def test_a_receive_without_a_sender_times_out(pair: Pair) -> None:
    config = pair.engine._loaded._config
    pair.engine._loaded._config = config.model_copy(update={"sync": config.sync.model_copy(update={"transfer_deadline_s": 1.0})})
    await pair.make_group()
    await pair.engine.pause()
    with pytest.raises(TransferFailed):
        await pair.engine.receive(77)
    pair.engine._loaded._config = config
    assert pair.engine.whole
    await pair.engine.resume()
    await pair.make_group()
    await pair.update()
    await pair.assert_equal()


ZERO3_RANK = """
import os, sys
import torch
from pathlib import Path
from services.trainer.weight_sender import make_weight_sender
from tests.support.models.tiny_vllm import BUCKET_BYTES, make_config, make_model
from tests.support.models.two_ranks import zero_engine
rank, folder = int(os.environ["RANK"]), Path(sys.argv[1]) / os.environ["RANK"]
torch.set_num_threads(1)
model = make_model(folder, tied=True)
expected = {name: weight.detach().clone() for name, weight in model.named_parameters(remove_duplicate=False)}
engine = zero_engine(model, torch.optim.SGD(model.parameters(), lr=0.1), {"stage": 3, "stage3_param_persistence_threshold": 0})
sender = make_weight_sender(make_config(folder), engine.module, rank, BUCKET_BYTES)
assert any(weight.numel() == 0 for weight in model.parameters()), "the weights must be partitioned"
if rank == 0:
    torch.save(expected, Path(sys.argv[1]) / "expected.pt")
    print(*sender.open(), flush=True)
    sender.connect(2)
for _ in range(2):
    sender.send()
assert any(weight.numel() == 0 for weight in model.parameters()), "the weights must be partitioned again"
print("sent", flush=True)
"""


async def test_weights_partitioned_by_zero_3_arrive_complete(tmp_path: Path) -> None:
    import torch

    from services.weights import collective

    def receive(host: str, port: int) -> list[dict[str, torch.Tensor]]:
        store = collective.join_store(host, port, 20)
        group = collective.make_group(store, 1, 2, host, port, 20)
        manifest = collective.read_manifest(store)
        return [dict(collective.receive(group, manifest, collective.Deadline(20))) for _ in range(2)]

    async with two_ranks(tmp_path, ZERO3_RANK, tmp_path) as ranks, asyncio.timeout(90):
        rounds = await asyncio.to_thread(receive, *await address(ranks[0]))
        outputs = [await process.communicate() for process in ranks]
    assert all(b"sent" in output for output, _ in outputs)
    expected = torch.load(tmp_path / "expected.pt")
    assert "lm_head.weight" in expected
    for weights in rounds:
        assert list(weights) == list(expected)
        assert all(torch.equal(weights[name], expected[name]) for name in expected)


async def test_buckets_keep_order_and_size() -> None:
    from services.weights.collective import TensorMeta, plan_buckets

    metas = [TensorMeta(str(i), "float32", [size]) for i, size in enumerate((3, 5, 100, 1, 1))]
    manifest = plan_buckets(metas, 256)
    assert [[meta.name for meta in bucket.tensors] for bucket in manifest.buckets] == [["0", "1"], ["2"], ["3", "4"]]
    assert [bucket.offsets for bucket in manifest.buckets] == [[0, 64], [0], [0, 64]]
    assert [bucket.nbytes for bucket in manifest.buckets] == [84, 400, 68]
    assert manifest.tensors == metas
    assert plan_buckets([], 64).nbytes == 0
