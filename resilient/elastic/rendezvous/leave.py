"""How a node leaves the others once it was decided that it does."""

from __future__ import annotations

import json
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _RendezvousExitOp

from resilient.elastic.outcome import CODE_PREEMPTED, Outcome, OutcomeKind
from resilient.elastic.rendezvous.membership import forget_what_was_heard
from resilient.elastic.restart_policy import Finish, GiveUp, LeaveHost
from resilient.errors import Fenced, PeerFailed

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler

    from resilient.clock import Clock
    from resilient.elastic.rendezvous.roster import Roster
    from resilient.elastic.signals import StopSignals

_OPEN_CODES = frozenset({PeerFailed.exit_code, Fenced.exit_code})
_POLL_SECONDS = 0.1
# Torch asks every second, and answers for a second with what it heard.
_HEARD_SECONDS = 2.5
# Of a stop, for the keeper and the way out.
_OUT_SECONDS = 2.0


def leave_rendezvous(
    group: Any,
    roster: Roster,
    action: Finish | LeaveHost | GiveUp,
    stops: StopSignals,
    clock: Clock,
    grace_seconds: float,
) -> bool:
    """Close the rendezvous if the run is over; a preempted one will come back to it.

    Others hear why: nodes that wait for room in the world, and where the run is given up those that
    were part of it and come to meet again, before the rendezvous may end with this agent.

    Ranks of other hosts may still have to hear whether their last save is committed, at the store
    of the life, which ends with the agent of the first node. So nodes that save and leave wait for
    each other, for ``grace_seconds`` or for what a stop leaves them.

    Returns:
        Whether others go on and wait for this node's place to be given back; see `leave_round`.
    """
    is_given_up = isinstance(action, GiveUp) and not stops.asked_by
    if action.code == 0 or (is_given_up and _may_close(group, roster, action.code)):
        if action.code == 0:
            _tell_end(group.spec.rdzv_handler)
        is_told = is_given_up and _tell_why(group.spec.rdzv_handler, action)
        is_closed = group.spec.rdzv_handler.shutdown()
        if is_closed and (roster.has_spares() or (is_told and roster.nodes > 1)):
            clock.sleep(_HEARD_SECONDS)
    elif action.code == CODE_PREEMPTED:
        roster.say_goodbye(group.group_rank)
        give_up_at_seconds = clock.monotonic_seconds() + grace_seconds
        while roster.waits_for_goodbyes(group.group_rank):
            left_seconds = stops.left_seconds()
            if left_seconds is None:
                left_seconds = give_up_at_seconds - clock.monotonic_seconds() + _OUT_SECONDS
            if left_seconds <= _OUT_SECONDS:
                break
            clock.sleep(_POLL_SECONDS)
        return roster.is_outlasted()
    return False


def leave_round(handler: Any) -> None:
    """Give this node's place back, once all is saved, where others go on without it.

    They wait for the next round until nobody holds this one; else that would be until they miss
    its heartbeats. Dying before is as if those stop.
    """
    with suppress(RendezvousError, dist.DistError):
        # There is no public way but to join again.
        handler._stop_heartbeats()  # noqa: SLF001
        deadline = handler._get_deadline(handler.settings.timeout.heartbeat)  # noqa: SLF001
        handler._op_executor.run(_RendezvousExitOp(), deadline)  # noqa: SLF001


def _may_close(group: Any, roster: Roster, code: int) -> bool:
    """Say whether what one node gives up is over for all.

    One that reaches nobody, or that a newer life has shut out, says nothing of the others; nor does
    one that the others have gone on without.
    """
    if code in _OPEN_CODES:
        return False
    handler = group.spec.rdzv_handler
    forget_what_was_heard(handler)
    with suppress(RendezvousError, dist.DistError):
        handler.num_nodes_waiting()
    return group.group_rank is None or group.group_rank not in roster.left()


def outcome_of_closed(
    handler: RendezvousHandler, error: RendezvousError, *, has_lived: bool = False
) -> Outcome:
    """Return how it ended for a node that met nobody because the rendezvous was closed.

    One that had waited for room in the world, or was part of it, ends as the others did, as far as
    they said so. One that comes to a rendezvous which is closed already knows nothing of a run: it
    may be meant for another one.

    Args:
        handler: of the rendezvous.
        error: that says that it is closed.
        has_lived: whether ranks of this node were part of the run.
    """
    held: Any = getattr(handler, "_state_holder", None)
    node = getattr(handler, "_this_node", None)
    has_waited = held and node in {*held.state.wait_list, *held.state.redundancy_list}
    if has_waited and _has_ended_well(handler):
        return Outcome(OutcomeKind.SUCCEEDED)
    code, why = _heard_why(handler) if has_waited or has_lived else (0, "")
    reason = f"the rendezvous is closed: {why or exit_reason(error)}"
    return Outcome(OutcomeKind.UNREACHABLE, code, reason=reason)


def exit_reason(error: Exception) -> str:
    """Return an error for a person, also one that says nothing but its name."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _tell_end(handler: Any) -> None:
    """Let nodes that wait for room know that the run is done, and not given up."""
    store = getattr(handler, "_store", None)
    if store is not None:
        with suppress(dist.DistError):
            store.set(_end_key(handler), "1")


def _has_ended_well(handler: Any) -> bool:
    with suppress(dist.DistError):
        return bool(handler._store.check([_end_key(handler)]))  # noqa: SLF001 - no public way
    return False


def _end_key(handler: Any) -> str:
    return f"resilient/ended/{handler.get_run_id()}"


def _tell_why(handler: Any, action: LeaveHost | GiveUp | Finish) -> bool:
    """Let the others know how the run ended, unless one of them has said it; say if they can."""
    store = getattr(handler, "_store", None)
    if store is not None:
        told = {"code": action.code, "host": socket.gethostname(), "reason": action.reason}
        with suppress(dist.DistError):
            store.compare_set(_why_key(handler), "", json.dumps(told))
            return True
    return False


def _heard_why(handler: Any) -> tuple[int, str]:
    """Return with which code the run ended, and whose reason that was; 0 where nobody said so."""
    store, key = getattr(handler, "_store", None), _why_key(handler)
    with suppress(dist.DistError, ValueError, KeyError, TypeError):
        if store is not None and store.check([key]):
            told = json.loads(store.get(key))
            return int(told["code"]), f"the run ended on {told['host']}: {told['reason']}"
    return 0, ""


def _why_key(handler: Any) -> str:
    return f"resilient/why/{handler.get_run_id()}"
