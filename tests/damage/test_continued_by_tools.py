"""Each library resumes what a repair wrote in its layout, and saves it again.

A slice of the damages runs by default; ``--every-repair`` runs all of them, DeepSpeed's included.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from resilient.errors import UnknownLayout
from resilient.layout_repair.case import AGREEMENT
from resilient.layout_repair.plan import place_of, plan_layout_repair, write_repaired
from tests.damage.campaign import kinds_for
from tests.damage.continuing import TOOLS, verdict_of
from tests.damage.kinds import Inapplicable
from tests.damage.matrix import Bench
from tests.damage.repairs import quiet
from tests.damage.sharded import ALL, SHARDS

pytestmark = pytest.mark.filterwarnings("ignore")
SAMPLES = {one.name: one for one in ALL if one.name in TOOLS}
BY_DEFAULT = {
    "accelerate": (
        "schedule: missing",
        "random state: empty",
        "weights: bytes behind its end",
        "weights: swapped with the optimizer",
        "optimizer: bit flip in a number",
        "optimizer: cut in half",
    ),
    "Lightning": ("weights: bit flip in the header", "weights: last byte cut"),
    "DCP": ("index: missing", "weights: cut in half"),
    "Megatron": ("weights: cut in half",),
    "torch": ("weights: bit flip in the header",),
    "save_pretrained": ("index: missing",),
}
"""Damages by layout, of which each repair works another way."""
WEIGHTS_ALONE = "it holds only weights, to start a new training from"


def repairs_of(path, copy):
    """Return what a repair writes: from the folder alone, and with a copy named."""
    for others in ((), (str(copy),)):
        try:
            plan = plan_layout_repair(str(path), others)
        except UnknownLayout:
            continue
        if plan.is_repaired:
            yield plan
            if plan.is_whole:
                return


def remaining(plan):
    """Return the losses that a checkpoint saved after a repair may still show.

    An optimizer that started again stays behind the trainer's count.
    """
    losses = {*plan.losses, *plan.verdict.lost}
    return losses | {AGREEMENT} if any("optimizer" in one for one in losses) else set()


def continued(bench, sample, kind):
    """Damage, repair, resume and save; return how many repairs there were."""
    scene = bench.copy(sample)
    try:
        with quiet():
            path = kind.spoil(scene) or scene.path
    except Inapplicable:
        return 0
    copy, count = bench.make(sample)[1], 0
    for plan in repairs_of(path, copy):
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = write_repaired(plan, Path(folder) / "made" / place_of(plan).name)
            # A restart from the weights alone is a model for `from_pretrained`.
            is_model = made.name.startswith("weights-")
            is_later = sample.name == "Trainer" and path.name != copy.name
            tool = TOOLS["save_pretrained" if is_model else SHARDS if is_later else sample.name]
            out = Path(folder) / "out"
            out.mkdir()
            with quiet():
                again = verdict_of(tool(made, out))
            if is_model:
                assert again.why == (WEIGHTS_ALONE,), (kind.name, again)
            elif again.answer != bench.reports[sample.name].answer:
                assert set(again.why) <= remaining(plan), (kind.name, again)
        count += 1
    return count


@pytest.mark.parametrize("name", SAMPLES)
def test_repaired_checkpoint_is_saved_again_by_its_library(request, name):
    is_long = request.config.getoption("--every-repair")
    chosen = BY_DEFAULT.get(name, ())
    kinds = [one for one in kinds_for(SAMPLES[name]) if is_long or one.name in chosen]
    if not kinds:
        pytest.skip("runs with --every-repair")
    bench = Bench()
    try:
        counts, faults = {}, {}
        for kind in kinds:
            try:
                counts[kind.name] = continued(bench, SAMPLES[name], kind)
            except Exception as error:  # noqa: BLE001 - what a library raises is listed
                faults[kind.name] = repr(error)[:600]
    finally:
        bench.close()
    assert faults == {}
    assert [one for one in chosen if not counts[one]] == []
    assert sum(counts.values())
