"""The manifests agree with the exit codes and the grace periods of the code."""

from __future__ import annotations

from pathlib import Path

import pytest

from resilient import errors
from resilient.train.arguments import TrainingArguments

yaml = pytest.importorskip("yaml")
JOB = Path(__file__).resolve().parents[2] / "k8s" / "base" / "job.yaml"


@pytest.fixture
def spec():
    return yaml.safe_load(JOB.read_text())["spec"]


def values(spec, action):
    return {
        code
        for rule in spec["podFailurePolicy"]["rules"]
        if rule["action"] == action
        for code in rule.get("onExitCodes", {}).get("values", ())
    }


def test_a_preempted_pod_does_not_count(spec):
    assert values(spec, "Ignore") == {errors.Preempted.exit_code}


def test_what_another_try_cannot_mend_fails_the_job(spec):
    permanent = {
        kind.exit_code
        for kind in (
            errors.UsageError,
            errors.NoIntactCheckpoint,
            errors.IncompatibleCheckpoint,
            errors.RepositoryNotFound,
            errors.CrashLoop,
            errors.StoreDenied,
            errors.ConfigError,
            errors.Fenced,
        )
    }
    assert values(spec, "FailJob") == permanent


def test_the_pod_outlives_the_agents_grace(spec):
    trainer_seconds = TrainingArguments(output_dir="x").grace_seconds
    pod = spec["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > 25 > trainer_seconds
    assert pod["restartPolicy"] == "Never"
