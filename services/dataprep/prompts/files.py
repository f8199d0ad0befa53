"""Finds the files of a prompt source: on this machine, or in a dataset on the hub, from which they are downloaded once.

Guarantees: files come in the order of their names; those of a dataset are of one commit. What was downloaded before is used when
the hub cannot be reached, but a pattern needs the hub, since nothing else knows whether all files are there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from glob import glob
from pathlib import Path
from urllib.parse import unquote

from services.chat.errors import DataError
from services.config.data import HUB

DATASET = re.compile(r"hf://datasets/(?P<name>[\w.-]+/[\w.-]+)(@(?P<revision>[^/]+))?/(?P<file>.+)")
WILDCARD = re.compile(r"[*?\[]")


@dataclass(frozen=True)
class SourceFile:
    """One file of a source."""

    path: Path
    shown: str
    """Its name in messages: as given, or its place on the hub."""


def find_files(path: str) -> list[SourceFile]:
    """Return the files that `path` names: a file, a pattern such as `data/*.jsonl`, or either in a dataset on the hub.

    Raises `DataError`, whose message continues a sentence that begins with the path.
    """
    if path.startswith(HUB):
        return _dataset_files(path)
    if Path(path).is_file():
        return [SourceFile(Path(path), path)]
    if not WILDCARD.search(path):
        raise DataError(f"is not a file (resolved to {Path(path).absolute()}): correct the path")
    found = [each for each in sorted(glob(path)) if Path(each).is_file()]
    if not found:
        raise DataError(f"matches no file (resolved to {Path(path).absolute()}): correct the pattern")
    return [SourceFile(Path(each), each) for each in found]


def _dataset_files(path: str) -> list[SourceFile]:
    """Download what is not in the cache. Raises `DataError`."""
    named = DATASET.fullmatch(path)
    if named is None:
        raise DataError(
            "does not have the form hf://datasets/OWNER/NAME/FILE or hf://datasets/OWNER/NAME@REVISION/FILE: correct it"
        )
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HTTPError  # of its HTTP library, which depends on its version

    name, revision, file = named["name"], unquote(named["revision"] or "") or None, named["file"]
    try:
        commit, files = _matching(name, revision, file) if WILDCARD.search(file) else (revision, [file])
        return [
            SourceFile(Path(hf_hub_download(name, each, repo_type="dataset", revision=commit)), f"hf://datasets/{name}/{each}")
            for each in files
        ]
    except DataError:
        raise
    except (HTTPError, OSError, ValueError) as error:  # ValueError: a name that the hub's library rejects
        raise DataError(_explained(name, revision, error)) from None


def _matching(name: str, revision: str | None, pattern: str) -> tuple[str | None, Sequence[str]]:
    """Return a dataset's commit and the files of it that match; `*` does not match a `/`, as on this machine."""
    from huggingface_hub import HfApi

    found = HfApi().dataset_info(name, revision=revision)
    files = sorted(each.rfilename for each in found.siblings or ())
    matching = [each for each in files if each.count("/") == pattern.count("/") and fnmatchcase(each, pattern)]
    if not matching:
        raise DataError(f"matches none of the dataset's files, which are {', '.join(files[:5]) or 'none'}: correct the pattern")
    return found.sha, matching


def _explained(name: str, revision: str | None, error: Exception) -> str:
    """Return why a dataset cannot be read, and the remedy."""
    from huggingface_hub import errors

    reason = (" ".join(str(error).split()) or type(error).__name__)[:200]
    if isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled):
        return (
            "cannot be downloaded, and is not in the cache: check HF_ENDPOINT, HF_HUB_OFFLINE and the network, or download the "
            "files and set the path to them"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"names a revision {revision!r} that {name} does not have: set a branch, tag or commit of it"
    if isinstance(error, errors.EntryNotFoundError):
        return f"names a file that {name} does not have: correct the path"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"is not readable: {name} is not on the hub, or is private or gated: correct the name, or set HF_TOKEN"
    return f"cannot be downloaded: {reason}; check HF_ENDPOINT and the network"
