"""What the store adds to redis-py's errors: an exception for each error reply, and the rule by which requests are sent again."""

from __future__ import annotations

from redis import exceptions
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff

from services.store.connection.login import BACKOFF_S, LONGEST_BACKOFF_S
from services.store.connection.replies import ELSEWHERE, ErrorReply


class Elsewhere(exceptions.ConnectionError):
    """A node reported that it does not serve the run now. Retried like a lost connection."""


def exception_of(reply: ErrorReply) -> exceptions.RedisError:
    """Return redis-py's exception for an error reply, to be raised: the retry rule knows its types."""
    kinds = {
        "OOM": exceptions.OutOfMemoryError, "NOAUTH": exceptions.AuthenticationError,
        "WRONGPASS": exceptions.AuthenticationError, "LOADING": exceptions.BusyLoadingError,
        "NOPERM": exceptions.NoPermissionError,
    }  # fmt: skip
    return (Elsewhere if reply.word in ELSEWHERE else kinds.get(reply.word, exceptions.ResponseError))(str(reply))


def retry_rule(retries: int) -> Retry:
    """Return the rule by which requests are sent again after their connection broke."""
    return Retry(ExponentialBackoff(cap=LONGEST_BACKOFF_S, base=BACKOFF_S), retries)
