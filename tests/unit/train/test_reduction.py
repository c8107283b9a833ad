"""Canonical reduction in one process: what is refused, and what a run is made of."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from resilient.errors import ConfigError
from resilient.strategies.canonical import checks
from resilient.train import canonical_reduction
from resilient.train.arguments import TrainingArguments
from resilient.train.callbacks.base import TrainerCallback
from resilient.train.trainer import Trainer
from tests.unit.train.models import DieAfter, Dies, Noisy

CANONICAL = {"reduction": "canonical", "global_train_batch_size": 12}


class Net(nn.Module):
    """A classifier with any module in the middle."""

    def __init__(self, middle=None):
        super().__init__()
        torch.manual_seed(5)
        middle = middle if middle is not None else nn.Dropout(0.3)
        self.layers = nn.Sequential(nn.Linear(6, 16), middle, nn.ReLU(), nn.Linear(16, 3))

    def forward(self, x, labels):
        logits = self.layers(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def trainer(folder, middle=None, callbacks=(), **options):
    told = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "learning_rate": 0.05,
        "max_steps": 6,
        "logging_steps": 1,
        "save_steps": 2,
        "disable_tqdm": True,
        "use_cpu": True,
        "log_level": "error",
    }
    arguments = TrainingArguments(**{**told, **CANONICAL, **options})
    return Trainer(Net(middle), arguments, train_dataset=Noisy(50), callbacks=callbacks)


def weights(one):
    return torch.cat([value.flatten() for value in one.model.state_dict().values()])


@pytest.mark.parametrize(
    "options",
    [
        {"parallelism": "fsdp"},
        {"parallelism": "deepspeed"},
        {"parallelism": "auto"},
        {"parallelism_config": {"tp_size": 2}},
        {"parallelism_config": {"pp_size": 2}},
        {"gradient_accumulation_steps": 2},
        {"ddp_comm_hook": "fp16"},
        {"ddp_static_graph": True},
        {"ddp_broadcast_buffers": False},
        {"auto_find_batch_size": True},
        {"average_tokens_across_devices": False},
        {"random_numbers": "transformers"},
        {"torch_compile": True},
        {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}},
        {"global_train_batch_size": None},
        {"global_train_batch_size": 10},
        {"shard_optimizer_state": True, "optim": "adafactor"},
        {"shard_optimizer_state": True, "fp16": True},
    ],
    ids=str,
)
def test_what_cannot_keep_its_bits_is_refused_at_once(tmp_path, options):
    told = {"output_dir": str(tmp_path), "per_device_train_batch_size": 4, **CANONICAL, **options}
    with pytest.raises(
        ConfigError, match=r"canonical|global_train_batch_size|shard_optimizer_state"
    ):
        TrainingArguments(**told)


@pytest.mark.parametrize("name", ["global_train_batch_size", "shard_optimizer_state"])
def test_what_is_about_canonical_reduction_needs_it(name):
    with pytest.raises(ConfigError, match=f"{name}.*reduction='canonical'"):
        TrainingArguments(**{name: 4 if name == "global_train_batch_size" else True})


class Counts(nn.Module):
    """Counts its passes in a buffer, behind torch's back."""

    def __init__(self, from_pass=0):
        super().__init__()
        self.register_buffer("passes", torch.zeros(()))
        self.made, self.from_pass = 0, from_pass

    def forward(self, x):
        self.made += 1
        if self.made > self.from_pass:
            self.passes += 1
        return x


class Follows(nn.Module):
    """Has a parameter that follows what it sees, as a codebook or a teacher does."""

    def __init__(self, how):
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(()), requires_grad=False)
        self.how, self.made = how, 0

    def forward(self, x):
        self.made += 1
        seen = x.detach().mean()
        if self.how == "in place":
            self.mean.lerp_(seen, 0.1)
        elif self.how == "data":
            self.mean.data.lerp_(seen, 0.1)
        elif self.made > 5:
            self.mean = nn.Parameter(self.mean.lerp(seen, 0.1), requires_grad=False)
        return x + self.mean


@pytest.mark.parametrize("how", ["in place", "data", "another"])
def test_a_module_whose_parameter_follows_its_input_is_refused_by_name(tmp_path, how):
    with pytest.raises(ConfigError, match=r"`layers.1` \(Follows\).*parameter `mean`") as raised:
        trainer(tmp_path, Follows(how)).train()
    assert "on_step_end" in raised.value.hint


