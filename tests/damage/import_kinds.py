"""Damages of a Trainer's checkpoint that an import once took for whole, or refused though whole."""

from __future__ import annotations

import json
import os
import shutil
import struct
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch

from tests.damage.kinds import Inapplicable, Kind, Scene, optimizer_in, rewritten
from tests.damage.samples import CONFIG, OPTIMIZER, RANDOM, SCHEDULE, STATE, WEIGHTS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize %d\n"
_BATCH_SIZE = "train_batch_size"


def of_trainer(change: Callable[[Scene], Path | None]) -> Callable[[Scene], Path | None]:
    """Do a damage to the Trainer's own layout alone."""

    def spoil(scene: Scene) -> Path | None:
        if scene.sample.name != "Trainer":
            raise Inapplicable
        return change(scene)

    return spoil


def weights(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Scene], Path | None]:
    """Save the weights anew, changed."""

    def spoil(scene: Scene) -> None:
        path = scene.file(WEIGHTS)
        found = safetensors.torch.load_file(path)
        change(found)
        safetensors.torch.save_file(found, path, {"format": "pt"})

    return of_trainer(spoil)


def state(change: Callable[[dict[str, Any]], None]) -> Callable[[Scene], Path | None]:
    """Write the Trainer's state anew, changed."""

    def spoil(scene: Scene) -> None:
        path = scene.file(STATE)
        value = json.loads(path.read_text())
        change(value)
        path.write_text(json.dumps(value, indent=2, sort_keys=True))

    return of_trainer(spoil)


def huge_weight(found: dict[str, torch.Tensor]) -> None:
    next(iter(found.values())).view(-1)[0] = 1e36


def huge_weights(found: dict[str, torch.Tensor]) -> None:
    next(iter(found.values())).view(-1)[:2] = 1e36


def huge_bias(found: dict[str, torch.Tensor]) -> None:
    next(value for name, value in found.items() if name.endswith(".bias")).fill_(1e30)


def name_in_a_wrapper(found: dict[str, torch.Tensor]) -> None:
    name = next(one for one in found if one.endswith("attn.c_attn.weight"))
    found[f"_orig_mod.{name}"] = found.pop(name)


def other_shape(found: dict[str, torch.Tensor]) -> None:
    name = next(one for one in found if one.endswith("ln_1.weight"))
    found[name] = torch.ones(found[name].numel() + 1)


def other_dtype(found: dict[str, torch.Tensor]) -> None:
    for name, one in found.items():
        found[name] = one.to(torch.bfloat16)


def updates(count: int) -> Callable[[Any], None]:
    """Give every parameter another count of updates."""

    def change(value: Any) -> None:
        for one in optimizer_in(value)["state"].values():
            one["step"] = one["step"] * 0 + count

    return change


def leftover_random(scene: Scene) -> None:
    path = scene.file(RANDOM)
    shutil.copy(path, path.with_name("rng_state_2.pth"))


def weights_alone(scene: Scene) -> None:
    for role in (OPTIMIZER, SCHEDULE, RANDOM, STATE):
        scene.file(role).unlink()


def without_config(scene: Scene) -> None:
    scene.file(CONFIG).unlink()


def legacy_weights(scene: Scene) -> None:
    path = scene.file(WEIGHTS)
    torch.save(safetensors.torch.load_file(path), path.with_name("pytorch_model.bin"))
    path.unlink()


def stopped_by_signal(value: dict[str, Any]) -> None:
    control = value["stateful_callbacks"]["TrainerControl"]["args"]
    control["should_training_stop"] = True


def of_older_version(value: dict[str, Any]) -> None:
    for name in (_BATCH_SIZE, "stateful_callbacks", "best_global_step", "eval_steps"):
        value.pop(name, None)


def emptied(scene: Scene) -> None:
    path = scene.path
    shutil.rmtree(path)
    path.mkdir()


def cut_arguments(scene: Scene) -> None:
    path = scene.folder / "training_args.bin"
    torch.save({"output_dir": "run"}, path)
    path.write_bytes(path.read_bytes()[:200])


def leftover_alone(scene: Scene) -> None:
    """Leave the random state of a rank without those of the ranks below it."""
    leftover_random(scene)
    (scene.folder / "training_args.bin").unlink(missing_ok=True)


def all_parts(pattern: str) -> Callable[[Scene], None]:
    """Lose the optimizer of every rank, not of one alone."""

    def spoil(scene: Scene) -> None:
        scene.file(OPTIMIZER)
        parts = list(scene.folder.glob(pattern))
        if not parts:
            raise Inapplicable
        for path in parts:
            path.unlink()

    return spoil


