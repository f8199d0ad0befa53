"""Which architectures can be trained: every type of causal language model in transformers, built tiny and tested.

`python -m benchmarks.architectures` prints a table, with `--json` only one JSON object; `--page` writes docs/models.md.
The verdict on a type is

- proven: it loads, and packed rows give the logprobs of the model alone, verified again here with other rows and a second copy;
- refused: loading rejects it with a reason;
- silent: it loads, but its packed logprobs are wrong. There must be none;
- crashed: loading or training raises any other error. There must be none;
- not built: its class cannot be made tiny from its defaults.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

if __name__ == "__main__":  # `python benchmarks/architectures.py` from the repository's root
    sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import tiny_models
from benchmarks.common import report
from benchmarks.models_page import write
from services.config.root import Model
from services.protocol.messages import RankPlan, Sample
from services.protocol.payloads import Payload
from services.trainer.model import policy_network
from services.trainer.model.attention import UnsupportedModel
from services.trainer.model.proof import Proofs
from services.trainer.step import batches

LARGEST_GAP = 1e-4
"""Nats: float32 gives 1e-6 to 1e-5 here, and the smallest mistake found was 1e-2."""
COUNTS = ("types", "built", "proven", "refused", "silent", "crashes", "worst_proven_gap")
"""Numeric figures of a sweep."""
LIMIT_S = 60  # per type; the slowest takes 5 s


@dataclass(frozen=True)
class Verdict:
    """The result for one type."""

    type: str
    verdict: str
    reason: str = ""
    gap: float | None = None  # nats, the largest of any token


def try_out(model_type: str, **changes: Any) -> Verdict:
    """Build a model of this type, load it as the trainer does, and compare packed rows with the model alone."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            with _limited():
                tiny_models.build(model_type, **changes).save_pretrained(folder)
        except Exception as error:  # a class may fail in any way on sizes that it was not written for
            return Verdict(model_type, "not built", _line(error))
        return judge(model_type, folder)


def judge(model_type: str, folder: Path) -> Verdict:
    """Load the model of `folder` as the trainer does, and compare packed rows with the model alone."""
    try:
        with _limited():
            config = Model(path=str(folder), dtype="float32", max_tokens=256)
            scorer = policy_network.load(config, 1.0, 64, proofs=Proofs(folder / "proofs"))
    except UnsupportedModel as error:
        return Verdict(model_type, "refused", str(error).replace(str(folder), "…"))
    except Exception as error:  # loading must refuse with a reason; anything else is a crash
        return Verdict(model_type, "crashed", _line(error))
    try:
        with _limited():
            gap = _gap(scorer, folder)
    except Exception as error:
        return Verdict(model_type, "crashed", _line(error))
    return Verdict(model_type, "proven" if gap <= LARGEST_GAP else "silent", "", gap)


def _gap(scorer: policy_network.Scorer, folder: Path) -> float:
    """Return the largest difference of a logprob between packed rows in training and a fresh copy of the model alone."""
    from transformers import AutoModelForCausalLM

    alone = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    payloads = _payloads(scorer.model.config.get_text_config().vocab_size)
    samples = [Sample(n, i, 1.0, int(length)) for n, payload in payloads.items() for i, length in enumerate(payload.lengths)]
    (row,) = batches.build(RankPlan([samples]), payloads, vocabulary=10**6, row_tokens=10**6)
    scorer.train()
    logprobs, _ = scorer(row)
    logprobs.sum().backward()
    expected: list[torch.Tensor] = []
    for sample in samples:
        payload = payloads[sample.payload]
        start = int(payload.lengths[: sample.index].sum())
        response = payload.tokens[start : start + int(payload.lengths[sample.index])]
        ids = torch.from_numpy(np.concatenate((payload.prompt, response))).long()
        with torch.no_grad():
            table = alone(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)
        expected.append(table[len(payload.prompt) - 1 : -1].gather(-1, torch.from_numpy(response).long()[:, None]).squeeze(-1))
    gap = float((logprobs.detach() - torch.cat(expected)).abs().max())
    return gap if np.isfinite(gap) else float("inf")


def _payloads(vocabulary: int) -> dict[str, Payload]:
    """Return three groups whose responses are longer than any tiny model's window."""
    random = np.random.default_rng(7)
    payloads: dict[str, Payload] = {}
    for group in range(3):
        lengths = random.integers(1, 45, 4).astype(np.int32)
        count = int(lengths.sum())
        payloads[f"{group}"] = Payload(
            prompt=random.integers(vocabulary // 8, vocabulary // 2, random.integers(1, 20)).astype(np.int32),
            lengths=lengths,
            tokens=random.integers(vocabulary // 8, vocabulary // 2, count).astype(np.int32),
            logprobs=np.full(count, -4.0, np.float32),
            spans=np.zeros((0, 4), np.int32),
        )
    return payloads


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    """Raise `TimeoutError` inside the block after `LIMIT_S`."""

    def late(_: int, __: Any) -> None:
        raise TimeoutError(f"took more than {LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def summary(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """Return the figures: counts, and the names behind those that must be 0."""
    import transformers

    counts = Counter(verdict.verdict for verdict in verdicts)
    names = {kind: [v.type for v in verdicts if v.verdict == kind] for kind in ("silent", "crashed", "not built")}
    return {
        "transformers": transformers.__version__,
        "types": len(verdicts),
        "built": len(verdicts) - counts["not built"],
        "proven": counts["proven"],
        "refused": counts["refused"],
        "silent": counts["silent"],
        "crashes": counts["crashed"],
        "worst_proven_gap": max((v.gap or 0.0 for v in verdicts if v.verdict == "proven"), default=0.0),
        "names": names,
        "verdicts": [asdict(verdict) for verdict in verdicts],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Sweep the given types, or all. Returns 1 if any is silent or crashes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", help="types as in config.json's model_type; default all")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--page", action="store_true", help="write docs/models.md")
    given = parser.parse_args(argv)
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.simplefilter("ignore")
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)  # models this small are slower with more
    verdicts: list[Verdict] = []
    for model_type in given.types or tiny_models.types():
        verdicts.append(try_out(model_type))
        if not given.json:
            last = verdicts[-1]
            print(f"{last.type:28} {last.verdict:10} {'' if last.gap is None else f'{last.gap:.1e} '}{last.reason}", flush=True)
    figures = summary(verdicts)
    if given.page:
        write(figures)
    if not given.json:
        del figures["verdicts"]
    counts = {name: [float(figures.pop(name))] for name in COUNTS}
    report({"benchmark": "architectures", **figures}, counts)
    return 1 if counts["silent"][0] or counts["crashes"][0] else 0


if __name__ == "__main__":
    sys.exit(main())
