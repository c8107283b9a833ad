"""How a node leaves the others once it was decided that it does."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousError

from resilient.agent.nodes.membership import forget_what_was_heard
from resilient.agent.verdict.decide import (
    CODE_PREEMPTED,
    Finish,
    GiveUp,
    Kind,
    LeaveHost,
    Outcome,
)
from resilient.errors import Fenced, PeerFailed

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler

    from resilient.agent.nodes.roster import Roster
    from resilient.agent.stops import Stops
    from resilient.clock import Clock

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
    stops: Stops,
    clock: Clock,
    grace_seconds: float,
) -> None:
    """Close the rendezvous if the run is over; a preempted one will come back to it.

    Nodes that wait for room in the world hear that it is closed before it may end with this agent.

    Ranks of other hosts may still have to hear whether their last save is committed, at the store
    of the life, which ends with the agent of the first node. So nodes that save and leave wait for
    each other, for ``grace_seconds`` or for what a stop leaves them.
    """
    is_given_up = isinstance(action, GiveUp) and not stops.asked_by
    if action.code == 0 or (is_given_up and _may_close(group, roster, action.code)):
        if action.code == 0:
            _tell_end(group.spec.rdzv_handler)
        is_closed = group.spec.rdzv_handler.shutdown()
        if is_closed and roster.has_spares():
            clock.sleep(_HEARD_SECONDS)
    elif action.code == CODE_PREEMPTED:
        roster.say_goodbye(group.group_rank)
        give_up_at_seconds = clock.monotonic_seconds() + grace_seconds
        while roster.waits_for_goodbyes(group.group_rank):
            left_seconds = stops.left_seconds()
            if left_seconds is None:
                left_seconds = give_up_at_seconds - clock.monotonic_seconds() + _OUT_SECONDS
            if left_seconds <= _OUT_SECONDS:
                return
            clock.sleep(_POLL_SECONDS)


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


def outcome_of_closed(handler: RendezvousHandler, error: RendezvousError) -> Outcome:
    """Return how it ended for a node that met nobody because the rendezvous was closed.

    One that had waited for room in the world ends as the others did, as far as they said so. One
    that comes to a rendezvous which is closed already knows nothing of a run: it may be meant for
    another one.
    """
    held: Any = getattr(handler, "_state_holder", None)
    node = getattr(handler, "_this_node", None)
    has_waited = held and node in {*held.state.wait_list, *held.state.redundancy_list}
    if has_waited and _has_ended_well(handler):
        return Outcome(Kind.SUCCEEDED)
    reason = f"the rendezvous is closed: {type(error).__name__}: {error}"
    return Outcome(Kind.UNREACHABLE, reason=reason)


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
