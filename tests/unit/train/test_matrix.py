"""Every optimizer with every schedule: a run that was interrupted ends like one that was not.

A subset covers each of them once; ``make matrix`` runs all pairs.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch

from resilient.errors import ConfigError
from resilient.train.arguments import TrainingArguments
from resilient.train.arguments.choices import OPTIMIZERS
from resilient.train.arguments.validation import NEVER
from resilient.train.optimizers import MAKERS, create_optimizer
from resilient.train.schedules import SCHEDULES
from tests.helpers.endings import differences, ending
from tests.unit.train.models import DieAfter, Dies, make_trainer

# Where they come from, if not from torch.
PACKAGES = {
    "adafactor": "transformers",
    "lion": "lion_pytorch",
    "stable_adamw": "optimi",
    "galore_adamw": "galore_torch",
    "galore_adamw_8bit": "galore_torch",
    "galore_adafactor": "galore_torch",
    "apollo_adamw": "apollo_torch",
    "adamw_torch_4bit": "torchao",
    "adamw_torch_8bit": "torchao",
    "schedule_free_adamw": "schedulefree",
    "schedule_free_radam": "schedulefree",
    "schedule_free_sgd": "schedulefree",
}
# Their steps are kernels for CUDA.
ON_GPU = {"galore_adamw_8bit"}
MORE = {
    "galore_adamw": {"optim_args": "rank=2,update_proj_gap=3"},
    "galore_adafactor": {"optim_args": "rank=2,update_proj_gap=3"},
    "apollo_adamw": {"optim_args": {"rank": 2, "update_proj_gap": 3}},
    "sgd": {"optim_args": "momentum=0.9,nesterov=true"},
    "ademamix": {"optim_args": "t_alpha=5"},
}
FED = {"reduce_lr_on_plateau": {"patience": 0}, "greedy": {"patience": 0, "min_lr": 1e-4}}
NEEDED = {
    "cosine_with_min_lr": {"min_lr_rate": 0.1},
    "cosine_warmup_with_min_lr": {"min_lr_rate": 0.1},
    "warmup_stable_decay": {"num_decay_steps": 3},
    **FED,
}


def module_of(optimizer):
    made_by = MAKERS[optimizer].__name__
    return "bitsandbytes" if made_by == "bitsandbytes" else PACKAGES.get(optimizer, "torch")


def pairs():
    """Return each optimizer with one schedule, so that each schedule is there too."""
    schedules = list(SCHEDULES)
    for number, optimizer in enumerate(MAKERS):
        yield optimizer, schedules[number % len(schedules)], True
        for schedule in schedules:
            if schedule != schedules[number % len(schedules)]:
                yield optimizer, schedule, False


def options_of(optimizer, schedule):
    options = {
        "optim": optimizer,
        "optim_target_modules": "all-linear",
        "lr_scheduler_type": "constant" if "schedule_free" in optimizer else schedule,
        "learning_rate": 0.01,
        "max_steps": 10,
        "warmup_steps": 2,
        "weight_decay": 0.01,
        **MORE.get(optimizer, {}),
    }
    options["lr_scheduler_kwargs"] = NEEDED.get(options["lr_scheduler_type"])
    if options["lr_scheduler_type"] in FED or "schedule_free" in optimizer:
        options |= {"eval_strategy": "steps", "eval_steps": 2, "eval_size": 9}
    return options


def end_of(folder, deaths, options):
    """Train through the deaths; return what the newest checkpoint on disk holds."""
    for step in deaths:
        with pytest.raises(Dies):
            make_trainer(folder, callbacks=[DieAfter(step)], **options).train()
    make_trainer(folder, **options).train()
    return ending(folder)


@pytest.fixture
def eager():
    """Have nothing compiled."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.mark.filterwarnings(
    "ignore:Paged optimizers are not supported on CPU",
    "ignore:This implementation of AdamW is deprecated:FutureWarning",
    "ignore:.*torch.cuda.amp.autocast.*:FutureWarning",
)
@pytest.mark.parametrize(("optimizer", "schedule", "covers"), list(pairs()))
@pytest.mark.usefixtures("eager")
def test_an_interrupted_run_equals_an_unbroken_one(request, tmp_path, optimizer, schedule, covers):
    everything = request.config.getoption("--matrix")
    if not (covers or everything):
        pytest.skip("one of all pairs: make matrix")
    if importlib.util.find_spec(module_of(optimizer)) is None:
        pytest.skip(f"{module_of(optimizer)} is not installed")
    if optimizer in ON_GPU and not torch.cuda.is_available():
        pytest.skip("its kernels are CUDA's")
    options = options_of(optimizer, schedule)
    unbroken = end_of(tmp_path / "unbroken", [], options)
    assert differences(end_of(tmp_path / "broken", [5, 7], options), unbroken) == []


@pytest.mark.parametrize("schedule", FED)
def test_a_rate_is_moved_by_the_metric_of_evaluations(tmp_path, schedule):
    options = options_of("sgd", schedule)
    optimizer = end_of(tmp_path, [], options)["optimizer"]
    rates = {group["lr"] for group in optimizer["param_groups"]}
    assert rates != {0.01}


def test_every_name_makes_an_optimizer_or_says_why_there_is_none():
    assert set(MAKERS) == set(OPTIMIZERS) - set(NEVER["optim"])


def test_a_forgotten_optimizer_state_would_be_seen(tmp_path):
    options = options_of("adagrad", "linear")
    kept = end_of(tmp_path / "kept", [], options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.Adagrad, "load_state_dict", lambda *_: None)
        forgotten = end_of(tmp_path / "forgotten", [5], options)
    assert any(line.startswith("/optimizer") for line in differences(kept, forgotten))


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("sgd", {"optim_args": "momentun=0.9"}, "did you mean `momentum`"),
        ("sgd", {"optim_args": "momentum=much"}, "which is not a float"),
        ("sgd", {"optim_args": "momentum"}, "is not key=value"),
        ("adamw_torch", {"optim_args": "rank=2"}, "it has none"),
        ("galore_adamw", {}, "needs `optim_target_modules`"),
        ("galore_adamw", {"optim_target_modules": ["q_proj"]}, "no linear module"),
        ("schedule_free_sgd", {}, "has no use for `lr_scheduler_type`"),
    ],
)
def test_what_an_optimizer_cannot_do_is_refused(name, options, said):
    pytest.importorskip(module_of(name))
    with pytest.raises(ConfigError, match=said):
        create_optimizer(TrainingArguments(optim=name, **options), torch.nn.Linear(2, 2))


def test_an_absent_package_is_an_error_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "lion_pytorch", None)
    with pytest.raises(ConfigError) as error:
        create_optimizer(TrainingArguments(optim="lion"), torch.nn.Linear(2, 2))
    assert error.value.hint == "pip install lion-pytorch"


def test_muon_takes_matrices_and_leaves_embeddings_to_adamw():
    model = torch.nn.Sequential(torch.nn.Embedding(4, 3), torch.nn.Linear(3, 2))
    optimizer = create_optimizer(TrainingArguments(optim="muon", learning_rate=0.1), model)
    before = [one.clone() for one in model.parameters()]
    model(torch.tensor([1, 2])).square().sum().backward()
    optimizer.step()
    kinds = [set(optimizer.state[one]) for one in model.parameters()]
    assert kinds == [
        {"step", "exp_avg", "exp_avg_sq"},
        {"momentum_buffer"},
        {"step", "exp_avg", "exp_avg_sq"},
    ]
    assert not any(map(torch.equal, before, model.parameters()))
