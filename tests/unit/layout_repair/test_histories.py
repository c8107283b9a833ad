"""A history that is lost with its state comes back from what the run logged."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import pytest
from torch.utils.tensorboard import SummaryWriter

from resilient.layout_repair.plan import place_of, plan_layout_repair, write_repaired
from resilient.layout_repair.training_logs import entries_of, entries_until
from resilient.layouts.model import Unreadable
from resilient.layouts.tfevents import FILE_BYTES_MAX, masked_sum, read_scalars
from resilient.storage.folder import open_folder

GOLDEN = Path(__file__).parents[2] / "golden" / "transformers"
STATE = "trainer_state.json"


@pytest.fixture
def run(tmp_path):
    return Path(shutil.copytree(GOLDEN / "gpt2_all" / "run", tmp_path / "run")) / "checkpoint-8"


def history_of(run):
    return json.loads((run / STATE).read_text())["log_history"]


def tag(name):
    family, _, rest = name.partition("_")
    return f"{family}/{rest}" if family in ("eval", "test") else f"train/{name}"


def write_board(folder, entries, *, new_style=False):
    """Log as the callback of Transformers does, and return the file."""
    before = set(folder.glob("*"))
    with SummaryWriter(str(folder)) as board:
        board.add_text("args", "{}" * 20_000)
        for one in entries:
            for name in [key for key in one if key not in ("step", "epoch")] + ["epoch"]:
                board.add_scalar(tag(name), one[name], one["step"], new_style=new_style)
    (made,) = set(folder.glob("*")) - before
    return made


def mended(run, *others):
    plan = plan_layout_repair(str(run), [str(one) for one in others])
    return plan, json.loads(b"".join(plan.draft.blocks(STATE)))


def scalars(path):
    folder = open_folder(str(path))
    return read_scalars(folder, folder.list(), path.name)


def close(found, expected):
    return [{key: pytest.approx(one, rel=1e-6) for key, one in it.items()} for it in expected] == (
        found
    )


@pytest.mark.parametrize("new_style", [False, True])
def test_tensorboard_s_files_say_what_was_logged_and_that_digits_are_lost(run, new_style):
    expected = history_of(run)
    later = [{"loss": 1.0, "step": 9, "epoch": 1.0}, {"train_runtime": 4.0, "step": 9, "epoch": 1}]
    write_board(run.parent / "runs" / "Nov24_host", [*expected, *later], new_style=new_style)
    (run / STATE).unlink()
    plan, state = mended(run)
    assert close(state["log_history"], expected)
    assert "history" not in plan.losses
    assert "seven digits" in plan.losses["digits"]
    assert "1 event files of TensorBoard in" in plan.steps[-1].source
    assert state["log_history"][1]["learning_rate"] == 0.00075, "the shortest that is the same"


def test_the_summary_that_ends_a_training_is_no_part_of_its_last_save(run):
    expected = history_of(run)
    end = [{"train_runtime": 4.0, "train_loss": 2.0, "step": 8, "epoch": 0.5}]
    write_board(run.parent / "runs", [*expected, *end])
    (run / STATE).unlink()
    assert close(mended(run)[1]["log_history"], expected)


def test_what_is_whole_of_a_cut_state_keeps_its_digits(run):
    text, expected = (run / STATE).read_text(), history_of(run)
    write_board(run.parent / "runs", expected)
    (run / STATE).write_text(text[: text.index('"step": 6')])
    plan, state = mended(run)
    assert state["log_history"][:5] == expected[:5]
    assert close(state["log_history"], expected)
    (run / STATE).write_text(text[: text.index('"eval_loss"')])
    assert close(mended(run)[1]["log_history"], expected), "the evaluation of the last step too"
    assert "digits" in plan.losses


@pytest.mark.parametrize("name", ["log.jsonl", "events/rank-0.jsonl"])
def test_our_own_lines_are_exact(run, name):
    expected = history_of(run)
    lines = [json.dumps({"at": "2026-01-01T00:00:00Z", "generation": 1, **one}) for one in expected]
    if name != "log.jsonl":
        event = {"at": "2026-01-01T00:00:00Z", "event": "MetricsLogged", "generation": 1}
        lines = [json.dumps({**event, "metrics": one}) for one in expected]
    speed = '{"at": "x", "generation": 1, "step": 8, "eval_runtime": 3}'
    path = run.parent / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join([*lines, speed, "[]", '{"at": "x", "lo']))
    write_board(run.parent / "runs", expected)
    (run / STATE).unlink()
    plan, state = mended(run)
    assert state["log_history"] == expected
    assert not {"history", "digits", "epoch"} & set(plan.losses)


def test_a_folder_of_logs_may_be_named(run, tmp_path):
    expected = history_of(run)
    write_board(tmp_path / "elsewhere", expected)
    (run / STATE).unlink()
    assert "history" in mended(run)[0].losses
    assert close(mended(run, tmp_path / "elsewhere")[1]["log_history"], expected)


def test_the_state_that_save_state_leaves_beside_checkpoints_is_asked(run):
    whole = json.loads((run / STATE).read_text())
    (run / STATE).rename(run.parent / STATE)
    plan, state = mended(run)
    assert state["log_history"] == whole["log_history"]
    assert "history" not in plan.losses


def test_the_best_is_found_again_among_the_evaluations(run):
    arguments = pytest.importorskip("transformers").TrainingArguments
    import torch

    whole = json.loads((run / STATE).read_text())
    worse = {"eval_loss": 9.0, "epoch": 0.25, "step": 4}
    expected = history_of(run)
    write_board(run.parent / "runs", [*expected[:4], worse, *expected[4:]])
    given = arguments("out", use_cpu=True, metric_for_best_model="loss", greater_is_better=False)
    torch.save(given, run / "training_args.bin")
    (run / STATE).unlink()
    plan, state = mended(run)
    assert "best model" not in plan.losses
    assert state["best_metric"] == pytest.approx(whole["best_metric"], rel=1e-6)
    assert (state["best_global_step"], state["best_model_checkpoint"]) == (8, str(run))


def test_rebuilt_best_path_is_of_the_best_step_that_was_saved(run):
    import torch

    arguments = pytest.importorskip("transformers").TrainingArguments
    saved = {"eval_loss": 0.5, "epoch": 0.25, "step": 4}
    unsaved = {"eval_loss": 0.25, "epoch": 0.375, "step": 6}
    expected = history_of(run)
    write_board(run.parent / "runs", [*expected[:4], saved, *expected[4:6], unsaved, *expected[6:]])
    given = arguments("out", use_cpu=True, metric_for_best_model="loss", greater_is_better=False)
    torch.save(given, run / "training_args.bin")
    (run / STATE).rename(run.with_name("state.json"))
    older = run.with_name("checkpoint-4")
    older.mkdir()
    (older / STATE).write_text("{}")
    _, state = mended(run)
    assert (state["best_global_step"], state["best_model_checkpoint"]) == (6, str(older))


def test_a_run_of_transformers_that_logs_to_tensorboard_gets_its_state_back_and_resumes(tmp_path):
    transformers = pytest.importorskip("transformers")
    from tests.helpers.hf_runs import Tokens, gpt2

    def trainer(out, steps):
        arguments = transformers.TrainingArguments(
            str(out), max_steps=steps, save_steps=4, logging_steps=1, eval_strategy="steps",
            eval_steps=4, report_to=["tensorboard"], use_cpu=True, disable_tqdm=True,
            metric_for_best_model="loss", remove_unused_columns=False, dataloader_drop_last=True,
        )  # fmt: skip
        rows = [{key: one[key] for key in ("input_ids", "labels")} for one in Tokens(64, 1)]
        return transformers.Trainer(gpt2(), arguments, train_dataset=rows, eval_dataset=rows[:8])

    trainer(tmp_path, 4).train()
    path = tmp_path / "checkpoint-4"
    whole = json.loads((path / STATE).read_text())
    (path / STATE).unlink()
    plan, state = mended(path)
    assert set(plan.losses) == {"callbacks", "counts", "digits"}
    assert close(state["log_history"], whole["log_history"])
    for key in ("best_global_step", "best_model_checkpoint", "global_step", "max_steps"):
        assert state[key] == whole[key], key
    made = write_repaired(plan, place_of(plan))
    resumed = trainer(tmp_path / "on", 6)
    resumed.train(resume_from_checkpoint=str(made))
    assert resumed.state.global_step == 6
    assert [one["step"] for one in resumed.state.log_history if "loss" in one] == [1, 2, 3, 4, 5, 6]


def life(*steps, by=0.0):
    return [{"step": one, "loss": one + by} for one in steps]


@pytest.mark.parametrize(
    ("lives", "step", "expected"),
    [
        ([life(1, 2, 3, 4), life(3, 4, 5, by=0.5)], 5, [1, 2, 3.5, 4.5, 5.5]),
        ([life(1, 2, 3, 4), life(2, 3, by=0.5)], 4, [1, 2, 3, 4]),
        ([life(1, 2, 3, 4), life(2, 3, by=0.5)], 3, [1, 2.5, 3.5]),
        ([life(1, 2, 3, 4), life(1, 2, 3, 4, by=0.5)], 3, [1.5, 2.5, 3.5]),
        ([life(1, 2), life(3, 4, by=0.5), life(9, by=0.7)], 4, [1, 2, 3.5, 4.5]),
        ([life(10, 20, 30), life(30, 40, by=0.5)], 32, [10, 20, 30.5]),
        ([], 4, []),
    ],
)
def test_of_several_lives_those_count_that_led_to_the_step(lives, step, expected):
    assert [one["loss"] for one in entries_until(lives, step)] == expected


def test_a_life_that_went_back_is_two(run):
    expected = history_of(run)
    old = [{**one, "loss": 9.0} for one in expected[4:7] if "loss" in one]
    write_board(run.parent / "runs", [*expected[:4], *old, *expected[4:]])
    (run / STATE).unlink()
    assert close(mended(run)[1]["log_history"], expected)


def test_a_record_that_is_spoiled_is_left_out_and_told(run):
    file = write_board(run.parent / "runs", history_of(run))
    data = file.read_bytes()
    at = data.index(b"train/loss")
    file.write_bytes(data[:at] + b"T" + data[at + 1 :])
    found = scalars(file)
    assert found.broken == "the checksum of a record is wrong"
    assert [one.tag for one in found.found].count("train/loss") == 7
    (run / STATE).unlink()
    assert "history" in mended(run)[0].losses


def test_where_a_length_is_spoiled_the_rest_is_not_guessed(run):
    file = write_board(run.parent / "runs", history_of(run))
    data = file.read_bytes()
    at = data.rindex(b"train/loss")
    begin = data.rindex(struct.pack("<Q", 32), 0, at)
    file.write_bytes(data[:begin] + b"\x21" + data[begin + 1 :])
    found = scalars(file)
    assert "length is wrong" in found.broken
    assert [one.tag for one in found.found].count("train/loss") == 7


def test_every_cut_of_a_file_of_events_is_a_part_of_it(run):
    file = write_board(run.parent / "runs", history_of(run)[:2])
    whole, data = scalars(file).found, file.read_bytes()
    for end in range(len(data) - 300, len(data)):
        file.write_bytes(data[:end])
        found = scalars(file)
        assert found.broken == ""
        assert found.found == whole[: len(found.found)]
    file.write_bytes(b"no events at all, and longer than a head")
    with pytest.raises(Unreadable, match="not a file of events"):
        scalars(file)


def test_a_record_of_any_length_is_not_read(tmp_path):
    head = struct.pack("<Q", FILE_BYTES_MAX + 1)
    file = tmp_path / "events.out.tfevents.1.host"
    file.write_bytes(head + struct.pack("<I", masked_sum(head)) + b"\0" * 64)
    with pytest.raises(Unreadable, match="claims"):
        scalars(file)


def test_the_checksum_is_that_of_the_castagnoli_polynomial():
    # RFC 3720, B.4: 32 bytes of zeros; here rotated and masked.
    crc = 0x8A9136AA
    assert masked_sum(bytes(32)) == ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def test_numbers_of_others_are_no_entries():
    from resilient.layouts.tfevents import Scalar

    told = [Scalar(1, "mine", 1.0), Scalar(1, "train/", 1.0), Scalar(1, "train/epoch", 0.5)]
    assert list(entries_of(told)) == [{"epoch": 0.5, "step": 1}]


def test_a_link_beside_a_checkpoint_is_not_followed(run, tmp_path):
    write_board(tmp_path / "elsewhere", history_of(run))
    (run.parent / "runs").symlink_to(tmp_path / "elsewhere")
    (run / STATE).unlink()
    assert "history" in mended(run)[0].losses
