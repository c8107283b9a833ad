"""A run of Transformers becomes one of ours, once, and is then as safe as any."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from resilient.errors import (
    ConfigError,
    IncompatibleCheckpoint,
    IntegrityError,
    NothingToResume,
    SignatureRefused,
)
from resilient.state_dict.snapshot import Part
from resilient.train.arguments.resume_rules import changes_at_import
from resilient.train.data.ordering import draw_for_loader
from resilient.train.data.sampler import DataCursor
from resilient.train.hf_interop import import_check
from resilient.train.hf_interop.checkpoint import TransformersCheckpoint
from resilient.train.hf_interop.conversion import RawState
from resilient.train.hf_interop.importer import Import, prepare_import
from tests.helpers.hf_runs import BASE, CASES, EVAL, HERE, SHARED, checkpoint_of, make, read_record
from tests.unit.train.models import DieAfter, Dies

MODEL = "model.safetensors"
EVALUATED = {**EVAL, "greater_is_better": False}


def trainer(folder, *, callbacks=(), **options):
    made = make("reg_sgd", folder, callbacks=callbacks, **options)
    if "eval_strategy" in options:
        made.eval_dataset = made.train_dataset
    return made


@pytest.fixture
def whole(tmp_path, theirs):
    """Return a run that was taken over and never died; its evaluations draw as theirs do."""
    run = trainer(tmp_path / "whole", **EVALUATED)
    run.train(str(theirs))
    return run


def test_a_run_goes_on_with_its_samples_and_its_schedule(tmp_path, theirs):
    run = trainer(tmp_path / "out")
    run.train(theirs)
    expected = read_record("reg_sgd")
    assert [one for one, _ in run.seen] == [one for one, _ in expected["seen"][7:]]
    rates = [one["learning_rate"] for one in run.state.log_history if "loss" in one]
    assert rates == [one["learning_rate"] for one in expected["log_history"] if "loss" in one]
    losses = [float.fromhex(one) for _, one in run.seen]
    assert losses == pytest.approx([float.fromhex(one) for _, one in expected["seen"][7:]], 1e-4)


@pytest.mark.parametrize("dies_after", [9, 20, 27])
def test_a_run_that_dies_afterwards_ends_as_one_that_did_not(tmp_path, theirs, whole, dies_after):
    out, losses = tmp_path / "out", {}
    for callbacks in ([DieAfter(dies_after)], []):
        run = trainer(out, callbacks=callbacks, **EVALUATED)
        if callbacks:
            with pytest.raises(Dies):
                run.train(theirs)
        else:
            # The same command again; what it came from is not needed any more.
            shutil.move(theirs, theirs.parent / "gone")
            run.train()
        first = run.state.global_step - len(run.seen)
        losses |= {first + nth: one for nth, one in enumerate(run.seen)}
    assert list(losses.values()) == whole.seen
    assert torch.equal(run.model.lin.weight, whole.model.lin.weight)
    assert run.state.log_history[-3] == whole.state.log_history[-3]


def test_an_evaluation_in_the_log_without_an_epoch_is_no_obstacle(tmp_path, theirs, whole):
    path = theirs / "trainer_state.json"
    state = json.loads(path.read_text())
    state["log_history"].insert(0, {"eval_loss": 1.0, "step": 0})
    path.write_text(json.dumps(state))
    run = trainer(tmp_path / "out", **EVALUATED)
    run.train(theirs)
    assert run.seen == whole.seen


def test_random_numbers_are_drawn_for_a_loader_as_theirs_and_only_then():
    def left(origin):
        torch.manual_seed(3)
        draw_for_loader(DataCursor(8, 0, origin=origin))
        return torch.get_rng_state()

    untouched = torch.manual_seed(3).get_state()
    torch.utils.data.DataLoader([1]).__iter__()  # draws one number for its workers
    assert torch.equal(left({"trainer": "transformers"}), torch.get_rng_state())
    assert torch.equal(left(None), untouched)


def test_the_same_request_again_goes_on_from_what_is_newest(tmp_path, theirs):
    out = tmp_path / "out"
    with pytest.raises(Dies):
        trainer(out, callbacks=[DieAfter(16)]).train(theirs)
    run = trainer(out)
    run.train(theirs)
    assert len(run.seen) == 40 - 14


def launched_with(run, monkeypatch, reference):
    rank_group = run.session.rank_group
    monkeypatch.setattr(rank_group, "launch", replace(rank_group.launch, resume=reference))
    return run


@pytest.mark.parametrize("is_launched", [False, True])
@pytest.mark.parametrize("died", [(9, None), (16, None), (30, 1)])
def test_the_same_request_goes_on_without_its_source(
    tmp_path, theirs, monkeypatch, capsys, is_launched, died
):
    """The import is all there is, there is a newer step, or retention deleted the import."""
    dies_after, limit = died
    out = tmp_path / "out"
    with pytest.raises(Dies):
        trainer(out, callbacks=[DieAfter(dies_after)], save_total_limit=limit).train(theirs)
    last = max(int(name.split("-")[1]) for name in commits(out))
    assert (limit is None) == ("checkpoint-7-g1" in commits(out))
    shutil.rmtree(theirs)
    run = trainer(out)
    named = theirs.parent / "elsewhere" / ".." / theirs.name
    capsys.readouterr()
    if is_launched:
        launched_with(run, monkeypatch, str(named)).train()
    else:
        run.train(named)
    assert len(run.seen) == 40 - last
    assert f"`{named}` is gone: this run began from it" in capsys.readouterr().err


def test_a_deleted_source_of_no_record_is_refused(tmp_path, theirs, monkeypatch):
    out, gone = tmp_path / "out", tmp_path / "gone" / "checkpoint-7"
    trainer(out, max_steps=8).train(theirs)
    before = names_in(out)
    with pytest.raises(NothingToResume, match="there is no folder") as refused:
        launched_with(trainer(out), monkeypatch, str(gone)).train()
    monkeypatch.undo()
    assert refused.value.hint.startswith("to continue the run that is there: resilient train")
    assert "--resume auto" in refused.value.hint
    with pytest.raises(ConfigError, match="is not in the repository") as refused:
        trainer(out).train(str(gone))
    assert refused.value.hint.startswith("to continue its run: omit `resume_from_checkpoint`")
    # A later run in the same place did not begin from the folder that an earlier one took over.
    trainer(out, max_steps=9).train(resume_from_checkpoint=False)
    shutil.rmtree(theirs)
    with pytest.raises(ConfigError, match="did not start from it"):
        trainer(out).train(str(theirs))
    assert set(before) < set(names_in(out))


def names_in(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_a_file_url_names_a_folder(tmp_path, theirs, monkeypatch):
    named = trainer(tmp_path / "named")
    named.train(f"file://{theirs}")
    launched = trainer(tmp_path / "launched")
    rank_group = launched.session.rank_group
    monkeypatch.setattr(rank_group, "launch", replace(rank_group.launch, resume=f"file://{theirs}"))
    launched.train()
    assert len(named.seen) == len(launched.seen) == 40 - 7


def test_a_repository_of_another_run_is_refused(tmp_path, theirs):
    out = tmp_path / "out"
    trainer(out, max_steps=2).train()
    before = names_in(out)
    with pytest.raises(ConfigError, match="did not start from it"):
        trainer(out).train(theirs)
    assert names_in(out) == before, "nothing was claimed or written"


def test_parts_that_they_know_nothing_of_begin_as_they_are(tmp_path, theirs):
    class Count:
        number = 5

        def state_dict(self):
            return {"number": self.number}

        def load_state_dict(self, state):
            self.number = state["number"]

    run, mine = trainer(tmp_path / "out"), Count()
    run.register("mine", mine)
    run.train(theirs)
    assert mine.number == 5


def commits(out):
    return sorted(one.name for one in out.glob("checkpoint-*"))


def test_import_of_another_model_commits_nothing(tmp_path):
    out = tmp_path / "out"
    with pytest.raises(IncompatibleCheckpoint, match="groups of"):
        trainer(out).train(checkpoint_of("gpt2_all", 8))
    assert not commits(out)


def spoil_nan(folder):
    weights = load_file(folder / MODEL)
    weights["lin.weight"][0, 0] = float("nan")
    save_file(weights, folder / MODEL)


def spoil_missing(folder):
    weights = load_file(folder / MODEL)
    del weights["lin.bias"]
    save_file(weights, folder / MODEL)


def spoil_batch_size(folder):
    """Leave what Transformers before 4.36 left."""
    file = folder / "trainer_state.json"
    state = json.loads(file.read_text())
    for name in ("train_batch_size", "stateful_callbacks", "best_global_step"):
        state.pop(name, None)
    file.write_text(json.dumps(state))


def spoil_args(folder):
    (folder / "training_args.bin").write_bytes(b"cos\nsystem\n(S'exit 9'\ntR.")


@pytest.mark.parametrize("spoil", [spoil_nan, spoil_missing, spoil_batch_size, spoil_args])
def test_failed_import_commits_nothing_and_mended_folder_works(tmp_path, theirs, spoil):
    kept, out = shutil.copytree(theirs, tmp_path / "kept"), tmp_path / "out"
    spoil(theirs)
    with pytest.raises((IntegrityError, IncompatibleCheckpoint), match="Nothing was committed"):
        trainer(out).train(theirs)
    assert not commits(out)
    shutil.rmtree(theirs)
    shutil.copytree(kept, theirs)
    run = trainer(out)
    run.train(theirs)
    assert len(run.seen) == 40 - 7


def test_import_without_optimizer_is_told_and_strict_refuses(tmp_path, theirs, capsys):
    (theirs / "optimizer.pt").unlink()
    with pytest.raises(IncompatibleCheckpoint, match="strict_resume refuses"):
        trainer(tmp_path / "strict", strict_resume=True).train(theirs)
    assert not commits(tmp_path / "strict")
    run = trainer(tmp_path / "out")
    run.train(theirs)
    assert len(run.seen) == 40 - 7
    assert "with loss of the optimizer's state and the schedule" in capsys.readouterr().err


def rewritten_state(folder, **changes):
    file = folder / "trainer_state.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_import_with_epoch_off_takes_that_of_the_log(tmp_path, theirs, capsys):
    rewritten_state(theirs, epoch=0.01)
    run = trainer(tmp_path / "out", strict_resume=True)
    run.train(theirs)
    assert [one for one, _ in run.seen] == [one for one, _ in read_record("reg_sgd")["seen"][7:]]
    assert "its epoch is 0.01 at step 7, and its log has" in capsys.readouterr().err


def test_import_healthy_reports_no_oddity(tmp_path, theirs, capsys):
    trainer(tmp_path / "out", max_steps=8).train(theirs)
    assert "although" not in capsys.readouterr().err


def test_import_of_save_on_sigterm_trains_on(tmp_path, theirs):
    file = theirs / "trainer_state.json"
    state = json.loads(file.read_text())
    state["stateful_callbacks"]["TrainerControl"]["args"]["should_training_stop"] = True
    file.write_text(json.dumps(state))
    run = trainer(tmp_path / "out")
    run.train(theirs)
    assert run.state.global_step == 40


def test_import_ignores_random_state_of_another_run(tmp_path, theirs):
    from transformers import TrainingArguments

    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    assert arguments.n_gpu == 0  # it looks for the other processes only when it is asked
    torch.save(arguments, theirs / "training_args.bin")
    expected = trainer(tmp_path / "expected")
    expected.train(theirs)
    shutil.copy(theirs / "rng_state.pth", theirs / "rng_state_2.pth")
    run = trainer(tmp_path / "out")
    run.train(theirs)
    assert run.seen == expected.seen


def test_import_with_unclear_number_of_ranks_is_refused(tmp_path, theirs):
    for rank in range(2):
        shutil.copy(theirs / "rng_state.pth", theirs / f"rng_state_{rank}.pth")
    with pytest.raises(IntegrityError, match="which run this was is unknown"):
        trainer(tmp_path / "out").train(theirs)
    assert not commits(tmp_path / "out")


def test_import_with_another_optimizer_commits_nothing(tmp_path, theirs):
    with pytest.raises(IncompatibleCheckpoint, match="another optimizer saved it"):
        trainer(tmp_path / "out", optim="adamw_torch").train(theirs)
    assert not commits(tmp_path / "out")


def spoiled(theirs, change):
    weights = load_file(theirs / MODEL)
    change(weights)
    save_file(weights, theirs / MODEL, {"format": "pt"})


@pytest.mark.parametrize("is_rejected", [False, True])
def test_import_of_options_that_the_optimizer_rejects(tmp_path, is_rejected):
    source = shutil.copytree(checkpoint_of("gpt2_all", 8), tmp_path / "checkpoint-8")
    optimizer = torch.load(source / "optimizer.pt", weights_only=True)
    for group in optimizer["param_groups"]:
        group |= {"lr": torch.tensor(group["lr"]), "foreach": is_rejected, "fused": None}
    torch.save(optimizer, source / "optimizer.pt")
    run = make("gpt2_all", tmp_path / "out", max_steps=9)
    if not is_rejected:
        run.train(source)
        return
    with pytest.raises(IncompatibleCheckpoint, match="lr as a Tensor") as refused:
        run.train(source)
    assert "the optimizer of this run rejects the saved options" in str(refused.value)
    assert "resume an older checkpoint" in refused.value.hint
    assert not commits(tmp_path / "out")


@pytest.mark.parametrize("is_lost", [False, True])
def test_import_keeps_empty_groups_of_a_given_optimizer(tmp_path, theirs, is_lost):
    plain = trainer(tmp_path / "plain")
    plain.train(theirs)
    optimizer = torch.load(theirs / "optimizer.pt", weights_only=True)
    schedule = torch.load(theirs / "scheduler.pt", weights_only=False)
    optimizer["param_groups"].insert(1, {**optimizer["param_groups"][0], "params": [], "lr": 0.5})
    for name in ("base_lrs", "_last_lr", "lr_lambdas"):
        schedule[name].insert(1, schedule[name][0])
    torch.save(optimizer, theirs / "optimizer.pt")
    torch.save(schedule, theirs / "scheduler.pt")
    if is_lost:
        (theirs / "optimizer.pt").unlink()
    run = trainer(tmp_path / "out")
    line = run.model.lin
    groups = [{"params": [line.weight]}, {"params": []}, {"params": [line.bias], "momentum": 0.5}]
    run.optimizer = torch.optim.SGD(groups, lr=0.05)
    run.train(theirs)
    if is_lost:
        assert [group["momentum"] for group in run.optimizer.param_groups] == [0, 0, 0.5]
    else:
        assert [len(group["params"]) for group in run.optimizer.param_groups] == [1, 0, 1]
        assert torch.equal(run.model.lin.weight, plain.model.lin.weight)


def test_import_names_a_missing_weight_and_a_way_on(tmp_path, theirs):
    spoiled(theirs, lambda weights: weights.pop("seen"))
    with pytest.raises(IncompatibleCheckpoint, match="no weights for `seen` of this model") as told:
        trainer(tmp_path / "out").train(theirs)
    assert told.value.hint == (
        "resume an older checkpoint, or restore the file: "
        f"resilient ckpt repair {theirs} --from COPY"
    )
    assert not commits(tmp_path / "out")


def test_import_ignores_weights_of_no_model_and_names_them(tmp_path, theirs, whole, capsys):
    spoiled(theirs, lambda weights: weights.update(extra=torch.ones(3)))
    run = trainer(tmp_path / "out", strict_resume=True, **EVALUATED)
    run.train(theirs)
    assert "this model does not have its weights `extra`" in capsys.readouterr().err
    assert torch.equal(run.model.lin.weight, whole.model.lin.weight)


def test_import_casts_a_wider_copy_exactly(tmp_path, theirs, whole):
    spoiled(theirs, lambda held: held.update({name: one.double() for name, one in held.items()}))
    spoiled(theirs, lambda held: held.update(seen=held["seen"].long()))
    run = trainer(tmp_path / "out", **EVALUATED)
    run.train(theirs)
    assert torch.equal(run.model.lin.weight, whole.model.lin.weight)


def test_import_into_another_dtype_commits_nothing(tmp_path, theirs):
    run = trainer(tmp_path / "out")
    run.model.to(torch.bfloat16)
    with pytest.raises(
        IncompatibleCheckpoint, match=r"digits would be lost.*Nothing was committed"
    ):
        run.train(theirs)
    assert not commits(tmp_path / "out")


def with_epoch(folder, epoch, *, keeps_log=True):
    file = folder / "trainer_state.json"
    state = {**json.loads(file.read_text()), "epoch": epoch}
    state["log_history"] = state["log_history"] if keeps_log else []
    file.write_text(json.dumps(state))


@pytest.mark.parametrize("epoch", [0.0, 0.01, 1.35, None])
def test_import_with_wrong_epoch_takes_place_of_log(tmp_path, theirs, epoch):
    expected = trainer(tmp_path / "expected")
    expected.train(theirs)
    with_epoch(theirs, epoch)
    run = trainer(tmp_path / "out")
    run.train(theirs)
    assert run.seen == expected.seen


@pytest.mark.parametrize("epoch", [0, None])
def test_import_without_epoch_and_log_is_told_and_strict_refuses(tmp_path, theirs, capsys, epoch):
    with_epoch(theirs, epoch, keeps_log=False)
    with pytest.raises(IncompatibleCheckpoint, match="strict_resume refuses"):
        trainer(tmp_path / "strict", strict_resume=True).train(theirs)
    assert not commits(tmp_path / "strict")
    trainer(tmp_path / "out", max_steps=8).train(theirs)
    assert "with loss of the place in the data" in capsys.readouterr().err


def test_import_of_folder_that_changes_is_refused(tmp_path, theirs, monkeypatch):
    from resilient.train.hf_interop import importer

    def check(parts, *_):
        (theirs / "rng_state.pth").touch()
        return parts, ()

    monkeypatch.setattr(importer, "require_loadable", check)
    with pytest.raises(IntegrityError, match="changed while it was read"):
        trainer(tmp_path / "out").train(theirs)
    assert not commits(tmp_path / "out")


def test_origin_covers_all_files(tmp_path, theirs):
    out = tmp_path / "out"
    with pytest.raises(Dies):
        trainer(out, callbacks=[DieAfter(16)]).train(theirs)
    weights = load_file(theirs / MODEL)
    weights["lin.bias"] += 1
    save_file(weights, theirs / MODEL)
    with pytest.raises(ConfigError, match="did not start from it"):
        trainer(out).train(theirs)


class DieBefore(DieAfter):
    """Dies before the first step, and so before the first save."""

    def on_train_begin(self, args, state, control, **_):
        raise Dies("before the first step")


def shifted_bias(folder):
    weights = load_file(folder / MODEL)
    weights["lin.bias"] += 1
    save_file(weights, folder / MODEL)


def test_a_repaired_source_is_imported_again_if_no_step_was_saved(tmp_path, theirs):
    expected, out = trainer(tmp_path / "expected"), tmp_path / "out"
    expected.train(theirs)
    intact = shutil.copytree(theirs, tmp_path / "intact")
    shifted_bias(theirs)
    with pytest.raises(Dies):
        trainer(out, callbacks=[DieBefore(1)]).train(theirs)
    assert commits(out) == ["checkpoint-7-g1"]
    shutil.rmtree(theirs)
    shutil.copytree(intact, theirs)
    run = trainer(out)
    run.train(theirs)
    assert run.seen == expected.seen
    assert torch.equal(run.model.lin.weight, expected.model.lin.weight)


def test_a_source_that_did_not_change_is_imported_once(tmp_path, theirs):
    out = tmp_path / "out"
    for _ in range(2):
        with pytest.raises(Dies):
            trainer(out, callbacks=[DieBefore(1)]).train(theirs)
    assert commits(out) == ["checkpoint-7-g1"]


def test_another_source_is_refused_although_no_step_was_saved(tmp_path, theirs):
    out, other = tmp_path / "out", shutil.copytree(theirs, tmp_path / "other")
    shifted_bias(other)
    with pytest.raises(Dies):
        trainer(out, callbacks=[DieBefore(1)]).train(theirs)
    with pytest.raises(ConfigError, match="did not start from it"):
        trainer(out).train(other)


def test_a_new_import_that_fails_leaves_the_old_one(tmp_path, theirs, monkeypatch):
    out = tmp_path / "out"
    with pytest.raises(Dies):
        trainer(out, callbacks=[DieBefore(1)]).train(theirs)
    shifted_bias(theirs)

    def killed(*_):
        raise Dies("before the first step")

    monkeypatch.setattr(Import, "_about", killed)
    with pytest.raises(Dies):
        trainer(out).train(theirs)
    assert commits(out) == ["checkpoint-7-g1"]
    monkeypatch.undo()
    expected, run = trainer(tmp_path / "expected"), trainer(out)
    expected.train(theirs)
    run.train(theirs)
    assert run.seen == expected.seen


@pytest.mark.parametrize("best_step", [3, 5, None], ids=["saved", "not saved", "unnamed"])
def test_import_brings_the_best_model_along(tmp_path, theirs, best_step):
    best = shutil.copytree(theirs, tmp_path / "checkpoint-3")
    weights = load_file(best / MODEL)
    weights["lin.bias"] += 5
    save_file(weights, best / MODEL)
    for folder, step in ((best, 3), (theirs, 7)):
        file = folder / "trainer_state.json"
        told = {"best_global_step": best_step, "best_model_checkpoint": "run/checkpoint-3"}
        told |= {"best_metric": -1.0, "global_step": step}
        state = {**json.loads(file.read_text()), **told}
        entry = {"eval_loss": -1.0, "epoch": 0.25, "step": best_step or 3}
        state["log_history"].append(entry)
        file.write_text(json.dumps(state))
    run = trainer(
        tmp_path / "out", **EVALUATED, load_best_model_at_end=True, save_steps=8, max_steps=16
    )
    run.train(theirs)
    assert torch.equal(run.model.lin.bias, weights["lin.bias"])
    assert run.state.best_global_step == (best_step or 3)
    assert run.state.best_model_checkpoint == "checkpoint-3"


def test_another_training_set_is_refused(tmp_path, theirs):
    run = trainer(tmp_path / "out")
    run.train_dataset = make("gpt2_ga_uneven", tmp_path / "other").train_dataset
    with pytest.raises(IncompatibleCheckpoint, match="was trained on another set"):
        run.train(theirs)


def test_more_samples_per_step_lose_and_repeat_none(tmp_path, theirs):
    run = trainer(tmp_path / "out", per_device_train_batch_size=8)
    run.train(theirs)
    taken = [one for indices, _ in read_record("reg_sgd")["seen"][:7] for one in indices]
    rest = [one for indices, _ in run.seen for one in indices]
    assert sorted(taken + rest[: 80 - len(taken)]) == list(range(80))


@pytest.mark.parametrize("word", ["1", "true"])
def test_import_signature_required_refuses_other_tools(tmp_path, monkeypatch, word):
    monkeypatch.setenv("RESILIENT_SIGNING_KEY", "0123456789abcdef")
    monkeypatch.setenv("RESILIENT_REQUIRE_SIGNATURE", word)
    with pytest.raises(SignatureRefused, match="another tool and is not signed"):
        prepare_import(str(tmp_path), None, None)


def altered(folder, name, change):
    held = torch.load(folder / name, weights_only=False)
    change(held)
    torch.save(held, folder / name)


def text_option(folder):
    altered(folder, "optimizer.pt", lambda held: held["param_groups"][0].update(lr="0.1"))


def text_base_rate(folder):
    altered(folder, "scheduler.pt", lambda held: held.update(base_lrs=["a"]))


def no_position(folder):
    altered(folder, "scheduler.pt", lambda held: held.update(last_epoch=None))


def text_entry(folder):
    rewritten_state(folder, log_history=["x"])


def text_control(folder):
    rewritten_state(folder, stateful_callbacks={"TrainerControl": {"args": "x"}})


@pytest.mark.parametrize("is_judged", [True, False], ids=["judged", "rehearsed"])
@pytest.mark.parametrize(
    "spoil",
    [text_option, text_base_rate, no_position, text_entry, text_control],
)
def test_import_of_an_impossible_field_commits_nothing(
    tmp_path, theirs, monkeypatch, spoil, is_judged
):
    kept, out = shutil.copytree(theirs, tmp_path / "kept"), tmp_path / "out"
    spoil(theirs)
    if not is_judged:
        # Another kind of damage, which the judge does not know.
        monkeypatch.setattr(import_check, "require_importable", lambda *_: None)
    with pytest.raises((IntegrityError, IncompatibleCheckpoint), match="Nothing was committed"):
        trainer(out).train(theirs)
    assert not commits(out)
    shutil.rmtree(theirs)
    shutil.copytree(kept, theirs)
    run = trainer(out)
    run.train(theirs)
    assert len(run.seen) == 40 - 7


@pytest.mark.parametrize(
    ("saved", "live", "is_taken"),
    [
        ((0.9, 0.99), (0.9, 0.999), True),
        ((0.9,), (0.9, 0.999), False),
        ("0.1", 0.1, False),
        (None, 0.1, False),
        (None, True, True),
        (torch.tensor(0.1), 0.1, True),
        (7, None, True),
    ],
)
def test_an_option_is_taken_in_place_of_one_of_its_kind(saved, live, is_taken):
    state = {"state": {}, "param_groups": [{"option": saved, "params": []}]}
    parts = {"optimizer": Part(RawState(state))}
    groups = [{"option": live, "params": []}]
    with nullcontext() if is_taken else pytest.raises(IncompatibleCheckpoint, match="`option`"):
        import_check.require_same_kinds(parts, groups)


@pytest.mark.parametrize("epoch", [float("nan"), "x"])
def test_import_with_an_epoch_that_is_no_number_takes_place_of_log(tmp_path, theirs, epoch, capsys):
    expected = trainer(tmp_path / "expected")
    expected.train(theirs)
    with_epoch(theirs, epoch)
    run = trainer(tmp_path / "out")
    run.train(theirs)
    assert run.seen == expected.seen
    assert "its epoch is not a number" in capsys.readouterr().err


@pytest.mark.parametrize("size", [0, -1, 2.5])
def test_import_with_no_size_of_a_batch_names_the_loss(tmp_path, theirs, capsys, size):
    rewritten_state(theirs, train_batch_size=size)
    run = trainer(tmp_path / "out")
    run.train(theirs)
    assert [one for one, _ in run.seen] == [one for one, _ in read_record("reg_sgd")["seen"][7:]]
    assert "loss of the batch size" in capsys.readouterr().err


def save_arguments(folder, **options):
    """Save arguments of stock Transformers as its Trainer does."""
    from transformers import TrainingArguments

    _, case = CASES["reg_sgd"]
    arguments = TrainingArguments(**{**BASE, **case, "output_dir": "theirs", **options})
    torch.save(arguments, folder / "training_args.bin")


CHANGED = "arguments differ from the checkpoint's:"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, ()),
        ({"logging_steps": 2, "save_steps": 3, "report_to": "none"}, ()),
        (
            {"learning_rate": 0.5, "seed": 7, "lr_scheduler_type": "linear"},
            (
                "learning_rate 0.05 -> 0.5: the checkpoint's value is used",
                "seed 42 -> 7: the order of the samples is that of the new seed",
                "lr_scheduler_type 'polynomial' -> 'linear': the rate follows the new schedule",
            ),
        ),
        ({"max_steps": 20}, ("max_steps -1 -> 20: the run ends at another step", "saved rate")),
        (
            {"gradient_accumulation_steps": 2},
            ("gradient_accumulation_steps 1 -> 2: training continues at the same sample",),
        ),
    ],
)
def test_import_tells_changed_arguments_once(tmp_path, theirs, capsys, options, told):
    save_arguments(theirs)
    own = {"lr_scheduler_kwargs": None} if "lr_scheduler_type" in options else {}
    trainer(tmp_path / "out", **options, **own).train(theirs)
    said = capsys.readouterr().err
    assert said.count(CHANGED) == bool(told)
    assert all(text in said for text in told)
    trainer(tmp_path / "out", **options, **own).train(theirs)
    assert CHANGED not in capsys.readouterr().err


@pytest.mark.parametrize("content", [None, b"", b"no archive", "object"])
def test_import_without_readable_arguments_tells_no_change(tmp_path, theirs, capsys, content):
    file = theirs / "training_args.bin"
    file.unlink(missing_ok=True)
    if content == "object":
        torch.save({"seed": 9}, file)
    elif content is not None:
        file.write_bytes(content)
    trainer(tmp_path / "out", learning_rate=0.5, seed=7).train(theirs)
    assert CHANGED not in capsys.readouterr().err


WHOLE = sorted(one for at in (HERE, SHARED) for one in at.glob("*/run/checkpoint-*"))


@pytest.mark.parametrize("case", sorted(CASES))
def test_recorded_run_with_its_own_arguments_has_no_change(tmp_path, case):
    folders = [one for one in WHOLE if one.parts[-3] == case]
    own = make(case, tmp_path).args.to_dict()
    changes = [changes_at_import(TransformersCheckpoint(one).arguments(), own) for one in folders]
    assert changes == [{}] * len(folders)
