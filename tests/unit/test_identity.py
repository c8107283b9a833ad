"""Identity of a start: which starts are the same run."""

from __future__ import annotations

import os

import pytest

from resilient.distributed import start_identity
from resilient.distributed.start_identity import (
    StartIdentity,
    inherited_start,
    new_start,
    own_start,
    write_start,
)
from resilient.errors import ConfigError

FIRST = StartIdentity("a", "", 0, 1)
SLURM = StartIdentity("a", "slurm/here/7", 0, 1)
RENDEZVOUS = StartIdentity("a", "rendezvous/x", 0, 1)


@pytest.mark.parametrize(
    ("later", "earlier", "is_same"),
    [
        (FIRST, FIRST, True),
        (StartIdentity("b", "", 0, 1), FIRST, False),
        (StartIdentity("a", "", 0, 2), FIRST, False),
        (StartIdentity(), StartIdentity(), False),
        (StartIdentity("b", "slurm/here/7", 1, 1), SLURM, True),
        (StartIdentity("b", "slurm/here/7", 0, 1), SLURM, False),
        (StartIdentity("b", "slurm/here/8", 1, 1), SLURM, False),
        (StartIdentity("b", "slurm/here/7", 1, 2), SLURM, False),
        (StartIdentity("b", "rendezvous/x", 0, 1), RENDEZVOUS, True),
        (StartIdentity("b", "rendezvous/y", 0, 1), RENDEZVOUS, False),
    ],
)
def test_identity_continues_the_same_run_only(later, earlier, is_same):
    assert later.continues(earlier) == is_same


@pytest.mark.parametrize(
    ("later", "earlier", "is_restart"),
    [
        (FIRST, FIRST, True),
        (StartIdentity("a", "", 0, 2), FIRST, True),
        (StartIdentity(), StartIdentity(), False),
        (StartIdentity("b", "slurm/here/7", 1, 2), SLURM, True),
        (StartIdentity("b", "slurm/here/7", 0, 1), SLURM, False),
        (StartIdentity("b", "slurm/here/8", 1, 1), SLURM, False),
        (StartIdentity("b", "rendezvous/x", 0, 1), RENDEZVOUS, False),
    ],
)
def test_identity_is_a_restart_without_a_user(later, earlier, is_restart):
    assert later.is_restart_of(earlier) == is_restart


def test_identity_of_two_starts_by_hand_differs():
    assert not new_start({}).continues(new_start({}))


@pytest.mark.parametrize(
    ("environ", "rendezvous", "job", "requeues"),
    [
        ({}, "", "", 0),
        ({}, "run-7", "rendezvous/run-7", 0),
        ({"RESILIENT_JOB": "mine", "SLURM_JOB_ID": "7"}, "run-7", "mine", 0),
        ({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2"}, "run-7-r2", "slurm//7", 2),
        ({"SLURM_JOB_ID": "7", "SLURM_CLUSTER_NAME": "big"}, "", "slurm/big/7", 0),
    ],
)
def test_new_start_names_the_job_of_its_scheduler(environ, rendezvous, job, requeues):
    found = new_start(environ, rendezvous)
    assert (found.job, found.requeues) == (job, requeues)


@pytest.mark.parametrize(
    ("pod", "job"),
    [
        ("train-x7k2p", "kubernetes/train"),
        ("train-0-x7k2p", "kubernetes/train"),
        ("train-1-0-x7k2p", "kubernetes/train-1"),
        ("jupyter-alice", ""),
        ("train-0", ""),
    ],
)
def test_new_start_in_a_pod_names_its_owner(monkeypatch, pod, job):
    monkeypatch.setattr(start_identity, "_descends_from_init", lambda: True)
    environ = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOSTNAME": pod}
    assert new_start(environ).job == job


def test_new_start_by_hand_in_a_pod_has_no_job(monkeypatch):
    monkeypatch.setattr(start_identity, "_descends_from_init", lambda: False)
    environ = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOSTNAME": "train-x7k2p"}
    assert new_start(environ).job == ""


@pytest.mark.parametrize(
    "environ",
    [
        {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "x"},
        {"RESILIENT_JOB": "x" * 300},
        {"RESILIENT_JOB": "x\n"},
    ],
)
def test_new_start_with_a_malformed_variable_is_refused(environ):
    with pytest.raises(ConfigError):
        new_start(environ)


def test_write_start_is_read_back_by_the_worker():
    start = StartIdentity("a", "slurm/here/7", 2)
    assert inherited_start(write_start(start)) == start
    assert inherited_start({"RESILIENT_JOB": "mine"}) == StartIdentity()


def test_own_start_is_shared_by_all_attempts_of_a_torchrun():
    environ = {"TORCHELASTIC_RUN_ID": "none"}
    first, second = own_start(environ), own_start({**environ, "TORCHELASTIC_RESTART_COUNT": "1"})
    assert second.continues(first)
    assert first.job == ""
    assert f"/{os.getppid()}/" in first.id


@pytest.mark.parametrize(
    "fields",
    [
        None,
        {},
        {"id": "a", "job": "", "requeues": 0},
        {"id": "a", "job": "", "requeues": True, "training": 0},
        {"id": "a", "job": "", "requeues": -1, "training": 0},
        {"id": "a" * 300, "job": "", "requeues": 0, "training": 0},
        {"id": "a\n", "job": "", "requeues": 0, "training": 0},
    ],
)
def test_identity_of_a_damaged_record_is_refused(fields):
    with pytest.raises(ValueError, match="start"):
        StartIdentity.from_json(fields)


def test_identity_survives_a_record():
    assert StartIdentity.from_json(SLURM.to_json()) == SLURM
