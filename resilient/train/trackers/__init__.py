"""Trackers: connections to tools that plot the metrics of a run.

::

    trainer.log --> Reporting (a callback, rank 0) --> TrackerWorker (a thread each) --> Tracker
                                                       removes points already logged     the tool

``report_to`` names trackers of this package. To add a tracker, write a subclass of :class:`Tracker`
and pass ``callbacks=[Reporting(MyTracker())]``. A checkpoint contains the id of the run in the tool
and the last step that the tool has. A resumed run therefore continues the same run of the tool, and
no point is plotted twice.
"""

from __future__ import annotations

from resilient.train.trackers.base import LoggedSteps, Tracker, TrackerContext
from resilient.train.trackers.reporting import Reporting

__all__ = ["LoggedSteps", "Reporting", "Tracker", "TrackerContext"]
