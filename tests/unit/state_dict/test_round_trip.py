"""What a save accepts, a resume takes: each value comes back equal, or is refused by its key."""

from __future__ import annotations

import collections
import dataclasses
import enum
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from resilient import Checkpointer
from resilient.clock import SystemClock
from resilient.errors import ConfigError, UnsavableState
from resilient.events import Emitter
from resilient.state_dict import round_trip
from resilient.state_dict.round_trip import REJECTIONS, RoundTripCheck, rehearse_options
from resilient.state_dict.snapshot import Part
from tests.helpers.round_trip import require_same_state

QUIET = Emitter(SystemClock(), ())


class Pair(NamedTuple):
    a: int
    b: int


class Text(str):
    __slots__ = ()


class Whole(int):
    pass


class Kind(enum.Enum):
    ONE = 1


class Number(enum.IntEnum):
    ONE = 1


@dataclasses.dataclass
class Record:
    one: int = 1


class Holder:
    """A stateful that gives its value as it is."""

    def __init__(self, value=None):
        self.value = value

    def state_dict(self):
        return {"v": self.value}

    def load_state_dict(self, state_dict):
        self.value = state_dict["v"]


class Whatever(Holder):
    """A stateful whose whole state is its value."""

    def state_dict(self):
        return self.value

    def load_state_dict(self, state_dict):
        self.value = state_dict


def read_only():
    array = np.arange(3.0)
    array.flags.writeable = False
    return array


TENSOR = torch.arange(6.0)
TAKEN = {
    "array of no dimension": np.array(3.0),
    "small array of no dimension": np.array(3, dtype=np.int16),
    "scalar of NumPy": np.float32(1),
    "scalar of truth": np.bool_(True),
    "NaN of NumPy": np.float64("nan"),
    "read-only array": read_only(),
    "reversed array": np.arange(3.0)[::-1],
    "big-endian array": np.arange(3, dtype=">i4"),
    "array in Fortran order": np.asfortranarray(np.ones((2, 3))),
    "empty array": np.zeros((0, 3)),
    "key NaN": {float("nan"): 1, 2: 3},
    "key truth": {True: "a", 2: "b"},
    "key NumPy": {np.int64(3): 1},
    "key tuple": {(1, "a"): torch.ones(2)},
    "key empty": {"": torch.ones(1)},
    "key surrogate": {"\ud800": torch.ones(1)},
    "key null": {"a\0b": torch.ones(1)},
    "key like a region": {"x@[0:1]": torch.ones(3), "x": torch.zeros(3)},
    "key like a path": {"a/b": torch.ones(1), "a": {"b": torch.zeros(1)}},
    "key like a tag": {"$tensor": "x"},
    "tuples": (1, (2,)),
    "ordered": collections.OrderedDict(z=1, a=2),
    "counter": collections.Counter("aab"),
    "set": {1, "a"},
    "frozen set": frozenset([1]),
    "bytes": b"ab",
    "whole numbers": [True, 1, 1.0, 2**70, -0.0, float("-inf")],
    "largest whole number": 10**4300 - 1,
    "complex": complex(1, float("nan")),
    "same tensor twice": [TENSOR, TENSOR],
    "views of one memory": [TENSOR[:3], TENSOR[1:4]],
    "transposed": TENSOR.view(2, 3).t(),
    "expanded": torch.ones(1).expand(4),
    "no element": torch.zeros(0, 3),
    "complex tensor": torch.ones(2, dtype=torch.complex64),
    "conjugate": torch.tensor([1 + 2j]).conj(),
    "float8": torch.ones(2).to(torch.float8_e4m3fn),
    "bfloat16 of no dimension": torch.tensor(2.0, dtype=torch.bfloat16),
    "uint64": torch.tensor([2**63], dtype=torch.uint64),
    "dtype": torch.float32,
    "dtype that no file holds": torch.complex128,
    "quantized dtype": torch.quint8,
    "device": torch.device("cuda:3"),
    "size": torch.Size([1, 2]),
}
REFUSED = {
    "long number": 10**4300,
    "named tuple": Pair(1, 2),
    "dataclass": Record(),
    "enum": Kind.ONE,
    "whole enum": Number.ONE,
    "kind of text": Text("a"),
    "kind of number": Whole(3),
    "default dict": collections.defaultdict(int, a=1),
    "deque": collections.deque([1]),
    "bytearray": bytearray(b"a"),
    "double complex": torch.ones(2, dtype=torch.complex128),
    "other float8": torch.ones(2).to(torch.float8_e4m3fnuz),
    "key tensor": {torch.ones(1): 1},
    "set of tensors": {torch.ones(1)},
    "long key": {"k" * 5000: torch.ones(1)},
    "text of NumPy": np.str_("a"),
    "date of NumPy": np.datetime64("2020-01-01"),
    "structured array": np.zeros(2, dtype=[("a", "i4")]),
    "masked array": np.ma.array([1, 2]),
    "range": range(3),
    "function": len,
    "NumPy dtype": np.dtype("f4"),
}


