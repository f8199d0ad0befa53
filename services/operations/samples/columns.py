"""The columns of the sample log, one row per completion.

Guarantees: all files of a log have these columns, in this order, except later ones in files of earlier versions, which read as
null; `payload`, `step`, `outcome`, `sample` and `incarnation` identify a row.
"""

from __future__ import annotations

import pyarrow as pa

FORMAT = 1
"""Version of the columns, in each file's metadata."""

SEGMENT = pa.struct(
    [
        ("context", pa.string()),
        ("text", pa.string()),
        ("context_tokens", pa.int32()),
        ("length", pa.int32()),
        ("oldest", pa.int32()),
        ("newest", pa.int32()),
    ]
)

_COLUMNS = {
    "group": (pa.string(), "ticket of the group, `<epoch>-<row>`"),
    "sample": (pa.int32(), "place of the completion in its group, from 0; null for a group without completions"),
    "step": (pa.int32(), "step that trained on it; for other outcomes, the step that was being prepared"),
    "outcome": (pa.string(), "`trained`, `filtered`, `stale`, `evicted` or `failed`"),
    "reason": (pa.string(), "why it was filtered or failed; empty otherwise"),
    "source": (pa.string(), "name of the prompt source"),
    "prompt": (pa.string(), "text of the prompt, with special tokens"),
    "completion": (pa.string(), "text of the completion; if it has several segments, their texts one after the other"),
    "reward": (pa.float64(), "weighted sum of the scores"),
    "advantage": (pa.float64(), "advantage over the whole group, by `advantage.kind`"),
    "scores": (pa.map_(pa.string(), pa.float64()), "verifier, or verifier.part, to unweighted score"),
    "solved": (pa.bool_(), "whether it is solved; null if no verifier can tell"),
    "truncated": (pa.bool_(), "whether it reached `sampling.max_tokens` or another limit"),
    "length": (pa.int32(), "tokens of the completion: those of all its segments, without contexts"),
    "prompt_tokens": (pa.int32(), "tokens of the prompt"),
    "tool_tokens": (pa.int32(), "tokens of the completion that the policy did not sample"),
    "turns": (pa.int32(), "turns of the policy"),
    "oldest": (pa.int32(), "oldest policy version among its tokens"),
    "newest": (pa.int32(), "newest policy version among its tokens"),
    "generator": (pa.string(), "pod that generated it"),
    "generate_s": (pa.float32(), "seconds from the claim to the group's last token"),
    "score_s": (pa.float32(), "seconds that verifiers took for the group"),
    "tool_s": (pa.float32(), "seconds that its environment took"),
    "tool_calls": (pa.int32(), "tools that the policy called"),
    "malformed_calls": (pa.int32(), "turns whose tool calls could not be parsed; the policy got the reason"),
    "gap_mean": (pa.float32(), "mean size of `gaps`"),
    "gap_max": (pa.float32(), "largest size of `gaps`"),
    "seq": (pa.int64(), "position in the order of issue"),
    "payload": (pa.string(), "`<ticket>.<fence>`: unique to each generation of a group; the ticket for a group without tokens"),
    "incarnation": (pa.int64(), "when the run was created or last restored, Unix seconds"),
    "logged_s": (pa.float64(), "when the row was written, Unix seconds"),
    "notes": (pa.string(), "JSON: notes of the verifiers; empty if there are none"),
    "segments": (pa.list_(SEGMENT), "segments of a rollout that has several, or contexts of its own; null otherwise"),
    "tokens": (pa.list_(pa.int32()), "token ids of the completion"),
    "logprobs": (pa.list_(pa.float32()), "behaviour logprobs of `tokens`, to 3 digits"),
    "gaps": (
        pa.list_(pa.float32()),
        "logprobs of `tokens` in training - `logprobs`, to 5 %; NaN where the policy did not sample; null if it was not trained",
    ),
}

SCHEMA = pa.schema([(name, kind) for name, (kind, _) in _COLUMNS.items()])
MEANINGS = {name: meaning for name, (_, meaning) in _COLUMNS.items()}
UNDONE = "undone"
"""Name in expressions of whether a restore to a checkpoint has undone the row's step."""
NAMES = (*(name for name, (kind, _) in _COLUMNS.items() if not pa.types.is_nested(kind)), UNDONE)
"""Names in expressions, except those of scores."""
SORTS = (
    *(name for name, (kind, _) in _COLUMNS.items() if pa.types.is_primitive(kind)),
    *("group", "outcome", "reason", "source", "generator"),
)
"""Columns by which rows can be sorted: those of a few bytes a row."""
