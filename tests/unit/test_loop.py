"""The checkpointer of a loop of one's own, in one process."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
from torch import nn

from resilient import BestOf, Checkpointer, Part, Retention
from resilient.errors import ConfigError, IncompatibleCheckpoint, SaveFailed
from resilient.storage.local import LocalStore

pytestmark = pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*:UserWarning")


class Loop:
    """A little training whose every step depends on all that came before."""

    def __init__(self, seed=0) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.5)
        self.generator = torch.Generator().manual_seed(seed)
        self.log: list[float] = []

    def things(self):
        return vars(self)

    def train(self, steps):
        for _ in range(steps):
            x = torch.rand(5, 3, generator=self.generator) + torch.rand(5, 3)
            loss = self.model(x).square().sum()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.log.append(loss.item())
        return self

    def bits(self):
        return [one.numpy().tobytes() for one in self.model.state_dict().values()], self.log


@pytest.mark.parametrize("overlap", [False, True])
def test_three_lines_make_an_interrupted_run_equal_an_unbroken_one(tmp_path, overlap):
    whole = Loop().train(6).bits()

    first = Loop()
    checkpointer = Checkpointer(tmp_path, overlap=overlap, **first.things())
    assert checkpointer.resume() is None
    first.train(4)
    checkpointer.save(4)
    first.train(1)
    checkpointer.close()

    second = Loop(seed=7)
    with Checkpointer(tmp_path, **second.things()) as checkpointer:
        assert checkpointer.resume() == 4
        second.train(2)
    assert second.bits() == whole


def test_without_rng_the_random_state_is_left_alone(tmp_path):
    with Checkpointer(tmp_path, rng=False, notes={}) as checkpointer:
        checkpointer.resume()
        checkpointer.save(1)
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    with Checkpointer(tmp_path, rng=False, notes={}) as checkpointer:
        checkpointer.resume()
    assert torch.equal(torch.rand(2), expected)


def test_plain_values_come_back_in_place_or_by_name(tmp_path):
    with Checkpointer(tmp_path, place={"epoch": 2}, log=[1.5], tries=3) as checkpointer:
        checkpointer.resume()
        checkpointer["tries"] = 4
        checkpointer.save(1)
    place, log = {"epoch": 0, "other": 1}, []
    with Checkpointer(tmp_path, place=place, log=log, tries=0) as checkpointer:
        checkpointer.resume()
        assert (place, log, checkpointer["tries"]) == ({"epoch": 2}, [1.5], 4)
        assert checkpointer["place"] is place


def test_a_value_of_another_kind_is_not_put_in_its_place(tmp_path):
    with Checkpointer(tmp_path, place={"epoch": 2}) as checkpointer:
        checkpointer.resume()
        checkpointer.save(1)
    with pytest.raises(IncompatibleCheckpoint, match="place"):
        Checkpointer(tmp_path, place=[]).resume()


def names_in(repository, step=1):
    manifest = json.loads((repository / f"checkpoint-{step}-g1" / "manifest.json").read_text())
    return {entry["name"] for entry in manifest["tensors"]}


@pytest.mark.parametrize("wrap", [nn.DataParallel, partial(torch.compile, backend="eager")])
def test_a_wrapped_model_is_saved_under_its_own_names(tmp_path, wrap):
    model = nn.Linear(2, 1)
    wrapped = wrap(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with Checkpointer(tmp_path, model=wrapped, optimizer=optimizer, rng=False) as checkpointer:
        checkpointer.resume()
        checkpointer.save(1)
    moments = {f"optimizer/state/{name}/momentum_buffer" for name in ("weight", "bias")}
    assert names_in(tmp_path) == {"model/weight", "model/bias"} | moments


def test_an_optimizer_over_two_models_knows_both(tmp_path):
    one, two = nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD([*one.parameters(), *two.parameters()], momentum=0.9)
    (one(torch.ones(1, 2)) + two(torch.ones(1, 2))).sum().backward()
    optimizer.step()
    things = {"one": one, "two": two, "both": optimizer}
    with Checkpointer(tmp_path, **things, rng=False) as checkpointer:
        checkpointer.resume()
        checkpointer.save(1)
    assert {name for name in names_in(tmp_path) if name.startswith("both")} == {
        "both/state/one.weight/momentum_buffer",
        "both/state/two.weight/momentum_buffer",
    }


def unfreeze_at(folder, steps, *, frozen=True, kind=torch.optim.AdamW):
    """Train to a step, the second layer from step 3 on; resume what is there, return all bits."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = kind(model[0].parameters(), lr=0.1)
    second = {"params": list(model[1].parameters()), "lr": 0.01}
    model[1].requires_grad_(not frozen)
    if not frozen:
        optimizer.add_param_group(second)
    with Checkpointer(folder, model=model, optimizer=optimizer) as checkpointer:
        for step in range((checkpointer.resume() or 0) + 1, steps + 1):
            if step == 3:
                model[1].requires_grad_()
                optimizer.add_param_group(second)
            optimizer.zero_grad()
            model(torch.rand(4, 3)).square().sum().backward()
            optimizer.step()
            checkpointer.save(step)
    return [one.detach().numpy().tobytes() for one in model.parameters()]


