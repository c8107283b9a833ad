"""A module and an optimizer are asked for their state in a way of ours: the answer is torch's."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import nn

from resilient.errors import UnsavableState
from resilient.state_dict.capture_cache import fast_state_dict
from resilient.state_dict.optimizer import NamedOptimizer
from resilient.state_dict.save_planner import tree_to_json
from resilient.state_dict.snapshot import Part, capture


class Tagged(nn.Parameter):
    """A parameter that knows more than its numbers."""


class Odd(nn.Module):
    """Has one of everything that is stored, and of what is not."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2, bias=False))
        self.tied = self.net[0]
        self.absent = None
        self.register_module("gone", None)
        self.register_parameter("none", None)
        self.register_buffer("kept", torch.ones(2))
        self.register_buffer("passing", torch.zeros(2), persistent=False)
        self.register_buffer("missing", None)


def plain(module):
    return module


def with_hook(module):
    module.net[1].register_state_dict_post_hook(
        lambda _, found, prefix, __: found.update({f"{prefix}more": torch.ones(1)})
    )
    return module


def with_pre_hook(module):
    module.register_state_dict_pre_hook(lambda one, *_: one.kept.add_(1))
    return module


def with_own_way(module):
    class Own(nn.Linear):
        def _save_to_state_dict(self, destination, prefix, keep_vars):
            super()._save_to_state_dict(destination, prefix, keep_vars)
            destination[prefix + "more"] = torch.ones(1)

    module.net[2] = Own(3, 2)
    return module


def with_own_state_dict(module):
    class Own(nn.Linear):
        def state_dict(self, *args, **more):
            found = super().state_dict(*args, **more)
            found.pop(f"{more.get('prefix', '')}weight")
            return found

    module.net[2] = Own(3, 2)
    return module


def with_extra_state(module):
    class Own(nn.Linear):
        def get_extra_state(self):
            return {"n": 3}

    module.net[2] = Own(3, 2)
    return module


def with_way_of_the_instance(module):
    module.net[2].state_dict = lambda *_, destination, prefix, **__: destination.update(
        {prefix + "own": torch.ones(1)}
    )
    return module


def scripted(module):
    module.net[2] = torch.jit.script(nn.Linear(3, 2))
    return module


def traced(module):
    module.net[2] = torch.jit.trace(nn.Linear(3, 2), torch.ones(1, 3))
    return module


def with_parameters_of_a_class_of_its_own(module):
    module.net[2].weight = Tagged(torch.ones(2, 3))
    return module


def parametrized(module):
    nn.utils.parametrizations.weight_norm(module.net[2])
    return module


WAYS = [plain, with_hook, with_pre_hook, with_own_way, with_own_state_dict, with_extra_state,
        with_way_of_the_instance, scripted, traced, with_parameters_of_a_class_of_its_own,
        parametrized]  # fmt: skip


def whole(value):
    """Return a state with numbers in place of tensors, in order."""
    return [
        (name, one.tolist() if isinstance(one, torch.Tensor) else one)
        for name, one in value.items()
    ]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_module_says_what_its_own_state_dict_says(way):
    torch.manual_seed(0)
    asked = fast_state_dict(way(Odd()))
    torch.manual_seed(0)
    own = way(Odd()).state_dict()
    assert type(asked) is type(own) is OrderedDict
    assert whole(asked) == whole(own)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_traced_module_says_what_its_own_state_dict_says():
    module = torch.jit.trace(nn.Linear(3, 2), torch.ones(1, 3))
    assert whole(fast_state_dict(module)) == whole(module.state_dict())


def test_a_parameter_of_a_class_of_its_own_is_stored_as_the_plain_tensor_that_torch_says():
    model = with_parameters_of_a_class_of_its_own(Odd())
    (part,) = capture(1, {"model": Part(model)}, 0).parts
    assert type(part.tensors["model/net.2.weight"]) is torch.Tensor


def test_what_is_stored_of_a_module_needs_no_gradient():
    """A copy from what needs one would need one too."""
    (part,) = capture(1, {"model": Part(Odd())}, 0).parts
    assert not any(one.requires_grad for one in part.tensors.values())


class Hooked(torch.optim.SGD):
    def state_dict(self):
        return {**super().state_dict(), "own": 1}


def made(kind, **more):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    groups = [
        {"params": list(model[1].parameters()), "weight_decay": 0.1},
        {"params": list(model[0].parameters()), "lr": 0.5},
    ]
    optimizer = kind(groups, lr=0.1, **more)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    return model, optimizer


