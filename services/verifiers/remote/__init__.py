"""Verifiers that are services: `http` and `judge`. Their replies are checked as all scores are.

Guarantees: while a service is unavailable, groups are held and requests repeated, with growing, jittered pauses, until
`GIVE_UP_S` have passed; then the groups fail for good, with the reason. A verifier has at most `MOST_REQUESTS` requests in
flight.
"""

from services.verifiers.remote.pool import RemotePool

__all__ = ["RemotePool"]
