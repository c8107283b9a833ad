"""How a node leaves the others once it was decided that it does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from resilient.agent.verdict.decide import CODE_PREEMPTED, Finish, GiveUp, LeaveHost
from resilient.errors import PeerFailed

if TYPE_CHECKING:
    from resilient.agent.nodes.roster import Roster
    from resilient.agent.stops import Stops
    from resilient.clock import Clock

_POLL_SECONDS = 0.1
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

    Ranks of other hosts may still have to hear whether their last save is committed, at the store
    of the life, which ends with the agent of the first node. So nodes that save and leave wait for
    each other, for ``grace_seconds`` or for what a stop leaves them.
    """
    is_over = action.code == 0 or (isinstance(action, GiveUp) and not stops.asked_by)
    is_reachable = not isinstance(action, GiveUp) or action.code != PeerFailed.exit_code
    if is_over and is_reachable:
        group.spec.rdzv_handler.shutdown()
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