def saved_and_resumed(folder, make, value, scope):
    with Checkpointer(folder, emit=QUIET, rng=False, x=Part(make(value), scope)) as saving:
        saving.resume()
        saving.save(1)
    found = make()
    with Checkpointer(folder, emit=QUIET, rng=False, x=Part(found, scope)) as resuming:
        assert resuming.resume() == 1
    return found.value


@pytest.mark.parametrize("scope", ["replicated", "rank"])
@pytest.mark.parametrize("value", TAKEN.values(), ids=TAKEN)
def test_value_saved_comes_back_equal(tmp_path, value, scope):
    require_same_state(value, saved_and_resumed(tmp_path, Holder, value, scope))


@pytest.mark.parametrize("scope", ["replicated", "rank"])
@pytest.mark.parametrize("value", REFUSED.values(), ids=REFUSED)
def test_value_refused_names_key(tmp_path, value, scope):
    with Checkpointer(tmp_path, emit=QUIET, rng=False, x=Part(Holder(value), scope)) as saving:
        saving.resume()
        with pytest.raises(UnsavableState) as found:
            saving.save(1)
    assert found.value.path.startswith("x/v" if scope == "replicated" else "x_0/v")
    assert not [*tmp_path.glob("checkpoint-*")]


@pytest.mark.parametrize("scope", ["replicated", "rank"])
def test_tensor_named_as_header_field_refused(tmp_path, scope):
    with pytest.raises(UnsavableState, match="__metadata__"):
        saved_and_resumed(tmp_path, Whatever, {"__metadata__": torch.ones(1)}, scope)


@pytest.mark.parametrize("document", ["", "x.json"])
def test_number_that_grows_too_long_refused(tmp_path, document):
    holder = Holder(1)
    part = Part(holder, document=document)
    with Checkpointer(tmp_path, emit=QUIET, rng=False, x=part) as saving:
        saving.resume()
        saving.save(1)
        holder.value = [10**5000]
        with pytest.raises(UnsavableState, match="4300 digits"):
            saving.save(2)
        holder.value = [2]
        saving.save(3)
        holder.value = [10**5000]
        with pytest.raises(UnsavableState, match=r"v/0.*4300 digits"):
            saving.save(4)


@pytest.mark.parametrize(
    "parts",
    [
        {"a": Part(Holder(1), "rank"), "a_0": Part(Holder(2))},
        {"a": Part(Holder(1), document="state.json"), "b": Part(Holder(2))},
        {"a": Part(Holder(1), document="manifest.json")},
        {"a": Part(Holder(1), document="x.json"), "b": Part(Holder(2), document="x.json")},
    ],
    ids=["name of a rank's part", "state document", "manifest", "one document"],
)
def test_parts_in_one_place_refused(tmp_path, parts):
    with Checkpointer(tmp_path, emit=QUIET, rng=False, **parts) as saving:
        saving.resume()
        with pytest.raises(ConfigError):
            saving.save(1)


class ExtraWithoutLoad(nn.Linear):
    def get_extra_state(self):
        return {"count": 1}


def with_strange_key(model):
    model.register_state_dict_post_hook(lambda *args: args[1].update(more=torch.ones(1)))
    return model


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: ExtraWithoutLoad(2, 2), "_extra_state"),
        (lambda: nn.Sequential(ExtraWithoutLoad(2, 2)), "0._extra_state"),
        (lambda: with_strange_key(nn.Linear(2, 2)), "more"),
    ],
)
def test_module_that_load_refuses_is_refused_at_save(tmp_path, make, key):
    with Checkpointer(tmp_path, emit=QUIET, model=make()) as saving:
        saving.resume()
        with pytest.raises(UnsavableState, match=key):
            saving.save(1)


def test_optimizer_that_load_refuses_is_refused_at_save(tmp_path):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    for one in model.parameters():
        # An optimizer of torch cannot make its next step with this state.
        optimizer.state[one] = {"exp_avg": torch.zeros_like(one)}
    before = {name: one.clone() for name, one in model.state_dict().items()}
    with Checkpointer(tmp_path, emit=QUIET, model=model, optimizer=optimizer) as saving:
        saving.resume()
        with pytest.raises(UnsavableState, match="`optimizer` would reject its own state"):
            saving.save(1)
        require_same_state(before, dict(model.state_dict()))
        optimizer.state.clear()
        saving.save(2)


class Broken(torch.optim.lr_scheduler.LambdaLR):
    def state_dict(self):
        return {**super().state_dict(), "lr_lambdas": [None, {"a": 1}]}


def test_schedule_that_load_refuses_is_refused_at_save(tmp_path):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = Broken(optimizer, lambda _: 1.0)
    things = {"model": model, "optimizer": optimizer, "schedule": schedule}
    with Checkpointer(tmp_path, emit=QUIET, **things) as saving:
        saving.resume()
        with pytest.raises(UnsavableState, match="`schedule` would reject its own state"):
            saving.save(1)


class Counting(Holder):
    checks = 0

    def check_saved(self, _):
        self.checks += 1


