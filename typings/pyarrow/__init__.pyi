from typing import Any

class ArrowInvalid(ValueError): ...

class Schema:
    @property
    def names(self) -> list[str]: ...

class RecordBatch:
    def to_pylist(self) -> list[dict[str, Any]]: ...
