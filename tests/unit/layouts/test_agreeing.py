"""What a folder of the Trainer says of itself in two places must be the same in both."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch
from transformers import TrainingArguments

from resilient.diff.foreign_verify import verify_foreign
from resilient.layouts.detect import read_layout
from resilient.layouts.resumability import assess_resumability
from resilient.storage.folder import open_folder

HERE = Path(__file__).parents[2] / "golden" / "transformers"
SHARED = Path(__file__).parents[4] / "shared" / "fixtures" / "hf"
WHOLE = sorted(one for at in (HERE, SHARED) for one in at.glob("*/run/checkpoint-*"))


def problems_of(path):
    """Return what is found at the deepest level."""
    folder = open_folder(str(path))
    contents = read_layout(folder, folder.list())
    return contents, (*contents.problems, *verify_foreign(folder, folder.list(), contents))


def look(path):
    """Return the answer and all that is said."""
    contents, problems = problems_of(path)
    contents = type(contents)(contents.layout, contents.title, problems=problems)
    told = " ".join(f"{one.place}: {one.what}" for one in problems)
    return assess_resumability(contents, str(path)).answer, told


@pytest.mark.parametrize("path", WHOLE, ids=lambda path: f"{path.parts[-3]}-{path.name}")
def test_nothing_is_found_in_a_whole_checkpoint(path):
    """But of a stream that begins anew: its recorded resumes took other data than the run."""
    report = path.parents[1] / "resume_report.json"
    resumes = json.loads(report.read_text())["resumes"] if report.exists() else []
    step = int(path.name.partition("-")[2])
    is_moved = any(one["from"] == step and not one["order_equal"] for one in resumes)
    # Of the last one of a run there is no resume to have been recorded.
    is_moved = is_moved or (path.parts[-3] == "gpt2_iterable" and step == 24)
    lost = {one.loses for one in problems_of(path)[1]}
    assert lost == ({"the place in the data"} if is_moved else set())


@pytest.fixture
def single(tmp_path):
    source = HERE / "gpt2_all" / "run" / "checkpoint-8"
    return Path(shutil.copytree(source, tmp_path / source.name))


@pytest.fixture
def ranks(tmp_path):
    source = HERE / "gpt2_ddp2_all" / "run" / "checkpoint-4"
    return Path(shutil.copytree(source, tmp_path / source.name))


def change(path, of):
    """Change what a file of torch's holds."""
    value = torch.load(path, weights_only=False)
    of(value)
    torch.save(value, path)


def edit(path, of):
    """Change what a document holds."""
    value = json.loads(path.read_text())
    of(value)
    path.write_text(json.dumps(value))


@pytest.mark.parametrize(
    ("of", "why"),
    [
        (lambda rng: rng.pop("python"), "it has no `python`"),
        (lambda rng: rng.update(cpu=rng["cpu"][:10].clone()), "its `cpu`"),
        (lambda rng: rng.update(cpu=rng["cpu"].float()), "its `cpu`"),
        (
            lambda rng: rng["cpu"].zero_(),
            "its `cpu` is not a state that the generator of torch accepts",
        ),
        (lambda rng: rng.update(python=(2, *rng["python"][1:])), "its `python`"),
        (lambda rng: rng.update(python=(3, rng["python"][1][:9], None)), "its `python`"),
        (lambda rng: rng.update(numpy=("PCG64", *rng["numpy"][1:])), "its `numpy`"),
        (lambda rng: rng.update(numpy=("MT19937", rng["numpy"][1][:9].copy(), 3)), "its `numpy`"),
    ],
)
def test_a_random_state_that_no_generator_takes_stops_its_trainer(single, of, why):
    change(single / "rng_state.pth", of)
    answer, told = look(single)
    assert answer == "no"
    assert f"rng_state.pth: {why}" in told


def test_a_numbered_random_state_alone_is_that_of_a_world_with_a_rank_lost(ranks):
    (ranks / "rng_state_1.pth").unlink()
    answer, told = look(ranks)
    assert answer == "partly"
    assert "ranks without a random state: 1" in told


def _of_each(held, of):
    """Change the state of each parameter."""
    for key, one in held["state"].items():
        held["state"][key] = of(one)


def _without(*names):
    return lambda one: {name: value for name, value in one.items() if name not in names}


