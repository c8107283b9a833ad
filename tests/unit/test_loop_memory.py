"""Without a keeper a save takes no more memory than it may: what is larger is streamed."""

from __future__ import annotations

import threading
import tracemalloc

import pytest
import torch
from torch import nn

from resilient import Checkpointer
from resilient.checkpoint.save.executor import MemoryBudget
from resilient.errors import ConfigError

MIB = 1 << 20
WIDTH = 1024  # 4 MiB of weights each


def models():
    torch.manual_seed(0)
    return {name: nn.Linear(WIDTH, WIDTH, bias=False) for name in ("one", "two", "three")}


def saved_peak(folder, bound, parity=0):
    """Return the most memory of Python that one save took, of state that changed after it."""
    things = models()
    with Checkpointer(folder, host_bytes_max=bound, parity=parity, **things) as checkpointer:
        checkpointer.resume()
        tracemalloc.start()
        checkpointer.save(1)
        for model in things.values():
            with torch.no_grad():
                model.weight.zero_()
        checkpointer.wait()
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peak_bytes


@pytest.mark.parametrize("parity", [0, 1])
def test_what_does_not_fit_is_streamed_and_is_of_one_moment(tmp_path, parity):
    bound = 5 * MIB
    peak_bytes = saved_peak(tmp_path, bound, parity)
    assert 4 * MIB < peak_bytes
    if not parity:
        assert peak_bytes < bound + MIB
    again, wanted = models(), models()
    for model in again.values():
        nn.init.zeros_(model.weight)
    with Checkpointer(tmp_path, **again) as checkpointer:
        assert checkpointer.resume() == 1
    for name, model in again.items():
        assert torch.equal(model.weight, wanted[name].weight)


def test_a_bound_that_is_below_one_file_is_refused_with_the_number_that_is_enough(tmp_path):
    with Checkpointer(tmp_path, host_bytes_max=4 * MIB, **models()) as checkpointer:
        checkpointer.resume()
        with pytest.raises(ConfigError, match="nothing was saved") as refused:
            checkpointer.save(1)
    enough = int(refused.value.hint.partition("host_bytes_max=")[2].split()[0])
    with Checkpointer(tmp_path, host_bytes_max=enough, **models()) as checkpointer:
        assert checkpointer.resume() is None
        checkpointer.save(1)
    with Checkpointer(tmp_path, **models()) as checkpointer:
        assert checkpointer.resume() == 1


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "1G"])
def test_what_is_no_number_of_bytes_is_refused(tmp_path, value):
    with pytest.raises(ConfigError, match="not a number of bytes"):
        Checkpointer(tmp_path, host_bytes_max=value, **models()).resume()


def test_files_wait_for_room():
    bound, order = MemoryBudget(10), []
    entered = threading.Event()

    def second():
        entered.set()
        with bound.reserved(6):
            order.append("second")

    with bound.reserved(6):
        thread = threading.Thread(target=second)
        thread.start()
        entered.wait()
        with bound.reserved(4):
            order.append("fits beside")
        order.append("first ends")
    thread.join()
    assert order == ["fits beside", "first ends", "second"]
