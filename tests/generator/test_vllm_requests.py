"""Requests to vLLM, without an engine."""

from __future__ import annotations

import pytest

from services.generator.engines import vllm_requests
from services.generator.engines.vllm_requests import sampling_params
from services.groups.generated import SamplingParameters

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),  # loading vLLM takes minutes on a busy machine
    pytest.mark.filterwarnings("default"),  # importing vLLM warns
]


def test_turns_of_any_length_share_the_checked_parameters() -> None:
    """Turns of environments ask for what their contexts leave room for, so nothing may be kept for each value."""
    vllm_requests._parameters.cache_clear()
    made = [sampling_params(SamplingParameters(limit, 0.5), limit + 1, 2, [7]) for limit in range(10, 30)]
    assert [(one.max_tokens, one.seed) for one in made] == [(limit - 2, limit + 1) for limit in range(10, 30)]
    assert {(one.temperature, *(one.stop_token_ids or ())) for one in made} == {(0.5, 7)}
    assert vllm_requests._parameters.cache_info().currsize == 1