def _swap_first(groups):
    groups[0]["params"][0] = groups[1]["params"][0]


@pytest.mark.parametrize(
    ("of", "answer", "why"),
    [
        (lambda held: held.update(param_groups=[]), "no", "no parameter groups"),
        (lambda held: _swap_first(held["param_groups"]), "no", "is twice in its groups"),
        (lambda held: held["param_groups"][1]["params"].pop(), "no", "belongs to no parameter"),
        (lambda held: held["param_groups"][1].update(lr=float("nan")), "no", "`lr` of its group 1"),
        (lambda held: held["param_groups"][0].update(betas=(0.9, float("inf"))), "no", "`betas`"),
        (lambda held: held["state"].clear(), "partly", "no state of any parameter"),
        (lambda held: _of_each(held, _without("exp_avg")), "no", "has no `exp_avg`"),
        (
            lambda held: _of_each(held, _without("exp_avg", "exp_avg_sq")),
            "no",
            "groups are of Adam",
        ),
        (lambda held: _of_each(held, _without("step")), "no", "has no `step`"),
        (lambda held: held["param_groups"].reverse(), "no", "are not in order"),
    ],
)
def test_groups_that_do_not_fit_their_states_are_told(single, of, answer, why):
    change(single / "optimizer.pt", of)
    found, told = look(single)
    assert found == answer
    assert "optimizer.pt: " in told
    assert why in told


@pytest.mark.parametrize(
    ("of", "answer", "why"),
    [
        (lambda held: held.update(last_epoch=-1), "partly", "it is at step -1"),
        (lambda held: held.update(base_lrs=[0.0, 0.0]), "no", "0, but its last rate was"),
        (lambda held: held.update(base_lrs=[0.003, 0.0]), "no", "group 1 starts from a rate of 0"),
        (
            lambda held: held.update(base_lrs=[0.0, 0.0], _last_lr=[0.0, 0.0]),
            "no",
            "0, but its initial rate in the optimizer is 0.003",
        ),
        (lambda held: held.update(base_lrs=[1.0, 1.0]), "yes", "computes its rate from 1"),
    ],
)
def test_a_schedule_that_would_begin_anew_is_told(single, of, answer, why):
    change(single / "scheduler.pt", of)
    found, told = look(single)
    assert found == answer
    assert why in told


def test_base_rates_of_zero_contradict_the_arguments(single):
    """The schedule and the optimizer may both have lost their rates."""
    change(
        single / "scheduler.pt", lambda held: held.update(base_lrs=[0.0] * 2, _last_lr=[0.0] * 2)
    )
    change(single / "optimizer.pt", lambda held: _of_groups(held, lr=0.0, initial_lr=0.0))
    assert look(single) == ("yes", "")
    save_arguments(single)
    answer, told = look(single)
    assert answer == "no"
    assert "the `learning_rate` of its run is 0.003" in told


def test_group_with_a_rate_of_zero_on_purpose_is_healthy(single):
    change(single / "scheduler.pt", lambda held: _to_zero(held, "base_lrs", "_last_lr"))
    change(
        single / "optimizer.pt", lambda held: held["param_groups"][0].update(lr=0.0, initial_lr=0.0)
    )
    save_arguments(single)
    assert look(single) == ("yes", "")


def _to_zero(held, *names):
    for name in names:
        held[name][0] = 0.0


def _of_groups(held, **options):
    for group in held["param_groups"]:
        group.update(options)


def save_arguments(path):
    torch.save(
        TrainingArguments(learning_rate=0.003, weight_decay=0.01), path / "training_args.bin"
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [("betas", (0, 0)), ("eps", 0.0), ("weight_decay", 1e3), ("maximize", True)],
)
def test_option_that_the_arguments_contradict_is_a_loss(single, name, value):
    save_arguments(single)
    assert look(single) == ("yes", "")
    change(single / "optimizer.pt", lambda held: _of_groups(held, **{name: value}))
    answer, told = look(single)
    assert answer == "partly"
    assert f"optimizer.pt: `{name}` of its group 0 is " in told
    assert "but the arguments" in told


def _into_one(held, decays):
    """Move all parameters into the first of two groups, as a script with an empty group does."""
    members = [number for group in held["param_groups"] for number in group["params"]]
    for group, numbers, decay in zip(held["param_groups"], (members, []), decays, strict=True):
        group.update(params=numbers, weight_decay=decay)