def pointers(scene: Scene) -> None:
    for role in (WEIGHTS, OPTIMIZER, STATE):
        path = scene.file(role)
        path.write_bytes(POINTER % (b"0" * 64, path.stat().st_size))


def unknown_dtype(scene: Scene) -> None:
    path = scene.file(WEIGHTS)
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    head = data[8 : 8 + length].replace(b'"F32"', b'"???"', 1)
    path.write_bytes(data[:8] + head + data[8 + length :])


def staging(scene: Scene) -> Path:
    return scene.path.rename(scene.path.with_name(f"tmp-{scene.path.name}"))


def older_cuda_state(value: Any) -> None:
    value["cuda"] = torch.zeros(816, dtype=torch.uint8)


def index_to(name: str) -> Callable[[Scene], Path | None]:
    """Name a file in an index that is not one of the folder."""

    def spoil(scene: Scene) -> None:
        path = scene.file(WEIGHTS)
        outside = scene.folder.parent / "outside.safetensors"
        path.rename(outside)
        named = name.replace("{outside}", str(outside))
        mapped = dict.fromkeys(safetensors.torch.load_file(outside), named)
        document = {"metadata": {"total_size": 1}, "weight_map": mapped}
        path.with_name("model.safetensors.index.json").write_text(json.dumps(document))

    return of_trainer(spoil)


def replaced(role: str, make: Callable[[Path], None]) -> Callable[[Scene], Path | None]:
    """Put what is no regular file in the place of one."""

    def spoil(scene: Scene) -> None:
        path = scene.file(role)
        path.unlink()
        make(path)

    return of_trainer(spoil)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def stale(role: str) -> Callable[[Scene], Path | None]:
    """Leave the file of an older step of the run under this step's name."""

    def spoil(scene: Scene) -> Path:
        newer = scene.path.with_name("checkpoint-12")
        path = newer / scene.sample.files[role]
        shutil.copy(scene.file(role), path)
        return newer

    return of_trainer(spoil)


PAGE_BYTES = 4096


def update(value: dict[str, Any], fields: dict[str, Any]) -> None:
    value.update(fields)


def zero_weight(found: dict[str, torch.Tensor]) -> None:
    name = next(one for one in found if one.endswith("c_attn.weight"))
    found[name] = torch.zeros_like(found[name])


def extra_weight(found: dict[str, torch.Tensor]) -> None:
    found["transformer.extra"] = torch.ones(3)


def wider_dtype(found: dict[str, torch.Tensor]) -> None:
    for name, one in found.items():
        found[name] = one.double()


