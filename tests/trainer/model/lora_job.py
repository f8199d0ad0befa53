"""The work of a rank in the adapter tests: train, send, export and save, then repeat from the checkpoint."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch

from tests.support.models.rank_worker import _policy, _train, whole_weights

BUCKET_BYTES = 20_000
"""A handful of buckets for the tiny model."""


def run(model: Path, sections: Any, payloads: Any, samples: Any, layouts: Any, root: Path) -> dict[str, Any]:
    """Train one step per layout.

    Before the last one, send, export and save the weights; then train it twice: with the same policy and with a new one from the
    checkpoint.
    """
    from services.trainer.checkpoints.folder import Checkpoints
    from services.trainer.model import export

    policy, checkpoints = _policy(model, sections), Checkpoints(root / "checkpoints", keep=1)
    weights = [whole_weights(policy)]
    metrics = []
    for step, layout in enumerate(layouts):
        if step == len(layouts) - 1:
            received = _transfer(policy)
            export.write(policy.module, policy.config, step - 1, root / "export", policy.world.rank, policy.zero_stage)
            checkpoints.save(policy, step - 1)
        metrics.append(_train(policy, payloads, samples, layout, step).metrics)
        weights.append(whole_weights(policy))
    fresh = _policy(model, sections)
    assert checkpoints.restore(fresh) is not None
    restored = whole_weights(fresh)
    again = _train(fresh, payloads, samples, layouts[-1], len(layouts) - 1).metrics
    return {
        "gradients": policy.gradients,
        "metrics": metrics,
        "weights": weights,
        "received": received,
        "resumed": {"metrics": again, "weights": [restored, whole_weights(fresh)]},
    }


def _transfer(policy: Any) -> dict[str, torch.Tensor]:
    """Return the weights that a receiver ends up with; {} on ranks that do not send. Uses a real gloo group in this process."""
    from tests.support.senders import sender_of

    sync = policy.config.sync.model_copy(update={"host": "127.0.0.1", "backend": "gloo"})
    config = policy.config.model_copy(update={"sync": sync})
    sender = sender_of(config, policy.module, policy.world.rank, bucket_bytes=BUCKET_BYTES)
    if policy.world.rank > 0:
        sender.send(0, 1)
        return {}
    received: dict[str, torch.Tensor] = {}
    receiver = threading.Thread(target=_receive, args=(*sender.open(1), received))
    receiver.start()
    sender.connect(2)
    sender.send(0, 1)
    receiver.join()
    sender.close()
    return received


def _receive(host: str, port: int, received: dict[str, torch.Tensor]) -> None:
    from services.weights.broadcast.gloo import GlooReceiver
    from services.weights.deadline import Deadline
    from services.weights.transport import Address

    receiver = GlooReceiver(torch.device("cpu"))
    connection = receiver.connect(Address(host, port, 1, 2, BUCKET_BYTES, 20), 1)
    assert len(connection.manifest.buckets) > 2
    received |= dict(receiver.take(connection, 0, Deadline(20)))