@pytest.mark.parametrize(
    ("decays", "answer"),
    [
        ((0.05, 0.05), "yes"),  # the optimizer of a script
        ((0.01, 0.01), "yes"),
        ((0.01, 0.0), "yes"),  # the Trainer's own
        ((0.05, 0.0), "partly"),
    ],
)
def test_empty_group_shows_who_made_the_optimizer(single, decays, answer):
    save_arguments(single)
    change(single / "optimizer.pt", lambda held: _into_one(held, decays))
    assert look(single)[0] == answer


def test_options_of_an_empty_group_contradict_nothing(single):
    save_arguments(single)
    change(single / "optimizer.pt", lambda held: _into_one(held, (0.01, 0.0)))
    change(single / "optimizer.pt", lambda held: held["param_groups"][1].update(betas=(0.5, 0.5)))
    assert look(single) == ("yes", "")


def test_default_decay_in_both_groups_is_that_of_a_script(single):
    save_arguments(single)
    change(single / "optimizer.pt", lambda held: _of_groups(held, weight_decay=0.01))
    assert look(single) == ("yes", "")


def beside(single, step):
    """Return a copy of a checkpoint as another step, with other numbers in each file."""
    path = Path(shutil.copytree(single, single.with_name(f"checkpoint-{step}")))
    file = path / "model.safetensors"
    weights = {name: one * 2 for name, one in safetensors.torch.load_file(file).items()}
    safetensors.torch.save_file(weights, file, {"format": "pt"})
    change(
        path / "optimizer.pt",
        lambda held: [one["exp_avg"].mul_(2) for one in held["state"].values()],
    )
    change(path / "rng_state.pth", lambda held: held["cpu"][64:72].fill_(step))
    edit(path / "trainer_state.json", lambda state: state.update(global_step=step, log_history=[]))
    return path


@pytest.mark.parametrize(
    ("option", "steps", "answer"),
    [
        ({"eps": 0.0}, (6, 10), "partly"),
        ({"eps": 0.0}, (4, 6), "yes"),  # a script may change a number from one step on
        ({"maximize": True}, (4, 6), "partly"),
        ({"maximize": True}, (6,), "yes"),
        ({"betas": (0.5, 0.5), "max_momentum": 0.9}, (6, 10), "yes"),
    ],
)
def test_option_is_judged_by_the_steps_beside(single, option, steps, answer):
    for step in steps:
        beside(single, step)
    change(single / "optimizer.pt", lambda held: _of_groups(held, **option))
    assert look(single)[0] == answer
    for step in steps:
        path = single.with_name(f"checkpoint-{step}") / "optimizer.pt"
        change(path, lambda held: _of_groups(held, **option))
    save_arguments(single)
    assert look(single) == ("yes", "")


@pytest.mark.parametrize("steps", [(), (6, 10)])
def test_base_rates_that_the_run_contradicts_are_a_loss(single, steps):
    for step in steps:
        beside(single, step)
    if not steps:
        save_arguments(single)
    factor = lambda held: held.update(base_lrs=[10 * one for one in held["base_lrs"]])  # noqa: E731
    change(single / "scheduler.pt", factor)
    answer, told = look(single)
    assert answer == "partly"
    assert "starts from a rate of 0.03, but its initial rate" in told
    for step in steps:
        change(single.with_name(f"checkpoint-{step}") / "scheduler.pt", factor)
    assert look(single)[0] == ("yes" if steps else "partly")


def test_weights_of_a_newer_step_are_told(single):
    newer = beside(single, 12)
    assert look(single) == ("yes", "")
    shutil.copyfile(newer / "model.safetensors", single / "model.safetensors")
    answer, told = look(single)
    assert answer == "partly"
    assert "byte for byte that of checkpoint-12 beside it" in told


def test_weights_that_a_newer_step_took_are_no_loss_of_the_older(single):
    newer = beside(single, 12)
    shutil.copyfile(single / "model.safetensors", newer / "model.safetensors")
    saved = (single / "model.safetensors").stat().st_mtime
    for at, path in ((saved, single), (saved + 60, newer)):
        for file in path.iterdir():
            os.utime(file, (at, at))
    os.utime(newer / "model.safetensors", (saved, saved))
    assert look(single) == ("yes", "")
    assert look(newer)[0] == "partly"


