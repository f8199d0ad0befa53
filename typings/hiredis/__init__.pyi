from collections.abc import Callable
from typing import Any

from _typeshed import ReadableBuffer

class ProtocolError(Exception): ...

class Reader:
    def __init__(
        self,
        protocolError: Callable[[str], Exception] = ...,
        replyError: Callable[[str], Exception] = ...,
        encoding: str | None = ...,
        errors: str | None = ...,
        notEnoughData: object = ...,
    ) -> None: ...
    def feed(self, buf: str | ReadableBuffer, off: int = ..., len: int = ..., /) -> None: ...
    def gets(self, shouldDecode: bool = ..., /) -> Any: ...

def pack_command(cmd: tuple[Any, ...], /) -> bytes: ...
