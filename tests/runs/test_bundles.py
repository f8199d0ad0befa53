"""Steps recorded from a real run in training are reproduced from their bundles, without Redis, in other processes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from services.console.__main__ import main
from services.console.bundles import trainer_stages
from services.console.errors import ConsoleError
from services.operations.bundles import format as bundles
from services.operations.bundles.format import Bundle
from services.operations.bundles.gathering import StepReader
from services.protocol import codec
from services.protocol.messages import Header, RankPlan
from tests.support.harness import save_model_folder
from tests.support.once import once
from tests.support.whole_runs import Hold, finish, start, wait_for, write_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
FIRST, LAST = "first.bundle", "last.bundle"


@dataclass
class Recorded:
    """Bundles of steps 1 and 5 of a run on two ranks, with checkpoints after steps 2 and 5; only the first has weights."""

    folder: Path

    def change(self, name: str, out: Path, edit: Callable[[Bundle], Bundle]) -> Path:
        """Write a modified bundle with a valid checksum."""
        file = bundles.read(self.folder / name)
        place = out.parent / "files"
        files = {}
        for folder in (bundles.MODEL, bundles.STATE):
            if file.has(folder):
                unpacked = file.unpack(folder, place)
                files |= {f"{folder}/{path.name}": path for path in unpacked.iterdir()}
        bundles.write(out, edit(file.bundle), files)
        return out


@contextmanager
def watched() -> Iterator[dict[int, set[int]]]:
    """Return the steps that recorders have read, by the first that each needs, as they read them."""
    read, read_ahead = dict[int, set[int]](), StepReader.read_ahead

    async def watch(self: StepReader, first: int, last: int, incarnation: int) -> None:
        await read_ahead(self, first, last, incarnation)
        read[first] = set(self._read)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(StepReader, "read_ahead", watch)
        yield read


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """Let the run train past a checkpoint only after both recorders have read the steps that it removes."""
    with once(tmp_path_factory, "bundles") as (folder, new):
        if new:
            save_model_folder(folder / "model")
            hold = Hold(folder, "seen")
            config = write_run(
                folder, "seen", hold.option, "admission.max_staleness=1", "run.steps=6",
                "checkpoint.every_steps=3", "trainer.ranks=2", "trainer.zero_stage=1",
                "trainer.deterministic=false", 'verifiers=[{kind="regex", pattern="[0-4]"}, {kind="length", soft_tokens=8}]',
            )  # fmt: skip
            process = start(config)
            run = str(folder / "seen")
            while not (folder / "seen" / "config.toml").exists():
                assert process.poll() is None
            with watched() as read, ThreadPoolExecutor(2) as both:
                first = both.submit(_record, run, "1", folder / FIRST, "--weights")
                last = both.submit(_record, run, "5", folder / LAST)
                wait_for(lambda: 0 in read.get(0, ()) and 3 in read, process)
                for steps, step, needed in ((1, 0, {0, 1}), (4, 3, {3, 4, 5})):
                    hold.reach(steps, process)
                    assert main(["pause", run, "--role", "trainer", "--wait", "60"]) == 0
                    hold.allow(max(needed))
                    wait_for(lambda step=step, needed=needed: read[step] >= needed, process)
                    assert main(["resume", run, "--role", "trainer"]) == 0
                assert (first.result(), last.result()) == (0, 0)
            finish(process)
    return Recorded(folder)


def _record(run: str, step: str, out: Path, *options: str) -> int:
    """Record a step as soon as it exists. Attaching fails until the run has a server and a first state."""
    import time

    deadline = time.monotonic() + 120
    while (code := main(["record", step, run, "--out", str(out), "--wait", "120", *options])) and time.monotonic() < deadline:
        time.sleep(0.2)
    return code


def _replay(capsys: pytest.CaptureFixture[str], path: Path, stage: str, *options: str) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = main(["replay-step", str(path), "--stage", stage, "--json", *options])
    captured = capsys.readouterr()
    return code, json.loads(captured.out) if captured.out else {"error": captured.err}


@pytest.mark.parametrize("name", [FIRST, LAST])
@pytest.mark.parametrize("stage", ["score", "settle", "pack", "train"])
def test_every_stage_is_reproduced(name: str, stage: str, recorded: Recorded, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = _replay(capsys, recorded.folder / name, stage)
    assert (code, found.get("different"), found.get("first")) == (0, 0, None), found
    assert found["compared"] > 20


@pytest.mark.parametrize(
    ("step", "why"),
    [("99", "the run has finished, and its last step is 5"), ("1", "the plan of step 0 or its groups are gone from Redis")],
)
def test_a_step_of_the_past_is_refused(step: str, why: str, recorded: Recorded, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["record", step, str(recorded.folder / "seen"), "--wait", "60"]) == 2
    assert f"step {step} cannot be recorded: {why}" in capsys.readouterr().err


def test_a_bundle_describes_its_starting_point(recorded: Recorded) -> None:
    first, last = (bundles.read(recorded.folder / name).bundle for name in (FIRST, LAST))
    assert (first.origin.step, len(first.steps), last.origin.step, len(last.steps)) == (-1, 2, 2, 3)
    assert {"torch", "deepspeed", "python"} <= first.versions.keys()
    assert "model/model.safetensors" in first.files
    assert not last.files
    assert not first.weights
    assert last.weights, "the checkpoint of step 5 contains them"
    assert all(group.answer is not None for group in first.groups.values())


def test_a_bundle_with_weights_is_self_contained(recorded: Recorded, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The other bundle reports what is missing once the model or the checkpoint is gone."""
    moved = tmp_path / "model"
    shutil.move(recorded.folder / "model", moved)
    try:
        code, found = _replay(capsys, recorded.folder / FIRST, "loss", "--save", str(tmp_path / "tokens"))
        assert (code, found.get("different")) == (0, 0), found
        code, found = _replay(capsys, recorded.folder / LAST, "loss")
        assert code == 1
        assert "record it with --weights" in found["error"]
    finally:
        shutil.move(moved, recorded.folder / "model")
    tokens = load_file(tmp_path / "tokens")
    name = next(name for name in tokens if name.endswith("/logprobs") and tokens[name].size > 3)
    tokens[name] = tokens[name].copy()
    tokens[name][3] += 1e-6
    save_file(tokens, tmp_path / "other")
    code, found = _replay(capsys, recorded.folder / FIRST, "loss", "--against", str(tmp_path / "other"))
    assert (code, found.get("different")) == (1, 1), found
    rank, row, _ = name.replace("rank-", "rank ").split("/")
    assert found["first"]["where"].startswith(f"token 3 of logprobs of {rank}, row {int(row[4:])} (groups 0-")


