"""A save beside training: a copy of one moment, whatever training does, and when it may do it."""

from __future__ import annotations

import threading
import time
import weakref

import pytest
import torch

from resilient.checkpoint.save.metadata import CheckpointInfo
from resilient.errors import SaveFailed
from resilient.format.keys import CheckpointId
from resilient.state_dict.host_copy import DeferredCopies, HostCopyBatch, TensorCopy, target_in
from resilient.state_dict.optimizer import NamedOptimizer
from resilient.state_dict.snapshot import Part
from resilient.state_dict.staging import address_of, stable_storages
from resilient.testing.memory_store import MemoryStore, run_ranks
from tests.helpers.manifests import Values
from tests.helpers.one_rank import Held, open_one

WIDTH = 200


class Loop:
    """A model with buffers that change in forward, and AdamW with state."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        norm = torch.nn.BatchNorm1d(WIDTH)
        frozen = torch.nn.Linear(WIDTH, WIDTH)
        frozen.requires_grad_(False)
        self.model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), norm, frozen)
        trained = [one for one in self.model.parameters() if one.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=0.1)
        self.parts = {
            "model": Part(self.model),
            "optimizer": Part(NamedOptimizer(self.model, self.optimizer)),
        }
        self.forward_backward()
        self.update()

    def forward_backward(self) -> None:
        self.model(torch.randn(8, WIDTH)).square().sum().backward()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def bits(self):
        state = dict(self.model.state_dict())
        held = self.parts["optimizer"].stateful.state_dict()["state"]
        state |= {f"{name}.{key}": one for name in held for key, one in held[name].items()}
        return {name: one.clone() for name, one in state.items()}


def bits_of(store, step):
    """Return what a checkpoint holds, by the names of ``Loop.bits``."""
    model, optimizer = Values(), Values()
    checkpointer = open_one(store)
    checkpointer.load_part(CheckpointId(1, step), "model", Part(model))
    checkpointer.load_part(CheckpointId(1, step), "optimizer", Part(optimizer))
    checkpointer.close()
    held = optimizer.state["state"]
    return {
        **model.state,
        **{f"{name}.{key}": one for name in held for key, one in held[name].items()},
    }


def assert_same(one, other):
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def hold_the_copy(checkpointer):
    """Return what lets the thread beside training begin."""
    go_on = threading.Event()
    checkpointer._overlap._thread.submit(go_on.wait, 20)
    return go_on


def test_forward_steps_and_persisting_leave_the_bits_of_the_moment_of_the_save():
    store, loop = Held(), Loop()
    checkpointer = open_one(store)
    checkpointer.resume({})
    moment = loop.bits()
    go_on = hold_the_copy(checkpointer)
    checkpointer.save(1, loop.parts, CheckpointInfo(), overlap=True)
    loop.forward_backward()
    assert not torch.equal(loop.model[1].running_mean, moment["1.running_mean"])
    threading.Timer(0.2, go_on.set).start()
    checkpointer.before_update()
    loop.update()
    loop.forward_backward()
    loop.update()
    store.go_on.set()
    checkpointer.close()
    assert_same(bits_of(store, 1), moment)


def test_save_returns_before_the_copy_and_training_copies_what_is_left_itself():
    store, loop = MemoryStore(), Loop()
    checkpointer = open_one(store)
    checkpointer.resume({})
    go_on = hold_the_copy(checkpointer)
    checkpointer.save(1, loop.parts, CheckpointInfo(), overlap=True)
    copies = checkpointer._overlap._copies
    # The weight that is trained, and its two moments together; the rest is small or may change.
    assert len(copies) == 2
    copies.make()
    assert len(copies) == 0
    go_on.set()
    checkpointer.close()


def test_a_small_parameter_that_a_forward_pass_keeps_within_bounds_is_saved_as_it_was():
    """CLIP does so with its temperature."""
    store, loop = MemoryStore(), Loop()
    checkpointer = open_one(store)
    checkpointer.resume({})
    moment = loop.bits()
    go_on = hold_the_copy(checkpointer)
    checkpointer.save(1, loop.parts, CheckpointInfo(), overlap=True)
    with torch.no_grad():
        loop.model[0].bias.clamp_(7, 8)
    go_on.set()
    checkpointer.close()
    assert not torch.equal(loop.model[0].bias, moment["0.bias"])
    assert_same(bits_of(store, 1), moment)


def test_without_overlap_nothing_is_promised_and_nothing_is_left_to_copy():
    store, loop = Held(), Loop()
    checkpointer = open_one(store)
    checkpointer.resume({})
    moment = loop.bits()
    go_on = hold_the_copy(checkpointer)
    checkpointer.save(1, loop.parts, CheckpointInfo())
    loop.forward_backward()
    loop.update()
    go_on.set()
    store.go_on.set()
    checkpointer.close()
    assert_same(bits_of(store, 1), moment)


def test_a_loop_that_breaks_its_promise_loses_that_save_and_is_told():
    store, loop = MemoryStore(), Loop()
    checkpointer = open_one(store)
    checkpointer.resume({})
    go_on = hold_the_copy(checkpointer)
    checkpointer.save(1, loop.parts, CheckpointInfo(), overlap=True)
    loop.forward_backward()
    loop.update()
    go_on.set()
    with pytest.raises(SaveFailed, match=r"0.weight.*` .*changed during the copy"):
        checkpointer.wait()
    assert checkpointer.committed() == []
    moment = loop.bits()
    checkpointer.save(2, loop.parts, CheckpointInfo(), overlap=True)
    checkpointer.close()
    assert_same(bits_of(store, 2), moment)


def test_what_one_rank_spoils_no_rank_commits():
    store = MemoryStore()

    def rank_main(world, board):
        checkpointer, loop = open_one(store, world, board), Loop()
        checkpointer.resume({})
        go_on = hold_the_copy(checkpointer)
        checkpointer.save(1, loop.parts, CheckpointInfo(), overlap=True)
        if world.rank == 0:
            with torch.no_grad():
                loop.model[0].weight.add_(1)
        go_on.set()
        with pytest.raises(SaveFailed, match=r"rank 0: .* .*changed during the copy"):
            checkpointer.wait()
        checkpointer.save(2, loop.parts, CheckpointInfo(), overlap=True)
        checkpointer.close()
        return checkpointer.committed()

    assert run_ranks(2, rank_main) == [[CheckpointId(1, 2)]] * 2


def test_what_was_copied_is_let_go_of_once_it_is_handed_over():
    """Training may have other tensors by then, and no memory for both."""
    loop = Loop()
    checkpointer = open_one(MemoryStore())
    checkpointer.resume({})
    checkpointer.save(1, loop.parts, CheckpointInfo(), overlap=True)
    checkpointer.before_update()
    moment = weakref.ref(loop.optimizer.state[loop.model[0].weight]["exp_avg"])
    loop.optimizer.state.clear()
    assert moment() is None
    assert not checkpointer._overlap._copies._work
    checkpointer.close()


def test_a_copy_that_fails_is_told_and_holds_nobody_up():
    class Broken:
        def make(self, *, modestly=False):
            raise RuntimeError("the device fell off")

        def changed(self):
            return []

    copies = DeferredCopies([Broken()])
    copies.make()
    with pytest.raises(Exception, match="the device fell off"):
        copies.require_unchanged()


def test_before_update_waits_for_nothing_when_nothing_is_copied():
    checkpointer = open_one(MemoryStore())
    checkpointer.before_update()
    checkpointer.resume({})
    checkpointer.save(
        1, {"model": Part(Values(weight=torch.ones(3)))}, CheckpointInfo(), overlap=True
    )
    assert checkpointer._overlap._copies is None
    checkpointer.before_update()
    checkpointer.close()


def test_only_what_an_optimizer_of_the_save_holds_is_steady():
    loop = Loop()
    steady = stable_storages(loop.parts)
    state = loop.optimizer.state[loop.model[0].weight]
    for tensor in (loop.model[0].weight, state["exp_avg"], state["exp_avg_sq"]):
        assert address_of(tensor) in steady
    for tensor in (loop.model[1].running_mean, loop.model[2].weight):
        assert address_of(tensor) not in steady
    assert stable_storages({"model": loop.parts["model"]}) == frozenset()


@pytest.mark.parametrize("modestly", [True, False])
@pytest.mark.parametrize(
    "source",
    [
        torch.arange(24.0).reshape(4, 6).t(),
        torch.arange(6.0).bfloat16(),
        torch.tensor(7, dtype=torch.int8),
        torch.complex(torch.arange(3.0), torch.ones(3)).conj(),
        torch.arange(6.0).to(torch.float8_e4m3fn),
        torch.tensor([3.0]).expand(5),
        torch.arange(4) > 1,
        torch.empty(0),
    ],
    ids=lambda one: str(one.dtype),
)
def test_both_ways_of_copying_give_the_same_bytes(source, modestly):
    buffer = memoryview(bytearray(8 + source.nbytes))
    copy = HostCopyBatch([TensorCopy("x", source, target_in(buffer, 8, source))])
    copy.make(modestly=modestly)
    expected = source.resolve_conj().contiguous().reshape(-1).view(torch.uint8)
    assert bytes(buffer[8:]) == bytes(expected.numpy())


def test_memory_is_there_before_the_first_save_and_used_by_it():
    store, loop = MemoryStore(), Loop()
    checkpointer = open_one(store)
    checkpointer.resume({})
    checkpointer.warm(loop.parts)
    checkpointer._overlap.settle()
    warm = {name: memory.obj for name, memory in checkpointer._staging_buffers._buffers.items()}
    assert set(warm) == {"model.r00000.safetensors", "optimizer.r00000.safetensors"}
    checkpointer.save(1, loop.parts, CheckpointInfo())
    assert all(
        checkpointer._staging_buffers._buffers[name].obj is one for name, one in warm.items()
    )
    checkpointer.close()
    assert_same(bits_of(store, 1), loop.bits())


class LetsGoAfterwards:
    """Copies, after which the hand-over still takes a while, however slow the machine is."""

    def __init__(self, copies, go_on) -> None:
        self.copies, self.timer = copies, threading.Timer(0.3, go_on.set)

    def make(self) -> None:
        self.copies.make()
        if self.timer.ident is None:
            self.timer.start()


def test_the_stall_that_is_told_is_all_that_training_waited():
    told = []
    store, loop = MemoryStore(), Loop()
    checkpointer = open_one(store)
    checkpointer.resume({})
    checkpointer._persister.submit = lambda _, job: told.append(job)
    go_on = hold_the_copy(checkpointer)
    checkpointer.save(1, loop.parts, CheckpointInfo(), overlap=True)
    in_save = checkpointer._stall.seconds()
    checkpointer._overlap._copies = LetsGoAfterwards(checkpointer._overlap._copies, go_on)
    checkpointer.before_update()
    checkpointer._overlap._copies.timer.join()
    assert told[0].stall_seconds() - in_save > 0.25
    checkpointer.close()


def test_to_wait_for_the_save_before_counts_for_the_next_whoever_asked_first():
    told, checkpointer = [], open_one(MemoryStore())
    checkpointer.resume({})
    checkpointer._persister.submit = lambda _, job: told.append(job)
    parts = {"model": Part(Values(weight=torch.ones(9)))}
    checkpointer.save(1, parts, CheckpointInfo())
    checkpointer._persister.wait = lambda: time.sleep(0.1)
    # As a trainer does that wants to know what it took.
    checkpointer.wait()
    checkpointer._persister.wait = lambda: None
    checkpointer.save(2, parts, CheckpointInfo())
    checkpointer.wait()
    checkpointer.save(3, parts, CheckpointInfo())
    first, second, third = (job.stall_seconds() for job in told)
    assert first < 0.1 <= second
    assert third < 0.1
    checkpointer.close()
