"""What CUDA streams wait for while weights travel by vLLM's packed broadcast.

The broadcast alternates between two streams that do not wait for each other: memory that one of them still reads must not be
written on the other.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from services.config import ConfigError
from services.weights.broadcast import nccl
from services.weights.broadcast.nccl import VLLM_MODULES, NcclConnection, NcclReceiver, NcclSender
from services.weights.broadcast.sender import BroadcastSender
from services.weights.buckets import Gathered, describe, plan_buckets
from services.weights.deadline import Deadline
from tests.support.harness import small_config
from tests.support.senders import sender_of

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]  # vLLM is imported, which warns

LENGTHS = (6, 6, 6, 6, 6, 6)
BUCKET = 40  # bytes: a bucket holds one weight; a broadcast, which ends once it exceeds this, holds two
DEVICE = "device"


class Streams:
    """Records what happens, in order, and on which stream: (what, stream)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from vllm.distributed.weight_transfer import packed_tensor

        self.seen: list[tuple[str, Any]] = []
        self.current: Any = None
        streams = self

        class Stream:
            def __init__(self, device: Any = None) -> None: ...

            def synchronize(self) -> None:
                streams.seen.append(("wait", self))

        @contextlib.contextmanager
        def on(stream: Any) -> Iterator[None]:
            before, streams.current = streams.current, stream
            yield
            streams.current = before

        self.current = self.own = Stream()
        packed_tensor._get_streams.cache_clear()
        for owner, name, by in (
            (torch.cuda, "Stream", Stream), (torch.cuda, "stream", on), (torch.cuda, "current_stream", lambda: self.current),
            (torch.cuda, "synchronize", lambda: self.note("wait", DEVICE)),
            (torch.accelerator, "synchronize", lambda: self.note("wait", DEVICE)),
            (torch.accelerator, "current_device_index", lambda: 0), (nccl, "BUCKET_BYTES", BUCKET),
        ):  # fmt: skip
            monkeypatch.setattr(owner, name, by)

    def note(self, what: str, stream: Any = None) -> None:
        self.seen.append((what, stream or self.current))


class Group:
    """A communicator that only records."""

    device = torch.device("cpu")

    def __init__(self, streams: Streams) -> None:
        self._streams = streams

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        self._streams.note("broadcast")

    def destroy(self) -> None: ...


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[Streams]:
    yield Streams(monkeypatch)
    from vllm.distributed.weight_transfer import packed_tensor

    packed_tensor._get_streams.cache_clear()


def weights() -> dict[str, torch.Tensor]:
    return {f"w{i}": torch.full((length,), float(i)) for i, length in enumerate(LENGTHS)}


def test_a_receiver_loads_a_bucket_to_the_end_before_it_receives_the_next(
    streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl, "check", lambda names, held, sent: None)  # the group sends nothing
    manifest = plan_buckets([describe(name, weight) for name, weight in weights().items()], BUCKET)
    connection = NcclConnection(Group(streams), manifest, BUCKET)
    NcclReceiver(torch.device("cpu")).stream(connection, Deadline(30.0), lambda _: streams.note("load"))
    kinds = [what for what, _ in streams.seen]
    assert kinds.count("load") == 3
    assert kinds.count("broadcast") == 4, "three of weights, one of checksums"
    for i, what in enumerate(kinds):
        if what == "load":
            assert streams.seen[i + 1] == ("wait", DEVICE)


class OnGpu(torch.Tensor):
    """A tensor that claims to be on a GPU, and records for which streams its memory is kept."""

    is_cuda = True
    streams: Streams

    def record_stream(self, stream: Any) -> None:
        self.streams.note("kept", stream)


def nccl_sender(folder: Path) -> NcclSender:
    sender = sender_of(small_config(folder, None, "sync.backend=nccl"), torch.nn.Linear(1, 1))
    assert isinstance(sender, NcclSender)
    return sender


def sent(streams: Streams, folder: Path) -> None:
    """Send weights that exist only while they are sent, as merged ones do."""
    OnGpu.streams = streams
    manifest = plan_buckets([describe(name, weight) for name, weight in weights().items()], BUCKET)

    def gathered() -> Gathered:
        for bucket, weight in zip(manifest.buckets, weights().values(), strict=True):
            streams.note("made")
            yield bucket, [torch.Tensor._make_subclass(OnGpu, weight)]

    nccl_sender(folder).broadcast(Group(streams), gathered(), Deadline(30.0))


def test_a_sender_waits_for_the_stream_that_trained(streams: Streams, tmp_path: Path) -> None:
    sent(streams, tmp_path)
    assert streams.seen[0] == ("wait", DEVICE)


def test_weights_are_made_to_the_end_before_another_stream_may_pack_them(streams: Streams, tmp_path: Path) -> None:
    sent(streams, tmp_path)
    made = [i for i, (what, _) in enumerate(streams.seen) if what == "made"]
    assert len(made) == len(LENGTHS)
    for i in made:
        assert streams.seen[i + 1] == ("wait", streams.seen[i][1])


def test_the_memory_of_a_weight_is_kept_for_the_stream_that_packs_it(streams: Streams, tmp_path: Path) -> None:
    sent(streams, tmp_path)
    waiting: list[Any] = []
    for what, stream in streams.seen:
        if what == "kept":
            waiting.append(stream)
        elif what == "broadcast":
            assert waiting in ([stream, stream], []), "two weights in each broadcast; none with the checksums"
            waiting = []
    assert not waiting


def test_vllm_is_imported_before_members_wait_for_the_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sender, done = nccl_sender(tmp_path), list[str]()
    monkeypatch.setattr(importlib, "import_module", done.append)
    monkeypatch.setattr(BroadcastSender, "open", lambda self, fence: done.append("open"))
    sender.open(1)
    assert done == [*VLLM_MODULES, "open"]


def test_a_trainer_without_vllm_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'sync.backend = "nccl".*pip install vllm==0.32.0, or set sync.backend = "gloo"'):
        nccl_sender(tmp_path)
