"""Weights over gloo into a real vLLM: equality after every update, in-flight updates, broken rounds."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from services.config import RunConfig
from services.generator.engines.base import Gauges
from services.generator.engines.vllm import VllmEngine
from services.groups.generated import SamplingParameters
from services.protocol.messages import Round, Span
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
        from tests.support.senders import sender_of

        self.engine, self.model, self.config = engine, model, config
        self.sender = sender_of(config, model, bucket_bytes=BUCKET_BYTES)
        self.epoch = 0
        self.version = -1
        self.limits: list[dict[str, Any]] = []  # the fields of `sync`, of both sides

    def round(self, host: str, port: int, world_size: int = 2) -> Round:
        self.epoch += 1
        return Round(self.epoch, self.version + 1, "join", {"generator-0:x": 1}, world_size, "gloo", host, port, self.epoch, 1)

    async def make_group(self) -> None:
        host, port = self.sender.open(1)
        await asyncio.gather(asyncio.to_thread(self.sender.connect, 2), self.engine.join(self.round(host, port), 1))

    async def update(self) -> None:
        """Send the model's weights as the next version."""
        await self.engine.pause()
        self.version += 1
        await asyncio.gather(asyncio.to_thread(self.sender.send, self.version, 1), self.engine.receive(self.version))
        await self.engine.resume()

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


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["tied", "untied"])
async def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    folder = tmp_path_factory.mktemp("model")
    tied = request.param == "tied"
    model = make_model(folder, tied=tied, bias=tied)
    config = make_config(folder, sync={"deadline_s": 10.0})
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
    pair.sender.close()


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


DYING_SENDER = """
import os, signal, sys
from pathlib import Path
from services.weights.broadcast import gloo
from tests.support.models.tiny_vllm import BUCKET_BYTES, make_config, make_model
from tests.support.senders import sender_of
folder = Path(sys.argv[1])
model = make_model(folder, tied=sys.argv[2] == "tied", seed=99)
sender = sender_of(make_config(folder), model, bucket_bytes=BUCKET_BYTES)
sent, honest = [], gloo.begin_broadcast
def dying(group, buffer, deadline):
    for work in sent:
        work.wait()
        os.kill(os.getpid(), signal.SIGKILL)
    sent.append(honest(group, buffer, deadline))
    return sent[0]
gloo.begin_broadcast = dying
print(*sender.open(1), flush=True)
sender.connect(2)
sys.stdin.readline()
sender.send(0, 1)
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
    assert time.monotonic() - started < pair.config.sync.deadline_s * 0.8
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
    from services.weights.broadcast import gloo

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
    from services.weights.transport import SendFailed

    running = asyncio.create_task(pair.engine.generate("busy", PROMPT, 5, SamplingParameters(150)))
    host, port = pair.sender.open(1)
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
    await pair.make_group()
    with pytest.raises(TransferFailed):
        await pair.engine.stage(77, 1.0)
    assert pair.engine.whole
    await pair.make_group()
    await pair.update()
    await pair.assert_equal()


ZERO3_RANK = """
import os, sys
import torch
from pathlib import Path
from tests.support.models.tiny_vllm import BUCKET_BYTES, make_config, make_model
from tests.support.models.two_ranks import zero_engine
from tests.support.senders import sender_of
rank, folder = int(os.environ["RANK"]), Path(sys.argv[1]) / os.environ["RANK"]
torch.set_num_threads(1)
model = make_model(folder, tied=True)
expected = {name: weight.detach().clone() for name, weight in model.named_parameters(remove_duplicate=False)}
engine = zero_engine(model, torch.optim.SGD(model.parameters(), lr=0.1), {"stage": 3, "stage3_param_persistence_threshold": 0})
sender = sender_of(make_config(folder), engine.module, rank, bucket_bytes=BUCKET_BYTES)
assert any(weight.numel() == 0 for weight in model.parameters()), "the weights must be partitioned"
if rank == 0:
    torch.save(expected, Path(sys.argv[1]) / "expected.pt")
    print(*sender.open(1), flush=True)
    sender.connect(2)
for version in range(2):
    sender.send(version, 1)
assert any(weight.numel() == 0 for weight in model.parameters()), "the weights must be partitioned again"
print("sent", flush=True)
"""


async def test_weights_partitioned_by_zero_3_arrive_complete(tmp_path: Path) -> None:
    import torch

    from services.weights.broadcast.gloo import GlooReceiver
    from services.weights.deadline import Deadline
    from services.weights.transport import Address

    def receive(host: str, port: int) -> list[dict[str, torch.Tensor]]:
        receiver = GlooReceiver(torch.device("cpu"))
        connection = receiver.connect(Address(host, port, 1, 2, BUCKET_BYTES, 20), 1)
        return [{name: weight.clone() for name, weight in receiver.take(connection, i, Deadline(20))} for i in range(2)]

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
    from services.weights.buckets import TensorMeta, plan_buckets

    metas = [TensorMeta(str(i), "float32", [size]) for i, size in enumerate((3, 5, 100, 1, 1))]
    manifest = plan_buckets(metas, 256)
    assert [[meta.name for meta in bucket.tensors] for bucket in manifest.buckets] == [["0", "1"], ["2"], ["3", "4"]]
    assert [bucket.offsets for bucket in manifest.buckets] == [[0, 64], [0], [0, 64]]
    assert [bucket.nbytes for bucket in manifest.buckets] == [84, 400, 68]
    assert manifest.tensors == metas
    assert plan_buckets([], 64).nbytes == 0