def test_weights_of_two_steps_without_telling_times_are_a_loss_of_the_newer(single):
    newer = beside(single, 12)
    shutil.copyfile(single / "model.safetensors", newer / "model.safetensors")
    for path in (*single.iterdir(), *newer.iterdir()):
        os.utime(path, (1e9, 1e9))
    answer, told = look(single)
    assert (answer, "checkpoint-12 may have the file of this step" in told) == ("yes", True)
    assert look(newer)[0] == "partly"


@pytest.mark.parametrize("has_beside", [False, True])
def test_float_weight_stored_as_integers_is_refused(single, has_beside):
    if has_beside:
        beside(single, 12)
    file = single / "model.safetensors"
    weights = safetensors.torch.load_file(file)
    name = next(iter(weights))
    safetensors.torch.save_file({**weights, name: weights[name].int()}, file, {"format": "pt"})
    answer, told = look(single)
    assert answer == "no"
    assert f"`{name}` is I32, but the optimizer trains" in told
    # A buffer of integers is none of the optimizer's.
    steps = torch.arange(len(weights))
    safetensors.torch.save_file({**weights, "steps": steps}, file, {"format": "pt"})
    assert look(single)[0] == "yes"


def test_moments_beyond_any_gradient_are_refused(single):
    def grow(held):
        for one in held["state"].values():
            one["exp_avg"].mul_(1e20)

    change(single / "optimizer.pt", grow)
    answer, told = look(single)
    assert answer == "no"
    assert "beyond the scale of any gradient" in told


def test_amsgrad_without_its_moments_is_refused(single):
    change(single / "optimizer.pt", lambda held: _of_groups(held, amsgrad=True))
    answer, told = look(single)
    assert answer == "no"
    assert "has no `max_exp_avg_sq`" in told


def test_fraction_of_a_call_in_a_schedule_is_refused(single):
    change(single / "scheduler.pt", lambda held: held.update(last_epoch=7.5))
    answer, told = look(single)
    assert answer == "no"
    assert "it is at step 7.5, but it counts whole calls" in told


def test_schedule_that_counts_no_calls_is_healthy(single):
    change(single / "scheduler.pt", lambda held: held.update(_step_count=0))
    assert look(single) == ("yes", "")


def test_betas_of_an_optimizer_of_the_script_are_healthy(single):
    save_arguments(single)
    change(single / "optimizer.pt", lambda held: _of_groups(held, betas=(0.9, 0.95), eps=1e-6))
    assert look(single) == ("yes", "")


@pytest.mark.parametrize("name", ["total_flos", "train_batch_size"])
def test_what_its_trainer_counts_with_is_a_number_and_is_repaired(single, name):
    before = json.loads((single / "trainer_state.json").read_text())
    edit(single / "trainer_state.json", lambda state: state.update({name: None}))
    answer, told = look(single)
    assert answer == "no"
    assert f"its `{name}` is not a number" in told
    assert isinstance(before[name], int | float)


def test_missing_batch_size_is_named_as_missing(single):
    edit(single / "trainer_state.json", lambda state: state.pop("train_batch_size"))
    answer, told = look(single)
    assert answer == "no"
    assert "it has no `train_batch_size`" in told
    assert "not a number" not in told


