"""What a ledger says ahead of a save is what the save then says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from resilient.checkpoint.daemon.step_slots import StepSlot, read_step_slot
from resilient.checkpoint.save.persist import SaveJob
from resilient.format.keys import CheckpointId
from resilient.train import sample_ledger as ledger_module
from resilient.train.sample_ledger import Ledger
from tests.helpers.manifests import empty_manifest

if TYPE_CHECKING:
    from resilient.format.ledger import Segment

AT = CheckpointId(3, 9)


def step(ledger, number, *, skips=False) -> None:
    cursor = SimpleNamespace(epoch=0, samples=4 * number, size=400, seed=7)
    if skips:
        ledger.leave_out(cursor, "spoiled", until=(0, 4 * number + 2))
    layout = SimpleNamespace(batch=4, ranks=1)
    ledger.end_step(number, 4 * (number - 1), cursor, layout, 1, [float(number)], updated=True)
    ledger.settle(lambda losses: [sum(one) for one in losses])


def begun() -> Ledger:
    ledger = Ledger(is_kept=True, ranks=1)
    ledger.begin(None, 0, SimpleNamespace(epoch=0, samples=0))
    return ledger


def same(peeked: Segment, ledger: Ledger) -> None:
    """Check what is peeked against the segment of a save, which is given back."""
    closed = ledger.close(AT, "run")
    assert peeked.closed() == closed
    assert (peeked.head, peeked.anchor) == (closed.head, closed.anchor)


def test_each_peek_is_the_segment_that_a_save_would_put():
    ledger = begun()
    for number in range(1, 6):
        step(ledger, number, skips=number == 3)
        peeked = ledger.peek(AT, "run")
    same(peeked, ledger)
    ledger.reopen()
    step(ledger, 6)
    same(ledger.peek(AT, "run"), ledger)
    # After the save it begins there.
    step(ledger, 7)
    same(ledger.peek(AT, "run"), ledger)


def test_steps_that_come_to_share_a_record_are_told_anew(monkeypatch):
    ledger = begun()
    for number in range(1, 10):
        step(ledger, number)
        ledger.peek(AT, "run")
    monkeypatch.setattr(ledger_module, "ENTRIES_MAX", 5)
    step(ledger, 10)
    peeked = ledger.peek(AT, "run")
    assert len(peeked.rows) == 2
    same(peeked, ledger)


def test_a_rank_that_keeps_no_records_has_none():
    assert Ledger(is_kept=False, ranks=2).peek(AT, "run") is None


@pytest.mark.parametrize("entries_max", [5, 100])
def test_the_keeper_puts_the_same_segment_together_from_what_was_said(monkeypatch, entries_max):
    monkeypatch.setattr(ledger_module, "ENTRIES_MAX", entries_max)
    memory = {}

    def reserve(name, size_bytes):
        memory[name] = memoryview(bytearray(size_bytes))
        return memory[name]

    ledger, slate = begun(), StepSlot(reserve, "{}")
    for number in range(1, 10):
        step(ledger, number)
        said = ledger.peek(AT, "run")
        slate.publish(SaveJob(empty_manifest(AT), (), (), (), False, "", 0.0, float, segment=said))
        whole = read_step_slot(lambda name: memory.get(name, memoryview(b"")))
        assert whole.segment == said.closed()
    # Rows that came after the last message are none of its own.
    step(ledger, 10)
    slate._rows.put(ledger.peek(AT, "run"))
    assert read_step_slot(memory.__getitem__).segment == whole.segment
