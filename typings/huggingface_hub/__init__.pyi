from collections.abc import Sequence
from os import PathLike

class RepoSibling:
    rfilename: str
    size: int | None

class ModelInfo:
    sha: str | None
    siblings: list[RepoSibling] | None

class DatasetInfo:
    sha: str | None
    siblings: list[RepoSibling] | None

class HfApi:
    def model_info(self, repo_id: str, *, revision: str | None = ..., files_metadata: bool = ...) -> ModelInfo: ...
    def dataset_info(self, repo_id: str, *, revision: str | None = ...) -> DatasetInfo: ...

def snapshot_download(
    repo_id: str,
    *,
    revision: str | None = ...,
    local_dir: str | PathLike[str] | None = ...,
    allow_patterns: str | Sequence[str] | None = ...,
) -> str: ...
def try_to_load_from_cache(repo_id: str, filename: str) -> str | object | None: ...
def hf_hub_download(repo_id: str, filename: str, *, repo_type: str | None = ..., revision: str | None = ...) -> str: ...
