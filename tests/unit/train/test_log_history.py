from __future__ import annotations

import json

import pytest

from benchmarks.resume import PLACES, _Jump, _trainer
from resilient.errors import IntegrityError
from resilient.format.state_json import JsonRows, extract_rows
from resilient.state_dict.flatten import flatten
from resilient.state_dict.save_planner import document_to_json
from resilient.train.state import TrainerState

ENTRIES = [
    {"loss": 2.5, "epoch": 0.5, "step": 10},
    {"loss": float("nan"), "grad_norm": float("inf"), "step": 20},
    {"eval_loss": 1.25, "text": '],\n  "log_history": [', "of": [1, {"a": (2,)}], "step": 20},
    {},
]


def document(state: TrainerState) -> str:
    tree, tensors = flatten("trainer_state", state.state_dict())
    assert not tensors
    return document_to_json(tree)


def alike(entries: list[dict[str, object]]) -> str:
    """Spell entries, of which a number may equal nothing."""
    return repr([sorted(one.items()) for one in entries])


def noted(entries: list[dict[str, object]]) -> TrainerState:
    state = TrainerState(global_step=20)
    for entry in entries:
        state.history.note(entry)
    return state


def resumed(text: str) -> TrainerState:
    rest, rows = extract_rows(text, "log_history")
    state = TrainerState()
    state.load_state_dict({**json.loads(rest), "log_history": rows})
    return state


@pytest.mark.parametrize("count", range(len(ENTRIES) + 1))
@pytest.mark.parametrize("first_life", range(3))
def test_a_document_is_the_same_bytes_whoever_looked_in_whichever_life(count, first_life):
    opened = TrainerState(global_step=20)
    opened.log_history.extend(ENTRIES[:count])
    expected = document(opened)
    tree, _ = flatten("trainer_state", {**opened.state_dict(), "log_history": ENTRIES[:count]})
    assert expected == json.dumps(tree, indent=2, sort_keys=True) + "\n"
    assert document(noted(ENTRIES[:count])) == expected
    later = resumed(document(noted(ENTRIES[: min(first_life, count)])))
    later.global_step = 20
    for entry in ENTRIES[first_life:count]:
        later.history.note(entry)
    assert isinstance(later.state_dict()["log_history"], JsonRows)
    assert document(later) == expected
    assert alike(later.log_history) == alike(ENTRIES[:count])
    assert document(later) == expected


def test_the_list_is_the_history_once_somebody_has_it():
    state = noted(ENTRIES[:1])
    state.log_history[0]["loss"] = 3.0
    state.history.note({"loss": 1.0})
    del state.log_history[0]["epoch"]
    assert json.loads(document(state))["log_history"] == [{"loss": 3.0, "step": 10}, {"loss": 1.0}]
    state.log_history = []
    assert json.loads(document(state))["log_history"] == []


def test_a_copy_is_nobodys():
    for state in (noted(ENTRIES[:1]), TrainerState(log_history=ENTRIES[:1])):
        state.history.copied()[0]["loss"] = 9.0
        state.history.copied().clear()
        assert state.log_history == ENTRIES[:1]


def test_an_entry_that_changes_after_it_was_noted_does_not():
    entry = {"loss": 1.0}
    state = noted([entry])
    entry["loss"] = 2.0
    assert state.log_history == [{"loss": 1.0}]


def test_what_was_measured_at_a_step_is_found_without_the_rest():
    text = document(noted([{"loss": 3.5, "step": 5}, *ENTRIES[:3]]))
    broken = text.replace('"loss": 3.5', '"loss": broken')
    state = resumed(broken)
    assert state.measured() == {"eval_loss": 1.25}
    state.global_step = 30
    assert state.measured() == {}
    state.history.note({"eval_loss": 0.5, "step": 30})
    state.history.note({"eval_other": 0.25, "eval_loss": 0.75, "step": 30})
    assert state.measured() == {"eval_loss": 0.75, "eval_other": 0.25}
    opened = TrainerState(global_step=20, log_history=ENTRIES[:3])
    assert opened.measured() == {"eval_loss": 1.25}


@pytest.mark.parametrize("text", ["    {", "    1", '    {\n      "a": {"$tensor": "x"}\n    }'])
def test_rows_that_are_none_say_so_when_somebody_looks(text):
    state = TrainerState()
    state.load_state_dict({"log_history": JsonRows(text)})
    with pytest.raises(IntegrityError, match="log_history"):
        state.history.copied()
    with pytest.raises(IntegrityError, match="log_history"):
        _ = state.log_history
    state.log_history = []
    assert document(state)


def test_what_a_document_cannot_hold_is_told_by_whoever_saves():
    state = noted(ENTRIES[:1])
    state.history.note({"what": object()})
    assert len(state.log_history) == 2
    with pytest.raises(Exception, match=r"trainer_state/log_history/1/what"):
        document(state)


def test_a_document_of_another_hand_is_left_whole():
    for text in ("{}", '{"log_history": [{}]}', '{\n "log_history": [\n  {}\n ]\n}'):
        assert extract_rows(text, "log_history") == (text, JsonRows())


def test_a_list_in_an_entry_is_no_end_of_the_history():
    state = noted([{"a": [{"b": [1]}], "step": 1}, {"c": {"log_history": [1]}}] * 2)
    _, rows = extract_rows(document(state), "log_history")
    assert len(rows.trees()) == len([*rows.newest()]) == 4
    assert [*rows.newest()] == rows.trees()[::-1]


def test_nobody_looks_at_the_whole_history_in_training(tmp_path, monkeypatch):
    place = PLACES["10"]
    _trainer(place, tmp_path, place.step, [_Jump(place)], save=True).train()
    monkeypatch.setattr(JsonRows, "trees", lambda rows: pytest.fail("decoded") if rows.text else [])
    args = {"logging_steps": 1, "save_steps": 2, "save_strategy": "steps"}
    trainer = _trainer(place, tmp_path, place.step + 5, [], save=True)
    for name, one in args.items():
        setattr(trainer.args, name, one)
    trainer.train()
    monkeypatch.undo()
    assert [one["step"] for one in trainer.state.log_history][-2:] == [15, 15]
