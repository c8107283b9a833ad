"""Who saves by way of the keeper: what a rank says of itself, and where its saves go."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from resilient.errors import UsageError
from resilient.format.signature import Signing, SigningKey
from resilient.storage.open import local_path, open_store
from resilient.storage.urls import protocol_of
from resilient.vault.desk import Limits
from resilient.vault.keeper.conversation import never
from resilient.vault.saving.near import with_near_tier
from resilient.vault.saving.promoter import Promoter
from resilient.vault.saving.tiering import Tiering
from resilient.vault.tiers.peers import PeerStore
from resilient.vault.tiers.places import Places
from resilient.vault.tiers.tiers import TieredStore
from resilient.world.serving import Address
from resilient.world.world import World

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from resilient.clock import Clock
    from resilient.format.names import CheckpointId
    from resilient.storage.store import Store
    from resilient.vault.desk import Desk

PROTOCOL_VERSION = 8


@dataclass(frozen=True, slots=True)
class KeeperAddress:
    """Where this host's keeper is, and what it must know of us.

    Attributes:
        path: of its socket.
        host: this host's name as the others reach it; of rank 0 it is where the board is.
        url: of the repository, for the keeper to open.
        near_url: of the near repository; empty for none.
        tiering: how that is used.
        events: file that the keeper's events are appended to; empty for none.
        storage_options: how to reach the repository; goes over the socket that only this user
            may open, and is never shown.
        left_seconds: until this rank's process must be gone, at any moment: a keeper that is
            silent is not waited for longer than a share of it.
    """

    path: str
    host: str = ""
    url: str = ""
    near_url: str = ""
    tiering: Tiering | None = None
    events: str = ""
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    left_seconds: Callable[[], float] = field(default=never, repr=False)


@dataclass(frozen=True, slots=True)
class Guest:
    """Who sits here, as it said when it came."""

    url: str
    store: Store
    near: Store | None
    tiering: Tiering
    world: World
    scope: str
    limits: Limits
    events: str
    signing: Signing


def introduction(address: KeeperAddress, desk: Desk) -> dict[str, Any]:
    """Return what a rank says of itself when it comes.

    Crash: nothing changes.
    """
    world = desk.world
    return {
        "version": PROTOCOL_VERSION,
        "url": anywhere(address.url),
        "near_url": anywhere(address.near_url) if address.near_url else "",
        "tiering": address.tiering.to_json() if address.tiering else {},
        "world": [world.rank, world.size, world.local_rank],
        "scope": desk.comms.scope,
        "limits": desk.limits.to_json(),
        "events": address.events,
        "storage_options": dict(address.storage_options),
        "signing_key": desk.signing.key.secret.hex() if desk.signing.key else "",
    }


def anywhere(url: str) -> str:
    """Return a URL that leads to the same from the keeper's working folder."""
    return str(local_path(url).absolute()) if protocol_of(url) == "file" else url


def guest_of(asked: Mapping[str, Any]) -> Guest:
    """Return who says hello.

    Crash: nothing was stored.

    Raises:
        UsageError: it speaks another version.
        ConfigError: a repository cannot be opened.
    """
    if asked["version"] != PROTOCOL_VERSION:
        raise UsageError(f"version {asked['version']} and this keeper's {PROTOCOL_VERSION}")
    rank, size, local_rank = (int(one) for one in asked["world"])
    near_url = str(asked["near_url"])
    return Guest(
        url=str(asked["url"]),
        store=open_store(str(asked["url"]), storage_options=asked["storage_options"]),
        near=open_store(near_url) if near_url else None,
        tiering=Tiering(**asked["tiering"]),
        world=World(rank, size, local_rank),
        scope=str(asked["scope"]),
        limits=Limits.from_json(asked["limits"]),
        events=str(asked["events"]),
        signing=_signing(str(asked.get("signing_key", ""))),
    )


def _signing(secret: str) -> Signing:
    """Return what the rank signs with; the key came over a socket that only this user may open."""
    return Signing(SigningKey(bytes.fromhex(secret))) if secret else Signing()


def tiers_to_json(desk: Desk) -> dict[str, Any]:
    """Return what the keeper must know of the places of this life's ranks.

    Crash: nothing changes.
    """
    peers = desk.store.peers if isinstance(desk.store, TieredStore) else ()
    known = [one for one in peers if isinstance(one, PeerStore)]
    return {
        "groups": desk.places.groups,
        "peers": [[one.url, one.address.to_json()] for one in known],
    }


class Onwards:
    """The two tiers of one guest, for as long as it saves.

    Args:
        guest: whose; it has a near tier.
        near: that.
    """

    def __init__(self, guest: Guest, near: Store) -> None:
        self._guest = guest
        self._near = near
        self._desk: Desk | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a promotion is on its way."""
        promoter = self._desk.promoter if self._desk else None
        return isinstance(promoter, Promoter) and promoter.is_busy

    def desk(
        self, desk: Desk, asked: Mapping[str, Any], mine: int, parent: CheckpointId | None
    ) -> Desk:
        """Return a desk that saves near and promotes.

        Crash: nothing was stored.

        Args:
            desk: at the durable repository.
            asked: what ``tiers_to_json`` said.
            mine: number of the life.
            parent: what it began from.
        """
        before = self._desk
        if before is not None:
            self._desk = replace(before, emit=desk.emit)
            return self._desk
        tiered = with_near_tier(desk, self._near, self._guest.tiering)
        groups = tuple(tuple(int(rank) for rank in group) for group in asked["groups"])
        tiered = replace(tiered, places=Places(groups))
        assert isinstance(tiered.store, TieredStore)  # noqa: S101 - it was just made
        tiered.store.peers = tuple(_peers(tiered.store, asked["peers"], desk.clock))
        if tiered.promoter and tiered.leads:
            tiered.promoter.begin(tiered, mine, parent)
        self._desk = tiered
        return tiered

    def finish(self, within_seconds: float) -> None:
        """Bring what was committed last to the durable tier.

        Crash: the near tier has it.

        Raises:
            Fenced: a newer life began.
            SaveFailed: the near tier alone has it.
        """
        desk = self._desk
        if desk and desk.promoter and desk.leads:
            desk.promoter.finish(desk, within_seconds)

    def close(self) -> None:
        """Let go, once what is on its way has arrived.

        Crash: either tier is consistent.
        """
        if self._desk is not None:
            self._desk.close()


def _peers(tiers: TieredStore, peers: list[Any], clock: Clock) -> Iterator[PeerStore]:
    """Yield the near tiers of other hosts; one that does not answer now may do so later."""
    for url, address in peers:
        peer = PeerStore(Address.from_json(address), str(url), clock)
        tiers.on_close(peer.close)
        yield peer
