"""What can be wrong with a checkpoint whose files are each whole: they are not of one save."""

from __future__ import annotations

import json
import shutil
import struct
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch

from tests.damage.kinds import (
    KINDS,
    Inapplicable,
    Kind,
    Scene,
    missing,
    on,
    optimizer_in,
    rewritten,
)
from tests.damage.misfits import ENGINE_GONE, KINDS_OF_MISFITS, OPTIMIZER_GONE
from tests.damage.samples import (
    ARGUMENTS,
    CONFIG,
    INDEX,
    OPTIMIZER,
    RANDOM,
    SCHEDULE,
    STATE,
    WEIGHTS,
)
from tests.damage.sharded import BESIDE, FSDP, MEGATRON, SHARDS, STEP, TITAN, ZERO2, ZERO3

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


LEAST_BYTES = 4096


def json_changed(
    role: str, name: str, change: Callable[[dict[str, Any]], None]
) -> Callable[[Scene], None]:
    """Change a file of JSON that has a name of its own."""

    def spoil(scene: Scene) -> None:
        path = scene.file(role)
        if path.name != name:
            raise Inapplicable
        value = json.loads(path.read_text())
        change(value)
        path.write_text(json.dumps(value))

    return spoil


def of_state(change: Callable[[dict[str, Any]], None]) -> Callable[[Scene], None]:
    return json_changed(STATE, "trainer_state.json", change)


def of_config(**fields: Any) -> Callable[[Scene], None]:
    return json_changed(CONFIG, "config.json", lambda value: value.update(fields))


def of_index(change: Callable[[dict[str, Any]], None]) -> Callable[[Scene], None]:
    return json_changed(INDEX, "model.safetensors.index.json", change)


def optimizer(change: Callable[[Any], None], role: str = OPTIMIZER) -> Callable[[Scene], None]:
    return rewritten(role, lambda value: change(optimizer_in(value)))


def no_groups(state: Any) -> None:
    assert state["param_groups"]
    state["param_groups"] = []


def rate_of(rate: float) -> Callable[[Any], None]:
    def change(state: Any) -> None:
        for one in state["param_groups"]:
            one["lr"] = rate + one["lr"] * 0

    return change


def nothing_of_any(state: Any) -> None:
    assert state["param_groups"]
    state["state"] = {}


def negative_squares(state: Any) -> None:
    next(iter(state["state"].values()))["exp_avg_sq"].fill_(-1)


def parameter_twice(state: Any) -> None:
    first, last = state["param_groups"][0], state["param_groups"][-1]
    first["params"][0] = last["params"][-1]


def updated_less(state: Any) -> None:
    one = list(state["state"].values())[1]
    one["step"] = one["step"] // 2


def ten_bytes(value: Any) -> None:
    assert "cpu" in value or {}["none"]
    value["cpu"] = torch.zeros(10, dtype=torch.uint8)


def no_python(value: Any) -> None:
    del value["python"]


def numbered(scene: Scene) -> None:
    """Leave what two ranks leave when the state of the last one is lost."""
    path = scene.file(RANDOM)
    if path.name == "rng_state_1.pth":
        path.unlink()
    elif path.name == "rng_state.pth":
        path.rename(path.with_name("rng_state_0.pth"))
    else:
        raise Inapplicable


