"""The stores that hosts meet at, each in a process of a host, and the ways there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.simulation.hosts.clockwork import HostLoop
    from tests.simulation.hosts.host import Host

SILENCE_SECONDS = 10.0
"""A connection that is silent for longer is given up: ``read_timeout``."""
_HOP_SECONDS = 0.002


class Network:
    """Which hosts reach each other.

    Attributes:
        loss: share of messages that must be sent again.
    """

    def __init__(self, loop: HostLoop, loss: float = 0.0) -> None:
        self.loop = loop
        self.loss = loss

    def is_open(self, one: Host | None, other: Host | None) -> bool:
        """Say whether messages pass; None is outside, where nothing ever fails."""
        ends = [host for host in (one, other) if host is not None]
        return one is other or all(host.is_up and not host.is_cut for host in ends)

    def hop_seconds(self, one: Host | None, other: Host | None) -> float:
        """Draw how long a message takes."""
        seconds = self.loop.draw.expovariate(1 / _HOP_SECONDS)
        if one is other:
            return seconds
        seconds += sum(host.slow_seconds for host in (one, other) if host is not None)
        while self.loop.draw.random() < self.loss:
            seconds += self.loop.draw.uniform(0.2, 1.5)
        return seconds


class Place:
    """What a store's server holds.

    Attributes:
        host: where it runs; None outside of all hosts.
        is_gone: its process has ended.
    """

    def __init__(self, loop: HostLoop, host: Host | None) -> None:
        self.loop = loop
        self.host = host
        self.values: dict[str, bytes] = {}
        self.is_gone = False

    def close(self) -> None:
        """End with the process."""
        self.is_gone = True
        self.loop.changed()


class Client:
    """A connection to a place, as torch's TCPStore is one: a question holds it until its answer.

    Args:
        network: the way there.
        host: whose.
        place: where to.
    """

    def __init__(self, network: Network, host: Host, place: Place) -> None:
        self._network, self._host, self.place = network, host, place
        self._loop = network.loop
        self._is_held = False
        self._is_broken = False
        self.timeout_seconds = SILENCE_SECONDS

    def clone(self) -> Client:
        return Client(self._network, self._host, self.place)

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(lambda held: held.__setitem__(key, _encoded(value)))

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        pairs = {key: _encoded(one) for key, one in zip(keys, values, strict=True)}
        self._ask(lambda held: held.update(pairs))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._ask(lambda held: all(key in held for key in keys)))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        def swap(held: dict[str, bytes]) -> bytes:
            found = held.get(key)
            if (found is None and not expected) or found == expected.encode():
                held[key] = desired.encode()
            return held.get(key, expected.encode())

        return bytes(self._ask(swap))

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        found = self._ask(lambda held: [held[key] for key in keys], waits_for=keys)
        return list(found)

    def _ask(self, act: Callable[[dict[str, bytes]], Any], waits_for: Sequence[str] = ()) -> Any:
        while self._is_held:
            self._loop.wait(lambda: not self._is_held, float("inf"))
        self._is_held = True
        try:
            self._reach()
            place, held = self.place, self.place.values
            is_there = self._loop.wait(
                lambda: place.is_gone or all(key in held for key in waits_for),
                self.timeout_seconds,
            )
            answer = act(held) if is_there and not place.is_gone else None
            if not waits_for or is_there:
                self._loop.changed()
            self._reach()
        finally:
            self._is_held = False
            self._loop.changed()
        if not is_there:
            raise dist.DistStoreError(f"wait timeout, keys: {list(waits_for)}")
        return answer

    def _reach(self) -> None:
        """Take as long as a message takes; a connection that is silent too long is none."""
        network, place = self._network, self.place
        is_through = not self._is_broken and self._loop.wait(
            lambda: network.is_open(self._host, place.host), SILENCE_SECONDS
        )
        if is_through:
            self._loop.sleep(network.hop_seconds(self._host, place.host))
        if not is_through or place.is_gone:
            self._is_broken = True
            raise dist.DistNetworkError("the connection to the store is gone")


class Prefixed:
    """A client that keeps its keys apart, as torch's PrefixStore does."""

    def __init__(self, prefix: str, inner: Client) -> None:
        self._prefix, self._inner = prefix, inner

    def clone(self) -> Prefixed:
        return Prefixed(self._prefix, self._inner.clone())

    def set(self, key: str, value: str | bytes) -> None:
        self._inner.set(self._at(key), value)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        self._inner.multi_set([self._at(key) for key in keys], values)

    def check(self, keys: Sequence[str]) -> bool:
        return self._inner.check([self._at(key) for key in keys])

    def get(self, key: str) -> bytes:
        return self._inner.get(self._at(key))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._inner.multi_get([self._at(key) for key in keys])

    def _at(self, key: str) -> str:
        return f"{self._prefix}/{key}"


def _encoded(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode()
