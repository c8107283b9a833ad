"""What a DeepSpeed engine holds becomes named state: held against an engine's documented face."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from resilient.errors import ConfigError, UnsavableState
from resilient.state_dict.deepspeed import ZeroOptimizer
from resilient.state_dict.sharding import FlatShard
from resilient.state_dict.statefuls import collect_parts


class DeepSpeedOptimizer:
    """Bears the name by which DeepSpeed's optimizers are known."""


class Line(DeepSpeedOptimizer):
    """ZeRO 1 of rank 0 of 2: three parameters end to end, cut in the middle of the second."""

    def __init__(self, model, half) -> None:
        names = ("first", "second", "third")
        self.bit16_groups = [[model.get_parameter(name) for name in names]]
        self.single_partition_of_fp32_groups = [torch.arange(float(half))]
        self.loss_scaler = SimpleNamespace(cur_scale=8.0, cur_iter=3, dynamic=True, dtype=None)
        for one, (start, offset, count) in zip(
            self.bit16_groups[0], ((0, 0, 4), (0, 4, 2), (0, 0, 0)), strict=True
        ):
            one._hp_mapping = SimpleNamespace(
                lp_fragment_address=SimpleNamespace(start=start, numel=count),
                hp_fragment_address=SimpleNamespace(start=offset, numel=count),
            )
        self.bit16_groups[0][2]._hp_mapping = None


class DeepSpeedEngine(nn.Module):
    """The face of an engine that is read."""

    dp_world_size = 1
    has_moe_layers = False
    global_steps, global_samples, skipped_steps = 5, 40, 1

    def __init__(self, *, fp16=False) -> None:
        super().__init__()
        self.module = nn.ParameterDict({name: torch.ones(4) for name in ("first", "second")})
        self.module["third"] = nn.Parameter(torch.ones(2))
        self.optimizer = Line(self.module, 6)
        flat = self.optimizer.single_partition_of_fp32_groups[0]
        self.basic_optimizer = torch.optim.AdamW([flat], lr=0.1)
        self.fp16 = fp16

    def fp16_enabled(self):
        return self.fp16

    def zero_optimization_stage(self):
        return 1


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)


def stepped(engine, **kept):
    flat = engine.optimizer.single_partition_of_fp32_groups[0]
    engine.basic_optimizer.state[flat] = {"step": torch.tensor(3.0), "exp_avg": flat * 10, **kept}
    return engine


def test_moments_are_named_after_the_parameter_in_whose_place_they_lie():
    state = ZeroOptimizer(stepped(DeepSpeedEngine())).state_dict()["state"]
    assert {name: one["exp_avg"].memory.tolist() for name, one in state.items()} == {
        "first": [0, 10, 20, 30],
        "second": [40, 50],
        "third": [],
    }
    assert (state["second"]["exp_avg"].shape, state["second"]["exp_avg"].start) == ((4,), 0)


def test_each_parameter_counts_steps_of_its_own():
    """Who loads them one by one would else count a shared number once for each of them."""
    state = ZeroOptimizer(stepped(DeepSpeedEngine())).state_dict()["state"]
    state["first"]["step"] += 1
    assert float(state["second"]["step"]) == 3


def test_groups_are_named_and_counters_and_loss_scale_go_along():
    engine = stepped(DeepSpeedEngine(fp16=True))
    state = ZeroOptimizer(engine).state_dict()
    assert [group["params"] for group in state["param_groups"]] == [["first", "second", "third"]]
    fresh = DeepSpeedEngine(fp16=True)
    fresh.global_steps, fresh.optimizer.loss_scaler.cur_scale = 0, 65536.0
    ZeroOptimizer(fresh).load_state_dict(state)
    assert (fresh.global_steps, fresh.skipped_steps) == (5, 1)
    assert vars(fresh.optimizer.loss_scaler) == vars(engine.optimizer.loss_scaler)


def test_steps_that_differ_within_a_partition_are_refused_with_both_numbers():
    state = ZeroOptimizer(stepped(DeepSpeedEngine())).state_dict()
    state["state"]["second"]["step"] += 1
    with pytest.raises(ValueError, match=r"`first` and `second`, which have 3\.0 and 4\.0"):
        ZeroOptimizer(DeepSpeedEngine()).load_state_dict(state)