def logged(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda state: state["log_history"].append({"epoch": 0.5, **fields})


def of_trainer(role: str, change: Callable[[Any], None]) -> Callable[[Scene], None]:
    """Change what only the Trainer keeps as it is: accelerate counts its own skipped steps in."""

    def spoil(scene: Scene) -> None:
        if scene.sample.name != "Trainer":
            raise Inapplicable
        rewritten(role, change)(scene)

    return spoil


def calls_miscounted(value: Any) -> None:
    assert "_step_count" in value or {}["none"]
    value["_step_count"] = 4


def zeroed(scene: Scene) -> None:
    """Make all numbers zeros, behind a right header."""
    data = _safetensors(scene)
    (length,) = struct.unpack_from("<Q", data)
    if len(data) - length < LEAST_BYTES:
        raise Inapplicable  # a bias alone may well be zeros
    scene.file(WEIGHTS).write_bytes(data[: 8 + length] + bytes(len(data) - 8 - length))


def _safetensors(scene: Scene) -> bytes:
    if scene.sample.is_ours or scene.file(WEIGHTS).suffix != ".safetensors":
        raise Inapplicable
    return scene.file(WEIGHTS).read_bytes()


def weight_renamed(scene: Scene) -> None:
    data = _safetensors(scene)
    (length,) = struct.unpack_from("<Q", data)
    head = data[8 : 8 + length]
    spoiled = head.replace(b"ln_1.weight", b"ln_9.weight", 1)
    if spoiled == head:
        raise Inapplicable
    scene.file(WEIGHTS).write_bytes(data[:8] + spoiled + data[8 + length :])


def stale_index(scene: Scene) -> None:
    path = scene.file(WEIGHTS)
    if path.name != "model.safetensors" or path == scene.path:
        raise Inapplicable
    mapped = {"transformer.wte.weight": "model-00001-of-00002.safetensors"}
    document = {"metadata": {"total_size": 5}, "weight_map": mapped}
    path.with_name("model.safetensors.index.json").write_text(json.dumps(document))


def in_two_shards(scene: Scene) -> None:
    first, second = sorted(scene.folder.glob("model-*.safetensors"))[:2]
    one, other = (safetensors.torch.load_file(path) for path in (first, second))
    name = min(one)
    safetensors.torch.save_file({**other, name: one[name] + 1}, second, {"format": "pt"})


def orphan_shard(scene: Scene) -> None:
    path = scene.file(WEIGHTS)
    path.with_name("model-00004-of-00004.safetensors").write_bytes(path.read_bytes())


def other_shard(document: dict[str, Any]) -> None:
    mapped = document["weight_map"]
    first = min(mapped)
    mapped[first] = next(one for one in mapped.values() if one != mapped[first])


def name_lost(document: dict[str, Any]) -> None:
    del document["weight_map"][min(document["weight_map"])]


def total_wrong(document: dict[str, Any]) -> None:
    document["metadata"]["total_size"] += 4


def of_step(*roles: str) -> Callable[[Scene], None]:
    """Put the files of an earlier step of the run in the place of its own."""

    def spoil(scene: Scene) -> None:
        for role in roles:
            path = scene.file(role)
            inner = str(path.relative_to(scene.path)).replace(f"step{STEP}", f"step{BESIDE}")
            shutil.copy(scene.path.with_name(f"checkpoint-{BESIDE}") / inner, path)

    return spoil


def optimizer_of_step(scene: Scene) -> None:
    folder = scene.file(OPTIMIZER).parent
    shutil.rmtree(folder)
    shutil.copytree(scene.path.with_name(f"checkpoint-{BESIDE}") / folder.name, folder)


def from_beside(role: str) -> Callable[[Scene], None]:
    """Take a file from the other step that stands beside it."""

    def spoil(scene: Scene) -> None:
        (other,) = (one for one in scene.path.parent.glob("*[-_]*8") if one != scene.path)
        shutil.copy(other / scene.file(role).name, scene.file(role))

    return spoil


def of_three_bytes(value: Any) -> None:
    assert "cpu" in value or {}["none"]
    value["cuda"] = torch.zeros(3, dtype=torch.uint8)


def older_tag(scene: Scene) -> None:
    older = scene.path.with_name(f"checkpoint-{BESIDE}") / f"global_step{BESIDE}"
    shutil.copytree(older, scene.path / older.name)
    scene.file(INDEX).write_text(older.name)


def copied_part(scene: Scene) -> None:
    path = scene.file(OPTIMIZER)
    shutil.copy(path.with_name(path.name.replace("rank_1", "rank_0")), path)


def exchanged_parts(scene: Scene) -> None:
    path = scene.file(OPTIMIZER)
    other = path.with_name(path.name.replace("rank_1", "rank_0"))
    mine, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs)
    other.write_bytes(mine)


