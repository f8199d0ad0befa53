"""A policy loss that blocks the trainer's main thread within a step while a file exists.

A trainer that imports it counts as stuck after `STUCK_S`.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from services.config.loss import Loss
from services.trainer import ranks
from services.trainer.losses.policies import POLICY_LOSSES, PolicyTerm, Tokens

HELD = "HELD_LOSS_WHILE"  # names the file
STUCK_S = 5.0

if HELD in os.environ:
    ranks.TIMEOUT_S = STUCK_S


def dapo(tokens: Tokens, loss: Loss) -> PolicyTerm:
    """Compute the loss `dapo` once the file is gone."""
    while Path(os.environ[HELD]).exists():
        time.sleep(0.02)
    return POLICY_LOSSES["dapo"](tokens, loss)
