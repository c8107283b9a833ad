"""Defects of notices of preemption, of stops in evaluations, and of where the last save goes."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

CLOUDS = "tests/contract/test_notice_sources.py"
PLACES = "tests/contract/test_notice_places.py"
JUDGING = "tests/unit/elastic/test_notice_judging.py"
WATCHER = "tests/unit/elastic/test_notice_watcher.py"
LEAVING = "tests/unit/train/test_leaving.py"
CUT = "tests/unit/train/test_cut_evaluation.py"
AGREEING = "tests/gang/test_stop_agreement.py"

MUTANTS = [
    Mutant(
        "a token that EC2 does not take any more is used for ever",
        "resilient/elastic/preemption/cloud_sources.py",
        "        if answer.status == _UNAUTHORIZED and self._token:\n",
        "        if False:\n",
        CLOUDS,
    ),
    Mutant(
        "a hop limit is not survived where EC2 needs no token",
        "resilient/elastic/preemption/cloud_sources.py",
        '                "modify-instance-metadata-options --http-put-response-hop-limit 2"\n'
        "            )\n"
        '            return ""\n',
        '                "modify-instance-metadata-options --http-put-response-hop-limit 2"\n'
        "            )\n"
        "            raise\n",
        CLOUDS,
    ),
    Mutant(
        "a recommendation stops the run",
        "resilient/elastic/preemption/cloud_sources.py",
        "None, not self._stops_on_rebalance)",
        "None)",
        CLOUDS,
    ),
    Mutant(
        "whoever answers in place of Google is believed",
        "resilient/elastic/preemption/cloud_sources.py",
        'if answer.headers.get("metadata-flavor") != "Google":',
        "if False:",
        CLOUDS,
    ),
    Mutant(
        "a notice of Google's is a new one each time that it is read",
        "resilient/elastic/preemption/cloud_sources.py",
        "notice.reason != self._heard.reason:",
        "True:",
        CLOUDS,
    ),
    Mutant(
        "events of other machines of Azure stop the run",
        "resilient/elastic/preemption/cloud_sources.py",
        "or self._machine in resources",
        "or True",
        CLOUDS,
    ),
    Mutant(
        "Azure is told that it may take the machine though nobody asked for that",
        "resilient/elastic/preemption/cloud_sources.py",
        "if not self._acknowledges or not self._heard:",
        "if not self._heard:",
        CLOUDS,
    ),
    Mutant(
        "the hook needs no token",
        "resilient/elastic/preemption/local_sources.py",
        "elif token and not hmac",
        "elif False and not hmac",
        PLACES,
    ),
    Mutant(
        "a far end stops the run at once",
        "resilient/elastic/preemption/notice.py",
        "    if left_seconds > lead_seconds:\n",
        "    if False:\n",
        JUDGING,
    ),
    Mutant(
        "a notice of long ago stops every life",
        "resilient/elastic/preemption/notice.py",
        "    if left_seconds < -STALE_SECONDS:\n",
        "    if False:\n",
        JUDGING,
    ),
    Mutant(
        "every source that says so stops the run once more",
        "resilient/elastic/preemption/watcher.py",
        "if self._closing.is_set() or self._heard:",
        "if self._closing.is_set():",
        WATCHER,
    ),
    Mutant(
        "a notice is delivered to an agent that has left",
        "resilient/elastic/preemption/watcher.py",
        "if self._closing.is_set() or self._heard:",
        "if self._heard:",
        WATCHER,
    ),
    Mutant(
        "a source that is gone is asked without a pause",
        "resilient/elastic/preemption/watcher.py",
        "max(every_seconds, 0.5) * 2.0**doublings",
        "every_seconds * 0.0**doublings",
        WATCHER,
    ),
    Mutant(
        "the mean of saves counts and not the slow ones",
        "resilient/train/saver.py",
        "math.ceil(0.95 * len(values)) - 1",
        "math.ceil(0.5 * len(values)) - 1",
        LEAVING,
    ),
    Mutant(
        "a promotion takes no time",
        "resilient/train/saver.py",
        "2 * land if has_near else land",
        "land",
        LEAVING,
    ),
    Mutant(
        "an evaluation that was cut is not made again",
        "resilient/train/trainer_evaluation.py",
        "            self.control.should_evaluate = True\n",
        "",
        CUT,
    ),
    Mutant(
        "a stop waits for the end of an evaluation",
        "resilient/train/trainer_evaluation.py",
        "if gate is not None and not gate.enter_batch():",
        "if False:",
        CUT,
    ),
    Mutant(
        "a rank that leaves in its first step reports lost work",
        "resilient/train/preemption.py",
        "if self._finished() <= self._durable:",
        "if False:",
        AGREEING,
    ),
]