def hole(scene: Scene) -> None:
    """Lose half of the bytes of the weights, in whole pages."""
    path = scene.file(WEIGHTS)
    data = path.read_bytes()
    begin = PAGE_BYTES * (1 + int.from_bytes(data[:8], "little") // PAGE_BYTES)
    length = len(data) // 2 // PAGE_BYTES * PAGE_BYTES
    path.write_bytes(data[:begin] + bytes(length) + data[begin + length :])


def moments(count: int, *slots: str) -> Callable[[Any], None]:
    """Lose some moments of the first parameters."""

    def change(value: Any) -> None:
        for one in list(optimizer_in(value)["state"].values())[:count]:
            for slot in slots:
                one[slot].zero_()

    return change


def narrow_moments(value: Any) -> None:
    for one in optimizer_in(value)["state"].values():
        for slot in ADAM:
            one[slot] = one[slot].bfloat16()


def no_betas(value: Any) -> None:
    for one in optimizer_in(value)["param_groups"]:
        one["betas"] = (0, 0)


def no_base_rates(value: Any) -> None:
    value["base_lrs"] = [0.0 for _ in value["base_lrs"]]


def of_later(role: str, change: Callable[[Any], None]) -> Callable[[Scene], Path | None]:
    """Change a file of the later step, which has the arguments of its run beside it."""

    def spoil(scene: Scene) -> Path:
        later = replace(scene, path=scene.path.with_name("checkpoint-12"))
        rewritten(role, change)(later)
        return later.path

    return of_trainer(spoil)


def counts(make: Callable[[], Any]) -> Callable[[Any], None]:
    """Give every parameter what is no count of updates."""

    def change(value: Any) -> None:
        states = [one for one in optimizer_in(value)["state"].values() if "step" in one]
        assert states or {}["none"]
        for one in states:
            one["step"] = make()

    return change


def option(name: str, value: Any) -> Callable[[Any], None]:
    """Set an option of the first group that has it."""

    def change(held: Any) -> None:
        group = optimizer_in(held)["param_groups"][0]
        assert name in group or {}["none"]
        group[name] = value

    return change


def scheduled(**fields: Any) -> Callable[[Scene], Path | None]:
    """Set fields of the schedule."""

    def change(held: Any) -> None:
        assert fields.keys() <= held.keys() or {}["none"]
        held.update(fields)

    return of_trainer(rewritten(SCHEDULE, change))


def exchanged_both(value: Any) -> None:
    """Exchange all moments of two parameters of different shapes."""
    states = optimizer_in(value)["state"]
    first, *others = states
    other = next(
        one for one in others if states[one]["exp_avg"].shape != states[first]["exp_avg"].shape
    )
    states[first], states[other] = states[other], states[first]


def beside_two(change: Callable[[Scene], Path | None]) -> Callable[[Scene], Path | None]:
    """Damage a checkpoint with two others beside it, which show what its optimizer counts."""

    def spoil(scene: Scene) -> Path | None:
        newer = scene.path.with_name("checkpoint-12")
        shutil.copytree(newer, scene.path.with_name("checkpoint-16"))
        return change(scene)

    return of_trainer(spoil)


COUNTS = {
    "negative": lambda: torch.tensor(-1.0),
    "NaN": lambda: float("nan"),
    "a fraction": lambda: torch.tensor(7.5),
    "a text": lambda: "8",
    "two numbers": lambda: torch.full((2,), 8.0),
}
FIELDS: dict[str, dict[str, Any]] = {
    "epoch: NaN": {"epoch": float("nan")},
    "epoch: a text": {"epoch": "x"},
    "batch size: negative": {_BATCH_SIZE: -1},
    "batch size: a fraction": {_BATCH_SIZE: 2.5},
    "batch size: zero": {_BATCH_SIZE: 0},
    "log: null": {"log_history": None},
    "log: a text": {"log_history": "x"},
    "log: a list of texts": {"log_history": ["x"]},
    "log: a text in place of a loss": {"log_history": [{"loss": "x", "step": 4}]},
    "tokens: a text": {"num_input_tokens_seen": "x"},
    "step: a float": {"global_step": 8.0},
    "control: a text": {"stateful_callbacks": {"TrainerControl": {"args": "x"}}},
    "control: without fields": {"stateful_callbacks": {"TrainerControl": {}}},
}
ADAM = ("exp_avg", "exp_avg_sq")


def fused_and_differentiable(value: Any) -> None:
    optimizer_in(value)["param_groups"][0].update(fused=True, differentiable=True)


KINDS_OF_TYPES = [
    *(Kind(f"type: step {name}", rewritten(OPTIMIZER, counts(make)))
      for name, make in COUNTS.items()),
    *(Kind(f"type: step {name}, in one file", rewritten(WEIGHTS, counts(make)))
      for name, make in COUNTS.items()),
    Kind("type: weight decay a text", rewritten(OPTIMIZER, option("weight_decay", "0.1"))),
    Kind("type: betas a number", rewritten(OPTIMIZER, option("betas", 0.9))),
    Kind("type: eps none", rewritten(OPTIMIZER, option("eps", None))),
    Kind("type: amsgrad without its state", rewritten(OPTIMIZER, option("amsgrad", True))),
    Kind("type: fused and differentiable", rewritten(OPTIMIZER, fused_and_differentiable)),
    Kind("type: schedule at none", scheduled(last_epoch=None)),
    Kind("type: schedule at a fraction", scheduled(last_epoch=4.5)),
    Kind("type: base rates texts", scheduled(base_lrs=["a", "a"])),
    Kind("type: functions a number", scheduled(lr_lambdas=1)),
    Kind("type: moments exchanged", beside_two(rewritten(OPTIMIZER, exchanged_both))),
    *(Kind(f"type: {name}", state(partial(update, fields=fields)))
      for name, fields in FIELDS.items()),
]  # fmt: skip


def grown_moments(value: Any) -> None:
    for one in optimizer_in(value)["state"].values():
        one["exp_avg"].mul_(1e20)
        one["exp_avg_sq"].mul_(1e20)


def largest_lost(value: Any) -> None:
    optimizer_in(value)["param_groups"][0]["amsgrad"] = True


def part_of_a_call(value: Any) -> None:
    value["last_epoch"] += 0.5


def as_integers(held: dict[str, torch.Tensor]) -> None:
    first = next(iter(held))
    held[first] = held[first].int()


def of_newer_step(scene: Scene) -> None:
    newer = scene.path.with_name("checkpoint-12")
    shutil.copyfile(newer / scene.file(WEIGHTS).name, scene.file(WEIGHTS))


KINDS_OF_IMPORTS = [
    *KINDS_OF_TYPES,
    Kind("weights: one stored as integers", weights(as_integers)),
    Kind("weights: of a newer step", of_trainer(of_newer_step)),
    Kind("optimizer: moments beyond any gradient", rewritten(OPTIMIZER, grown_moments)),
    Kind("optimizer: amsgrad without its moments", rewritten(OPTIMIZER, largest_lost)),
    Kind("schedule: a fraction of a call", of_trainer(rewritten(SCHEDULE, part_of_a_call))),
    Kind("weights: a matrix of zeros", weights(zero_weight)),
    Kind("weights: half of the file a hole", of_trainer(hole)),
    Kind("weights: one that no model has", weights(extra_weight)),
    Kind("weights: a copy of twice the digits", weights(wider_dtype)),
    Kind("optimizer: all moments zero", of_trainer(rewritten(OPTIMIZER, moments(999, *ADAM)))),
    Kind("optimizer: moments of one zero", of_trainer(rewritten(OPTIMIZER, moments(1, *ADAM)))),
    Kind("optimizer: all squares zero", of_trainer(rewritten(OPTIMIZER, moments(999, ADAM[1])))),
    Kind("optimizer: rounded moments", of_trainer(rewritten(OPTIMIZER, narrow_moments))),
    Kind("optimizer: betas of zero", of_later(OPTIMIZER, no_betas)),
    Kind("schedule: base rates of zero", of_trainer(rewritten(SCHEDULE, no_base_rates))),
    Kind("weights: one of 1e36", weights(huge_weight)),
    Kind("weights: a shape that the configuration contradicts", weights(other_shape)),
    Kind("weights: of another dtype", weights(other_dtype)),
    Kind("weights: in a legacy file", of_trainer(legacy_weights)),
    Kind("weights: alone in the folder", of_trainer(weights_alone)),
    Kind("weights: a dtype that safetensors refuses", of_trainer(unknown_dtype)),
    Kind("weights: an index that leads up", index_to("../outside.safetensors")),
    Kind("weights: an index of an absolute path", index_to("{outside}")),
    Kind("weights: a pipe", replaced(WEIGHTS, os.mkfifo)),
    Kind("weights: a link to a device", replaced(WEIGHTS, endless)),
    Kind("optimizer: a pipe", replaced(OPTIMIZER, os.mkfifo)),
    Kind("optimizer: fewer updates than steps", of_trainer(rewritten(OPTIMIZER, updates(5)))),
    Kind("optimizer: more updates than steps", of_trainer(rewritten(OPTIMIZER, updates(11)))),
    Kind("optimizer: of the step before", stale(OPTIMIZER)),
    Kind("schedule: of the step before", stale(SCHEDULE)),
    Kind("weights: of the step before", stale(WEIGHTS)),
    Kind("random state: a leftover of a third rank", of_trainer(leftover_random)),
    Kind("random state: of CUDA before torch 2.1", of_trainer(rewritten(RANDOM, older_cuda_state))),
    Kind("random state: a leftover, and no arguments", of_trainer(leftover_alone)),
    Kind("optimizer: the parts of all ranks missing", all_parts("global_step*/*optim_states.pt")),
    Kind("optimizer: the slices of all ranks missing", all_parts("optimizer_0/*.distcp")),
    Kind("arguments: cut short", of_trainer(cut_arguments)),
    Kind("folder: empty", of_trainer(emptied)),
    Kind("state: stopped by a signal", state(stopped_by_signal)),
    Kind("state: of an older version", state(of_older_version)),
    Kind("configuration: missing", of_trainer(without_config)),
    Kind("all: pointers of Git LFS", of_trainer(pointers)),
    Kind("all: in a staging folder", of_trainer(staging)),
    Kind("weights: two of 1e36", weights(huge_weights)),
    Kind("weights: a bias of 1e30", weights(huge_bias)),
    Kind("weights: one name with the prefix of a wrapper", weights(name_in_a_wrapper)),
]
