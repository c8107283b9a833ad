"""Defects of Jobs and of the talk with a cluster: what counts as a failure, how a run ended."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

TESTS = "tests/cli/test_k8s_cluster.py"
STATES = "cli/resilient_cli/kubernetes/status.py"
LOOK = "cli/resilient_cli/kubernetes/watch.py"
CHANGE = "cli/resilient_cli/kubernetes/apply.py"
APPLYING = "tests/cli/test_k8s_applying.py"
FOLLOW = "cli/resilient_cli/kubernetes/watch.py"
MANIFESTS = "cli/resilient_cli/kubernetes/manifests.py"
RULES = "tests/k8s/test_job_controller.py -k becomes"

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
        "a dry run applies",
        CHANGE,
        '*_APPLY, "--dry-run=server")',
        "*_APPLY)",
        f"{APPLYING} -k changes_nothing",
    ),
    Mutant(
        "a run that Kueue admitted is suspended again",
        CHANGE,
        'suspend = before["spec"].get("suspend", False)',
        "suspend = True",
        f"{APPLYING} -k kueue_says",
    ),
    Mutant(
        "the value of a secret stands in a difference",
        CHANGE,
        'return json.dumps({**value, "value": _HIDDEN})',
        "return json.dumps(value)",
        f"{APPLYING} -k names_the_fields",
    ),
    Mutant(
        "delete asks nobody and deletes",
        "cli/resilient_cli/commands/k8s.py",
        "if asks and not is_somebody_there(output):",
        "if False:",
        f"{APPLYING} -k goes_and_what_stays",
    ),
    Mutant(
        "whoever is named in a URL stands in the logs",
        "cli/resilient_cli/commands/k8s.py",
        ("text = redact_userinfo(line.text)"),
        "text = line.text",
        f"{TESTS} -k whose_they_are",
    ),
    Mutant(
        "a preemption counts as a failure of the Job",
        MANIFESTS,
        '{"action": "Ignore", "onPodConditions": disrupted}',
        '{"action": "Count", "onPodConditions": disrupted}',
        RULES,
    ),
    Mutant(
        "a run that was asked to stop counts as a failure",
        MANIFESTS,
        '{"action": "Ignore", "onExitCodes": {**codes, "values": [REQUEUE]}}',
        '{"action": "Count", "onExitCodes": {**codes, "values": [REQUEUE]}}',
        RULES,
    ),
    Mutant(
        "a bug of the script is started again",
        MANIFESTS,
        '{"action": "FailJob", "onExitCodes"',
        '{"action": "Count", "onExitCodes"',
        RULES,
    ),
    Mutant(
        "a pod whose peers have no node yet fails after torch's minute",
        "resilient/elastic/rendezvous/connect.py",
        'parameters.get_as_int("join_timeout", 0) or 0',
        "0",
        "tests/unit/elastic/test_late_first_node.py -k late",
    ),
    Mutant(
        "a pod that lost pod 0 looks for it at the place that is gone",
        "resilient/elastic/rendezvous/connect.py",
        "spec.rdzv_handler = self.connect()",
        "self.connect()",
        "tests/unit/elastic/test_comeback.py -k anew",
    ),
    Mutant(
        "a pod whose own name leads nowhere for a moment fails",
        "resilient/elastic/rendezvous/connect.py",
        "get_rendezvous_handler(told_where(parameters))",
        "get_rendezvous_handler(parameters)",
        "tests/unit/elastic/test_names.py -k address_of_its_own",
    ),
]
