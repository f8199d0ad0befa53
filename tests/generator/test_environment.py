"""The environment variables of vLLM's processes."""

from __future__ import annotations

import os
from unittest import mock

from services.config import RunConfig
from services.generator.engines.vllm_arguments import set_environment

METHOD = "VLLM_WORKER_MULTIPROC_METHOD"


def given(gpu: bool, **environ: str) -> dict[str, str]:
    """Return the environment after `set_environment` has changed `environ`."""
    config = RunConfig.model_validate({"model": {"path": "/no/model"}, "data": {"sources": [{"kind": "jsonl", "path": "x"}]}})
    with mock.patch.dict(os.environ, environ, clear=True):
        set_environment(config, gpu)
        return dict(os.environ)


def test_processes_are_spawned_on_a_gpu_since_cuda_fails_in_a_fork_of_a_process_that_has_counted_gpus() -> None:
    assert given(True)[METHOD] == "spawn"
    assert METHOD not in given(False), "vLLM decides, and template.py may fork"


def test_what_the_user_sets_is_kept() -> None:
    assert given(True, **{METHOD: "fork"})[METHOD] == "fork"