@pytest.mark.parametrize("wrapper", ["module.", "_orig_mod."])
def test_weights_named_as_in_a_wrapper_are_told(single, wrapper):
    weights = safetensors.torch.load_file(single / "model.safetensors")
    renamed = {wrapper + name: one for name, one in weights.items()}
    safetensors.torch.save_file(renamed, single / "model.safetensors")
    answer, told = look(single)
    assert answer == "partly"
    assert f"named `{wrapper}...`" in told


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt"])
def test_a_pointer_of_git_lfs_is_named(single, name):
    (single / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    answer, told = look(single)
    assert answer == "no"
    assert f"{name}: it is a pointer of Git LFS" in told


@pytest.mark.parametrize("text", ["{", "", "[]"])
def test_a_configuration_that_is_none_stops_a_resume_and_one_that_is_gone_does_not(single, text):
    (single / "config.json").write_text(text)
    answer, told = look(single)
    assert answer == "no"
    assert "config.json: it is" in told
    (single / "config.json").unlink()
    assert look(single)[0] == "partly"
    (single / "generation_config.json").unlink()
    assert look(single) == ("yes", "")


def test_arguments_that_are_cut_stop_no_resume(single):
    path = single / "training_args.bin"
    torch.save({"seed": 1}, path)
    path.write_bytes(path.read_bytes()[:100])
    answer, told = look(single)
    assert answer == "yes"
    assert "training_args.bin: it is not a complete zip" in told


@pytest.mark.parametrize(
    ("name", "of", "answer", "why"),
    [
        ("trainer_state.json", {"best_metric": 1.0}, "partly", "best metric is 1, but its log"),
        ("trainer_state.json", {"epoch": 0.1}, "yes", "its epoch is 0.1 at step 8"),
        ("trainer_state.json", {"epoch": 3.0}, "yes", "its epoch is 3 at step 8"),
        ("config.json", {"n_embd": 64}, "yes", "its `n_embd` is 64, and"),
        ("config.json", {"n_layer": 7}, "yes", "its `n_layer` is 7, and the weights are of 2"),
        ("config.json", {"vocab_size": 7}, "yes", "its `vocab_size` is 7, and"),
    ],
)
def test_a_document_that_contradicts_another_is_told(single, name, of, answer, why):
    edit(single / name, lambda value: value.update(of))
    found, told = look(single)
    assert found == answer
    assert told.startswith(f"{name}: ")
    assert why in told


def test_a_log_of_the_future_is_told(single):
    more = {"step": 99, "epoch": 9.0, "loss": 1.0}
    edit(single / "trainer_state.json", lambda value: value["log_history"].append(more))
    answer, told = look(single)
    assert answer == "yes"
    assert told == "trainer_state.json: its log continues to step 99, beyond its own 8"


@pytest.mark.parametrize(
    ("of", "answer", "why"),
    [
        (lambda held: held.update(_step_count=5), "yes", "it counts 5 calls at step 8"),
        (lambda held: held.update(base_lrs=[float("nan")] * 2), "no", "initial rate is nan"),
        (lambda held: held.update(_last_lr=[0.5, 0.5]), "partly", "learning rate of group 0"),
    ],
)
def test_a_schedule_that_contradicts_itself_or_the_optimizer_is_told(single, of, answer, why):
    change(single / "scheduler.pt", of)
    found, told = look(single)
    assert found == answer
    assert why in told


def _back(held):
    for one in held["state"].values():
        one["step"].fill_(3)


def test_an_optimizer_that_is_behind_is_of_another_step_unless_a_scaler_skipped(single):
    change(single / "optimizer.pt", _back)
    answer, told = look(single)
    assert answer == "partly"
    assert "the optimizer made 3 updates by step 8" in told
    torch.save({"scale": 2.0}, single / "scaler.pt")
    assert look(single) == ("yes", "")


def test_a_square_that_is_negative_makes_weights_nan(single):
    change(single / "optimizer.pt", lambda held: held["state"][0]["exp_avg_sq"].fill_(-1))
    answer, told = look(single)
    assert answer == "no"
    assert "optimizer.pt: `state.0.exp_avg_sq` has " in told
    assert "negative" in told


def test_weights_that_are_all_zero_are_none(single):
    path = single / "model.safetensors"
    data = path.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    path.write_bytes(data[:begin] + bytes(len(data) - begin))
    answer, told = look(single)
    assert answer == "no"
    assert "model.safetensors: every number in it is zero" in told


def test_a_file_of_new_weights_with_more_beside_them_is_whole(tmp_path):
    """A bias begins at zero, and a rank may write no other weight beside its part of the rest."""
    moment = {"exp_avg": torch.ones(2048)}
    optimizer = {"state": {0: moment}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    torch.save({"model": {"bias": torch.zeros(2048)}, "optimizer": optimizer}, tmp_path / "a.pt")
    contents, problems = problems_of(tmp_path / "a.pt")
    assert {one.part for one in contents.tensors} == {"model", "optimizer"}
    assert not [one for one in problems if "zero" in one.what]


def test_a_parameter_that_is_out_of_step_with_the_others_is_told(single):
    change(single / "optimizer.pt", lambda held: held["state"][5]["step"].fill_(3))
    answer, told = look(single)
    assert answer == "yes"
    assert told == (
        "optimizer.pt: `state.5.step` is 3, but most others are 8: a parameter that was frozen, or "
        "had no gradient, has fewer updates"
    )
