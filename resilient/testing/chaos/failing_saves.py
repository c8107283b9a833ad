"""A job that cannot save for a while: whether it notices, and what it makes of that."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from resilient.testing.chaos.evidence import Struck, ended_by
from resilient.testing.chaos.honesty import SAVE_FAILED
from resilient.testing.chaos.job import Job, WentWrong

if TYPE_CHECKING:
    from resilient.clock import Clock

_STEPS = 2


def until_a_save_fails(job: Job, clock: Clock, within_seconds: float, told: Struck) -> Struck:
    """Wait until a save has failed, and return what came of that.

    Args:
        job: nothing that it saves becomes durable.
        clock: time.
        within_seconds: how long a job may take to end when it should.
        told: what is known of the strike.

    Raises:
        WentWrong: the job neither ends nor goes on.
    """
    count = len(job.facts())

    def has_failed() -> bool:
        return any(one["event"] == "SaveAborted" for one in job.facts()[count:])

    seconds = told.strike.fault.seconds
    began_seconds = clock.monotonic_seconds()
    try:
        code = job.until(has_failed, seconds)
    except WentWrong:
        # Nothing was saved meanwhile, or it was not noticed; the run goes on.
        return replace(told, what=f"{told.what} for {seconds:g} s, and no save failed")
    took_seconds = clock.monotonic_seconds() - began_seconds
    what = f"{told.what} for {took_seconds:.1f} s"
    if code is None and _ends_soon(job, within_seconds):
        code = job.wait(within_seconds)
    if code is None:
        return replace(told, what=what)
    return ended_by(told, what, code, *SAVE_FAILED)


def _ends_soon(job: Job, within_seconds: float) -> bool:
    """Whether a failed save ends the job: it does unless the script says otherwise."""
    step = job.highest
    return job.until(lambda: job.highest > step + _STEPS, within_seconds) is not None
