"""When a held step is copied beside training, and when training waits for the copy."""

from __future__ import annotations

import pytest
import torch

from resilient import in_memory_steps as spine
from resilient.checkpoint.save.metadata import CheckpointInfo
from resilient.errors import SaveFailed
from resilient.format.keys import CheckpointId
from resilient.in_memory_steps import start_step_cache
from resilient.state_dict.snapshot import Part
from resilient.state_dict.staging import has_idle_core
from tests.helpers.keepers import begin, resumed_from, resumed_weight, weight


def saved_and_holding(keeper, url, monkeypatch, cores):
    """Begin a life on so many cores that has saved step 1."""
    monkeypatch.setattr(spine, "usable_cores", lambda: float(cores))
    checkpointer = begin(keeper, url)
    checkpointer.save(1, weight(1), CheckpointInfo())
    checkpointer.wait()
    return checkpointer, start_step_cache(checkpointer)


def lose(checkpointer, holding) -> None:
    """Release a rank as the kernel does after a kill."""
    holding._overlap.close()
    holding._client.close()
    checkpointer._persister._connection.close()
    checkpointer._persister._fallback.close()


def trained():
    model = torch.nn.Linear(400, 400)
    return model, {
        "model": Part(model),
        "optimizer": Part(torch.optim.SGD(model.parameters(), lr=1)),
    }


@pytest.mark.parametrize("is_said", [True, False], ids=["said", "not yet said"])
def test_a_step_that_was_being_changed_while_it_was_copied_is_not_believed(
    start, tmp_path, monkeypatch, is_said
):
    """torch counts a change in place once it is made, and the copy may have been made by then."""
    keeper = start()
    checkpointer, holding = saved_and_holding(keeper, tmp_path / "run", monkeypatch, cores=64)
    model, parts = trained()
    holding.hold(2, weight(2), CheckpointInfo(), overlap=False)
    holding.hold(3, parts, CheckpointInfo(), overlap=True)
    copies, said = holding._overlap._copies, holding._overlap._work
    assert len(copies) > 0
    copies.make()
    if is_said:
        holding._lull.set()
        assert said.exception() is None
    with torch.no_grad():
        model.weight.add_(1)
    holding.before_update()
    with pytest.raises(SaveFailed, match=r"changed during the copy"):
        holding.hold(4, parts, CheckpointInfo(), overlap=True)
    lose(checkpointer, holding)
    assert resumed_weight(keeper, tmp_path / "run")[:2] == (CheckpointId(1, 2), 2.0)


@pytest.mark.parametrize(
    ("machine", "expected"),
    [
        ((64, "1", 64 << 20), [True, True]),
        ((1, "1", 64 << 20), [True, False]),
        ((64, "64", 64 << 20), [True, False]),
        ((1, "1", 1 << 10), [True, True]),
    ],
    ids=["a core is left", "none is", "other ranks have them", "it is long"],
)
def test_a_step_is_copied_beside_training_where_that_takes_no_core_from_it(
    start, tmp_path, monkeypatch, machine, expected
):
    """Of the first nobody knows how long it is."""
    cores, ranks, long_bytes = machine
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    monkeypatch.setattr(spine, "_BACKWARD_COPY_BYTES_MAX", long_bytes)
    keeper = start()
    checkpointer, holding = saved_and_holding(keeper, tmp_path / "run", monkeypatch, cores)
    model, parts = trained()
    was_beside = []
    for step in (2, 3):
        holding.hold(step, parts, CheckpointInfo(), overlap=True)
        was_beside.append(holding._overlap.is_copying)
        holding.before_update()
        with torch.no_grad():
            model.weight.fill_(step)
    lose(checkpointer, holding)
    assert was_beside == expected
    checkpoint, state, _ = resumed_from(keeper, tmp_path / "run")
    assert checkpoint == CheckpointId(1, 3)
    assert set(state["weight"].flatten().tolist()) == {2.0}


def test_a_core_is_left_where_fewer_threads_compute_than_there_are(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert has_idle_core(2, 6.5)
    assert not has_idle_core(2, 6.0)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert has_idle_core(2, 1.0)
