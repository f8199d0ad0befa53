from collections.abc import Sequence

class HistogramProto:
    def __init__(
        self,
        *,
        min: float = ...,
        max: float = ...,
        num: float = ...,
        sum: float = ...,
        sum_squares: float = ...,
        bucket_limit: Sequence[float] = ...,
        bucket: Sequence[float] = ...,
    ) -> None: ...
