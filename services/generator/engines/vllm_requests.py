"""What vLLM is asked for a completion, and what is made of its answer. Imports vLLM inside functions only."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from services.generator.engines.base import Generated, GenerationFailed, SamplingParameters
from services.protocol.messages import Span

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams

_FINISH: dict[str, Literal["stop", "length", "aborted"]] = {"stop": "stop", "length": "length", "abort": "aborted"}


def sampling_params(sampling: SamplingParameters, seed: int, made: int, stop_tokens: Sequence[int]) -> SamplingParams:
    """For a completion that has `made` tokens already."""
    parameters = copy.copy(_parameters(sampling, tuple(stop_tokens)))
    parameters.seed, parameters.max_tokens = seed, sampling.max_tokens - made
    return parameters


@cache
def _parameters(sampling: SamplingParameters, stop_tokens: tuple[int, ...]) -> SamplingParams:
    """What the completions of a run have in common: vLLM checks it for longer than it takes to begin a completion."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_tokens,
        stop=list(sampling.stop),
        stop_token_ids=list(stop_tokens),
        logprobs=0,  # of the sampled token alone
        flat_logprobs=True,
        detokenize=bool(sampling.stop),
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,  # vLLM's deep copy of each would be a fifth of what a short completion costs this process
    )


def continued_seed(seed: int, made: int) -> int:
    """Seed after `made` tokens, so that a continuation does not draw the first tokens' random numbers again."""
    return seed if made == 0 else int(np.random.SeedSequence([seed, made]).generate_state(1, np.uint64)[0] >> np.uint64(1))


async def last(outputs: AsyncIterator[RequestOutput]) -> RequestOutput:
    """The final output: with FINAL_ONLY the only one."""
    async for output in outputs:
        if output.finished:
            return output
    raise GenerationFailed("vLLM ended a completion without a final output")


def generated(request_id: str, output: RequestOutput, prefix: Generated | None) -> Generated:
    """vLLM's final output behind `prefix`."""
    completion = output.outputs[0]
    finish = _FINISH.get(completion.finish_reason or "")
    if finish is None:
        raise GenerationFailed(f"{request_id}: vLLM ended it with {completion.finish_reason!r}")
    flat: Any = completion.logprobs  # FlatLogprobs: `logprobs=0` leaves one number a token
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
    """Spans of a completion in two parts, the second starting at `offset`; equal versions at the seam become one."""
    shifted = [Span(span.version, span.start + offset, span.end + offset) for span in second]
    if first and shifted and first[-1].version == shifted[0].version:
        seam = Span(first[-1].version, first[-1].start, shifted[0].end)
        return [*first[:-1], seam, *shifted[1:]]
    return [*first, *shifted]
