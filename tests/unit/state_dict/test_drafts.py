"""Files are planned once for states that are alike, and the plan remembers no tensor."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from resilient.distributed.launch_env import World
from resilient.state_dict.save_planner import SavePlanner
from resilient.state_dict.snapshot import Part, capture
from resilient.state_dict.staging import StagingBuffers, stage
from tests.helpers.manifests import Values


def snapshot(step=1, **tensors):
    return capture(step, {"model": Part(Values(**tensors))}, 0)


def staged(snapshot, world, drafts=None):
    arena = StagingBuffers()
    arena.drafts = drafts or arena.drafts
    made = stage(snapshot, world, arena)
    return [(one.name, bytes(one.data), one.tensors) for one in made.files]


def state(seed, *, width=300):
    torch.manual_seed(seed)
    return {
        "weight": torch.randn(900, width),
        "scalar": torch.tensor(float(seed)),
        "empty": torch.empty(0, 3),
        "turned": torch.randn(width, 7).t(),
        "half": torch.randn(5).bfloat16(),
    }


@pytest.mark.parametrize("world", [World(), World(0, 2), World(1, 2)], ids=str)
def test_a_plan_gives_the_bytes_of_the_state_at_hand(world):
    drafts = SavePlanner()
    for seed in range(3):
        now = snapshot(seed, **state(seed))
        assert staged(now, world, drafts) == staged(now, world)


@pytest.mark.parametrize(
    "change",
    [
        {"weight": torch.zeros(900, 301)},
        {"half": torch.zeros(5)},
        {"half": torch.zeros(5, dtype=torch.float16)},
        {"new": torch.zeros(3)},
    ],
    ids=["shape", "type", "another type of that size", "name"],
)
def test_a_state_that_is_not_alike_is_planned_anew(change):
    drafts = SavePlanner()
    staged(snapshot(**state(1)), World(), drafts)
    now = snapshot(**{**state(2), **change})
    assert staged(now, World(), drafts) == staged(now, World())


def test_two_parts_of_the_same_shapes_are_two():
    drafts = SavePlanner()
    parts = {name: Part(Values(**state(number))) for number, name in enumerate(("one", "other"))}
    now = capture(1, parts, 0)
    assert staged(now, World(), drafts) == staged(now, World()) == staged(now, World(), drafts)


def test_a_plan_is_made_once_and_holds_no_tensor():
    drafts = SavePlanner()
    weight = torch.ones(64, 64)
    first = drafts.of(snapshot(weight=weight), World())
    held = weakref.ref(weight.untyped_storage())
    again = drafts.of(snapshot(weight=torch.zeros(64, 64)), World())
    assert again[0].layout is first[0].layout
    assert again[0].entries is first[0].entries
    del weight, first
    gc.collect()
    assert held() is None


@pytest.mark.parametrize("world", [World(), World(1, 2)], ids=str)
def test_an_arena_used_again_gives_the_bytes_of_the_state_at_hand(world):
    memory = [bytearray(2 << 20) for _ in range(3)]
    turns = iter([0, 0, 1, 1, 2])
    given = {}
    arena = StagingBuffers(lambda name, _: memoryview(given[name]))
    for seed in (1, 2, 3, 4, 5):
        turn = next(turns)
        # The keeper gives other memory when it had to take back what it gave.
        given.update({f"model.r0000{world.rank}.safetensors": memory[turn]})
        given.setdefault("state.json", bytearray(1 << 16))
        now = snapshot(seed, **state(seed))
        made = stage(now, world, arena)
        assert [(one.name, bytes(one.data), one.tensors) for one in made.files] == staged(
            now, world
        )
        made.rest.make()


def test_views_of_one_memory_are_one_tensor_only_if_they_see_the_same():
    base = torch.randn(4, 4)
    part = capture(
        1,
        {"model": Part(Values(a=base, b=base.view(4, 4), c=base.t(), d=base[:2], e=base.view(16)))},
        0,
    ).parts[0]
    assert set(part.tensors) == {"model/a", "model/c", "model/d", "model/e"}
    assert part.tree["b"] == {"$tensor": "model/a"}
