"""What the Job controller of Kubernetes makes of pods that end: counts, delays, replacements.

It starts nothing and asks no clock, so that a test of its own holds it. Written after the documents
and the controller's source of 1.34: an ignored failure counts towards no limit, but it makes the
delay before new pods longer as any other does (kubernetes/kubernetes#130881).
"""

from __future__ import annotations

from dataclasses import dataclass, field

FIRST_DELAY_SECONDS = 10.0
LONGEST_DELAY_SECONDS = 600.0


def action_for(rules, code, *, is_disrupted):
    """Return what a podFailurePolicy makes of a pod that failed: the first rule that matches.

    Args:
        rules: of the policy.
        code: of its one container, not 0.
        is_disrupted: whether the pod has the condition DisruptionTarget.
    """
    for rule in rules:
        codes = rule.get("onExitCodes")
        if codes:
            if (code in codes["values"]) == (codes["operator"] == "In"):
                return rule["action"]
        elif is_disrupted and _is_of_disruptions(rule):
            return rule["action"]
    return "Count"


def _is_of_disruptions(rule):
    condition = {"type": "DisruptionTarget", "status": "True"}
    return condition in rule["onPodConditions"]


@dataclass
class Controller:
    """The controller of one Indexed Job.

    Args:
        spec: of the Job; changed by `scale`.

    Attributes:
        ends: of each pod that ended its index, code, and what that counted as.
        failed: pods that count towards backoffLimit.
        state: ``Complete`` or ``Failed`` from the end of the Job on.
        reason: of that, as the condition of the Job names it.

    Raises:
        ValueError: an API server would refuse the Job.
    """

    spec: dict
    ends: list[tuple[int, int, str]] = field(default_factory=list)
    failed: int = 0
    state: str = ""
    reason: str = ""
    _succeeded: set[int] = field(default_factory=set)
    _in_a_row: int = 0
    _failed_at: float = 0.0

    def __post_init__(self):
        self._refuse(self.spec.get("completionMode") != "Indexed", "not an Indexed Job")
        if "podFailurePolicy" in self.spec:
            pods = self.spec["template"]["spec"]
            self._refuse(pods.get("restartPolicy") != "Never", "needs restartPolicy Never")
            policy = self.spec.get("podReplacementPolicy", "Failed")
            self._refuse(policy != "Failed", "needs podReplacementPolicy Failed")

    @property
    def delay(self):
        """How long after the last failure there are no new pods, in seconds."""
        if not self._in_a_row:
            return 0.0
        return min(FIRST_DELAY_SECONDS * 2.0 ** (self._in_a_row - 1), LONGEST_DELAY_SECONDS)

    def scale(self, size):
        """Patch completions and parallelism, together, as an elastic Indexed Job may be."""
        self._refuse(self.spec["completions"] != self.spec["parallelism"], "cannot be scaled")
        self.spec["completions"] = self.spec["parallelism"] = size

    def ended(self, index, code, now, *, is_disrupted=False):
        """Take note of a pod that is gone: not of one that is about to go.

        Args:
            index: of the pod.
            code: of its container.
            now: seconds on any clock that runs on.
            is_disrupted: whether it has the condition DisruptionTarget.
        """
        action = self._judge(index, code, now, is_disrupted=is_disrupted)
        self.ends.append((index, code, action))
        if self.state:
            return
        if action == "FailJob":
            self.state, self.reason = "Failed", "PodFailurePolicy"
        elif self.failed > self.spec["backoffLimit"]:
            self.state, self.reason = "Failed", "BackoffLimitExceeded"
        elif self._is_complete():
            self.state, self.reason = "Complete", "SuccessPolicy"

    def due(self, pods, now):
        """Return the indexes that get a pod now.

        Args:
            pods: indexes whose pods are not gone, those that are about to go too.
            now: as for `ended`.
        """
        if self.state or now < self._failed_at + self.delay:
            return []
        incomplete = self.spec["completions"] - len(self._succeeded)
        free_slots = min(self.spec["parallelism"], incomplete) - len(pods)
        indexes = range(self.spec["completions"])
        return [index for index in indexes if index not in {*pods, *self._succeeded}][
            : max(free_slots, 0)
        ]

    def surplus(self, pods):
        """Return the indexes whose pods are to be deleted."""
        return [pod for pod in pods if self.state or pod >= self.spec["completions"]]

    def _judge(self, index, code, now, *, is_disrupted):
        if code == 0:
            self._succeeded.add(index)
            self._in_a_row = 0
            return "Succeeded"
        if self.state:
            return "Ended"
        rules = self.spec.get("podFailurePolicy", {"rules": []})["rules"]
        action = action_for(rules, code, is_disrupted=is_disrupted)
        if index >= self.spec["completions"] and action != "FailJob":
            return "Surplus"
        self._in_a_row += 1
        self._failed_at = now
        self.failed += action != "Ignore"
        return action

    def _is_complete(self):
        policy = self.spec.get("successPolicy", {"rules": []})
        index_lists = [rule["succeededIndexes"] for rule in policy["rules"]]
        enough = (set(map(int, rule.split(","))) <= self._succeeded for rule in index_lists)
        return any(enough) or len(self._succeeded) >= self.spec["completions"]

    @staticmethod
    def _refuse(wrong, reason):
        if wrong:
            raise ValueError(f"an API server refuses the Job: {reason}")
