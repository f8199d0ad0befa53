"""The process of a dataprep pod on a cluster stays ready after its run has ended, and serves the control API."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx

from services.config import RunConfig, to_toml
from services.console.run.redis_server import RedisServer
from services.runtime.process_tools import CONFIG_ENV, free_port
from services.store import Store
from tests.support.harness import save_tokenizer_folder, small_config, wait_until

TOKEN = {"Authorization": "Bearer test-token"}


@contextlib.contextmanager
def started(config: RunConfig, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Yield the process of a pod, which is terminated like a pod."""
    (folder / "resolved.toml").write_text(to_toml(config))
    environ = {**os.environ, CONFIG_ENV: str(folder / "resolved.toml")}
    with subprocess.Popen([sys.executable, "-m", "services.dataprep", "--stay"], env=environ) as process:
        try:
            yield process
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()


async def is_ready(http: httpx.AsyncClient) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return (await http.get("/health/ready")).status_code == 200
    return False


async def refusal(http: httpx.AsyncClient, path: str, body: dict[str, object]) -> tuple[int, str]:
    answer = await http.post(path, headers=TOKEN, json=body)
    return answer.status_code, answer.json()["detail"]


async def ended(http: httpx.AsyncClient) -> bool:
    return re.search(r"^grpo_run_ended\{.*\} 1\.0$", (await http.get("/metrics")).text, re.MULTILINE) is not None


async def test_a_finished_run_stays_readable_and_resumes_with_more_steps(
    store: Store, server: RedisServer, tmp_path: Path
) -> None:
    config = small_config(tmp_path, server, f"run.name={store.keys.name}", f"api.port={free_port()}")
    save_tokenizer_folder(tmp_path / "model")
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{config.api.port}", timeout=30) as http:
        with started(config, tmp_path) as process:
            await wait_until(lambda: is_ready(http))
            await store.run.finish("trained 4 of 4 steps", await store.run.attach_trainer())
            await wait_until(lambda: ended(http))
            state = (await http.get("/v1/state")).json()
            assert (state["pod"]["pid"], state["state"]["finished"]) == (process.pid, "trained 4 of 4 steps")
            assert (await http.get("/v1/audit")).json()["lost"] == 0
            assert (await http.get("/v1/buffer")).status_code == 200
            finished, over = "the run has already finished: trained 4 of 4 steps", "the run is over: trained 4 of 4 steps"
            assert await refusal(http, "/v1/fleet/generators", {"replicas": 3}) == (409, finished)
            assert await refusal(http, "/v1/deadletters/requeue", {"all": True}) == (409, over)
            assert await is_ready(http)
        with started(config, tmp_path):  # as in a Kubernetes rollout
            await wait_until(lambda: is_ready(http))
            await wait_until(lambda: ended(http))
        more = config.model_copy(update={"run": config.run.model_copy(update={"steps": 6})})
        with started(more, tmp_path):  # as in an upgrade
            await wait_until(lambda: is_ready(http))
            state = await store.run.state()
            assert state is not None
            assert (state.finished, state.steps) == ("", 6)
