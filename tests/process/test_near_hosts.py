"""Two hosts with a near tier each: SIGKILL of one, its disk lost, the two swapped."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest

from resilient.checkpoint.catalog import committed
from resilient.checkpoint.verify import verify
from resilient.storage.open import open_store
from tests.process.gangs import finish, gang_of

SCRIPT = Path(__file__).with_name("host_trainer.py")
STEPS = 7


def train(folder, hosts) -> tuple[set[str], str]:
    """Train to the end; return what the ranks printed, and what they told."""
    ranks = len(hosts.split(","))
    with gang_of(ranks, SCRIPT, folder, hosts, STEPS, "none") as gang:
        ends = finish(gang)
    told = "\n".join(err for _, _, err in ends)
    assert [status for status, _, _ in ends] == [0] * ranks, told
    return {out.strip() for _, out, _ in ends}, told


def steps(folder) -> list[int]:
    return [one.step for one in committed(open_store(str(folder)))]


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """Two hosts with two ranks each, of which one died when step 5 was saved near."""
    folder = tmp_path_factory.mktemp("killed")
    with gang_of(4, SCRIPT, folder, "a,a,b,b", STEPS, "b") as gang:
        for process in gang[2:]:
            assert process.wait(90) == -signal.SIGKILL, process.stderr.read()
        # As an agent would: without their peers they have nothing left to do.
        for process in gang[:2]:
            process.kill()
    assert [steps(folder / f"near-{host}") for host in "ab"] == [[5, 4], [5, 4]]
    assert steps(folder / "durable") == [3, 1]
    return folder


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory) -> str:
    (said,), _ = train(tmp_path_factory.mktemp("unbroken"), "a")
    return said.split()[1]


def check_end(folder, unbroken) -> None:
    durable = open_store(str(folder / "durable"))
    newest = committed(durable)[0]
    assert newest.step == STEPS
    assert not verify(durable, newest, "full")


@pytest.mark.smoke
def test_sigkill_of_one_host_costs_nothing_although_the_hosts_change_places(
    killed, unbroken, tmp_path
):
    shutil.copytree(killed, tmp_path / "run")
    said, _ = train(tmp_path / "run", "b,a")
    assert said == {f"5 {unbroken}"}
    check_end(tmp_path / "run", unbroken)


def test_a_host_that_lost_its_disk_goes_back_to_the_durable_tier_with_everybody(
    killed, unbroken, tmp_path
):
    shutil.copytree(killed, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "near-b")
    said, told = train(tmp_path / "run", "a,b")
    assert said == {f"3 {unbroken}"}
    assert "the near tier of ranks 1 is empty" in told
    assert "checkpoint-5-g1" in told
    check_end(tmp_path / "run", unbroken)


def test_a_replaced_host_goes_back_with_everybody_too(killed, unbroken, tmp_path):
    shutil.copytree(killed, tmp_path / "run")
    said, _ = train(tmp_path / "run", "c,b")
    assert said == {f"3 {unbroken}"}
    check_end(tmp_path / "run", unbroken)