def test_tensors_that_cannot_be_saved_are_reported_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConsoleError, match=r"--save .*/no/such: .*No such file or directory"):
        trainer_stages._write(tmp_path / "no" / "such", {"rank-0/logprobs": np.zeros(3, np.float32)})


def test_the_first_difference_is_named(recorded: Recorded, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def worse(bundle: Bundle) -> Bundle:
        name, group = next(iter(bundle.groups.items()))
        header = codec.decode(group.header, Header)
        scores = {"regex": [*header.scores["regex"][:-1], 0.5]} | {"length": header.scores["length"]}
        changed = msgspec.structs.replace(header, scores=scores, rewards=[*header.rewards[:-1], header.rewards[-1] + 0.25])
        groups = bundle.groups | {name: msgspec.structs.replace(group, header=codec.encode(changed))}
        return msgspec.structs.replace(bundle, groups=groups)

    path = recorded.change(FIRST, tmp_path / "worse.bundle", worse)
    ticket = codec.decode(next(iter(bundles.read(path).bundle.groups.values())).header, Header).ticket
    code, found = _replay(capsys, path, "score")
    assert code == 1
    assert found["first"]["where"].startswith(f"score of verifier regex, group {ticket}")
    assert found["first"]["was"] == 0.5
    code, found = _replay(capsys, path, "settle")
    assert (code, found["first"]["where"].startswith(f"advantage of group {ticket}, completion ")) == (1, True)

    def shorter(bundle: Bundle) -> Bundle:
        *before, last = bundle.steps
        plan = codec.decode(last.ranks[1], RankPlan)
        row = next(number for number, row in enumerate(plan.rows) if row)
        sample = msgspec.structs.replace(plan.rows[row][0], advantage=plan.rows[row][0].advantage + 1)
        rows = [*plan.rows[:row], [sample, *plan.rows[row][1:]], *plan.rows[row + 1 :]]
        ranks = [last.ranks[0], codec.encode(RankPlan(rows))]
        return msgspec.structs.replace(bundle, steps=[*before, msgspec.structs.replace(last, ranks=ranks)])

    path = recorded.change(FIRST, tmp_path / "shorter.bundle", shorter)
    code, found = _replay(capsys, path, "pack")
    assert (code, found.get("different")) == (1, 1), found
    assert found["first"]["where"].startswith("advantage of step 1, rank 1, row ")
    code, found = _replay(capsys, path, "loss")
    assert code == 1
    assert found["first"]["where"].endswith("of step 1"), "step 0, which was not modified, must be reproduced"


def test_code_named_by_a_bundle_is_not_executed(recorded: Recorded, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mark, code_file = tmp_path / "ran", tmp_path / "evil.py"
    code_file.write_text(f"open({str(mark)!r}, 'w')\n\ndef score(completion): return 1.0\n\ndef loss(*_): return None\n")

    def hostile(bundle: Bundle) -> Bundle:
        config = bundle.config.replace(
            'kind = "regex"\n', f'kind = "python"\nfunction = "{code_file}:score"\nrange = [0.0, 1.0]\n'
        )
        config = "\n".join(line for line in config.splitlines() if not line.startswith("pattern"))
        assert "evil" in config
        return msgspec.structs.replace(bundle, config=config)

    path = recorded.change(FIRST, tmp_path / "hostile.bundle", hostile)
    _, found = _replay(capsys, path, "score")
    assert "add --run-code" in found["notes"][0], found
    assert not mark.exists()

    text = bundles.read(recorded.folder / FIRST).bundle.config
    policy = next(line for line in text.splitlines() if line.startswith("policy = "))
    path = recorded.change(
        FIRST, tmp_path / "lossy.bundle",
        lambda bundle: msgspec.structs.replace(bundle, config=bundle.config.replace(policy, 'policy = "evil:loss"')),
    )  # fmt: skip
    code, found = _replay(capsys, path, "train")
    assert code == 2
    assert "is code" in found["error"]
    assert not mark.exists()


def test_a_replay_needs_no_gpu(recorded: Recorded, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def on_gpu(bundle: Bundle) -> Bundle:
        config = bundle.config
        for before, now in (('attention = "auto"', 'attention = "flex"'), ("compile = false", "compile = true")):
            assert config.count(before) == 1
            config = config.replace(before, now)
        return msgspec.structs.replace(bundle, config=config)

    path = recorded.change(FIRST, tmp_path / "gpu.bundle", on_gpu)
    code, found = _replay(capsys, path, "loss")
    assert (code, found.get("different")) == (0, 0), found
