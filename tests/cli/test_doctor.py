"""`resilient doctor`: what it looks at, what it warns of, and what it leaves behind."""

from __future__ import annotations

import json
import stat
import subprocess
import sys

import pytest

from resilient.clock import SystemClock
from resilient.errors import NotExclusive, StoreUnavailable
from resilient.testing.memory_store import MemoryStore
from resilient_cli import preemption_budget
from resilient_cli.commands import doctor
from resilient_cli.commands.doctor import examine
from resilient_cli.preemption_budget import PreemptionBudget, judge

FITS = PreemptionBudget(10.0, 3.0, 25.0, 60.0, 120.0, "test")


def verdicts(terms):
    return {one.name: one.is_ok for one in judge(terms)}


def changed(**terms):
    values = {name: getattr(FITS, name) for name in FITS.__slots__} | terms
    return verdicts(PreemptionBudget(**values))


def test_each_comparison_of_the_inequality_is_made():
    assert verdicts(FITS) == {"budget": True, "termination": True, "notice": True}
    assert changed(grace_seconds=18.0)["budget"]
    assert not changed(grace_seconds=17.9)["budget"]
    assert not changed(tail_seconds=10.1)["budget"]
    assert not changed(grace_seconds=60.0)["termination"]
    assert not changed(notice_seconds=59.0)["notice"]
    assert changed(notice_seconds=60.0)["notice"]


def test_without_a_termination_grace_the_notice_is_held_against_the_grace():
    assert changed(termination_seconds=None, notice_seconds=24.0) == {
        "budget": True,
        "notice": False,
    }
    assert changed(termination_seconds=None, notice_seconds=None) == {"budget": True}


def test_the_hints_of_a_budget_fit_together():
    def hints(save, grace, termination):
        return [
            one.hint for one in judge(PreemptionBudget(save, 0.0, grace, termination, None, "test"))
        ]

    assert hints(2.0, 3.0, 2.0) == [
        "resilient train --grace 7",
        "resilient doctor --grace 7 --termination-grace 14",
    ]
    assert hints(2.0, 12.0, 10.0) == ["", "resilient train --grace 7"]
    assert hints(2.0, 70.0, 60.0) == ["", "resilient train --grace 30"]


def test_a_budget_that_does_not_fit_says_which_grace_would():
    (check, *_) = judge(PreemptionBudget(40.2, 0.0, 25.0, None, None))
    assert "--grace 46" in check.hint


def test_what_saves_took_is_read_from_event_files(tmp_path):
    rows = [{"event": "CheckpointCommitted", "commit_seconds": n} for n in range(1, 101)]
    rows += [{"event": "CheckpointPromoted", "took_seconds": 7}, {"event": "Other"}, [1]]
    text = "\n".join([*map(json.dumps, rows), '{"event": "CheckpointCom'])
    (tmp_path / "rank-0.jsonl").write_text(text)
    took = preemption_budget.read_events(tmp_path)
    assert preemption_budget.p95(took.saves) == 95
    assert took.promotions == [7]


def test_the_answer_is_one_document_and_the_exit_code_says_whether_all_is_well(call, tmp_path):
    (tmp_path / "rank-0.jsonl").write_text(
        '{"event": "CheckpointCommitted", "commit_seconds": 40}\n'
    )
    ended = call("doctor", "--json", "--repo", tmp_path / "repo", "--events", tmp_path)
    assert ended.status == 1
    document = json.loads(ended.stdout)
    assert (document["schema"], document["is_ok"]) == ("resilient/doctor@1", False)
    checks = {one["name"]: one["is_ok"] for one in document["checks"]}
    assert checks["budget"] is False
    assert all(checks[name] for name in ("conditional write", "atomic put", "signals"))
    left = [one for one in (tmp_path / "repo").rglob("*") if one.is_file()]
    assert left == []


def test_quietly_it_names_what_needs_attention(call):
    ended = call("doctor", "-q", "--grace", "60", "--notice", "30")
    assert "notice" in ended.stdout.split()
    assert ended.status == 1


def test_a_notice_that_nobody_knows_is_wrong_usage(call):
    assert call("doctor", "--notice", "soon").status == 2


class Replacing(MemoryStore):
    def put_new(self, key, data):
        self.put(key, data)


class Unable(MemoryStore):
    def put_new(self, key, data):
        raise NotExclusive("no exclusive create here", key=key)


class Away(MemoryStore):
    def put_new(self, key, data):
        raise StoreUnavailable("nobody answers", key=key)


@pytest.mark.parametrize(
    ("kind", "name", "text"),
    [
        (Replacing, "conditional write", "a second writer replaced"),
        (Unable, "conditional write", "no exclusive create"),
        (Away, "storage", "nobody answers"),
    ],
)
def test_a_store_that_cannot_fence_or_does_not_answer_is_a_warning(kind, name, text):
    store = kind()
    found = {one.name: one for one in examine(store, SystemClock()).checks}
    assert not found[name].is_ok
    assert text in found[name].found
    assert list(store.list()) == []


def test_another_projects_package_of_our_name_is_found():
    assert doctor.check_package().is_ok
    assert not doctor.check_package("numpy").is_ok


def gpus(folder, text, status=0):
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\ncat <<'EOF'\n{text}\nEOF\nexit {status}\n")
    path.chmod(path.stat().st_mode | stat.S_IEXEC)
    return doctor.check_gpus(str(path))


def test_gpus_are_asked_of_the_driver(tmp_path):
    assert "on the CPU" in doctor.check_gpus("no-such-program").found
    good = gpus(tmp_path, "NVIDIA H100, 81559, 0\nNVIDIA H100, 81559, [N/A]")
    assert good.is_ok
    assert good.found == "2 x NVIDIA H100, 81559 MiB"
    assert "[1]" in gpus(tmp_path, "NVIDIA H100, 81559, 0\nNVIDIA H100, 81559, 3").found
    assert not gpus(tmp_path, "No devices were found", 6).is_ok


def test_shared_memory_that_is_not_there_is_a_warning(tmp_path):
    assert not doctor.check_shared_memory(tmp_path / "absent").is_ok


@pytest.mark.parametrize(
    ("first", "status", "is_ok"),
    [
        ("tini", "SigIgn:\t0\nSigBlk:\t0\n", True),
        ("bash", "SigIgn:\t0\nSigBlk:\t0\n", False),
        ("tini", "SigIgn:\t0000000000004000\nSigBlk:\t0\n", False),
        ("tini", "SigIgn:\t0\nSigBlk:\t0000000000004000\n", False),
    ],
)
def test_a_shell_in_front_and_a_signal_that_is_held_back_are_warnings(
    tmp_path, first, status, is_ok
):
    for folder in ("1", "self"):
        (tmp_path / folder).mkdir()
    (tmp_path / "1" / "comm").write_text(f"{first}\n")
    (tmp_path / "self" / "status").write_text(status)
    assert doctor.check_signals(tmp_path).is_ok is is_ok


def test_torch_is_not_imported():
    code = "import sys, resilient_cli.commands.doctor; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
