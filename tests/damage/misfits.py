"""What can be wrong with an optimizer, a schedule and weights that do not fit each other."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import safetensors.torch

from tests.damage.kinds import Inapplicable, Kind, Scene, optimizer_in, rewritten
from tests.damage.samples import OPTIMIZER, SCHEDULE, STATE, WEIGHTS

if TYPE_CHECKING:
    from collections.abc import Callable


def exchanged_moments(state: Any) -> None:
    one, *others = state["state"].values()
    other = next(each for each in others if each["exp_avg"].shape != one["exp_avg"].shape)
    one["exp_avg"], other["exp_avg"] = other["exp_avg"], one["exp_avg"]


def transposed_moments(state: Any) -> None:
    held = (one for one in state["state"].values() if one["exp_avg"].ndim > 1)
    one = next((each for each in held if len(set(each["exp_avg"].shape)) > 1), {})
    for slot in ("exp_avg", "exp_avg_sq"):
        one[slot] = one[slot].t().contiguous()


def group_more(state: Any) -> None:
    state["param_groups"].append({**state["param_groups"][0], "params": []})


def no_rate(state: Any) -> None:
    del state["param_groups"][0]["lr"]


def half_the_states(state: Any) -> None:
    for one in list(state["state"])[::2]:
        del state["state"][one]


def one_base_less(value: Any) -> None:
    value["base_lrs"].pop()


def marked(scene: Scene) -> None:
    path = scene.file(STATE)
    if path.suffix != ".json" or scene.sample.is_ours:
        raise Inapplicable
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())


def weight_lost(scene: Scene) -> None:
    scene.file(OPTIMIZER)
    if scene.sample.is_ours or scene.file(WEIGHTS).suffix != ".safetensors":
        raise Inapplicable
    weights = safetensors.torch.load_file(scene.file(WEIGHTS))
    del weights[max(weights)]
    safetensors.torch.save_file(weights, scene.file(WEIGHTS), {"format": "pt"})


def of(change: Callable[[Any], None], role: str = OPTIMIZER) -> Callable[[Scene], None]:
    return rewritten(role, lambda value: change(optimizer_in(value)))


def schedule_of_less(scene: Scene) -> None:
    if scene.sample.name != "Trainer":
        raise Inapplicable
    rewritten(SCHEDULE, one_base_less)(scene)


def best_gone(scene: Scene) -> None:
    path = scene.file(STATE)
    if path.name != "trainer_state.json" or scene.sample.is_ours:
        raise Inapplicable
    state = json.loads(path.read_text())
    best = {"best_model_checkpoint": "gone/checkpoint-2", "best_global_step": 2}
    path.write_text(json.dumps(state | best))


def tag_gone(scene: Scene) -> None:
    shutil.rmtree(scene.file(OPTIMIZER).parent)


ENGINE_GONE = Kind("index: the tag it names is gone", tag_gone)
OPTIMIZER_GONE = Kind("optimizer: its folder is gone", tag_gone)
KINDS_OF_MISFITS = [
    *(Kind(f"optimizer: {name}{end}", of(change, role))
      for role, end in ((OPTIMIZER, ""), (WEIGHTS, ", in one file"))
      for name, change in (
          ("moments of two parameters exchanged", exchanged_moments),
          ("moments transposed", transposed_moments), ("a group more", group_more),
          ("a group without a rate", no_rate), ("half of the states", half_the_states))),
    Kind("schedule: of a group less", schedule_of_less),
    Kind("state: a byte order mark before it", marked),
    Kind("state: best checkpoint is gone", best_gone),
    Kind("weights: one is lost", weight_lost),
]  # fmt: skip
