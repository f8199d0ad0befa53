"""Options and arguments that commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Run = Annotated[str, typer.Argument(metavar="RUN", help="Folder of the run, or its name under runs/; default: the newest.")]
File = Annotated[Path, typer.Argument(metavar="FILE", help="Configuration, TOML.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="section.key=value", help="Keys laid over the file.")]
Role = Annotated[str, typer.Option(help="all, generator, dataprep or trainer.")]
Why = Annotated[str, typer.Option(help="Reason, kept with the run.")]
RedisUrl = Annotated[str, typer.Option(help="Redis of the run, redis://host:port/0; default: what the run's folder says.")]
Json = Annotated[bool, typer.Option("--json", help="JSON instead of a table.")]
Api = Annotated[str, typer.Option(help="Ask this service, https://host:port, instead of Redis.")]
TokenFile = Annotated[str, typer.Option(help="Bearer token for --api; default: $GRPO_API_TOKEN, or the run folder's.")]
CaFile = Annotated[str, typer.Option(help="Who may have signed its certificate, PEM; default: api.ca_file, or the system's.")]
WaitS = Annotated[float, typer.Option("--wait", metavar="SECONDS", min=0, max=300, help="Wait so long for the effect.")]
Listen = Annotated[bool, typer.Option("--listen", help="Only try a collective with another machine, which comes here.")]
Reach = Annotated[str, typer.Option(metavar="HOST:PORT", help="The same from there: the address that --listen prints.")]