def text(model, optimizer):
    (part,) = capture(1, {"o": Part(NamedOptimizer(model, optimizer))}, 0).parts
    return tree_to_json(part.tree), {name: one.tolist() for name, one in part.tensors.items()}


@pytest.mark.parametrize(
    ("kind", "more"),
    [(torch.optim.AdamW, {"amsgrad": True}), (torch.optim.SGD, {"momentum": 0.9}),
     (torch.optim.SGD, {}), (torch.optim.Adagrad, {})],
)  # fmt: skip
def test_an_optimizer_says_by_name_what_torch_says_by_number(kind, more, monkeypatch):
    model, optimizer = made(kind, **more)
    asked = text(model, optimizer)
    monkeypatch.setattr("resilient.state_dict.optimizer._is_plain", lambda _: False)
    assert text(model, optimizer) == asked


@pytest.mark.parametrize("moment", ["pre", "post"])
def test_what_is_hooked_to_an_optimizers_state_is_stored(moment):
    model, optimizer = made(torch.optim.SGD)
    if moment == "post":
        optimizer.register_state_dict_post_hook(lambda _, found: {**found, "seen": 7})
    else:
        optimizer.register_state_dict_pre_hook(lambda one: one.param_groups[0].update(seen=7))
    assert '"seen": 7' in text(model, optimizer)[0]


@pytest.mark.parametrize("where", ["class", "instance"])
def test_an_optimizer_with_a_way_of_its_own_is_asked_that_way(where):
    model, optimizer = made(Hooked if where == "class" else torch.optim.SGD)
    if where == "instance":
        theirs = optimizer.state_dict
        optimizer.state_dict = lambda: {**theirs(), "own": 1}
    assert '"own": 1' in text(model, optimizer)[0]


def with_state_of_its_own(optimizer, weight):
    optimizer.state["whole"] = {"n": 3}
    optimizer.state["calls"] = 7
    optimizer.state["mean"] = torch.full((2,), 5.0)
    optimizer.state[weight] = torch.full((3,), 2.0)


def test_state_of_what_is_no_parameter_and_state_that_is_no_dict_come_back():
    model, optimizer = made(torch.optim.SGD, momentum=0.9)
    with_state_of_its_own(optimizer, model[0].weight)
    said = NamedOptimizer(model, optimizer).state_dict()
    other, theirs = made(torch.optim.SGD, momentum=0.9)
    NamedOptimizer(other, theirs).load_state_dict(said)
    assert theirs.state["whole"] == {"n": 3}
    assert theirs.state["calls"] == 7
    assert theirs.state["mean"].tolist() == [5, 5]
    assert theirs.state[other[0].weight].tolist() == [2, 2, 2]
    moment = optimizer.state[model[1].weight]["momentum_buffer"]
    assert torch.equal(theirs.state[other[1].weight]["momentum_buffer"], moment)


def test_an_optimizer_that_keeps_a_tensor_for_a_parameter_is_asked_in_less_time_too():
    model, optimizer = made(torch.optim.SGD, momentum=0.9)
    optimizer.state[model[0].weight] = torch.full((3,), 2.0)
    assert NamedOptimizer(model, optimizer).uses_default_state_dict()
    said = NamedOptimizer(model, optimizer).state_dict()["state"]
    assert said["0.weight"].tolist() == [2, 2, 2]


@pytest.mark.parametrize("key", ["0.weight", 0, 7])
def test_state_that_would_be_taken_for_a_parameters_is_refused(key):
    model, optimizer = made(torch.optim.SGD, momentum=0.9)
    optimizer.state[key] = 3
    with pytest.raises(UnsavableState, match=f"keeps a state of its own under .*{key}"):
        text(model, optimizer)


def test_what_an_optimizer_keeps_of_itself_comes_back_to_where_it_was():
    """torch moves what is a parameter's alone. Memory of no device stands for another device."""
    model, optimizer = made(torch.optim.SGD)
    optimizer.state["own"] = {"mean": torch.ones(2), "count": torch.tensor(3)}
    optimizer.state["sum"] = torch.ones(2)
    said = NamedOptimizer(model, optimizer).state_dict()
    optimizer.state["sum"] = torch.zeros(2)
    optimizer.state.pop("own")
    model.to("meta")
    for group, name in zip(optimizer.param_groups, (1, 0), strict=True):
        group["params"] = [*model[name].parameters()]
    NamedOptimizer(model, optimizer).load_state_dict(said)
    assert str(optimizer.state["own"]["mean"].device) == "meta"
    assert str(optimizer.state["own"]["count"].device) == "cpu"
    assert str(optimizer.state["sum"].device) == "cpu"
