"""Download a model once, into a folder that all pods share: `python -m services.dataprep.prompts.preload NAME FOLDER`.

Guarantees: the folder appears complete or not at all; an existing one is left unchanged; an interrupted download resumes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from services.runtime.atomic_folders import PARTIAL, FolderError, explain


def preload(name: str, folder: Path, revision: str) -> str:
    """Download the model `name` from the hub into `folder` and return what was done. Raises `FolderError`."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    if folder.exists():
        return f"{folder} already exists"
    partial = folder.with_name(folder.name + PARTIAL)
    try:
        snapshot_download(name, revision=revision or None, local_dir=partial)
        partial.rename(folder)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        raise FolderError(f"{name} cannot be downloaded: {str(error).splitlines()[0]}; check the name and HF_TOKEN") from None
    except OSError as error:
        raise FolderError(explain(folder, error)) from None
    return f"{name} is in {folder}"


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m services.dataprep.prompts.preload", description="Download a model into a folder."
    )
    parser.add_argument("name", help="name of the model on the hub")
    parser.add_argument("folder", type=Path, help="folder to download to")
    parser.add_argument("--revision", default="", help="branch, tag or commit (default: the newest)")
    given = parser.parse_args(argv)
    try:
        print(preload(given.name, given.folder, given.revision), flush=True)
    except FolderError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
