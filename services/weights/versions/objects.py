"""Named objects in a folder or in a bucket: written whole, read, listed, deleted.

Guarantees: an object under its name is complete, whatever is killed while it is written; every failure is an `OSError`; every
call to a bucket has a time limit. A folder may be a volume that many machines share. Buckets (`s3://`, `gs://`, `az://`) take
their credentials and endpoint from the environment, as the vendors' own tools do (obstore: AWS_ENDPOINT_URL and so on).
"""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from services.runtime import atomic_folders
from services.weights.buckets import huge_pages

_CONNECT = "5s"
_SILENCE = "60s"  # for one request; a part of 32 MiB takes 3 s at 100 Mbit/s
_RETRIES: Any = {"max_retries": 2, "retry_timeout": timedelta(seconds=15)}

Data = Sequence[bytes | bytearray | memoryview]
Target = tuple[int, memoryview]
"""Memory to fill, and the offset in an object at which its bytes begin; they end inside the object."""


class Objects(ABC):
    """A place for objects. Names have slashes, and no component begins with a dot."""

    @abstractmethod
    def put(self, name: str, data: Data) -> None:
        """Write an object from buffers, or replace it."""

    @abstractmethod
    def get(self, name: str) -> memoryview:
        """Return an object's bytes. Raises `FileNotFoundError`, or another `OSError`."""

    def read_into(self, name: str, nbytes: int, targets: Sequence[Target]) -> Iterator[None]:
        """Fill memory from an object of `nbytes`. Yield after each target. Raises `FileNotFoundError`, or another `OSError`."""
        data = np.frombuffer(self.get(name), np.uint8)
        _check_size(name, len(data), nbytes)
        for offset, memory in targets:
            np.copyto(np.frombuffer(memory, np.uint8), data[offset : offset + len(memory)])
            yield

    @abstractmethod
    def names(self) -> list[str]:
        """Return the names of all objects, and of what interrupted writes have left."""

    @abstractmethod
    def delete(self, names: Iterable[str]) -> None:
        """Delete objects; missing ones are ignored."""


class FolderObjects(Objects):
    """Objects as files below a folder."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def put(self, name: str, data: Data) -> None:
        """Write a file beside the final one, then rename it; both are on disk when this returns."""
        path = self._root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        try:
            with partial.open("wb") as file:
                for buffer in data:
                    file.write(buffer)
                file.flush()
                os.fsync(file.fileno())  # a volume may report a failed write only now
            partial.rename(path)
        except OSError:
            with contextlib.suppress(OSError):
                partial.unlink()
            raise
        with contextlib.suppress(OSError):  # not every volume can make a rename durable
            atomic_folders.sync(path.parent)

    def get(self, name: str) -> memoryview:
        """Read a file. It is not mapped: the sender may remove it at any time."""
        with (self._root / name).open("rb", buffering=0) as file:
            view, end = huge_pages(os.fstat(file.fileno()).st_size).numpy().data, 0
            while end < len(view) and (read := file.readinto(view[end:])):
                end += read
        return view[:end]

    def read_into(self, name: str, nbytes: int, targets: Sequence[Target]) -> Iterator[None]:
        """Read ranges of a file into their targets. The system fetches later ones while the caller uses earlier ones."""
        with (self._root / name).open("rb", buffering=0) as file:
            _check_size(name, os.fstat(file.fileno()).st_size, nbytes)
            os.posix_fadvise(file.fileno(), 0, nbytes, os.POSIX_FADV_WILLNEED)
            for offset, memory in targets:
                end = 0
                while end < len(memory) and (read := os.preadv(file.fileno(), [memory[end:]], offset + end)):
                    end += read
                _check_size(name, offset + end, offset + len(memory))  # another process may have truncated it
                yield

    def names(self) -> list[str]:
        """Walk the folder."""
        return [path.relative_to(self._root).as_posix() for path in self._root.rglob("*") if path.is_file()]

    def delete(self, names: Iterable[str]) -> None:
        """Unlink files, and folders that are empty then."""
        for name in names:
            path = self._root / name
            path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # not empty, or another process was faster
                for parent in path.parents:
                    if parent == self._root:
                        break
                    parent.rmdir()


class BucketObjects(Objects):
    """Objects in a bucket, by obstore."""

    def __init__(self, url: str) -> None:
        try:
            from obstore import store
        except ImportError:
            raise OSError(f"{url} needs the package obstore: pip install 'grpo[bucket]'") from None
        plain = os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://")  # otherwise obstore would refuse the user's endpoint
        limits: Any = {"connect_timeout": _CONNECT, "timeout": _SILENCE, "allow_http": plain}
        with _as_os_errors(url):
            self._store: Any = store.from_url(url, client_options=limits, retry_config=_RETRIES)
        self._url = url

    def put(self, name: str, data: Data) -> None:
        """Put an object; a bucket shows it when it is complete."""
        import obstore

        with _as_os_errors(f"{self._url}/{name}"):
            obstore.put(self._store, name, b"".join(data))

    def get(self, name: str) -> memoryview:
        """Get an object."""
        import obstore

        with _as_os_errors(f"{self._url}/{name}"):
            return memoryview(obstore.get(self._store, name).bytes())

    def names(self) -> list[str]:
        """List the bucket below the URL."""
        import obstore

        with _as_os_errors(self._url):
            return [found["path"] for page in obstore.list(self._store, chunk_size=1000) for found in page]

    def delete(self, names: Iterable[str]) -> None:
        """Delete several at a time."""
        import obstore

        if given := list(names):
            with _as_os_errors(self._url), contextlib.suppress(FileNotFoundError):
                obstore.delete(self._store, given)


def open_objects(place: str) -> Objects:
    """Return the objects at `place`, a folder or a URL. Raises `OSError`."""
    return BucketObjects(place) if "://" in place else FolderObjects(Path(place))


def _check_size(name: str, nbytes: int, expected: int) -> None:
    if nbytes != expected:
        raise OSError(f"{name} has {nbytes} bytes instead of {expected}")


@contextlib.contextmanager
def _as_os_errors(what: str) -> Any:
    """Turn obstore's exceptions into `OSError` with `what` and the first line of the reason."""
    from obstore.exceptions import BaseError, NotFoundError

    try:
        yield
    except (NotFoundError, FileNotFoundError) as error:
        raise FileNotFoundError(f"{what}: {_first_line(error)}") from None
    except (BaseError, ValueError) as error:
        raise OSError(f"{what}: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
