"""Trackers: where the curves of a run are drawn.

::

    trainer.log --> Reporting (a callback, rank zero) --> Courier (a thread each) --> Tracker
                                                            filters what is there       the tool

``report_to`` names those of the field; a tracker of your own is a :class:`Tracker`, given as
``callbacks=[Reporting(MyTracker())]``. The id of the run in the tool and the last step that the
tool has are in the checkpoint, so a resumed run goes on in the same run of the tool, and no
point is drawn twice.
"""

from __future__ import annotations

from resilient.train.trackers.base import LoggedSteps, Tracker, TrackerContext
from resilient.train.trackers.reporting import Reporting

__all__ = ["LoggedSteps", "Reporting", "Tracker", "TrackerContext"]