@pytest.mark.parametrize(
    ("middle", "why"),
    [
        (nn.BatchNorm1d(16), r"`layers.1` \(BatchNorm1d\).*running statistics"),
        (nn.SyncBatchNorm(16), r"`layers.1` \(SyncBatchNorm\).*all ranks"),
        (Counts(), r"`layers.1` \(Counts\).*buffer `passes`"),
        (nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16)), r"`layers.1.*SpectralNorm"),
        (Counts(from_pass=5), r"`layers.1` \(Counts\).*buffer `passes`"),
    ],
    ids=["batch norm", "synchronous", "a buffer", "spectral norm", "a buffer in the second step"],
)
def test_a_module_that_mixes_micro_batches_is_refused_by_name(tmp_path, middle, why):
    with pytest.raises(ConfigError, match=why):
        trainer(tmp_path, middle).train()


class Freezes(TrainerCallback):
    def on_train_begin(self, args, state, control, /, *, model, **_):
        for one in model.modules():
            if isinstance(one, nn.BatchNorm1d):
                one.eval()


def test_a_norm_without_running_statistics_or_a_frozen_one_is_trained(tmp_path):
    trainer(tmp_path / "own", nn.BatchNorm1d(16, track_running_stats=False)).train()
    trainer(tmp_path / "frozen", nn.BatchNorm1d(16), callbacks=[Freezes()]).train()


def test_sparse_gradients_are_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match=r"`layers.1` \(Embedding\) has sparse gradients"):
        trainer(tmp_path, nn.Embedding(4, 16, sparse=True)).train()


@pytest.mark.parametrize("shards", [False, True])
def test_a_run_that_dies_ends_as_one_that_did_not(tmp_path, shards):
    whole = trainer(tmp_path / "whole", shard_optimizer_state=shards)
    whole.train()
    dies = trainer(tmp_path / "died", callbacks=[DieAfter(5)], shard_optimizer_state=shards)
    with pytest.raises(Dies):
        dies.train()
    after = trainer(tmp_path / "died", shard_optimizer_state=shards)
    after.train()
    assert torch.equal(weights(after), weights(whole))
    assert after.state.log_history == whole.state.log_history


def test_a_step_is_one_of_the_mean_over_its_micro_batches(tmp_path):
    """Without anything random, it is the step of a loop that knows the whole batch."""
    options = {
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "max_steps": 1,
        "lr_scheduler_type": "constant",
    }
    one = trainer(tmp_path, nn.Identity(), **options)
    one.train_dataset.augment = False
    start = Net(nn.Identity())
    one.train()
    order = torch.randperm(50, generator=torch.Generator().manual_seed(42))[:12]
    loss = start(one.train_dataset.x[order], one.train_dataset.y[order])["loss"]
    loss.backward()
    for mine, expected in zip(one.model.parameters(), start.parameters(), strict=True):
        assert torch.allclose(mine, expected - 0.05 * expected.grad, atol=1e-7)


def test_the_rehearsal_leaves_no_trace(tmp_path, monkeypatch):
    whole = trainer(tmp_path / "whole")
    whole.train()
    monkeypatch.setattr(
        "resilient.train.canonical_reduction.check_first_micro_batch", lambda *_: ""
    )
    without = trainer(tmp_path / "without")
    without.train()
    assert torch.equal(weights(without), weights(whole))


def test_a_life_on_another_kind_of_host_is_refused_or_told(tmp_path, monkeypatch, capfd):
    trainer(tmp_path, max_steps=2).train()
    monkeypatch.setattr(canonical_reduction, "arithmetic_of", lambda *_: "another")
    with pytest.raises(
        ConfigError, match=r"this attempt computes other bits.*than the attempt that saved"
    ):
        trainer(tmp_path).train()
    trainer(tmp_path, on_arithmetic_mismatch="continue", log_level="warning").train()
    assert "this attempt computes other bits" in capfd.readouterr().err


def test_the_probe_sees_other_arithmetic_and_leaves_random_numbers_alone():
    cpu = torch.device("cpu")
    before = torch.get_rng_state()
    digest = checks.arithmetic_of(cpu, torch.float32)
    assert torch.equal(torch.get_rng_state(), before)
    assert checks.arithmetic_of(cpu, torch.float32) == digest
    assert checks.arithmetic_of(cpu, torch.bfloat16) != digest


def test_a_native_run_goes_on_canonically_and_back(tmp_path):
    native = {"reduction": "native", "global_train_batch_size": None}
    trainer(tmp_path, max_steps=2, **native).train()
    trainer(tmp_path, max_steps=4).train()
    last = trainer(tmp_path, max_steps=6, **native)
    last.train()
    assert [one["step"] for one in last.state.log_history if "loss" in one] == [1, 2, 3, 4, 5, 6]


def test_threads_are_set_and_one_by_default(tmp_path):
    before = torch.get_num_threads()
    try:
        trainer(tmp_path, threads_per_rank=2)
        assert torch.get_num_threads() == 2
        trainer(tmp_path)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
