"""The one object with a memory: one save in flight, and a copy that training cannot touch."""

from __future__ import annotations

import threading

import pytest
import torch

from resilient.checkpoint.context import CheckpointContext, CheckpointOptions
from resilient.checkpoint.garbage_collection import discard_uncommitted
from resilient.checkpoint.retention import Retention
from resilient.checkpoint.save.metadata import CheckpointInfo
from resilient.checkpoint_engine import CheckpointEngine
from resilient.clock import SystemClock
from resilient.distributed.coordination import ControlGroup
from resilient.distributed.kv_store import InMemoryKVStore
from resilient.distributed.launch_env import World
from resilient.engine_factory import open_engine
from resilient.errors import ConfigError, IncompatibleCheckpoint, KeyNotFound
from resilient.events import CheckpointCommitted, Emitter
from resilient.format.keys import CheckpointId
from resilient.state_dict.rng_state import RandomState
from resilient.state_dict.snapshot import Part
from resilient.testing.memory_store import MemoryStore
from tests.helpers.manifests import Values, begin, save
from tests.helpers.one_rank import Held, open_one


def tensor_part(values):
    return {"model": Part(Values(weight=values))}


def load(store, step):
    target = Values()
    checkpointer = open_one(store)
    checkpointer.load_part(CheckpointId(1, step), "model", Part(target))
    checkpointer.close()
    return target.state["weight"]


def test_what_training_does_after_save_returned_does_not_reach_the_checkpoint():
    store = Held()
    checkpointer = open_one(store)
    checkpointer.resume({})
    weight = torch.arange(1000.0)
    checkpointer.save(1, tensor_part(weight), CheckpointInfo())
    weight.add_(1)
    store.go_on.set()
    checkpointer.close()
    assert torch.equal(load(store, 1), torch.arange(1000.0))


def test_a_refused_configuration_is_refused_before_anything_is_loaded_or_claimed():
    store = MemoryStore()
    first = open_one(store)
    first.resume({})
    first.save(1, tensor_part(torch.ones(3)), CheckpointInfo(config={"seed": 1}))
    first.close()
    heard, target = [], Values()

    def refuse(config):
        heard.append(dict(config))
        raise ConfigError("seed 1 -> 2")

    second = open_one(store)
    with pytest.raises(ConfigError, match="seed 1 -> 2"):
        second.resume({"model": Part(target)}, examine=refuse)
    assert heard == [{"seed": 1}]
    assert second.generation == 0
    assert not target.state
    second.close()
    third = open_one(store)
    third.resume({"model": Part(target)}, examine=heard.append)
    assert third.generation == 2
    assert torch.equal(target.state["weight"], torch.ones(3))
    third.close()


def test_a_second_save_waits_for_the_first():
    store = Held()
    checkpointer = open_one(store)
    checkpointer.resume({})
    checkpointer.save(1, tensor_part(torch.zeros(100)), CheckpointInfo())
    second = threading.Thread(
        target=checkpointer.save, args=(2, tensor_part(torch.ones(100)), CheckpointInfo())
    )
    second.start()
    second.join(0.2)
    assert second.is_alive()
    store.go_on.set()
    second.join(20)
    checkpointer.close()
    assert torch.equal(load(store, 1), torch.zeros(100))
    assert torch.equal(load(store, 2), torch.ones(100))


def test_tensors_of_any_layout_come_back_equal():
    store = MemoryStore()
    checkpointer = open_one(store)
    checkpointer.resume({})
    base = torch.arange(24.0).reshape(4, 6)
    state = {
        "transposed": base.t(),
        "strided": base[::2, 1::2],
        "expanded": torch.tensor([3.0]).expand(5),
        "scalar": torch.tensor(7, dtype=torch.int8),
        "half": base.half(),
        "bool": base > 3,
        "complex": torch.complex(base, base),
        "float8": base.to(torch.float8_e4m3fn),
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    }
    checkpointer.save(1, {"model": Part(Values(**state))}, CheckpointInfo())
    target = Values()
    checkpointer.wait()
    checkpointer.load_part(CheckpointId(1, 1), "model", Part(target))
    checkpointer.close()
    for name, tensor in state.items():
        assert target.state[name].dtype == tensor.dtype
        same = torch.equal(target.state[name].to(torch.complex64), tensor.to(torch.complex64))
        assert same, name


