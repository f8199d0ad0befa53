"""The command `grpo export`, which writes a checkpoint of a run in Hugging Face format, from its folder alone.

Guarantees: torch is imported in a separate process; a failure is reported in one line.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from services.console.errors import EXIT_CONFIG, EXIT_FAILED, EXIT_OK, ConsoleError
from services.console.options import Json, Run
from services.console.paths import existing
from services.console.printable import print_json, printable

EXPORTS = "exports"
"""Folder of a run with the exports that are written without OUT."""
LATEST = -1  # instead of a step, for the process that writes


def export(
    run: Run = "",
    out: Annotated[
        Path | None, typer.Argument(metavar="OUT", help="Folder to write; default: RUN/exports/step-N, or RUN/exports/latest.")
    ] = None,
    step: Annotated[int | None, typer.Option(min=0, help="Step of the checkpoint; default: the latest one.")] = None,
    as_json: Json = False,
) -> int:
    """Write a checkpoint as a model in Hugging Face format.

    The model has its tokenizer, chat template and sampling defaults. The command reads the run's folder and needs no server.
    Adapters are merged into the model and also written next to it. An earlier export in OUT is replaced; any other folder is
    refused.
    """
    folder = existing(run)
    if missing := [name for name in ("torch", "transformers", "deepspeed") if importlib.util.find_spec(name) is None]:
        raise ConsoleError(
            f"grpo export needs {', '.join(missing)}: pip install 'grpo[trainer]', or run it in a trainer's pod", EXIT_CONFIG
        )
    if out is None:
        out = folder.path / EXPORTS / ("latest" if step is None else f"step-{step:08d}")
    elif out.resolve() == (folder.path / "model").resolve():
        raise ConsoleError(f"{out} is where the run itself writes its export: give another folder", EXIT_CONFIG)
    command = [sys.executable, "-m", "services.trainer.checkpoints.exporting"]
    given = [str(folder.config), str(folder.checkpoints), str(LATEST if step is None else step), str(out.absolute())]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([*command, *given], capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise ConsoleError(printable(last.removeprefix("error: ")), EXIT_FAILED)
    written = json.loads(done.stdout.strip().splitlines()[-1])
    if as_json:
        print_json(written)
    else:
        print(f"checkpoint of step {written['step']} written to {written['folder']}")
    return EXIT_OK