def test_layers_that_are_unfrozen_later_are_saved_and_resumed_to_the_bit(tmp_path):
    whole = unfreeze_at(tmp_path / "whole", 6)
    unfreeze_at(tmp_path / "cut", 4)
    assert unfreeze_at(tmp_path / "cut", 6, frozen=False) == whole


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_group_added_in_training_is_added_at_the_resume(tmp_path, capfd, kind):
    whole = unfreeze_at(tmp_path / "whole", 6, kind=kind)
    unfreeze_at(tmp_path / "cut", 3, kind=kind)
    unfreeze_at(tmp_path / "cut", 4, kind=kind)
    capfd.readouterr()
    assert unfreeze_at(tmp_path / "cut", 6, kind=kind) == whole
    assert "optimizer: groups 1 -> 2: training had added groups" in capfd.readouterr().err


def test_optimizer_created_with_fewer_groups_is_refused(tmp_path):
    unfreeze_at(tmp_path, 2, frozen=False)
    with pytest.raises(IncompatibleCheckpoint, match=r"parameters differ: 1\.bias"):
        unfreeze_at(tmp_path, 6)


def test_the_state_of_another_kind_of_optimizer_is_refused_before_anything_is_loaded(tmp_path):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    with Checkpointer(
        tmp_path, notes=(notes := {"at": 1}), model=model, optimizer=optimizer
    ) as kept:
        kept.resume()
        kept.save(1)
    notes["at"] = 2
    other = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(IncompatibleCheckpoint, match="`betas`, `eps`, but SGD has `dampening`"):
        Checkpointer(tmp_path, notes=notes, model=model, optimizer=other).resume()
    assert notes == {"at": 2}
    other.step()


def test_an_optimizer_of_unknown_parameters_is_refused(tmp_path):
    optimizer = torch.optim.SGD(nn.Linear(2, 1).parameters())
    with pytest.raises(ConfigError, match="`optimizer` trains none of the modules"):
        Checkpointer(tmp_path, optimizer=optimizer).resume()


def test_partitions_of_others_are_refused_rather_than_saved_in_part(tmp_path):
    partitioned = nn.Linear(2, 1)
    partitioned.weight.ds_id = 0  # as ZeRO-3 marks what is spread over ranks
    with pytest.raises(ConfigError, match="only its engine can collect them"):
        Checkpointer(tmp_path, model=partitioned).resume()


def test_a_thing_without_state_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match=r"`loader` is a .*DataLoader"):
        Checkpointer(tmp_path, loader=torch.utils.data.DataLoader([1])).resume()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["world", "board", "scope", "keeper"])
def test_what_is_found_here_cannot_name_a_thing(tmp_path, name):
    with pytest.raises(ConfigError, match=name):
        Checkpointer(tmp_path, **{name: {}})


def test_the_name_of_the_random_state_is_taken(tmp_path):
    with pytest.raises(ConfigError, match="rng_state"):
        Checkpointer(tmp_path, rng_state={}).resume()


def test_saving_before_resuming_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"call resume\(\) before save\(\)"):
        Checkpointer(tmp_path, notes={}).save(1)


def test_a_second_resume_is_refused(tmp_path):
    with Checkpointer(tmp_path, notes={}) as checkpointer:
        checkpointer.resume()
        with pytest.raises(ConfigError, match="already"):
            checkpointer.resume()


def test_options_are_those_of_the_spine_and_metrics_choose_the_best(tmp_path):
    best = Retention(keep_last=1, keep_best=(BestOf("loss"),))
    with Checkpointer(tmp_path, notes={}, retention=best) as checkpointer:
        checkpointer.resume()
        for step, loss in enumerate((0.5, 0.25, 0.75, 1.0), 1):
            checkpointer.save(step, metrics={"loss": torch.tensor(loss, requires_grad=True)})
    left = {path.parent.name for path in tmp_path.glob("checkpoint-*/manifest.json")}
    assert left == {"checkpoint-2-g1", "checkpoint-4-g1"}


def test_another_reference_is_taken_by_name(tmp_path):
    notes = {"at": 0}
    with Checkpointer(tmp_path, notes=notes) as checkpointer:
        checkpointer.resume()
        for step in (1, 2):
            notes["at"] = step
            checkpointer.save(step)
    with Checkpointer(tmp_path, notes=notes) as checkpointer:
        assert checkpointer.resume("checkpoint-1-g1") == 1
    assert notes == {"at": 1}


def end_with_a_failed_save(folder, monkeypatch, error=None):
    """Leave the block after a save that the store refuses, by an error or without."""

    def fail(*_):
        raise OSError("no")

    with Checkpointer(folder, notes={}) as checkpointer:
        checkpointer.resume()
        monkeypatch.setattr(LocalStore, "put", fail)
        monkeypatch.setattr(LocalStore, "put_new", fail)
        checkpointer.save(1)
        if error is not None:
            raise error


def test_what_ended_the_loop_is_not_covered_up_by_a_failed_save(tmp_path, monkeypatch):
    with pytest.raises(RuntimeError, match="mine") as caught:
        end_with_a_failed_save(tmp_path, monkeypatch, RuntimeError("mine"))
    assert "the save in flight failed too" in caught.value.__notes__[0]


def test_leaving_the_block_raises_what_the_save_in_flight_raised(tmp_path, monkeypatch):
    with pytest.raises(SaveFailed):
        end_with_a_failed_save(tmp_path, monkeypatch)


def test_a_part_is_taken_as_it_is(tmp_path):
    with Checkpointer(tmp_path, mine=Part(Loop().model, "rank"), rng=False) as checkpointer:
        checkpointer.resume()
        checkpointer.save(1)
    assert (tmp_path / "checkpoint-1-g1" / "mine_0.safetensors").exists()
