from collections.abc import Sequence
from os import PathLike

def snapshot_download(
    repo_id: str,
    *,
    revision: str | None = ...,
    local_dir: str | PathLike[str] | None = ...,
    allow_patterns: str | Sequence[str] | None = ...,
) -> str: ...
def try_to_load_from_cache(repo_id: str, filename: str) -> str | object | None: ...
