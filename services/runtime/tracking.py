"""Checks, before the run starts and without importing them, that the trackers a run configures can be used here."""

from __future__ import annotations

import importlib.util
import netrc
from collections.abc import Mapping
from typing import Literal, cast, get_args

from services.config import ConfigError, RunConfig

WANDB_HOST = "api.wandb.ai"

WandbMode = Literal["online", "offline", "disabled", "shared"]


def check_tracking(config: RunConfig, environ: Mapping[str, str]) -> None:
    """Raise `ConfigError` for a tracker whose package is missing, and for W&B online without a key."""
    tracking = config.tracking
    for name in tracking.trackers:
        found = importlib.util.find_spec(name)
        if (
            found is None or found.origin is None
        ):  # origin None: a folder of that name, which W&B itself leaves in working directories
            raise ConfigError(
                f"tracking.{name} = {getattr(tracking, name)!r} needs the package {name}, which is not installed: "
                "pip install 'grpo[tracking]', or remove the key"
            )
    if tracking.wandb and wandb_mode(environ) == "online" and not environ.get("WANDB_API_KEY") and not _logged_in(environ):
        raise ConfigError(
            "WANDB_MODE = online needs a key: set WANDB_API_KEY, run `wandb login`, or unset WANDB_MODE and upload the files "
            "later with `wandb sync`"
        )


def wandb_mode(environ: Mapping[str, str]) -> WandbMode:
    """Return W&B's own WANDB_MODE; `offline` where it is not set, since a run should not depend on a service outside.

    Raises `ConfigError` for a mode that W&B does not have.
    """
    mode = environ.get("WANDB_MODE") or "offline"
    if mode not in get_args(WandbMode):
        raise ConfigError(f"WANDB_MODE = {mode!r} is not a mode of W&B: set it to one of {', '.join(get_args(WandbMode))}")
    return cast("WandbMode", mode)


def _logged_in(environ: Mapping[str, str]) -> bool:
    """Return whether `wandb login` left a key in its file."""
    try:
        return netrc.netrc(environ.get("NETRC")).authenticators(WANDB_HOST) is not None
    except (OSError, netrc.NetrcParseError):
        return False
