"""KVStore over torch's TCPStore, and the process group of an attempt on the same store.

The TCPStore uses its own sockets, so ranks can still exchange values while a collective hangs. The
TCPStore has no authentication, so its port must stay inside the cluster (docs/guarantees.md).
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from resilient.distributed.kv_store import address_toward
from resilient.errors import PeerFailed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from resilient.distributed.launch_env import World

_CONNECT_SECONDS = 300.0


class TorchKVStore:
    """A KVStore on a TCPStore server.

    Args:
        store: Client that only this object uses: a TCPStore client serves one call at a time.
    """

    def __init__(self, store: dist.TCPStore) -> None:
        self.store = store

    def post(self, key: str, value: bytes) -> None:
        """Set ``key`` on the server."""
        self._call(self.store.set, key, value)

    def peek(self, key: str) -> bytes | None:
        """Ask the server once; never waits for another rank."""
        if not self._call(self.store.check, [key]):
            return None
        value: bytes = self._call(self.store.get, key)
        return value

    def wait(self, keys: Sequence[str], within_seconds: float) -> list[bytes] | None:
        """Wait on the server side for all ``keys``, at most ``within_seconds``."""
        try:
            self.store.wait(list(keys), timedelta(seconds=max(within_seconds, 0.001)))
        except dist.DistStoreError:
            return None
        except dist.DistNetworkError as error:
            raise _unreachable_error(error) from error
        # Send one request for all keys. Otherwise rank 0 would send thousands of requests in turn.
        values: list[bytes] = self._call(self.store.multi_get, list(keys))
        return values

    def remove(self, key: str) -> None:
        """Delete ``key`` on the server."""
        self._call(self.store.delete_key, key)

    def another(self) -> TorchKVStore:
        """Open a second connection to the same server."""
        return TorchKVStore(self.store.clone())  # type: ignore[attr-defined]  # missing in the stubs

    def here(self) -> str:
        """Return this host's address toward the server; on the server's host, the server's name."""
        try:
            own_address = address_toward(self.store.host, self.store.port)
        except OSError as error:
            raise _unreachable_error(error) from error
        # A host's own name may resolve to its loopback address, which no other host can reach.
        return self.store.host if own_address.startswith("127.") else own_address

    @staticmethod
    def _call(method: Any, *arguments: Any) -> Any:
        try:
            return method(*arguments)
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            raise _unreachable_error(error) from error


def _unreachable_error(error: Exception) -> PeerFailed:
    return PeerFailed(f"the rendezvous store is unreachable: {error}", rank=0)


def connect(world: World, host: str, port: int, *, hosted: bool) -> TorchKVStore:
    """Open the attempt's key-value store; rank 0 serves it unless the agent already does.

    Args:
        world: Identity of this rank.
        host: Address of the server.
        port: TCP port of the server.
        hosted: Whether a launcher's agent already serves the store.

    Raises:
        PeerFailed: No server answered within five minutes, or rank 0 cannot listen there.
    """
    try:
        store = dist.TCPStore(
            host,
            port,
            world.size,
            is_master=world.is_coordinator and not hosted,
            timeout=timedelta(seconds=_CONNECT_SECONDS),
            wait_for_workers=False,
        )
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        raise PeerFailed(f"no rendezvous store at {host}:{port}: {error}", rank=0) from error
    return TorchKVStore(store)


def join_process_group(
    kv_store: TorchKVStore, world: World, backend: str, attempt: str, timeout_seconds: float
) -> None:
    """Start torch's default process group on the key-value store.

    ``attempt`` separates the keys of this attempt of the group from those of the next attempt on
    the same server. Libraries that use the default group later (accelerate, FSDP) find this group.
    """
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(f"group/{attempt}", kv_store.another().store),
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(seconds=timeout_seconds),
    )
