"""Store that injects planned faults at numbered operations, so a plan reproduces a failing test."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from enum import Enum
from random import Random
from typing import TYPE_CHECKING, TypeVar

from resilient.clock import SystemClock
from resilient.errors import StoreError, StoreFull, StoreUnavailable
from resilient.storage.transfer import as_byte_view

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from resilient.clock import Clock
    from resilient.storage.store import Data, ObjectInfo, Store

Result = TypeVar("Result")

_SYSTEM_CLOCK = SystemClock()
_WRITES = frozenset({"put", "put_new"})


class Crash(BaseException):
    """Simulated death of the process, which no ``except Exception`` can catch."""


class StoreFaultKind(Enum):
    """Kind of a fault. Every store must survive all kinds except ``TORN``."""

    CRASH_BEFORE = "the process dies before the operation takes effect"
    CRASH_AFTER = "the process dies after the effect, before the answer"
    ERROR_ONCE = "StoreUnavailable, nothing happened"
    ERROR_AFTER = "StoreUnavailable, and yet it happened"
    TORN = "a put stores a first part, then the process dies: breaks the promise Atomic"
    FULL = "StoreFull from a put, nothing happened; other operations are not disturbed"
    BROKEN_AFTER = "a StoreError that no retry mends, and yet it happened"
    FULL_AFTER = "StoreFull from a put, and yet it happened"
    DELAY = "the operation takes ``seconds`` longer"

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True, slots=True)
class StoreFault:
    """Planned fault.

    Attributes:
        at: Number of the operation, from 0, reads included.
        kind: Kind of the fault.
        seconds: Length of a ``DELAY``.
    """

    at: int
    kind: StoreFaultKind
    seconds: float = 0.01


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """Plan of faults; its ``repr`` is the call that creates it again.

    Attributes:
        seed: Seed for details that the faults leave open, such as the cut of a ``TORN`` put.
        faults: Faults; only the first one of an operation counts.
    """

    seed: int = 0
    faults: Sequence[StoreFault] = field(default=())

    @classmethod
    def drawn(
        cls, seed: int, operations: int, count: int, kinds: Sequence[StoreFaultKind]
    ) -> FaultPlan:
        """Return ``count`` faults in the first ``operations``, equal for equal seeds."""
        random = Random(seed)  # noqa: S311 - repeatable is the point
        places = sorted(random.sample(range(operations), count))
        return cls(seed, tuple(StoreFault(at, random.choice(list(kinds))) for at in places))

    def fault_at(self, number: int) -> StoreFault | None:
        """Return the fault of operation ``number``, or None."""
        return next((fault for fault in self.faults if fault.at == number), None)


class FaultyStore:
    """Store that follows a fault plan.

    After a crash every operation of every thread raises ``Crash``: the process is dead. Open the
    inner store again for the next process.

    Args:
        store: Inner store.
        plan: Planned faults.
        clock: Clock that sleeps for a ``DELAY``.

    Attributes:
        operations: Number of started operations, with which a sweep finds its end.
        trace: Name and key (or prefix) of each operation, in order.
    """

    def __init__(
        self, store: Store, plan: FaultPlan | None = None, clock: Clock = _SYSTEM_CLOCK
    ) -> None:
        self.url = store.url
        self.exclusive = store.exclusive
        self.plan = plan or FaultPlan()
        self.operations = 0
        self.trace: list[tuple[str, str]] = []
        self._store = store
        self._clock = clock
        self._dead = False
        self._lock = threading.Lock()

    def put(self, key: str, data: Data) -> None:
        """Store ``data`` under ``key``, or fail as planned."""
        self._run("put", key, lambda: self._store.put(key, data), data)

    def put_new(self, key: str, data: Data) -> None:
        """Create ``key``, or fail as planned."""
        self._run("put_new", key, lambda: self._store.put_new(key, data), data)

    def get(self, key: str) -> bytes:
        """Return the whole object, or fail as planned."""
        return self._run("get", key, lambda: self._store.get(key))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Return part of the object, or fail as planned."""
        return self._run("get_range", key, lambda: self._store.get_range(key, start, length))

    def list(self, prefix: str = "") -> Iterable[ObjectInfo]:
        """Return the entries, or fail as planned."""
        return self._run("list", prefix, lambda: tuple(self._store.list(prefix)))

    def delete(self, key: str) -> None:
        """Remove the object, or fail as planned."""
        self._run("delete", key, lambda: self._store.delete(key))

    def stat(self, key: str) -> ObjectInfo:
        """Return the object's entry, or fail as planned."""
        return self._run("stat", key, lambda: self._store.stat(key))

    def _run(
        self, name: str, key: str, operation: Callable[[], Result], data: Data = b""
    ) -> Result:
        fault = self._begin(name, key)
        if fault is not None:
            self._before(fault, name, key, data)
        result = operation()
        if fault is not None:
            self._after(fault, name, key)
        with self._lock:
            # Another thread may have crashed meanwhile, so this result must not be returned.
            self._require_alive()
        return result

    def _begin(self, name: str, key: str) -> StoreFault | None:
        with self._lock:
            self._require_alive()
            number = self.operations
            self.operations += 1
            self.trace.append((name, key))
        return self.plan.fault_at(number)

    def _require_alive(self) -> None:
        if self._dead:
            raise Crash(f"dead since an earlier operation: {self.plan!r}")

    def _before(self, fault: StoreFault, name: str, key: str, data: Data) -> None:
        match fault.kind:
            case StoreFaultKind.CRASH_BEFORE:
                self._crash(fault)
            case StoreFaultKind.TORN:
                if name in _WRITES:
                    self._store.put(key, self._torn(fault, data))
                self._crash(fault)
            case StoreFaultKind.ERROR_ONCE:
                raise StoreUnavailable(f"injected at `{key}`: {fault!r}", key=key)
            case StoreFaultKind.FULL if name in _WRITES:
                raise StoreFull(f"injected at `{key}`: {fault!r}", key=key)
            case StoreFaultKind.DELAY:
                self._clock.sleep(fault.seconds)

    def _after(self, fault: StoreFault, name: str, key: str) -> None:
        if fault.kind is StoreFaultKind.CRASH_AFTER:
            self._crash(fault)
        if fault.kind is StoreFaultKind.BROKEN_AFTER:
            raise StoreError(f"injected after `{key}`: {self.plan!r}", key=key)
        if fault.kind is StoreFaultKind.FULL_AFTER and name in _WRITES:
            raise StoreFull(f"injected after `{key}`: {self.plan!r}", key=key)
        if fault.kind is StoreFaultKind.ERROR_AFTER:
            raise StoreUnavailable(f"injected at `{key}`: {fault!r}", key=key)

    def _crash(self, fault: StoreFault) -> None:
        with self._lock:
            self._dead = True
        raise Crash(f"{fault!r} of {self.plan!r}")

    def _torn(self, fault: StoreFault, data: Data) -> memoryview:
        view = as_byte_view(data)
        cut = Random(self.plan.seed + fault.at).random()  # noqa: S311 - repeatable is the point
        return view[: int(view.nbytes * cut)]


def every_crash(operations: int) -> Iterator[FaultPlan]:
    """Yield a plan for a crash before and a plan for a crash after each of ``operations``."""
    for at in range(operations):
        yield FaultPlan(0, (StoreFault(at, StoreFaultKind.CRASH_BEFORE),))
        yield FaultPlan(0, (StoreFault(at, StoreFaultKind.CRASH_AFTER),))
