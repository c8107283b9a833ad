"""A rank's side of the keeper: stage into shared memory, hand the job over, hear the verdict.

All ranks hand over, or none does: after each copy they agree whether every one of them reached
its keeper. If one did not, this save is persisted by a thread in each rank, as without a keeper.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resilient.errors import Fenced, KeyNotFound, PeerFailed, SaveFailed, StoreFull
from resilient.format.shard import HostFile
from resilient.storage.open import local_path
from resilient.storage.shared import map_file
from resilient.storage.urls import protocol_of
from resilient.vault import facts
from resilient.vault.handover import Held, to_json
from resilient.vault.persister import ThreadPersister
from resilient.vault.recall import RecallingStore
from resilient.vault.seat import PROTOCOL_VERSION
from resilient.world.agreement import Failure, agree, attempt, hear
from resilient.world.lines import BadLine, Lines
from resilient.world.sockets import Address, SocketBoard

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient.format.names import CheckpointId
    from resilient.storage.store import Store
    from resilient.vault.desk import Desk
    from resilient.vault.persist import Job
    from resilient.vault.persister import Persister

# The keeper answers within a slice, so silence for much longer means that it is stuck.
_SILENCE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class KeeperAddress:
    """Where this host's keeper is, and what it must know of us.

    Attributes:
        path: of its socket.
        host: this host's name as the others reach it; of rank 0 it is where the board is.
        url: of the repository, for the keeper to open.
        events: file that the keeper's events are appended to; empty for none.
        storage_options: how to reach the repository; goes over the socket that only this user
            may open, and is never shown.
    """

    path: str
    host: str = ""
    url: str = ""
    events: str = ""
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)


class KeeperPersister:
    """Hands jobs to the keeper of this host, and to ``fallback`` when a rank has none.

    Args:
        address: where the keeper is.
        fallback: persists in this process.
    """

    def __init__(self, address: KeeperAddress, fallback: Persister) -> None:
        self._address = address
        self._fallback = fallback
        self._lines: Lines | None = None
        self._board: Address | None = None
        self._why_not = "it was not asked yet"
        self._segments: dict[str, memoryview] = {}
        self._handed: tuple[Desk, Job] | None = None

    def open(self, desk: Desk) -> Store:
        """Connect, wait for what past lives left in flight, and agree on the keepers' board.

        Collective: every rank, before it asks what to resume from.
        """
        mine = attempt(lambda: self._settle(desk))
        self._why_not = mine.message if isinstance(mine, Failure) else ""
        shown = None if isinstance(mine, Failure) else mine
        within_seconds = desk.limits.within_seconds
        board = agree(desk.comms, "keeper/board", shown, _first_if_all, within_seconds)
        if board is None:
            self._lose(self._why_not or "another host has none")
        if self._lines is None:
            return desk.store
        joined = attempt(lambda: self._ask("join", board=board))
        if isinstance(joined, Failure):
            self._lose(joined.message)
            return desk.store
        self._board = Address.from_json(board)
        return self._recalling(desk)

    def begin(self, topic: str) -> None:
        """Announce a job; if this process dies now, its peers fail at once."""
        if self._lines is None:
            return
        begun = attempt(lambda: self._ask("begin", topic=topic))
        self._why_not = begun.message if isinstance(begun, Failure) else ""

    def buffer(self, name: str, size_bytes: int) -> memoryview:
        """Return shared memory, or private memory if there is none.

        Raises:
            ConfigError: ``host_bytes_max`` is too small.
        """
        if self._lines is not None and not self._why_not:
            try:
                return self._reserve(name, size_bytes)
            except (PeerFailed, StoreFull) as error:
                self._why_not = error.message
        return self._fallback.buffer(name, size_bytes)

    def submit(self, desk: Desk, job: Job) -> None:
        """Hand the job over if every rank can; else persist it here. Collective."""
        shared = attempt(lambda: self._all_shared(job))
        why_not = shared.message if isinstance(shared, Failure) else self._why_not
        if isinstance(shared, Failure) and shared.code == "RES-CONFIG" and shared.cause:
            raise shared.cause
        ruling = agree(
            desk.comms, f"{job.topic}/way", why_not, _first_reason, desk.limits.within_seconds
        )
        if ruling or isinstance(shared, Failure):
            desk.tell(facts.KeeperBypassed(job.about.checkpoint.folder, ruling))
            self._fallback.submit(desk, job)
            return
        stall_seconds = desk.clock.monotonic_seconds() - job.began_seconds
        shared = replace(shared, stall_seconds=stall_seconds)
        self._handed = (desk, shared)
        sent = {"job": to_json(shared, desk.world.rank), "context": dict(desk.emit.context)}
        handed = attempt(lambda: self._ask("save", **sent))
        if isinstance(handed, Failure):
            # The peers learn it from the keepers' board, and all of us at the next wait.
            self._lose(handed.message)

    def wait(self) -> None:
        """Return when the job handed over is durable.

        A keeper that died is no verdict: the ruling on the board is, or else the store.

        Raises:
            SaveFailed: it could not be made so; older checkpoints are intact.
            Fenced: a newer life began, so nothing was committed.
        """
        handed, self._handed = self._handed, None
        if handed is None:
            self._fallback.wait()
            return
        try:
            while self._ask("wait").get("is_pending"):
                continue
        except PeerFailed as error:
            self._lose(error.message)
            self._find_verdict(*handed, error)

    def close(self) -> None:
        """Leave the keeper; it keeps what was committed last for the next life."""
        self._fallback.close()
        self._lose("it was closed")

    def _settle(self, desk: Desk) -> dict[str, Any]:
        """Introduce this rank, wait for older saves, and return where the keeper's board is."""
        self._lines = self._connect()
        world = desk.world
        url = self._address.url
        self._ask(
            "hello",
            version=PROTOCOL_VERSION,
            # The keeper has another working folder than a script may have by now.
            url=str(local_path(url).absolute()) if protocol_of(url) == "file" else url,
            world=[world.rank, world.size, world.local_rank],
            scope=desk.comms.scope,
            limits=desk.limits.to_json(),
            events=self._address.events,
            storage_options=dict(self._address.storage_options),
            signing_key=desk.signing.key.secret.hex() if desk.signing.key else "",
        )
        deadline_seconds = desk.clock.monotonic_seconds() + desk.limits.within_seconds
        while self._ask("settle")["is_busy"] and desk.clock.monotonic_seconds() < deadline_seconds:
            continue
        board: dict[str, Any] = self._ask("board")["board"]
        return board | {"host": board["host"] or self._address.host}

    def _recalling(self, desk: Desk) -> Store:
        answer = attempt(lambda: self._ask("recall"))
        if isinstance(answer, Failure):
            return desk.store
        held = {key: Held.from_json(one) for key, one in answer["held"].items()}
        return RecallingStore(desk.store, held, lambda key: desk.emit(facts.MemoryDoubted(key)))

    def _reserve(self, name: str, size_bytes: int) -> memoryview:
        held = self._segments.get(name)
        if held is None or len(held) < size_bytes:
            answer = self._ask("reserve", name=name, size_bytes=size_bytes)
            held = map_file(Path(answer["path"]), answer["size_bytes"], writable=True)
            self._segments[name] = held
        return held[:size_bytes]

    def _all_shared(self, job: Job) -> Job:
        """Return the job with every file in shared memory: small ones are copied now."""
        if self._why_not or self._lines is None:
            raise PeerFailed(self._why_not)
        return replace(job, files=tuple(self._shared(file) for file in job.files))

    def _shared(self, file: HostFile) -> HostFile:
        held = self._segments.get(file.name)
        data = memoryview(file.data)
        if held is not None and held.obj is data.obj:
            return file
        target = self._reserve(file.name, len(data))
        target[:] = data
        return HostFile(file.name, target, file.tensors)

    def _find_verdict(self, desk: Desk, job: Job, gone: PeerFailed) -> None:
        """Learn how a job ended whose keeper is gone; return if it is committed."""
        checkpoint = job.about.checkpoint
        found = attempt(lambda: _is_committed(desk.store, checkpoint) or self._hear(desk, job))
        if isinstance(found, Failure) and found.code == Fenced.code:
            raise found.to_error(1) from gone
        # The keeper may have put the manifest and died before anybody heard the ruling.
        landed = found is True or attempt(lambda: _is_committed(desk.store, checkpoint)) is True
        if not landed:
            raise SaveFailed(
                f"{checkpoint} was not saved: {gone.message}; older checkpoints are intact",
                hint=f"resilient ckpt ls {desk.store.url}",
            ) from gone

    def _hear(self, desk: Desk, job: Job) -> bool:
        if desk.world.is_coordinator or self._board is None:
            raise PeerFailed("the keeper that would have ruled is gone")
        board = SocketBoard(self._board)
        try:
            hear(desk.comms.over(board), job.topic, desk.limits.within_seconds)
        finally:
            board.close()
        return True

    def _connect(self) -> Lines:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(_SILENCE_SECONDS)
        try:
            connection.connect(self._address.path)
        except OSError as error:
            connection.close()
            raise PeerFailed(f"no keeper at {self._address.path}: {error}") from error
        return Lines(connection)

    def _ask(self, verb: str, **message: Any) -> dict[str, Any]:
        """Ask the keeper; an answer that is a failure is raised as an error of its kind.

        Raises:
            PeerFailed: the keeper is gone.
        """
        try:
            if self._lines is None:
                raise PeerFailed(f"the keeper is gone: {self._why_not}")
            self._lines.send({"verb": verb, **message})
            answer = self._lines.receive()
        except (OSError, BadLine) as error:
            raise PeerFailed(f"the keeper is gone: {error}") from error
        if answer is None:
            raise PeerFailed("the keeper is gone: it closed the connection")
        if "failure" in answer:
            raise Failure(**answer["failure"]).to_error(1)
        return answer

    def _lose(self, why: str) -> None:
        self._why_not = self._why_not or why
        if self._lines is not None:
            self._lines.close()
            self._lines = None


def persister_for(
    keeper: KeeperAddress | None, url: str, storage_options: Mapping[str, Any]
) -> Persister:
    """Return who persists jobs for ``url``: the keeper if there is one, else a thread."""
    thread = ThreadPersister()
    if keeper is None:
        return thread
    address = replace(keeper, url=url, storage_options=storage_options)
    return KeeperPersister(address, thread)


def _first_if_all(boards: list[Any]) -> Any:
    return boards[0] if all(boards) else None


def _first_reason(reasons: list[str]) -> str:
    for rank, reason in enumerate(reasons):
        if reason:
            return f"rank {rank}: {reason}" if len(reasons) > 1 else reason
    return ""


def _is_committed(store: Store, checkpoint: CheckpointId) -> bool:
    try:
        store.stat(checkpoint.manifest_key)
    except KeyNotFound:
        return False
    return True
