"""Traces cost nothing when disabled, and block nothing when they cannot be sent."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from benchmarks.observing import black_hole
from services.config import ConfigError
from services.runtime import tracing
from services.runtime.tracing import OtlpTracing, TraceRecorder, check_tracing, open_tracing
from tests.support.harness import small_config, wait_until
from tests.support.servers.collector import collecting


def test_tracing_is_off_by_default_and_then_costs_nothing(tmp_path: Path) -> None:
    made = open_tracing(small_config(tmp_path), "trainer", "trainer-0")
    assert type(made) is TraceRecorder
    assert made.begin() == ""
    made.record("train", "", 0.0)
    made.close()
    code = "import sys, services.http.entry; print(any(name.startswith('opentelemetry.sdk.trace') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "False"


async def test_spans_arrive_as_one_trace(tmp_path: Path) -> None:
    with collecting() as collector:
        made = OtlpTracing(small_config(tmp_path, None, f"tracing.endpoint={collector.url}"), "dataprep", "dataprep-0")
        context, forgotten = made.begin(), made.begin()
        made.issued([context], done=True)
        made.issued([forgotten], done=False)
        now = time.monotonic()
        made.record("generate", context, now - 2.0, now - 1.0, tokens=5)
        made.record("generate", "nonsense", now - 2.0)
        made.record("generate", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", now - 2.0)
        await wait_until(lambda: made.counts["sent"] == 2, 60)
        made.close()
    (spans,) = collector.by_trace().values()
    generated, issued = spans
    assert (issued.name, issued.parent, generated.parent) == ("issue", "", issued.id)
    assert abs((generated.ended - generated.started) - 1.0) < 0.01
    assert abs(generated.started - time.time() + 2.0) < 60
    assert (generated.attributes, generated.service, generated.pod) == ({"grpo.tokens": 5}, "grpo-dataprep", "dataprep-0")


def test_only_a_share_of_groups_is_traced(tmp_path: Path) -> None:
    with collecting() as collector:
        config = small_config(tmp_path, None, f"tracing.endpoint={collector.url}", "samples.share=0.2")
        made = OtlpTracing(config, "dataprep", "dataprep-0")
        begun = Counter(bool(made.begin()) for _ in range(2000))
        made.close()
    assert 250 < begun[True] < 550


def test_a_hanging_collector_blocks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "QUEUED", 100)
    monkeypatch.setattr(tracing, "CLOSE_S", 0.5)
    with black_hole() as (url, _):
        made = OtlpTracing(small_config(tmp_path, None, f"tracing.endpoint={url}"), "trainer", "trainer-0")
        context = made.begin()
        for _ in range(1000):
            made.record("train", context, 0.0, step=1)
        assert made.counts["dropped"] >= 1000 - 100 - tracing.BATCH
        made.close()
        assert made.counts["sent"] == 0


async def test_failed_spans_are_counted_and_logged_once(tmp_path: Path) -> None:
    with collecting() as collector, capture_logs() as logs:
        wrong = collector.url.replace("127.0.0.1", "127.0.0.2")  # nothing listens there
        made = OtlpTracing(small_config(tmp_path, None, f"tracing.endpoint={wrong}"), "trainer", "trainer-0")
        for count in (1, 2):
            made.record("train", made.begin(), 0.0)
            await wait_until(lambda count=count: made.counts["failed"] == count, 120)
        made.close()
    assert (made.counts["sent"], made.counts["dropped"]) == (0, 0)
    (warning,) = (entry for entry in logs if "losing spans" in entry["event"])
    assert warning["log_level"] == "warning"
    assert warning["error"]


def test_a_missing_package_is_reported_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_config(tmp_path, None, "tracing.endpoint=http://collector:4318/v1/traces")
    check_tracing(config)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"tracing\.endpoint = .* pip install 'grpo\[tracing\]'"):
        check_tracing(config)
