"""Discovery of the ranks that share a near tier, and servers of near tiers for other hosts.

A near tier is a fast local store for checkpoints, such as the disk of a host. Each rank writes
random content into its near tier, under one key for all ranks. Ranks that then read the same
content share a near tier. A name, a path or a disk id does not identify a near tier, because these
are equal on cloned hosts.
"""

from __future__ import annotations

import secrets
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from resilient.checkpoint import events
from resilient.checkpoint.generations import list_numbers
from resilient.checkpoint.tiers.peer_store import NearTierGroups, PeerServer, PeerStore
from resilient.checkpoint.tiers.tiered_store import TieredStore
from resilient.distributed.coordination import agree, capture_failure
from resilient.distributed.kv_store import Address
from resilient.errors import ConfigError, ResilientError, StoreUnavailable
from resilient.format.keys import probe_key

if TYPE_CHECKING:
    from resilient.checkpoint.context import CheckpointContext


def discover_near_tiers(context: CheckpointContext) -> CheckpointContext:
    """Return a context with the near repositories of all hosts.

    Collective: every rank, before it asks what to resume from.
    Crash: a few bytes may be left under ``store-probe/`` of a near repository; they are never read.

    Args:
        context: Context: ranks and this rank's tiers.

    Raises:
        ConfigError: Hosts with separate near repositories cannot connect to each other.
        StoreError: A near repository failed.
    """
    tiers = context.store
    if not isinstance(tiers, TieredStore):
        return context
    context = replace(context, places=_find_places(context, tiers))
    if context.places.groups:
        tiers.peers = _connect_peers(context, tiers)
    return context


def _find_places(context: CheckpointContext, tiers: TieredStore) -> NearTierGroups:
    within_seconds = context.limits.within_seconds
    token = agree(
        context.comms, "near/token", None, lambda _: secrets.token_hex(16), within_seconds
    )
    key = probe_key(token, 0)
    put_result: Any = capture_failure(lambda: tiers.near.put(key, secrets.token_bytes(16)))
    agree(context.comms, "near/put", put_result, lambda _: None, within_seconds)

    def read_probe() -> list[Any]:
        return [tiers.near.get(key).hex(), max(list_numbers(tiers.near), default=0)]

    ruling = agree(context.comms, "near/seen", capture_failure(read_probe), _ruling, within_seconds)
    places = NearTierGroups(tuple(tuple(group) for group in ruling["groups"]))
    if places.is_leader(context.world.rank):
        # The remainder is a few bytes that are never read.
        with suppress(ResilientError):
            tiers.near.delete(key)
    if ruling["fresh"]:
        context.emit_once(events.NearTierEmpty(ruling["fresh"]))
    return places


def _ruling(answers: list[Any]) -> dict[str, Any]:
    """Group the ranks by what they read; name those whose host lacks the others' generations."""
    groups: dict[str, list[int]] = {}
    for rank, (probe_content, _) in enumerate(answers):
        groups.setdefault(probe_content, []).append(rank)
    has_generations = any(newest for _, newest in answers)
    return {
        "groups": list(groups.values()) if len(groups) > 1 else [],
        "fresh": [
            rank for rank, (_, newest) in enumerate(answers) if has_generations and not newest
        ],
    }


def _connect_peers(context: CheckpointContext, tiers: TieredStore) -> tuple[PeerStore, ...]:
    """Serve this host's near repository, if this rank leads it, and connect to the others."""
    comms, within_seconds = context.comms, context.limits.within_seconds

    def serve() -> dict[str, Any] | None:
        if not context.is_near_tier_leader:
            return None
        host = comms.here
        try:
            server = PeerServer(tiers.near, host)
        except OSError as error:
            raise StoreUnavailable(f"cannot serve the near tier at {host}: {error}") from error
        tiers.on_close(server.close)
        return server.address.to_json()

    address_by_rank = agree(
        comms, "near/served", capture_failure(serve), lambda answers: answers, within_seconds
    )

    def connect() -> tuple[PeerStore, ...]:
        own_place = context.places.number(context.world.rank)
        peer_ranks = [rank for at, rank in enumerate(context.places.leaders) if at != own_place]
        return tuple(_connect(tiers, rank, address_by_rank[rank]) for rank in peer_ranks)

    peers: Any = capture_failure(connect)
    answers = None if isinstance(peers, tuple) else peers
    agree(comms, "near/reached", answers, lambda _: None, within_seconds)
    assert isinstance(peers, tuple), "a failure of this rank fails all ranks"  # noqa: S101
    return peers


def _connect(tiers: TieredStore, rank: int, address: Any) -> PeerStore:
    url = f"the near tier of rank {rank}'s host"
    peer = PeerStore(Address.from_json(address), url)
    try:
        peer.connect_now()
    except StoreUnavailable as error:
        raise ConfigError(
            f"{error.message}; hosts with separate near tiers read missing files from each other, "
            "so their ports must be reachable",
        ) from error
    tiers.on_close(peer.close)
    return peer
