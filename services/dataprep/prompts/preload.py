"""Download a model once, into a folder that all pods share: `python -m services.dataprep.prompts.preload NAME FOLDER`.

Guarantees: the folder appears complete or not at all; an existing one is left unchanged; an interrupted download keeps the files
that were whole, unless the model has changed meanwhile. An error is one line; exit code 2: a retry does not help.
Waits for: the hub.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from services.runtime.atomic_folders import FULL, PARTIAL, FolderError, discard

if TYPE_CHECKING:
    from huggingface_hub import ModelInfo

EXIT_OK, EXIT_FAILED, EXIT_WRONG = 0, 1, 2
DENIED = (401, 403)
COMMIT_DIGITS = 12  # of the commit in the name of a partial folder: what belongs to different commits is never mixed
CUT_OFF = "*.incomplete"  # files that a killed download has begun, which the library neither resumes nor deletes


class NoSuchModel(FolderError):
    """The requested model or folder is wrong: a retry does not help."""


def preload(name: str, folder: Path, revision: str) -> str:
    """Download the model `name` from the hub into `folder` and return what was done. Raises `FolderError`."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HTTPError  # of its HTTP library, which depends on its version

    if folder.is_dir():
        return f"{folder} already exists"
    if folder.exists():
        raise NoSuchModel(f"{folder} is a file, not a folder: set model.path to a folder for {name}, or delete the file")
    found = _look_up(name, revision)
    partial = folder.with_name(f"{folder.name}.{str(found.sha)[:COMMIT_DIGITS]}{PARTIAL}")
    try:
        for path in partial.rglob(CUT_OFF):
            path.unlink()
        snapshot_download(name, revision=found.sha, local_dir=partial)
        if missing := _missing(partial, found):  # without the hub it returns what is in the cache
            raise FolderError(f"{name} is incomplete: {', '.join(missing[:3])} could not be downloaded; run it again to resume")
        partial.rename(folder)
    except HTTPError as error:
        raise FolderError(f"{name} could not be downloaded whole: {_first_line(error)}; run it again to resume") from None
    except OSError as error:
        raise _explained(name, folder, error) from None
    _discard_others(folder)
    return f"{name} is in {folder}"


def _look_up(name: str, revision: str) -> ModelInfo:
    """Return the commit of a model and its files. Raises `FolderError`."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        HTTPError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        return HfApi().model_info(name, revision=revision or None, files_metadata=True)
    except HFValidationError as error:
        raise NoSuchModel(f"{name!r} is not the name of a model on the hub, which is owner/name: {_first_line(error)}") from None
    except RevisionNotFoundError:
        raise NoSuchModel(f"{name} has no revision {revision!r}: set a branch, tag or commit of it") from None
    except RepositoryNotFoundError:
        raise NoSuchModel(
            f"{name} is not on the hub, or is private or gated: correct the name, or set HF_TOKEN to a token that may read it"
        ) from None
    except (HTTPError, OSError) as error:
        if isinstance(error, HfHubHTTPError) and error.response.status_code in DENIED:
            raise NoSuchModel(f"{name} may not be read: {_first_line(error)}; set HF_TOKEN to a token that may") from None
        raise FolderError(
            f"{name} cannot be looked up on the hub: {_first_line(error)}; check HF_ENDPOINT and the network"
        ) from None


def _missing(partial: Path, found: ModelInfo) -> list[str]:
    """Return the files of the model that are not in `partial`, or not whole."""
    missing: list[str] = []
    for file in found.siblings or ():
        path = partial / file.rfilename
        if not path.is_file() or file.size not in (None, path.stat().st_size):
            missing.append(file.rfilename)
    return missing


def _explained(name: str, folder: Path, error: OSError) -> FolderError:
    """Return why a download failed: because of the disk, or of the network if the system gives no error number."""
    if error.errno is None:
        return FolderError(f"{name} could not be downloaded whole: {_first_line(error)}; run it again to resume")
    if error.errno in FULL:
        return FolderError(f"{folder} cannot be written: {error.strerror}; free space there, or enlarge the volume")
    return NoSuchModel(f"{folder} cannot be written: {error.strerror}; correct model.path, or make its parent folder writable")


def _discard_others(folder: Path) -> None:
    """Delete what interrupted downloads of other commits have left."""
    pattern = rf"{re.escape(folder.name)}\.[0-9a-f]{{{COMMIT_DIGITS}}}{re.escape(PARTIAL)}"
    for path in folder.parent.iterdir():
        if re.fullmatch(pattern, path.name):
            discard(path)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__).rstrip(".")


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
        return EXIT_WRONG if isinstance(error, NoSuchModel) else EXIT_FAILED
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
