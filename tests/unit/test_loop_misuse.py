"""What a loop of one's own gets wrong is refused or told, before anything is lost."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from resilient import Checkpointer, Part
from resilient.checkpoint.events import PartsIgnored
from resilient.clock import SystemClock
from resilient.errors import ConfigError, IncompatibleCheckpoint, NothingToResume
from resilient.events import Emitter


class Two(nn.Module):
    """Two layers of one shape, in the order that is asked for."""

    def __init__(self, names="ab"):
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(3, 3, bias=False))

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


def trained(names="ab"):
    torch.manual_seed(0)
    model = Two(names)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("wrap", [lambda one: one, Part])
def test_moments_follow_names_however_the_optimizer_is_given(tmp_path, wrap):
    model, optimizer = trained()
    with Checkpointer(tmp_path, model=wrap(model), optimizer=wrap(optimizer)) as saving:
        saving.resume()
        saving.save(1)
    again, other = trained("ba")
    with Checkpointer(tmp_path, model=wrap(again), optimizer=wrap(other)) as resuming:
        assert resuming.resume() == 1
    for name in "ab":
        was, now = getattr(model, name).weight, getattr(again, name).weight
        assert torch.equal(optimizer.state[was]["exp_avg"], other.state[now]["exp_avg"])


def test_an_optimizer_in_a_part_waits_for_the_copy_too(tmp_path):
    model = nn.Linear(600, 600)
    optimizer = torch.optim.AdamW(model.parameters())
    before = model.weight.detach().clone()
    with Checkpointer(tmp_path, overlap=True, model=model, optimizer=Part(optimizer)) as one:
        one.resume()
        one.save(1)
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
        one.wait()
        assert not torch.equal(model.weight, before)
        one.load(one.save(2), "model")
    with Checkpointer(tmp_path, model=model, optimizer=optimizer) as again:
        assert again.resume("step:1") == 1
    assert torch.equal(model.weight, before)


def test_what_the_checkpoint_holds_and_nobody_takes_is_told(tmp_path):
    model, optimizer = trained()
    with Checkpointer(tmp_path, model=model, optimizer=optimizer, epoch=3) as saving:
        saving.resume()
        saving.save(1)
    for things, left in (({}, ("epoch", "optimizer")), ({"epoch": 0}, ("optimizer",))):
        told = []
        emit = Emitter(SystemClock(), (lambda _, event, told=told: told.append(event),))
        with (
            Checkpointer(tmp_path, emit=emit, model=model, **things) as one,
            pytest.raises(IncompatibleCheckpoint, match="not passed to this run"),
        ):
            one.resume()
        allowed = {"resume_changes": left}
        with Checkpointer(tmp_path, emit=emit, model=model, **allowed, **things) as one:
            one.resume()
        [fact] = [event for event in told if isinstance(event, PartsIgnored)]
        assert fact.parts == left
        assert "ckpt tag" in fact.message()


def test_who_takes_everything_is_told_nothing_of_it(tmp_path):
    model, optimizer = trained()
    things = {"model": model, "optimizer": optimizer, "own": Part({"rank": 0}, "rank")}
    told = []
    emit = Emitter(SystemClock(), (lambda _, event: told.append(event),))
    for step in (1, 2):
        with Checkpointer(tmp_path, emit=emit, **things) as one:
            one.resume()
            one.save(step)
    assert not [event for event in told if isinstance(event, PartsIgnored)]


def test_a_lower_step_in_one_life_is_refused_and_costs_nothing(tmp_path):
    """The highest is the newest: 3 after 20 would be saved, and resumed by nobody."""
    value = {"n": 0}
    with Checkpointer(tmp_path, value=value, keep_last=1) as one:
        one.resume()
        one.save(20)
        with pytest.raises(ConfigError, match="cannot save step 3: step 20") as refused:
            one.save(3)
        assert "across epochs" in refused.value.hint
        one.save(21)
    with Checkpointer(tmp_path, value=value) as again:
        assert again.resume() == 21
        again.save(4)
    with Checkpointer(tmp_path, value=value) as last:
        assert last.resume() == 4, "a later life outranks an earlier one"


@pytest.mark.parametrize("name", ["secret", "signing_key", "aws_secret_access_key", "HF_TOKEN"])
def test_a_secret_is_not_saved_as_a_thing(tmp_path, name):
    with pytest.raises(ConfigError, match="plain text") as refused:
        Checkpointer(tmp_path, **{name: "hunter2"})
    assert "hunter2" not in f"{refused.value}{refused.value.hint}"
    assert "RESILIENT_STORAGE_OPTIONS" in refused.value.hint
    Checkpointer(tmp_path, **{name: Part("meant")})


@pytest.mark.parametrize("name", ["token_count", "tokenizer_name", "secretary_count", "keys"])
def test_names_that_are_no_secrets_are_left_alone(tmp_path, name):
    Checkpointer(tmp_path, **{name: 3})


@pytest.mark.parametrize(
    ("name", "value", "meant"),
    [
        ("save_parity", 1, "`parity`"),
        ("near_repo", "/mnt", "`near_url`"),
        ("durable_every", 5, "`tiering`"),
        ("save_overlap", True, "`overlap`"),
        ("max_checkpoints", 2, "`keep_last`"),
        ("host_bytes", 1 << 20, "`host_bytes_max`"),
        ("on_save_failure", "continue", "SaveFailed"),
    ],
)
def test_an_option_of_the_trainer_is_not_saved_as_a_thing(tmp_path, name, value, meant):
    with pytest.raises(ConfigError) as refused:
        Checkpointer(tmp_path, **{name: value})
    assert meant in str(refused.value)


@pytest.mark.parametrize("name", ["checkpoint-1-g1", "checkpoint-9"])
def test_a_file_url_to_resume_from_is_read_as_its_path(tmp_path, name):
    with Checkpointer(tmp_path, value={"n": 0}) as one:
        one.resume()
        one.save(1)
    told = []
    for reference in (str(tmp_path / name), (tmp_path / name).as_uri()):
        with (
            Checkpointer(tmp_path, value={"n": 0}) as one,
            pytest.raises(NothingToResume) as refused,
        ):
            one.resume(reference)
        told.append((refused.value.message, refused.value.hint))
    assert told[0] == told[1]


def test_a_thing_is_loaded_by_any_reference(tmp_path):
    value = {"n": 0}
    with Checkpointer(tmp_path, value=value) as one:
        one.resume()
        for step, loss in ((1, 0.5), (2, 0.1), (3, 0.9)):
            value["n"] = step
            saved = one.save(step, metrics={"loss": loss})
        for ref, wanted in (("best:loss", 2), ("step:1", 1), ("latest", 3), (saved, 3)):
            one.load(ref, "value")
            assert value == {"n": wanted}
        with pytest.raises(ConfigError, match=r"`other` is not registered.*: value"):
            one.load(saved, "other")
        with pytest.raises(ConfigError, match="not 3"):
            one.load(3, "value")
        with pytest.raises(NothingToResume, match="step:7"):
            one.load("step:7", "value")
        assert value == {"n": 3}
