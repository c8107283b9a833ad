"""Departure of a node from a round or from the whole rendezvous.

A round is the set of nodes that train together in one attempt.
"""

from __future__ import annotations

import json
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _RendezvousExitOp

from resilient.elastic.outcome import CODE_PREEMPTED, Outcome, OutcomeKind
from resilient.elastic.rendezvous.membership import discard_cached_state
from resilient.elastic.restart_policy import Finish, GiveUp, LeaveHost
from resilient.errors import Fenced, PeerFailed

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler

    from resilient.clock import Clock
    from resilient.elastic.rendezvous.roster import Roster
    from resilient.elastic.signals import StopSignals

_OPEN_CODES = frozenset({PeerFailed.exit_code, Fenced.exit_code})
_POLL_SECONDS = 0.1
# torch queries once per second, and answers from its cache for a second.
_CACHE_SECONDS = 2.5
# Part of a stop's time for the saver daemon and the exit.
_EXIT_RESERVE_SECONDS = 2.0


def leave_rendezvous(
    group: Any,
    roster: Roster,
    action: Finish | LeaveHost | GiveUp,
    stops: StopSignals,
    clock: Clock,
    grace_seconds: float,
) -> bool:
    """Close the rendezvous if the run is over; leave it open if the run was preempted.

    The rendezvous may end with this agent. Before that, nodes that wait for a free position and
    former nodes that join again receive the reason.

    Ranks of other hosts may still query the attempt's store for the commit of their last save. The
    store ends with the agent of the first node. So nodes that save and leave wait for each other,
    at most for ``grace_seconds`` or for the time left of a stop request.

    Returns:
        Whether other nodes continue and wait until this node calls :func:`leave_round`.
    """
    is_given_up = isinstance(action, GiveUp) and not stops.asked_by
    if action.code == 0 or (is_given_up and _may_close(group, roster, action.code)):
        if action.code == 0:
            _publish_success(group.spec.rdzv_handler)
        is_reason_published = is_given_up and _publish_reason(group.spec.rdzv_handler, action)
        is_closed = group.spec.rdzv_handler.shutdown()
        if is_closed and (roster.has_waiting_nodes() or (is_reason_published and roster.nodes > 1)):
            clock.sleep(_CACHE_SECONDS)
    elif action.code == CODE_PREEMPTED:
        roster.publish_leave(group.group_rank)
        give_up_at_seconds = clock.monotonic_seconds() + grace_seconds
        while roster.waits_for_leaving_nodes(group.group_rank):
            left_seconds = stops.left_seconds()
            if left_seconds is None:
                left_seconds = (
                    give_up_at_seconds - clock.monotonic_seconds() + _EXIT_RESERVE_SECONDS
                )
            if left_seconds <= _EXIT_RESERVE_SECONDS:
                break
            clock.sleep(_POLL_SECONDS)
        return roster.is_continued_without()
    return False


def leave_round(handler: Any) -> None:
    """Give up this node's position after its save, if the other nodes continue without it.

    The other nodes wait for the next round until no node is in this round, or until the heartbeats
    of its last nodes are missing. If this process dies before this call, the missing heartbeats
    have the same effect.
    """
    with suppress(RendezvousError, dist.DistError):
        # torch has no public way except to join again.
        handler._stop_heartbeats()  # noqa: SLF001
        deadline = handler._get_deadline(handler.settings.timeout.heartbeat)  # noqa: SLF001
        handler._op_executor.run(_RendezvousExitOp(), deadline)  # noqa: SLF001


def _may_close(group: Any, roster: Roster, code: int) -> bool:
    """Return whether the end of this node's run is the end for all nodes.

    A node that reaches no other node, or was fenced by a newer attempt, knows nothing of the
    others. This also applies to a node that the others continued without.
    """
    if code in _OPEN_CODES:
        return False
    handler = group.spec.rdzv_handler
    discard_cached_state(handler)
    with suppress(RendezvousError, dist.DistError):
        handler.num_nodes_waiting()
    return group.group_rank is None or group.group_rank not in roster.left()


def outcome_of_closed(
    handler: RendezvousHandler, error: RendezvousError, *, has_run_before: bool = False
) -> Outcome:
    """Return the outcome for a node that found the rendezvous closed.

    A node that was part of the run, or waited for a position, ends like the other nodes if they
    reported their outcome. A node that arrives at a closed rendezvous has no information on the
    run, and may belong to another run.

    Args:
        handler: Handler of the rendezvous.
        error: Error that reports the closed rendezvous.
        has_run_before: Whether ranks of this node were part of the run.
    """
    state_holder: Any = getattr(handler, "_state_holder", None)
    node = getattr(handler, "_this_node", None)
    has_waited = state_holder and node in {
        *state_holder.state.wait_list,
        *state_holder.state.redundancy_list,
    }
    if has_waited and _has_succeeded(handler):
        return Outcome(OutcomeKind.SUCCEEDED)
    code, published_reason = _published_reason(handler) if has_waited or has_run_before else (0, "")
    reason = f"the rendezvous is closed: {published_reason or exit_reason(error)}"
    return Outcome(OutcomeKind.UNREACHABLE, code, reason=reason)


def exit_reason(error: Exception) -> str:
    """Return an error as readable text, with its type if it has no message."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _publish_success(handler: Any) -> None:
    """Report to waiting nodes that the run is complete, and not given up."""
    store = getattr(handler, "_store", None)
    if store is not None:
        with suppress(dist.DistError):
            store.set(_end_key(handler), "1")


def _has_succeeded(handler: Any) -> bool:
    with suppress(dist.DistError):
        return bool(handler._store.check([_end_key(handler)]))  # noqa: SLF001 - no public way
    return False


def _end_key(handler: Any) -> str:
    return f"resilient/ended/{handler.get_run_id()}"


def _publish_reason(handler: Any, action: LeaveHost | GiveUp | Finish) -> bool:
    """Publish the reason of the end, unless a node did; return whether others can read it."""
    store = getattr(handler, "_store", None)
    if store is not None:
        message = {"code": action.code, "host": socket.gethostname(), "reason": action.reason}
        with suppress(dist.DistError):
            store.compare_set(_reason_key(handler), "", json.dumps(message))
            return True
    return False


def _published_reason(handler: Any) -> tuple[int, str]:
    """Return exit code and reason that another node published; 0 without one."""
    store, key = getattr(handler, "_store", None), _reason_key(handler)
    with suppress(dist.DistError, ValueError, KeyError, TypeError):
        if store is not None and store.check([key]):
            message = json.loads(store.get(key))
            return int(message["code"]), f"the run ended on {message['host']}: {message['reason']}"
    return 0, ""


def _reason_key(handler: Any) -> str:
    return f"resilient/why/{handler.get_run_id()}"
