"""Builds vLLM's request for a completion and converts its response. Imports vLLM inside functions only."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from services.groups.generated import Generated, GenerationFailed, SamplingParameters
from services.protocol.messages import Span

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams

_FINISH: dict[str, Literal["stop", "length", "aborted"]] = {"stop": "stop", "length": "length", "abort": "aborted"}


def sampling_params(sampling: SamplingParameters, seed: int, made: int, stop_tokens: Sequence[int]) -> SamplingParams:
    """Return the parameters for a completion that already has `made` tokens."""
    parameters = copy.copy(_parameters(replace(sampling, max_tokens=1), tuple(stop_tokens)))
    parameters.seed, parameters.max_tokens = seed, sampling.max_tokens - made
    return parameters


@cache
def _parameters(sampling: SamplingParameters, stop_tokens: tuple[int, ...]) -> SamplingParams:
    """Return the parameters common to all completions of a run, since vLLM's checks take longer than starting a completion.

    Not common are the seed and `max_tokens`: turns of environments ask for many values, and each would be kept.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_tokens,
        stop=list(sampling.stop),
        stop_token_ids=list(stop_tokens),
        logprobs=0,  # only of the sampled token
        flat_logprobs=True,
        detokenize=bool(sampling.stop),
        skip_special_tokens=False,  # a stop string may be or contain one
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,  # vLLM's deep copy would be a fifth of this process' time for a short completion
    )


def continued_seed(seed: int, made: int) -> int:
    """Return the seed after `made` tokens, so that a continuation does not repeat the random numbers of the first tokens."""
    return seed if made == 0 else int(np.random.SeedSequence([seed, made]).generate_state(1, np.uint64)[0] >> np.uint64(1))


async def last(outputs: AsyncIterator[RequestOutput]) -> RequestOutput:
    """Return the final output; with FINAL_ONLY it is the only one."""
    async for output in outputs:
        if output.finished:
            return output
    raise GenerationFailed("vLLM ended a completion without a final output")


def generated(request_id: str, output: RequestOutput, prefix: Generated | None) -> Generated:
    """Append vLLM's final output to `prefix`."""
    completion = output.outputs[0]
    finish = _FINISH.get(completion.finish_reason or "")
    if finish is None:
        raise GenerationFailed(f"{request_id}: vLLM ended it with finish reason {completion.finish_reason!r}")
    flat: Any = completion.logprobs  # FlatLogprobs: `logprobs=0` leaves one number per token
    tokens = np.asarray(completion.token_ids, dtype=np.int32)
    logprobs = np.asarray(flat.logprobs, dtype=np.float32)
    spans = [Span(int(span.version), span.start, span.end) for span in completion.weight_versions or () if span.end > span.start]
    assert len(tokens) == len(logprobs) == (spans[-1].end if spans else 0), f"{request_id}: ragged output"
    if prefix is None or not len(prefix.tokens):
        return Generated(tokens, logprobs, spans, finish)
    return Generated(
        np.concatenate([prefix.tokens, tokens]),
        np.concatenate([prefix.logprobs, logprobs]),
        _joined_spans(prefix.spans, spans, len(prefix.tokens)),
        finish,
        prefix.tool_spans,
    )


def _joined_spans(first: list[Span], second: list[Span], offset: int) -> list[Span]:
    """Return the spans of a completion in two parts, the second starting at `offset`; equal versions at the seam are merged."""
    shifted = [Span(span.version, span.start + offset, span.end + offset) for span in second]
    if first and shifted and first[-1].version == shifted[0].version:
        seam = Span(first[-1].version, first[-1].start, shifted[0].end)
        return [*first[:-1], seam, *shifted[1:]]
    return [*first, *shifted]
