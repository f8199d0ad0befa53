"""Verifiers that are services: `http` and `judge`. Their replies are checked as all scores are.

Guarantees: while a service is away, groups are held and asked for again, with growing, jittered pauses, until `give_up_s` has
passed; then they fail for good, with the reason. No more than `max_requests` requests of a verifier are under way at a time.
"""

from services.verifiers.remote.pool import RemotePool

__all__ = ["RemotePool"]
