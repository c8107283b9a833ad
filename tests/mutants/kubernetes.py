"""Defects of the talk with a cluster: what counts as a failure, what a run ended with."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

TESTS = "tests/cli/test_k8s_cluster.py"
STATES = "cli/resilient_cli/kubernetes/states.py"
LOOK = "cli/resilient_cli/kubernetes/look.py"
FOLLOW = "cli/resilient_cli/kubernetes/follow.py"

MUTANTS = [
    Mutant(
        "a preemption counts as a failure",
        STATES,
        "return self.disrupted or self.exit_code == REQUEUE",
        "return self.exit_code == REQUEUE",
        f"{TESTS} -k no_failures",
    ),
    Mutant(
        "the code of a bug gives way to one that followed from it",
        STATES,
        "else fatal or counted or ended",
        "else counted or ended",
        f"{TESTS} -k of_wait_is",
    ),
    Mutant(
        "a run in a queue is taken for a suspended one",
        STATES,
        'return "queued" if admission else "suspended"',
        'return "suspended" if admission else "suspended"',
        f"{TESTS} -k in_a_queue",
    ),
    Mutant(
        "a lost connection ends the waiting",
        LOOK,
        "if error and now - heard > _SILENCE_SECONDS:",
        "if error and now - heard > 0:",
        f"{TESTS} -k outlives",
    ),
    Mutant(
        "what was read before a cut is printed twice",
        FOLLOW,
        "if time > before:",
        "if time:",
        f"{TESTS} -k through_a_cut",
    ),
    Mutant(
        "whoever is named in a URL stands in the logs",
        "cli/resilient_cli/views/kubernetes.py",
        "text = redact(line.text)",
        "text = line.text",
        f"{TESTS} -k whose_they_are",
    ),
]