def test_buffers_are_used_again_and_still_hold_the_right_bytes():
    store = MemoryStore()
    checkpointer = open_one(store)
    checkpointer.resume({})
    for step, size in ((1, 5000), (2, 100), (3, 9000)):
        checkpointer.save(step, tensor_part(torch.full((size,), float(step))), CheckpointInfo())
    checkpointer.close()
    for step, size in ((1, 5000), (2, 100), (3, 9000)):
        assert torch.equal(load(store, step), torch.full((size,), float(step)))


def test_the_best_checkpoint_outlives_rotation():
    store = MemoryStore()
    checkpointer = open_one(store, retention=Retention(1))
    checkpointer.resume({})
    for step in (1, 2, 3):
        keep = [CheckpointId(1, 1)]
        checkpointer.save(step, tensor_part(torch.zeros(3)), CheckpointInfo(), keep=keep)
    checkpointer.close()
    assert checkpointer.committed() == [CheckpointId(1, 3), CheckpointId(1, 1)]


def test_loading_a_part_that_is_not_there_says_so():
    store = MemoryStore()
    checkpointer = open_one(store)
    checkpointer.resume({})
    checkpointer.save(1, tensor_part(torch.zeros(3)), CheckpointInfo())
    checkpointer.wait()
    with pytest.raises(IncompatibleCheckpoint, match="holds no `ema`"):
        checkpointer.load_part(CheckpointId(1, 1), "ema", Part(Values()))
    with pytest.raises(KeyNotFound):
        checkpointer.load_part(CheckpointId(1, 9), "model", Part(Values()))
    checkpointer.close()


def test_a_plain_loop_needs_no_trainer(tmp_path, capsys):
    model = torch.nn.Linear(3, 2)
    parts = {"model": Part(model), "rng": Part(RandomState(), "rank")}
    for expected in (None, 5):
        checkpointer = open_engine(str(tmp_path), keep_last=1)
        resumed = checkpointer.resume(parts)
        assert (resumed.step if resumed else None) == expected
        checkpointer.save(5, parts, CheckpointInfo())
        checkpointer.close()
    assert "resumed from checkpoint-5-g1" in capsys.readouterr().err


def test_a_step_is_saved_once_and_a_second_try_harms_nothing():
    store = MemoryStore()
    checkpointer = open_one(store)
    checkpointer.resume({})
    checkpointer.save(5, tensor_part(torch.ones(3)), CheckpointInfo())
    with pytest.raises(ConfigError, match="this run already saved it"):
        checkpointer.save(5, tensor_part(torch.zeros(3)), CheckpointInfo())
    checkpointer.close()
    assert torch.equal(load(store, 5), torch.ones(3))


def test_a_listener_that_fails_cannot_unmake_a_commit():
    store = MemoryStore()

    def listen(_record, event):
        if isinstance(event, CheckpointCommitted):
            raise OSError("no space for the log")

    comms = ControlGroup(InMemoryKVStore(), World(), "life")
    emit = Emitter(SystemClock(), (listen,))
    checkpointer = CheckpointEngine(
        CheckpointContext(store, comms, CheckpointOptions(), SystemClock(), emit)
    )
    checkpointer.resume({})
    checkpointer.save(5, tensor_part(torch.ones(3)), CheckpointInfo())
    checkpointer.close()
    assert torch.equal(load(store, 5), torch.ones(3))


def test_what_is_committed_is_never_discarded():
    store = MemoryStore()
    begin(store)
    save(store, CheckpointId(1, 5))
    before = dict(store.objects)
    discard_uncommitted(store, CheckpointId(1, 5))
    assert store.objects == before


def test_the_memory_of_a_process_is_refused_for_several_ranks():
    with pytest.raises(ConfigError, match="memory of one process"):
        open_engine("memory://run", World(0, 2), InMemoryKVStore())


def test_several_ranks_need_a_board(tmp_path):
    with pytest.raises(ConfigError, match="2 ranks need a key-value store"):
        open_engine(str(tmp_path), World(0, 2))
