"""Referenced by vllm_logging.json, which the processes that vLLM starts read so that they log as the service does."""

from __future__ import annotations

import os

from services.runtime import logs

LEVEL = os.environ.get("VLLM_LOGGING_LEVEL", "WARNING").upper()
formatter = logs.inherited_formatter
