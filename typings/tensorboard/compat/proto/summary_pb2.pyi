from collections.abc import Sequence

from tensorboard.compat.proto.histogram_pb2 import HistogramProto

class Summary:
    class Value:
        def __init__(self, *, tag: str = ..., simple_value: float = ..., histo: HistogramProto = ...) -> None: ...

    def __init__(self, *, value: Sequence[Summary.Value] = ...) -> None: ...