def test_a_parameter_that_never_had_a_gradient_gets_what_zero_gives_it():
    state = ZeroOptimizer(stepped(DeepSpeedEngine())).state_dict()
    del state["state"]["first"]
    engine = stepped(DeepSpeedEngine())
    ZeroOptimizer(engine).load_state_dict(state)
    flat = engine.optimizer.single_partition_of_fp32_groups[0]
    assert engine.basic_optimizer.state[flat]["exp_avg"].tolist() == [0, 0, 0, 0, 40, 50]


def test_a_state_of_before_the_first_step_clears_what_was_there():
    state = ZeroOptimizer(DeepSpeedEngine()).state_dict()
    assert state["state"] == {}
    engine = stepped(DeepSpeedEngine())
    ZeroOptimizer(engine).load_state_dict(state)
    assert not engine.basic_optimizer.state


def test_other_parameters_or_groups_are_refused():
    state = ZeroOptimizer(stepped(DeepSpeedEngine())).state_dict()
    state["state"]["foreign"] = state["state"]["first"]
    with pytest.raises(ValueError, match="foreign"):
        ZeroOptimizer(DeepSpeedEngine()).load_state_dict(state)
    del state["state"]["foreign"]
    state["param_groups"][0]["params"] = ["first", "second"]
    with pytest.raises(ValueError, match="grouped differently"):
        ZeroOptimizer(DeepSpeedEngine()).load_state_dict(state)


def test_a_group_that_the_engine_does_not_train_is_refused_rather_than_left_out():
    engine = stepped(DeepSpeedEngine())
    part = ZeroOptimizer(engine)
    engine.basic_optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    with pytest.raises(ConfigError, match="group 1 of the optimizer, of 1 parameters, was added"):
        part.state_dict()


def test_what_cannot_be_told_apart_by_parameter_is_refused_by_name():
    engine = stepped(DeepSpeedEngine(), absmax=torch.ones(2))
    with pytest.raises(UnsavableState, match="`absmax` of shape"):
        ZeroOptimizer(engine).state_dict()


def test_where_moments_will_land_is_known_before_there_are_any():
    engine = DeepSpeedEngine()
    part = ZeroOptimizer(engine)
    place = part.like("state/second/exp_avg")
    assert isinstance(place, FlatShard)
    assert (tuple(place.shape), place.start, place.memory.numel()) == ((4,), 0, 2)
    assert part.like("state/second/step") is None
    assert part.like("state/foreign/exp_avg") is None


def test_a_step_changes_the_partitions_and_their_moments_alone():
    engine = stepped(DeepSpeedEngine())
    flat = engine.optimizer.single_partition_of_fp32_groups[0]
    addresses = {one.data_ptr() for one in ZeroOptimizer(engine).steady()}
    assert flat.data_ptr() in addresses
    assert engine.basic_optimizer.state[flat]["exp_avg"].data_ptr() in addresses


def test_an_engine_spread_by_more_than_data_parallelism_is_refused():
    engine = DeepSpeedEngine()
    engine.dp_world_size = 4
    with pytest.raises(ConfigError, match="only plain data parallelism"):
        ZeroOptimizer(engine)


def test_an_optimizer_whose_places_are_not_known_is_refused():
    engine = DeepSpeedEngine()
    engine.optimizer = DeepSpeedOptimizer()
    with pytest.raises(ConfigError, match="DeepSpeedOptimizer keeps its state in an unknown way"):
        ZeroOptimizer(engine)


def test_the_engine_is_found_by_either_of_its_optimizers():
    engine = DeepSpeedEngine()
    for optimizer in (engine.optimizer, engine.basic_optimizer):
        things = collect_parts({"model": engine, "optimizer": optimizer}, 1, rng=False)
        assert isinstance(things.parts["optimizer"].stateful, ZeroOptimizer)
        assert things.strategy == "zero-1"
    with pytest.raises(ConfigError, match="its engine was not passed"):
        collect_parts({"model": nn.Linear(1, 1), "optimizer": engine.optimizer}, 1, rng=False)
