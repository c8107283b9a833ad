"""What a repair makes of a damaged checkpoint, and what its own tool then has."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from resilient.errors import UnknownLayout
from resilient.layout_repair.plan import place_of, plan_layout_repair, write_repaired
from tests.damage import own
from tests.damage.samples import load_model

if TYPE_CHECKING:
    from collections.abc import Iterator

    from resilient.layout_repair.plan import LayoutRepairPlan
    from tests.damage.samples import Loaded, Sample

MENDS, LOSES, SAVES, STAYS, COPY = "mends", "loses", "saves", "stays", "copy"


def repaired(sample: Sample, path: Path, copy: Path, whole: Loaded | None) -> tuple[str, str]:
    """Return what a repair does to a damaged checkpoint, and how.

    First with what is in it and beside it alone, then with another copy named. What is mended is
    written, and the layout's own tool has to have of it what it has of the whole one.

    Args:
        sample: its layout.
        path: the damaged one.
        copy: the same one, whole.
        whole: what the tool has of the whole one; nothing is loaded without.
    """
    attempt = _own if sample.is_ours else _attempt
    word, how = attempt(sample, path, (), whole)
    if word == MENDS:
        return word, how
    again, _ = attempt(sample, path, (str(copy),), whole)
    if again == MENDS:
        word = COPY if word == STAYS else f"{word}, {COPY}"
    return word, how


def _attempt(
    sample: Sample, path: Path, others: tuple[str, ...], whole: Loaded | None
) -> tuple[str, str]:
    try:
        plan = plan_layout_repair(str(path), others)
    except UnknownLayout as error:
        return STAYS, error.message
    if not plan.is_repaired:
        return SAVES if plan.salvaged else STAYS, _told(plan)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        target = write_repaired(plan, Path(folder) / place_of(plan).name)
        wrong = _wrong(sample, target, whole, is_whole=plan.is_whole)
    return wrong or (MENDS if plan.is_whole else LOSES), _told(plan)


def _own(
    sample: Sample, path: Path, others: tuple[str, ...], whole: Loaded | None
) -> tuple[str, str]:
    """Repair a checkpoint of ours in a copy of its repository, as the command does."""
    with tempfile.TemporaryDirectory(dir=path.parents[1]) as folder:
        run = Path(shutil.copytree(path.parent, Path(folder) / "run", symlinks=True))
        is_whole, how = own.mend(run / path.name, others)
        if not is_whole:
            return STAYS, how
        return _wrong(sample, run / path.name, whole, is_whole=True) or MENDS, how


def _wrong(sample: Sample, path: Path, whole: Loaded | None, *, is_whole: bool) -> str:
    """Return what the layout's own tool has of what was mended that it should not have."""
    if whole is None:
        return ""
    if path.name.startswith("weights-"):
        # DeepSpeed resumes no folder without its engine: a new training begins from the weights.
        held = load_model(path).weights
        is_same = all(torch.equal(one, held[name]) for name, one in whole.weights.items())
        return "" if is_same else "WRONG: other weights"
    word, found = loaded(sample, path)
    if found is None:
        return f"WRONG: {word}"
    if not same(found.weights, whole.weights):
        return "WRONG: other weights"
    return "WRONG: another state" if is_whole and not same(found.rest, whole.rest) else ""


def _told(plan: LayoutRepairPlan) -> str:
    said = [f"{one.file}: {one.what}" for one in plan.steps]
    said += [f"lost: {name}" for name in plan.losses]
    return "; ".join(said or [f"{place}: {why}" for place, why in plan.refused.items()])


def same(one: Any, other: Any) -> bool:
    """Say whether two values are the same, to the bit of every tensor in them."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return (
            isinstance(other, dict)
            and list(one) == list(other)
            and all(same(value, other[key]) for key, value in one.items())
        )
    if isinstance(one, list | tuple):
        return (
            isinstance(other, list | tuple)
            and len(one) == len(other)
            and all(same(a, b) for a, b in zip(one, other, strict=True))
        )
    if type(one) is type(other) and getattr(one, "__dict__", None):
        return same(vars(one), vars(other))
    return bool(one == other)


def loaded(sample: Sample, path: Path) -> tuple[str, Loaded | None]:
    """Return what a layout's own tool does, and what it has then.

    It ``loads``, ``stops``, or ``runs it``.
    """
    found = None
    with tempfile.TemporaryDirectory() as folder:
        os.environ["DAMAGE_BOMB"] = f"{folder}/went-off"
        try:
            with quiet():
                found = sample.load(path)
        except (Exception, CheckpointException):  # noqa: BLE001 - whatever its tool raises
            done = "stops"
        else:
            done = "loads"
        finally:
            del os.environ["DAMAGE_BOMB"]
        return ("runs it", None) if any(Path(folder).iterdir()) else (done, found)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    sink = io.StringIO()
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(sink),
            contextlib.redirect_stderr(sink),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)
