"""Shows weight sync: the last round, what the trainer sent, and each generator's version, received bytes and pauses."""

from __future__ import annotations

from services.operations.inspection.answer import Answer
from services.store import Store


class SyncMember(Answer):
    """A generator, as its last heartbeat describes it."""

    member: str
    """Pod and process."""
    phase: str
    """What it does."""
    version: int
    """Policy version that it holds; -1: none."""
    behind: int
    """Published version minus its own; -1: it holds no weights."""
    answered: str
    """Its answer to the last phase of the round, with the reason of a failure; empty: none."""
    fetching: str
    """`<trainer's fence>/<version>`: the oldest version of the store that it still reads; empty: it reads none."""
    bytes: int | None
    """Bytes that its last weights took from the store of versions; null: it fetches from none."""
    pause_s: float | None
    """Seconds that it paused to apply them; null: it has not."""
    catch_ups: int
    """Times that it fetched weights outside rounds."""


class SyncAnswer(Answer):
    """Weight sync of a run."""

    published: int
    """Version that generators need to claim tickets; -1: none."""
    round: str
    """Phase of the last round; empty: there was none."""
    version: int
    """Version of that round."""
    epoch: int
    """Epoch of its group."""
    attempt: int
    """Number of the attempt."""
    backend: str
    """How its weights travel."""
    sent_bytes: int | None
    """Bytes of the version that the trainer wrote last; null: unknown."""
    sent_share: float | None
    """Those bytes over the bytes of the weights."""
    changed_share: float | None
    """Share of the elements that changed."""
    encoding: str
    """`delta` or `anchor`; empty: unknown."""
    members: list[SyncMember]
    """Generators, by name."""


async def inspect_sync(store: Store, ttl_s: float) -> SyncAnswer:
    """Read the round and the heartbeats that are younger than `ttl_s`."""
    last, said = await store.fleet.round()
    pods = await store.fleet.members(ttl_s)
    state = await store.run.state()
    published = -1 if state is None else state.published_version
    sent = next((pod.weights for pod in pods if pod.kind == "trainer"), dict[str, float]())
    return SyncAnswer(
        published=published,
        round="" if last is None else last.phase,
        version=-1 if last is None else last.version,
        epoch=0 if last is None else last.epoch,
        attempt=0 if last is None else last.attempt,
        backend="" if last is None else last.backend,
        sent_bytes=int(sent["bytes"]) if "bytes" in sent else None,
        sent_share=sent.get("share"),
        changed_share=sent.get("changed"),
        encoding="" if "delta" not in sent else "delta" if sent["delta"] else "anchor",
        members=[
            SyncMember(
                member=pod.member,
                phase=pod.phase,
                version=pod.version,
                behind=-1 if pod.version < 0 else max(0, published - pod.version),
                answered=" ".join(said.get(pod.member, ("", ""))).strip(),
                fetching=pod.fetching,
                bytes=int(pod.weights["bytes"]) if "bytes" in pod.weights else None,
                pause_s=pod.weights.get("pause_s"),
                catch_ups=int(pod.weights.get("catch_ups", 0)),
            )
            for pod in sorted(pods, key=lambda pod: pod.member)
            if pod.kind == "generator"
        ],
    )
