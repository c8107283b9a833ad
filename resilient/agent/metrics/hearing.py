"""What agents and ranks tell, as figures: one function for each, by the name of the event."""

from __future__ import annotations

from typing import TYPE_CHECKING

from resilient.agent.metrics import names
from resilient.agent.verdict.causes import Cause
from resilient.agent.verdict.outcome import Kind
from resilient.format.names import parse_checkpoint

if TYPE_CHECKING:
    from resilient.accounting.records import Record
    from resilient.agent.metrics.board import Board

_CAUSES = frozenset(one.value for one in (*Cause, *Kind))
_OTHER = "other"
_ASKED = frozenset({Kind.STOPPED.value, Kind.PREEMPTED.value, Kind.KILLED.value})
_TOGETHER = frozenset({Kind.SUCCEEDED.value, Kind.STOPPED.value, Kind.PREEMPTED.value})
_BROKEN = ("nan", "inf", "spike")
_COUNTED = {
    "HangFound": names.HANGS,
    "NoticeHeard": names.NOTICES,
    "StragglerFound": names.STRAGGLERS,
}


def hear_agent(one: Record, board: Board) -> None:
    """Note what the agent of this process tells."""
    if one.event in _COUNTED:
        board.add(_COUNTED[one.event])
    elif one.event == "WorkerGroupStarted":
        board.add(names.LIVES)
        board.put(names.WORLD_SIZE, one.number("world_size"))
        board.put(names.LOCAL_WORLD_SIZE, one.number("local_world_size"))
        board.put(names.NODES, one.number("nodes"))
    elif one.event == "ReactionChosen":
        _hear_reaction(one, board)
    elif one.event == "LifeEnded":
        # Ranks are gone when nobody looks; those that end together have done the same steps.
        if one.text("ended") in _TOGETHER and one.number("step", -1) >= 0:
            board.put(names.STEP, one.number("step"))
    elif one.event in ("RunEnded", "RunGivenUp"):
        board.put(names.EXIT_CODE, one.number("exit_code"))


def hear_rank(one: Record, board: Board, *, is_new: bool) -> None:
    """Note what a rank tells.

    Args:
        one: what it told.
        board: where to note it.
        is_new: whether it was told since this agent is there; counters begin with the agent.
    """
    if one.event == "GenerationClaimed":
        board.put(names.GENERATION, one.number("generation"))
        if not one.text("parent"):  # older checkpoints are left aside, if there are any
            for metric in (names.CHECKPOINT_STEP, names.CHECKPOINT_TIME, names.CHECKPOINT_BYTES):
                board.drop(metric)
    elif one.event in ("CheckpointCommitted", "CheckpointRestored"):
        found = parse_checkpoint(one.text("checkpoint"))
        board.put(names.CHECKPOINT_STEP, found.step if found else one.number("step"))
    if one.event == "CheckpointCommitted":
        board.put(names.CHECKPOINT_TIME, one.at_ms / 1000)
        board.put(names.CHECKPOINT_BYTES, one.number("size_bytes"))
    if is_new:
        _count_what_ranks_tell(one, board)


def begin(board: Board, version: str, now_seconds: float) -> None:
    """Put up what is known from the start: a counter that is not there yet cannot be seen to grow.

    Args:
        board: empty so far.
        version: of the library.
        now_seconds: in unix time.
    """
    board.put(names.AGENT_INFO, 1, version)
    board.put(names.AGENT_START, now_seconds)
    for one in names.ALL:
        if one.kind == "counter" and not one.label:
            board.add(one, 0)
    for cause in (Cause.EXIT, Cause.SIGNAL, Cause.OOM_KILL, Cause.HANG):
        board.add(names.FAILURES, 0, cause.value)
        board.add(names.RESTARTS, 0, cause.value)
    for kind in _BROKEN:
        board.add(names.LOSSES_BROKEN, 0, kind)


def _hear_reaction(one: Record, board: Board) -> None:
    ended = one.text("ended")
    cause = one.text("cause") or ended
    cause = cause if cause in _CAUSES else _OTHER
    if one.text("action") == "Restart":
        board.add(names.RESTARTS, 1, cause)
    if ended == Kind.FAILED.value:
        board.add(names.FAILURES, 1, cause)
    if ended in _ASKED:
        board.add(names.PREEMPTIONS)
    board.put(names.RESTARTS_LEFT, one.number("restarts_left"))


def _count_what_ranks_tell(one: Record, board: Board) -> None:
    if one.event == "CheckpointCommitted":
        _count_save(one, board)
    elif one.event == "SaveAborted":
        board.add(names.SAVES_ABORTED)
    elif one.event == "LossBroke" and one.text("kind") in _BROKEN:
        board.add(names.LOSSES_BROKEN, 1, one.text("kind"))


def _count_save(one: Record, board: Board) -> None:
    board.add(names.CHECKPOINTS)
    written = one.number("written_bytes", -1)
    board.add(names.CHECKPOINT_WRITTEN, written if written >= 0 else one.number("size_bytes"))
    board.add(names.COMMIT, one.milliseconds("commit_seconds") / 1000)
    board.add(names.STALL, one.milliseconds("stall_seconds") / 1000)
