"""Which exit codes of agents are right after a fault (pure)."""

from __future__ import annotations

from resilient.testing.chaos.faults import Kind, Planned, Target
from resilient.testing.chaos.job import MEETING_HOST

KILLED, STOPPED = 137, 75
UNREACHABLE, NOT_DURABLE = 69, 73
SAVE_FAILED = (UNREACHABLE, NOT_DURABLE)
_OF_ALL = {
    Kind.PREEMPT: (STOPPED,),
    Kind.NOTICE: (STOPPED,),
    Kind.BIT_FLIP: (KILLED,),
    Kind.STORAGE_ERROR: SAVE_FAILED,
    Kind.DISK_FULL: SAVE_FAILED,
}


def right_codes(fault: Planned, struck: int | None, host: int) -> tuple[int, ...]:
    """Return the codes with which the agent of a host may end because of a fault.

    0 is not among them: it says that the run is over, whatever struck it. Where none is, the
    agent must go on.

    Args:
        fault: what went wrong.
        struck: the host that it was for; None: all of them, or none.
        host: the one of the agent.
    """
    if fault.kind is Kind.KILL and fault.target is Target.JOB:
        return (KILLED,)
    if struck is None or fault.kind in _OF_ALL:
        return _OF_ALL.get(fault.kind, ())
    # Where it served the rendezvous, the others have nobody left to meet at.
    others = (UNREACHABLE,) if struck == MEETING_HOST else ()
    if fault.kind is Kind.CUT:
        return (UNREACHABLE,) if host == struck else others
    if fault.kind is Kind.KILL and fault.is_of_host:
        return (KILLED,) if host == struck else others
    return ()