IN_ONE = ", in one file"
KINDS_OF_CONTENT = [
    *(Kind(f"optimizer: {name}{end}", optimizer(change, role))
      for role, end in ((OPTIMIZER, ""), (WEIGHTS, IN_ONE))
      for name, change in (
          ("no groups", no_groups), ("a rate of NaN", rate_of(float("nan"))),
          ("nothing of any parameter", nothing_of_any), ("negative squares", negative_squares),
          ("one parameter updated less often", updated_less))),
    Kind("optimizer: another rate than its schedule's", optimizer(rate_of(0.5))),
    Kind("optimizer: a parameter twice in its groups", optimizer(parameter_twice)),
    Kind("schedule: calls and steps miscounted", of_trainer(SCHEDULE, calls_miscounted)),
    Kind("random state: of ten bytes", rewritten(RANDOM, ten_bytes)),
    Kind("random state: that of CUDA is none", rewritten(RANDOM, of_three_bytes)),
    Kind("random state: without that of Python", rewritten(RANDOM, no_python)),
    Kind("random state: of two ranks, one lost", numbered),
    Kind("state: best metric is not the log's", of_state(lambda one: one.update(best_metric=1.0))),
    Kind("state: epoch is not the log's", of_state(lambda one: one.update(epoch=0.01))),
    Kind("state: a log of the future", of_state(logged(step=99, loss=1.0))),
    Kind("configuration: cut in half", on(CONFIG, lambda data: data[: len(data) // 2])),
    Kind("configuration: of a wider model", of_config(n_embd=64)),
    Kind("configuration: of more layers", of_config(n_layer=7)),
    Kind("configuration: of another vocabulary", of_config(vocab_size=7)),
    Kind("weights: every number zero", zeroed),
    Kind("weights: a name with a flipped bit", weight_renamed),
    Kind("index: a stale one beside weights in one file", stale_index),
]  # fmt: skip
TOGETHER: Mapping[str, list[Kind]] = {
    SHARDS: [
        Kind("arguments: cut in half", on(ARGUMENTS, lambda data: data[: len(data) // 2])),
        Kind("weights: missing", missing(WEIGHTS)),
        Kind("weights: a name in two shards", in_two_shards),
        Kind("weights: a shard that no index names", orphan_shard),
        Kind("index: missing", missing(INDEX)),
        Kind("index: another total", of_index(total_wrong)),
        Kind("index: names another shard", of_index(other_shard)),
        Kind("index: lacks a name", of_index(name_lost)),
    ],
    FSDP: [
        Kind("weights: missing", missing(WEIGHTS)),
        Kind("weights: one rank's of another step", of_step(WEIGHTS)),
        Kind("optimizer: one rank's of another step", of_step(OPTIMIZER)),
        Kind("optimizer: all ranks' of another step", optimizer_of_step),
        OPTIMIZER_GONE,
        Kind("random state: of two ranks, one lost", numbered),
    ],
    TITAN: [
        Kind("schedule: a file of slices of another step", from_beside(SCHEDULE)),
        Kind("optimizer: a file of slices of another step", from_beside(OPTIMIZER)),
    ],
    MEGATRON: [
        Kind("weights: a file of slices of another step", from_beside(WEIGHTS)),
        Kind("state: all of another step", from_beside(STATE)),
    ],
    ZERO2: [
        Kind("optimizer: missing", missing(OPTIMIZER)),
        Kind("optimizer: one rank's of another step", of_step(OPTIMIZER)),
        Kind("optimizer: one rank's copied from another", copied_part),
        Kind("optimizer: two ranks' exchanged", exchanged_parts),
        Kind("weights: of another step", of_step(WEIGHTS)),
        Kind("index: names an older tag", older_tag),
        ENGINE_GONE,
        Kind("random state: of two ranks, one lost", numbered),
    ],
    ZERO3: [
        Kind("weights: one rank's missing", missing(WEIGHTS)),
        Kind("weights: one rank's of another step", of_step(WEIGHTS)),
        Kind("optimizer: missing", missing(OPTIMIZER)),
        Kind("optimizer: one rank's of another step", of_step(OPTIMIZER)),
        Kind("optimizer: one rank's copied from another", copied_part),
        Kind("optimizer: two ranks' exchanged", exchanged_parts),
        Kind("index: names an older tag", older_tag),
        ENGINE_GONE,
    ],
}

GENERAL = [*KINDS, *KINDS_OF_CONTENT, *KINDS_OF_MISFITS]
EVERY_KIND = [*GENERAL, *(one for kinds in TOGETHER.values() for one in kinds)]


def kinds_of(sample) -> list[Kind]:
    """Return what is done to a layout."""
    return GENERAL if sample.is_general else TOGETHER[sample.name]
