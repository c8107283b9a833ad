"""What a ledger says ahead of a save is what the save then says."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import TYPE_CHECKING

from resilient.format.names import CheckpointId
from resilient.train import ledger as ledger_module
from resilient.train.ledger import Ledger
from resilient.vault.keeper.holding import _segment_text, _Whole

if TYPE_CHECKING:
    from resilient.format.ledger import Segment

AT = CheckpointId(3, 9)


def step(ledger, number, *, skips=False) -> None:
    cursor = SimpleNamespace(epoch=0, samples=4 * number, size=400, seed=7)
    if skips:
        ledger.leave_out(cursor, "spoiled", until=(0, 4 * number + 2))
    deal = SimpleNamespace(batch=4, ranks=1)
    ledger.end_step(number, 4 * (number - 1), cursor, deal, 1, [float(number)], updated=True)
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


def test_the_keeper_puts_the_same_segment_together_from_what_it_was_told():
    ledger = begun()
    for number in range(1, 4):
        step(ledger, number)
    peeked = ledger.peek(AT, "run")
    said = {
        "run_id": "run",
        "previous": peeked.previous,
        "opens": peeked.opens,
        "start": [0, 0, 0],
        "stop": [3, 0, 12],
        "before": 0,
        "head": peeked.head,
    }
    later = [*peeked.rows, '["step",4]']
    whole = _Whole(AT, "", "", said, later, len(peeked.rows), {})
    stored = json.loads(_segment_text(whole))
    assert stored["head"] == ledger.close(AT, "run").head
    assert len(stored["records"]) == len(peeked.rows)
