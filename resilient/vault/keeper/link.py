"""A rank's side of the keeper: stage into shared memory, hand the job over, hear the verdict.

Nothing waits for the keeper on the way: it is told of a job while its bytes are copied, and a
thread listens for the verdict. All ranks hand over, or none does: after each copy they agree
whether every one of them reached its keeper. If one did not, this save is persisted by a thread
in each rank, as without a keeper.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from resilient.errors import (
    ConfigError,
    DeadlineExceeded,
    Fenced,
    PeerFailed,
    ResilientError,
)
from resilient.vault import facts
from resilient.vault.keeper import rulings
from resilient.vault.keeper.conversation import Conversation, tell_once
from resilient.vault.keeper.ending import KeeperProcess
from resilient.vault.keeper.guest import (
    KeeperAddress,
    introduction,
    tiers_to_json,
)
from resilient.vault.keeper.handover import to_json
from resilient.vault.keeper.leased import Leased, Share
from resilient.vault.keeper.listener import Listener
from resilient.vault.keeper.verdict import find_verdict, free, is_committed
from resilient.vault.reading.held import Held
from resilient.vault.reading.recall import RecallingStore
from resilient.world.agreement import Failure, agree, attempt
from resilient.world.serving import Address

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient.storage.store import Store
    from resilient.vault.desk import Desk
    from resilient.vault.saving.persist import Job
    from resilient.vault.saving.persister import Persister

_ANSWER_SECONDS = 10.0


class KeeperPersister:
    """Hands jobs to the keeper of this host, and to ``fallback`` when a rank has none.

    Args:
        address: where the keeper is.
        fallback: persists in this process.

    Attributes:
        leased: what the keeper has lent this rank for its saves.
    """

    def __init__(self, address: KeeperAddress, fallback: Persister) -> None:
        self.address = address
        self._fallback = fallback
        self._talk: Conversation | None = None
        self._process = KeeperProcess(0)
        self.board: Address | None = None
        self._url, self._why_not = "", "it was not asked yet"
        self._is_announced = False
        self.leased = Leased(lambda verb, **message: self._to().ask(verb, **message))
        self._handed: tuple[Desk, Job] | None = None
        self._ended: Any = None
        self._listener: Listener | None = None
        self._is_last_kept = self._is_mute = False
        self.took_seconds = self.rested_seconds = 0.0

    def open(self, desk: Desk) -> Store:
        """Connect, wait for what past lives left in flight, and agree on the keepers' board.

        Collective: every rank, before it asks what to resume from.
        """
        mine = attempt(lambda: self._settle(desk))
        self._why_not = mine.message if isinstance(mine, Failure) else ""
        shown = None if isinstance(mine, Failure) else mine
        within_seconds = desk.limits.within_seconds
        board = agree(desk.comms, "keeper/board", shown, rulings.first_if_all, within_seconds)
        if board is None:
            self._lose(self._why_not or "another host has none")
        if self._talk is None:
            return desk.store
        self.board = Address.from_json(board)
        return self._recalling(desk, board)

    def begin(self, topic: str) -> None:
        """Announce a job; if this process dies now, its peers fail at once."""
        self._is_announced = True
        if self._talk is None:
            return
        begun = attempt(lambda: self._to().tell("begin", topic=topic))
        self._why_not = begun.message if isinstance(begun, Failure) else ""

    def buffer(self, name: str, size_bytes: int) -> memoryview:
        """Return shared memory, or private memory if there is none for a job announced.

        Raises:
            ConfigError: ``host_bytes_max`` is too small.
            ResilientError: there is none yet; past lives still have theirs.
        """
        if self._talk is not None and not self._why_not:
            try:
                return self.leased.get(name, size_bytes)
            except ConfigError:
                raise
            except ResilientError as error:
                if not self._is_announced:
                    raise
                self._why_not = error.message
        return self._fallback.buffer(name, size_bytes)

    def streams(self, sizes: Mapping[str, int]) -> bool:
        """Say whether this rank's share of the keeper's memory is smaller than these files.

        Raises:
            ConfigError: without a keeper, if this process may not even hold one of them.
        """
        if self._talk is None or self._why_not:
            return self._fallback.streams(sizes)
        has_room = attempt(lambda: self.leased.has_room(sizes))
        return has_room is False

    def submit(self, desk: Desk, job: Job) -> None:
        """Hand the job over if every rank can; else persist it here. Collective.

        If a rank has no room for its files, all see this job to its end before they go on.
        """
        self._is_announced = False
        shared = attempt(lambda: self._all_shared(job))
        why_not = shared.message if isinstance(shared, Failure) else self._why_not
        shown: Any = {"why_not": why_not, "streams": bool(job.streamed)}
        if isinstance(shared, Failure) and isinstance(shared.cause, ConfigError):
            # What the user asked for is too little: no way around it, on any rank.
            shown = shared
        way = agree(desk.comms, f"{job.topic}/way", shown, rulings.way, desk.limits.within_seconds)
        if way["why_not"] or isinstance(shared, Failure):
            desk.tell(facts.KeeperBypassed(job.about.checkpoint.folder, way["why_not"]))
            self._is_last_kept = False
            self._fallback.submit(desk, job)
            return
        shared, slots = shared
        self._handed = (desk, shared)
        # If it is gone, the peers learn it from the keepers' board, and all of us at the next wait.
        attempt(lambda: self._to().tell("save", **_handover(desk, shared, slots)))
        self._listener = Listener(self._to, job, slots, self.address.left_seconds, desk.clock)
        if way["streams"]:
            self._ended = attempt(self._see_to_its_end)

    def wait(self) -> None:
        """Return when the job handed over is durable.

        A keeper that died is no verdict: the ruling on the board is, or else the store. Without
        any, the trainers persist by themselves: the bytes still lie in their memory. Collective
        if the job is not durable.

        Raises:
            SaveFailed: it could not be made so; older checkpoints are intact.
            Fenced: a newer life began, so nothing was committed.
        """
        ended, self._ended = self._ended, None
        if isinstance(ended, Failure):
            raise ended.cause or ended.to_error(1)
        self._see_to_its_end()

    def close(self) -> None:
        """Leave the keeper; it keeps what was committed last for the next life."""
        self._fallback.close()
        self._lose("it was closed")
        self._process.close()

    def _see_to_its_end(self) -> None:
        handed, self._handed = self._handed, None
        listener = self._listener
        if handed is None or listener is None:
            self._fallback.wait()
            _remember(self, self._fallback)
            return
        self._is_last_kept = True
        if listener.is_listening:
            tell_once(self.address.path, "hurry", url=self._url)
        desk, job = handed
        if is_called := listener.join(partial(desk.comms.is_called, _here(job))):
            self._lose("another rank gave its keeper up")
            listener.join()
        _remember(self, listener)
        failed = listener.heard
        if isinstance(failed, Failure) and isinstance(failed.cause, PeerFailed):
            self._lose(failed.message)
            # One that sleeps is killed: then its part is over, and its peers hear of it.
            sleeps = self._is_mute and not self._process.end()
            if sleeps:
                attempt(lambda: desk.comms.call(_here(job)))
            # It may never show the others its part: there is no ruling to wait for.
            board = None if sleeps or is_called else self.board
            failed = attempt(partial(find_verdict, desk, job, board, failed.message))
        if isinstance(failed, Failure) and not self._persist_here(desk, job, failed):
            return
        if desk.promoter and desk.leads:
            desk.promoter.note(job.about.checkpoint, job.keep)

    def finish(self, within_seconds: float) -> bool:
        """Have the keeper bring what it committed last to the durable tier.

        Args:
            within_seconds: how long the keepers of other hosts may take to come.

        Returns:
            Whether it did: not if the last save was not its, or it is gone.

        Raises:
            SaveFailed: the near tier alone has it.
            Fenced: a newer life began.
        """
        if not self._is_last_kept:
            return False
        try:
            self._to().ask("finish", within_seconds=within_seconds)
            while self._to().ask("wait").get("is_pending"):
                continue
        except PeerFailed as error:
            self._lose(error.message)
            return False
        return True

    def _settle(self, desk: Desk) -> dict[str, Any]:
        """Introduce this rank, wait for older saves, and return where the keeper's board is."""
        talk = self._talk = Conversation(self.address.path, self.address.left_seconds)
        self._process = KeeperProcess(talk.peer_pid)
        hello = introduction(self.address, desk)
        # As it was then: the working folder may be another one later.
        self._url = hello["url"]
        welcome = talk.ask("hello", **hello)
        self.leased.share = Share(**welcome["share"])
        if welcome["is_busy"]:
            _wait_for_past_lives(talk, desk)
        board: dict[str, Any] = welcome["board"]
        return board | {"host": board["host"] or self.address.host}

    def _recalling(self, desk: Desk, board: Mapping[str, Any]) -> Store:
        """Join the keepers' board, and return a store that knows what the keeper holds."""
        answer = attempt(lambda: _joined(self._to(), board))
        if isinstance(answer, Failure):
            self._lose(answer.message)
            return desk.store
        held = {key: Held.from_json(one) for key, one in answer["held"].items()}
        return RecallingStore(desk.store, held, lambda key: desk.emit(facts.MemoryDoubted(key)))

    def _all_shared(self, job: Job) -> tuple[Job, dict[str, memoryview]]:
        """Return the job with every file in shared memory, and slots for those that are streamed.

        Small files are copied now.
        """
        if self._why_not:
            raise PeerFailed(self._why_not)
        # The announcement was heard while the bytes were copied.
        self._to().hear()
        files = tuple(self.leased.with_memory(file) for file in job.files)
        slots = self.leased.slots(job.streamed)
        # Said once: whoever persists it after all writes the very files that the keeper would,
        # which may only be asleep and put one of them later.
        return replace(job, files=files, copies_bytes_max=self.leased.spare_bytes), slots

    def _persist_here(self, desk: Desk, job: Job, failed: Failure) -> bool:
        """Persist in this process if a rank's keeper is gone, else raise what failed. Collective.

        Returns:
            Whether a keeper made it durable after all.

        Raises:
            SaveFailed: it could not be made durable this way either.
            Fenced: a newer life began.
        """
        shown = failed if failed.code == Fenced.code else {"gone": self._talk is None}
        # A rank that died cannot answer; its peers shall not wait for it as for a slow store.
        within_seconds = min(desk.limits.within_seconds, _ANSWER_SECONDS)
        topic = _here(job)
        try:
            is_gone = agree(desk.comms, f"{topic}/why", shown, rulings.is_any_gone, within_seconds)
        except (DeadlineExceeded, PeerFailed):
            # A keeper that was only slow has told those who still listened.
            if attempt(lambda: is_committed(desk.store, job.about.checkpoint)) is True:
                return True
            raise failed.cause or failed.to_error(1) from None
        if not is_gone:
            free(desk, job)
            raise failed.cause or failed.to_error(1)
        desk.tell(facts.KeeperBypassed(job.about.checkpoint.folder, failed.message))
        self._is_last_kept = False
        self._fallback.submit(desk, replace(job, topic=topic, has_rival=True))
        self._fallback.wait()
        _remember(self, self._fallback)
        return False

    def _to(self) -> Conversation:
        """Return the conversation with the keeper.

        Raises:
            PeerFailed: there is none.
        """
        if self._talk is not None and self._talk.is_over:
            self._lose("it did not answer")
        if self._talk is None:
            raise PeerFailed(f"the keeper is gone: {self._why_not}")
        return self._talk

    def _lose(self, why: str) -> None:
        self._why_not = self._why_not or why
        # One that was only asleep may still read them: nobody writes there any more.
        self.leased.forget()
        if self._talk is not None:
            self._is_mute = self._talk.is_silent
            self._talk.close()
            self._talk = None


def _handover(desk: Desk, job: Job, slots: Mapping[str, memoryview]) -> dict[str, Any]:
    said = to_json(job, desk.world.rank, slots)
    return {"job": said, "context": dict(desk.emit.context), "tiers": tiers_to_json(desk)}


def _joined(talk: Conversation, board: Mapping[str, Any]) -> dict[str, Any]:
    talk.tell("join", board=board)
    return talk.ask("recall")


def _wait_for_past_lives(talk: Conversation, desk: Desk) -> None:
    deadline_seconds = desk.clock.monotonic_seconds() + desk.limits.within_seconds
    while desk.clock.monotonic_seconds() < deadline_seconds:
        if not talk.ask("settle")["is_busy"]:
            return


def _remember(mine: KeeperPersister, last: Persister | Listener) -> None:
    mine.took_seconds, mine.rested_seconds = last.took_seconds, last.rested_seconds


def _here(job: Job) -> str:
    """Return where the ranks meet to persist what a keeper does not."""
    return f"{job.topic}/here"