def test_structure_checked_once():
    holder, check = Counting({"a": [1.0, {"b": torch.ones(1)}]}), RoundTripCheck()
    for _ in range(3):
        check.flatten_part("x", holder)
    assert holder.checks == 1
    holder.value["a"][1]["c"] = torch.ones(2)
    for _ in range(3):
        check.flatten_part("x", holder)
    assert holder.checks == 2


def test_list_that_grows_checked_seldom():
    holder, check = Counting([]), RoundTripCheck()
    for at in range(1000):
        holder.value.append({"loss": float(at)})
        check.flatten_part("x", holder)
    assert holder.checks <= 102


@dataclasses.dataclass
class Run:
    """A stateful of a user's own that holds a scheduler beside a model."""

    model: nn.Module
    scheduler: torch.optim.lr_scheduler.LRScheduler
    unused: dataclasses.InitVar[int] = 0

    def state_dict(self):
        return {"model": self.model.state_dict(), "scheduler": self.scheduler.state_dict()}

    def load_state_dict(self, state):
        self.model.load_state_dict(state["model"])
        self.scheduler.load_state_dict(state["scheduler"])


class Scale:
    def __init__(self):
        self.scale = torch.tensor([2.0])

    def __call__(self, _):
        return 1.0


class OwnSchedule(torch.optim.lr_scheduler.LRScheduler):
    def __init__(self, optimizer):
        self.table = torch.tensor([3.0])
        super().__init__(optimizer)

    def get_lr(self):
        return [group["lr"] for group in self.optimizer.param_groups]

    def load_state_dict(self, state):
        self.table.copy_(state["table"])
        super().load_state_dict({**state, "table": self.table})


def test_check_of_a_first_save_changes_no_live_object(tmp_path):
    schedules = torch.optim.lr_scheduler
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    scale, own = Scale(), OwnSchedule(optimizer)
    given = {
        "run": Run(model, schedules.StepLR(optimizer, 1)),
        "cyclic": schedules.CyclicLR(optimizer, 0.1, 0.2, scale_fn=scale),
        "nested": schedules.SequentialLR(
            optimizer, [own, schedules.ConstantLR(optimizer)], milestones=[3]
        ),
    }
    weight = model.weight.detach().clone()
    with Checkpointer(tmp_path, emit=QUIET, rng=False, **given) as saving:
        saving.resume()
        saving.save(1)
    assert torch.equal(model.weight, weight)
    assert (scale.scale.item(), own.table.item()) == (2.0, 3.0)


class AddsKeys(nn.Module):
    """A module with a key that its own hook takes back."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self._register_state_dict_hook(
            lambda _, state, prefix, __: state.update({f"{prefix}extra": torch.zeros(1)})
        )
        self.register_load_state_dict_post_hook(lambda _, keys: keys.unexpected_keys.clear())


def test_module_with_a_load_post_hook_is_saved(tmp_path):
    with Checkpointer(tmp_path, emit=QUIET, rng=False, model=AddsKeys()) as saving:
        saving.resume()
        saving.save(1)


def test_scalar_of_another_type_with_the_same_dtype_is_saved():
    RoundTripCheck().flatten_part("part", Holder({"value": np.longlong(3)}))


def test_crowded_dict_with_changing_keys_is_checked_once(monkeypatch):
    checked = []
    monkeypatch.setattr(round_trip, "_require_loadable", lambda *given: checked.append(given))
    held = Holder({f"old {key}": [key] for key in range(100)})
    check = RoundTripCheck()
    for key in range(30):
        held.value[f"new {key}"] = held.value.pop(f"old {key}")
        check.flatten_part("part", held)
    assert len(checked) == 1


class Own(torch.optim.SGD):
    """An optimizer of a script, whose step may do anything."""

    def step(self, closure=None):
        raise AssertionError("rehearsed")


OPTIM = torch.optim


@pytest.mark.parametrize(
    ("kind", "options", "changed", "is_rejected"),
    [
        (OPTIM.AdamW, {}, {}, False),
        (OPTIM.AdamW, {"fused": True}, {"differentiable": True}, True),
        (OPTIM.Adam, {}, {"lr": torch.tensor(0.1), "foreach": True}, True),
        (OPTIM.Adam, {}, {"betas": (0.9,)}, True),
        (OPTIM.Muon, {"lr": 0.1}, {}, False),
        (OPTIM.SGD, {"lr": 0.1, "momentum": 0.9}, {"nesterov": True}, False),
        (OPTIM.LBFGS, {}, {"lr": "a text"}, False),  # its step needs a closure
        (Own, {"lr": 0.1}, {"lr": "a text"}, False),
    ],
)
def test_rehearsed_options_touch_no_live_object(kind, options, changed, is_rejected):
    weights = [nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(2, 2))]
    optimizer = kind(weights, **options)
    groups = [{**group, **changed, "params": []} for group in optimizer.param_groups]
    if is_rejected:
        with pytest.raises(REJECTIONS):
            rehearse_options(optimizer, groups)
    else:
        rehearse_options(optimizer, groups)
    assert not any(optimizer.state.values())
    assert all(weight.eq(1).all() and weight.grad is None for weight in weights)
    assert [len(group["params"]) for group in optimizer.param_groups] == [2]
