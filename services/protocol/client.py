"""Redis clients and the state of the server behind them: the only place where a client is made.

Guarantees: a server that cannot serve a run is found out in seconds, with one line that says why and how to mend it;
no wait is without a limit.
"""

from __future__ import annotations

import re

import redis.asyncio as aioredis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.exceptions import AuthenticationError, ConnectionError, OutOfMemoryError, RedisError, ResponseError, TimeoutError

from services.protocol.errors import StoreError

OLDEST_SERVER = (7, 0)  # the first Redis with Functions
CONNECT_TIMEOUT_S = 5.0
REPLY_TIMEOUT_S = 60.0  # longer than an AOF rewrite was ever seen to stall a reply
PROBE_TIMEOUT_S = 2.0  # of each try to reach a server that may not be one; two to connect, for each of two to ask
PROBE_RETRIES = 1
RETRIES = 12  # back-off 0.05 s doubling to 1 s: about 9 s, a restart of a server


def make_client(url: str, password: str | None = None) -> aioredis.Redis:
    """A client: binary replies, bounded waits, bounded retries. Raises `StoreError` for an address that is none."""
    return _client(url, password, RETRIES, CONNECT_TIMEOUT_S, REPLY_TIMEOUT_S)


def _client(url: str, password: str | None, retries: int, connect_timeout_s: float, reply_timeout_s: float) -> aioredis.Redis:
    try:
        return aioredis.Redis.from_url(
            url,
            password=password,
            socket_connect_timeout=connect_timeout_s,
            socket_timeout=reply_timeout_s,
            socket_keepalive=True,
            health_check_interval=15,
            retry=Retry(ExponentialBackoff(cap=1.0, base=0.05), retries),
            retry_on_error=[ConnectionError, TimeoutError],
        )
    except ValueError as error:
        raise StoreError(f"redis.url = {_shown(url)!r} is not a Redis address: {error}; use redis://host:port/0") from None


async def check_server(url: str, password: str | None) -> None:
    """Raises `StoreError` when the server cannot be reached, is too old or may evict a run's keys."""
    probe = _client(url, password, PROBE_RETRIES, PROBE_TIMEOUT_S, PROBE_TIMEOUT_S)
    try:
        info = await probe.info("server")
        policy = await _eviction_policy(probe)
    except RedisError as error:
        raise explain(url, error) from None
    finally:
        await probe.aclose()
    url = _shown(url)
    version = str(info.get("valkey_version") or info.get("redis_version") or "0")
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_SERVER:
        raise StoreError(f"Redis at {url} is {version}, which has no Functions: run Redis 7.0 or newer, or Valkey")
    if policy != "noeviction":
        raise StoreError(f"Redis at {url} has maxmemory-policy {policy}, which may delete a run's state: set it to noeviction")


async def _eviction_policy(client: aioredis.Redis) -> str:
    try:
        settings = await client.config_get("maxmemory-policy")
    except ResponseError:  # CONFIG may be forbidden by the provider; then the policy cannot be checked
        return "noeviction"
    return str(settings.get("maxmemory-policy") or "noeviction")


def explain(url: str, error: RedisError) -> StoreError:
    """A one-line account of why a server cannot be used."""
    url = _shown(url)
    if isinstance(error, AuthenticationError) or "NOAUTH" in str(error) or "WRONGPASS" in str(error):
        return StoreError(f"Redis at {url} refused the password: set redis.password_file or GRPO_REDIS_PASSWORD")
    if isinstance(error, OutOfMemoryError):
        return StoreError(
            f"Redis at {url} is full: raise its maxmemory, or lower admission.prompts_per_step or checkpoint.every_steps"
        )
    if "unknown command" in str(error):
        return StoreError(f"Redis at {url} answers {str(error)!r}: run Redis 7.0 or newer, or Valkey")
    if isinstance(error, ConnectionError | TimeoutError):
        return StoreError(f"Redis at {url} cannot be reached ({error}): is it running, and is redis.url right?")
    return StoreError(f"Redis at {url} cannot be used: {error}")


def _shown(url: str) -> str:
    """The address without user and password, fit for a log."""
    return re.sub(r"//[^@/]*@", "//", url)
