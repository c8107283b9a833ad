"""The Job controller of the box does what that of Kubernetes does; held against rendered Jobs."""

from __future__ import annotations

from copy import deepcopy

import pytest

from resilient.errors import PERMANENT
from resilient_cli.kubernetes.manifests import manifests
from resilient_cli.kubernetes.spec import Flavor, KubeRun
from tests.helpers.job_controller import Controller, action_for

RUN = KubeRun("train", "image", ("t.py",), 1, 2)
(JOB,) = (one for one in manifests(RUN, Flavor.JOB) if one["kind"] == "Job")


@pytest.fixture
def spec():
    return deepcopy(JOB["spec"])


@pytest.fixture
def controller(spec):
    return Controller(spec)


@pytest.mark.parametrize(
    ("code", "disrupted", "action"),
    [
        *((code, False, "FailJob") for code in PERMANENT),
        *((code, True, "Ignore") for code in (1, 70, 137, 143)),
        (75, False, "Ignore"),
        *((code, False, "Count") for code in (1, 69, 71, 73, 80, 137, 143)),
    ],
)
def test_what_becomes_of_a_pod(spec, code, disrupted, action):
    assert action_for(spec["podFailurePolicy"]["rules"], code, is_disrupted=disrupted) == action


def test_what_has_another_condition_is_no_disruption(spec):
    rules = spec["podFailurePolicy"]["rules"]
    rules[0]["onPodConditions"][0]["type"] = "ConfigIssue"
    assert action_for(rules, 143, is_disrupted=True) == "Count"


def test_the_operator_not_in_matches_all_other_codes():
    rule = {"action": "FailJob", "onExitCodes": {"operator": "NotIn", "values": [75]}}
    assert action_for([rule], 1, is_disrupted=False) == "FailJob"
    assert action_for([rule], 75, is_disrupted=False) == "Count"


def test_an_index_has_one_pod_and_gets_the_next_when_that_is_gone(controller):
    assert controller.due([], 0.0) == [0, 1]
    assert controller.due([0, 1], 0.0) == []
    controller.ended(1, 143, 5.0, is_disrupted=True)
    assert controller.due([0], 15.0) == [1]


def test_ignored_failures_count_nothing_and_yet_delay_what_comes_next(controller):
    waits = []
    for nth in range(8):
        controller.ended(nth % 2, 75, 1000.0 * nth)
        waits.append(controller.delay)
        assert controller.due([], 1000.0 * nth + waits[-1] - 0.1) == []
        assert controller.due([], 1000.0 * nth + waits[-1]) == [0, 1]
    assert waits == [10, 20, 40, 80, 160, 320, 600, 600]
    assert (controller.failed, controller.state) == (0, "")


def test_a_success_ends_the_delays(controller):
    controller.ended(0, 75, 0.0)
    controller.ended(1, 0, 1.0)
    assert controller.due([], 1.0) == [0]


def test_more_failures_than_the_limit_end_the_job_and_its_pods(controller, spec):
    for _ in range(spec["backoffLimit"]):
        controller.ended(1, 1, 0.0)
    assert not controller.state
    controller.ended(1, 1, 0.0)
    assert (controller.state, controller.reason) == ("Failed", "BackoffLimitExceeded")
    assert controller.surplus([0]) == [0]
    assert controller.due([], 1e6) == []


def test_a_permanent_failure_ends_the_job_at_once(controller):
    controller.ended(1, 78, 0.0)
    assert (controller.state, controller.reason) == ("Failed", "PodFailurePolicy")
    assert controller.surplus([0]) == [0]


def test_pod_0_makes_the_job_complete_whatever_the_others_do(controller):
    controller.ended(1, 0, 0.0)
    assert not controller.state
    assert controller.due([0], 0.0) == []
    controller.ended(0, 0, 0.0)
    assert controller.state == "Complete"


def test_a_job_that_shrinks_deletes_the_last_indexes_and_counts_them_nothing(controller):
    controller.scale(1)
    assert controller.surplus([0, 1]) == [1]
    controller.ended(1, 143, 0.0)
    assert controller.ends == [(1, 143, "Surplus")]
    assert (controller.failed, controller.delay) == (0, 0.0)


def test_a_job_that_grows_waits_for_the_pods_that_are_about_to_go(controller):
    controller.scale(3)
    assert controller.due([0, 1], 0.0) == [2]
    controller.scale(2)
    assert controller.due([0, 2], 0.0) == []
    assert controller.due([0], 0.0) == [1]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("completionMode", "NonIndexed"),
        ("podReplacementPolicy", "TerminatingOrFailed"),
        ("template", {"spec": {"restartPolicy": "OnFailure"}}),
    ],
)
def test_a_job_that_an_api_server_refuses_is_refused(spec, path, value):
    with pytest.raises(ValueError, match="API server refuses"):
        Controller({**spec, path: value})


def test_only_a_job_with_as_many_completions_as_pods_can_be_scaled(spec):
    with pytest.raises(ValueError, match="cannot be scaled"):
        Controller({**spec, "parallelism": 1}).scale(3)
