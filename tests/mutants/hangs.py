"""Defects of who is blamed for a hang: nobody for a suspension, and one host of several."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

SIGHT = "tests/unit/elastic/test_sight.py"
STANDING = "tests/unit/elastic/test_standing.py"
ELSEWHERE = "tests/unit/elastic/test_elsewhere.py"
BEAT = "tests/unit/test_beat.py"
LOOPS = "tests/process/test_hangs_of_loops.py"
KILLED_HERE = "tests/unit/elastic/test_ends_beside_a_hang.py"
ADAPTERS = "tests/process/test_adapters.py -k get_on"
MEMBERS = "tests/unit/elastic/test_membership.py"
HOOK = "register_step_post_hook(self.beat.end_step)"

MUTANTS = [
    Mutant(
        "an agent that was suspended counts that time against its ranks",
        "resilient/elastic/suspend_detection.py",
        "        if gap_seconds <= self._away_seconds:\n",
        "        if True:\n",
        SIGHT,
    ),
    Mutant(
        "a look that takes long is an absence",
        "resilient/elastic/suspend_detection.py",
        '        """End a check."""\n        self._until_seconds = now_seconds\n',
        '        """End a check."""\n',
        f"{SIGHT} -k inside",
    ),
    Mutant(
        "a rank that stays stopped was so while the agent was suspended too",
        "resilient/elastic/health_monitor.py",
        "self._sight.shifted(stopped_seconds)",
        "stopped_seconds",
        f"{SIGHT} -k stays_stopped",
    ),
    Mutant(
        "a start is over while all are suspended",
        "resilient/elastic/health_monitor.py",
        "began_seconds, ended_seconds = shifted(self._began_seconds), self._ended_seconds",
        "began_seconds, ended_seconds = self._began_seconds, self._ended_seconds",
        f"{SIGHT} -k slow_start",
    ),
    Mutant(
        "a step that was suspended is the longest ever after",
        "resilient/elastic/suspend_detection.py",
        "        if now > known and now >= away_seconds:\n",
        "        if False:\n",
        f"{SIGHT} -k learned",
    ),
    Mutant(
        "a node that was suspended has missed others all that time",
        "resilient/elastic/rendezvous/membership.py",
        "            self._roster.forgive()\n",
        "            pass\n",
        f"{MEMBERS} -k suspended",
    ),
    Mutant(
        "a node that was suspended takes the others for silent",
        "resilient/elastic/rendezvous/connect.py",
        "self._sight.shifted(at_seconds) + lasts_seconds",
        "at_seconds + lasts_seconds",
        "tests/unit/elastic/test_heartbeats_seen.py -k suspended",
    ),
    Mutant(
        "a host is to blame for how far a stopped one had come",
        "resilient/elastic/hang_detection.py",
        '            self.state != "T",\n',
        "",
        STANDING,
    ),
    Mutant(
        "a host that is ahead is to blame",
        "resilient/elastic/hang_detection.py",
        "            self.step,\n            self.is_overdue,",
        "            self.is_overdue,",
        STANDING,
    ),
    Mutant(
        "a host that still has time is not waited for",
        "resilient/elastic/hang_detection.py",
        "            self.is_overdue,\n            state_place",
        "            state_place",
        STANDING,
    ),
    Mutant(
        "each host judges its own ranks alone",
        "resilient/elastic/rendezvous/remote_hangs.py",
        "        return self._is_waited_for(culprit, own, now_seconds)\n",
        "        return False\n",
        f"{ELSEWHERE} -k leaves_it",
    ),
    Mutant(
        "answers are waited for for ever",
        "resilient/elastic/rendezvous/remote_hangs.py",
        "        if is_missing and waited_seconds < _ANSWER_SECONDS:\n",
        "        if is_missing:\n",
        f"{ELSEWHERE} -k lost",
    ),
    Mutant(
        "what a host wrote long ago is an answer",
        "resilient/elastic/rendezvous/remote_hangs.py",
        "                if number != known:\n",
        "                if True:\n",
        f"{ELSEWHERE} -k silence",
    ),
    Mutant(
        "an agent that does nothing is waited for for ever",
        "resilient/elastic/rendezvous/remote_hangs.py",
        "            return now_seconds - self._accused_at_seconds < _ACT_SECONDS\n",
        "            return True\n",
        f"{ELSEWHERE} -k nothing",
    ),
    Mutant(
        "a host whose ranks wait for another one is charged",
        "resilient/elastic/attempt_monitor.py",
        "if hang is None or self._elsewhere.has_culprit(hang):",
        "if hang is None:",
        "tests/process/test_hang_of_two_hosts.py",
    ),
    Mutant(
        "a loop of one's own shows no progress",
        "resilient/checkpointer.py",
        f"            self._hooks.append(optimizer[0].{HOOK})\n",
        "",
        f"{LOOPS} -k plain",
    ),
    Mutant(
        "each optimizer's step is one of the loop's",
        "resilient/checkpointer.py",
        f"            self._hooks.append(optimizer[0].{HOOK})\n",
        "            for one in self._optimizers():\n"
        f"                self._hooks.append(one.{HOOK})\n",
        BEAT,
    ),
    Mutant(
        "two count the steps of a loop that shows them itself",
        "resilient/distributed/heartbeat.py",
        "    pulse.is_told = True\n",
        "",
        BEAT,
    ),
    Mutant(
        "what follows a loop's last step is still training",
        "resilient/checkpointer.py",
        "            self.beat.stop()\n",
        "            pass\n",
        BEAT,
    ),
    Mutant(
        "a stopped rank that showed no sign is waited for for ever",
        "resilient/elastic/health_monitor.py",
        "[*vitals, *self._silent(pids, seen, now_seconds)]",
        "vitals",
        f"{LOOPS} -k needs_no_sign",
    ),
    Mutant(
        "a step of Transformers' trainer has the patience of what is none",
        "resilient/integrations/transformers.py",
        "            self._beat.begin_step()\n",
        "            pass\n",
        f"{ADAPTERS} and transformers",
    ),
    Mutant(
        "a step of Lightning's trainer has the patience of what is none",
        "resilient/integrations/lightning.py",
        "            self._beat.begin_step()\n",
        "            pass\n",
        f"{ADAPTERS} and lightning",
    ),
    Mutant(
        "a rank that was killed here ended because of a hang elsewhere",
        "resilient/elastic/attempt_monitor.py",
        "is_blame_elsewhere and first.status != -signal.SIGKILL",
        "is_blame_elsewhere",
        KILLED_HERE,
    ),
    Mutant(
        "who only waited for a rank that hangs elsewhere is to blame",
        "resilient/elastic/attempt_monitor.py",
        "is_blame_elsewhere and first.status != -signal.SIGKILL",
        "False",
        KILLED_HERE,
    ),
]
