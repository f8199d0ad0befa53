"""The pure parts of benchmarks/replay.py, and its measurements of our side on small tables."""

from __future__ import annotations

import json

import pytest

from benchmarks import replay
from benchmarks.replay import Cell, Ours, figures, make_payload, summary
from services.protocol import codec
from services.protocol.payloads import Payload
from services.store import Store

OURS = {
    "insert_s": 1.0, "overhead_bytes_per_group": 900.0, "names_s": 0.001, "draw_s": 0.002, "sample_s": 0.5, "bare_insert_s": 0.25,
    "bare_sample_s": 0.125,
}  # fmt: skip
THEIRS = {"insert_s": 2.0, "insert_each_s": 6.0, "draw_s": 0.008, "sample_s": 1.0, "sample_each_s": 2.0}


@pytest.mark.parametrize("size", [1000, 40_000, 400_000])
def test_payloads_have_the_requested_size_and_one_shape(size: int) -> None:
    payloads = [make_payload(size, seed) for seed in range(4)]
    assert {len(payload) for payload in payloads} == {len(payloads[0])}, "Reverb's batches need one shape"
    assert len(set(payloads)) == 4
    assert abs(len(payloads[0]) - size) < 0.15 * size
    assert codec.decode(payloads[0], Payload).lengths.sum() == codec.decode(payloads[0], Payload).tokens.size


def test_cells_are_named_by_size_and_count() -> None:
    assert [Cell(1000, 100_000).name, Cell(40_000, 10_000).name, Cell(40_000, 200).name] == ["1KB/100k", "40KB/10k", "40KB/200"]


def test_samples_are_whole_draws_of_at_most_250_megabytes() -> None:
    for size, groups in replay.CELLS + replay.QUICK_CELLS:
        cell = Cell(size, groups)
        assert cell.samples % replay.BATCH == 0
        assert cell.samples >= 8 * replay.BATCH
        assert cell.samples * size <= max(260_000_000, 8 * replay.BATCH * size)


def test_a_pass_that_does_not_fit_is_skipped_with_a_reason() -> None:
    cell = Cell(400_000, 10_000)
    assert cell.why_not(0.001, 60.0, 6.0) == ""
    assert cell.why_not(0.001, 60.0, 3.0) == "3.7 GiB of payloads, limit 3 GiB"
    assert cell.why_not(0.001, 8.0, 6.0) == "about 20 s, 8 s left", "both samplers"
    assert Cell(1000, 100_000).why_not(0.001, 110.0, 6.0) == "", "one sampler for large tables"


def test_the_cells_include_what_the_summary_needs() -> None:
    assert {replay.HEADLINE, (1000, 1000), (1000, 100_000)} <= set(replay.CELLS)
    assert len(set(replay.CELLS)) == len(replay.CELLS)


def test_ratios_of_speed_are_inverse_ratios_of_time() -> None:
    found = figures(
        {"uniform": OURS, "prioritized": {**OURS, "insert_s": 3.0, "sample_s": 2.0}},
        {"uniform": THEIRS, "prioritized": THEIRS},
        Cell(40_000, 1000),
    )
    assert found["insert_ratio"] == 1.0
    assert found["insert_each_ratio"] == 3.0
    assert (found["bare_insert_ratio"], found["bare_insert_each_ratio"]) == (8.0, 24.0)
    assert (found["bare_sample_uniform_ratio"], found["bare_sample_prioritised_ratio"]) == (8.0, 8.0)
    assert found["draw_p50_ratio"] == 0.25
    assert (found["sample_uniform_ratio"], found["sample_prioritised_ratio"]) == (2.0, 0.5)
    assert (found["sample_each_uniform_ratio"], found["sample_each_prioritised_ratio"]) == (4.0, 1.0)
    assert found["overhead_bytes_per_group"] == 900.0
    assert found["inserts_per_s"] == 500.0
    assert found["names_ms"] == 1.0


def test_one_sampler_alone_gives_figures() -> None:
    found = figures({"prioritized": OURS}, {"prioritized": THEIRS}, Cell(1000, 1000))
    assert (found["insert_ratio"], found["inserts_per_s"], found["sample_prioritised_ratio"]) == (2.0, 1000.0, 2.0)
    assert "sample_uniform_ratio" not in found


def test_the_summary_has_the_headline_and_growth_across_cells(capsys: pytest.CaptureFixture[str]) -> None:
    cells = {
        "40KB/10k": {"insert_ratio": [0.5, 0.75, 1.0], "names_ms": [9.0]},
        "1KB/1k": {"insert_ratio": [7.0], "names_ms": [1.0, 2.0, 3.0]},
        "1KB/100k": {"insert_ratio": [8.0], "names_ms": [5.0]},
    }
    result = summary(cells, {"left_out": {"400KB/10k": "no memory"}})
    assert result == json.loads(capsys.readouterr().out)
    assert (result["headline"], result["insert_ratio"], result["growth_100k"]) == ("40KB/10k", 0.75, 2.5)
    assert result["spread"]["insert_ratio"] == [0.5, 1.0]
    assert result["cells"]["1KB/1k"]["names_ms"] == [2.0, 1.0, 3.0]
    assert result["left_out"] == {"400KB/10k": "no memory"}


def test_without_the_headline_the_last_cell_takes_its_place() -> None:
    result = summary({"1KB/200": {"insert_ratio": [1.0]}, "40KB/200": {"insert_ratio": [2.0]}}, {})
    assert (result["headline"], result["insert_ratio"]) == ("40KB/200", 2.0)
    assert "growth_100k" not in result


@pytest.mark.parametrize("sampler", ["uniform", "prioritized"])
async def test_our_side_is_measured_through_the_products_calls(store: Store, sampler: str) -> None:
    ours = Ours([store, store, store], [make_payload(1000, seed) for seed in range(3)])
    found = await ours.measure(Cell(1000, 200), sampler, draws=3)
    assert set(found) == set(OURS)
    overhead = found.pop("overhead_bytes_per_group")
    assert abs(overhead) < 20_000, "the server's own buffers outweigh 200 small groups, but not 10,000"
    assert all(value > 0 for value in found.values())
    assert found["names_s"] < found["draw_s"]
    assert await store.run.state() is None, "the run was deleted"
