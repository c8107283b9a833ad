"""The answer of ``ckpt repair``."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from resilient.vault.access.damage import join_names
from resilient_cli.render import Answer, Table
from resilient_cli.views.verdict import conclusion, resumable
from resilient_cli.views.words import NONE, count, folder

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from resilient.format.names import CheckpointId
    from resilient.layouts.values import Verdict
    from resilient.train.interop.rebuilding import Rebuilt
    from resilient.vault.health.repair import Fix, Loss, RepairPlan


def repairing(
    url: str,
    plan: RepairPlan,
    resume: CheckpointId | None,
    *,
    done: bool,
    aside: Mapping[str, str],
) -> Answer:
    """Return the answer of ``ckpt repair``.

    Args:
        url: the repository.
        plan: what can be made whole and what cannot.
        resume: what training can resume from; None was not asked for, or is none.
        done: whether the plan was carried out.
        aside: where what was damaged is kept, by file name.
    """
    document = {
        "repository": url,
        "id": plan.checkpoint.folder,
        "done": done,
        "whole": plan.is_whole,
        "fixes": [{"type": "fix", **asdict(one)} for one in plan.fixes],
        "losses": [{"type": "loss", **asdict(one)} for one in plan.losses],
        "lost_tensors": list(plan.lost_tensors),
        "whole_tensors": list(plan.whole_tensors),
        "parts": plan.parts,
        "resume": folder(resume),
        "aside": dict(aside),
    }
    verdict = "rebuilt" if done else "rebuild"
    rows = [*(_fix(one, verdict) for one in plan.fixes), *map(_loss, plan.losses)]
    table = Table(("FILE", "PLAN", "BYTES", "PROBLEM", "FROM", "TENSORS"), tuple(rows))
    ids = tuple(one.file for one in plan.fixes)
    lines = [*_lines(plan, resume, done=done), *_kept(aside)]
    blocks: tuple[Table | str, ...] = (table, *lines)
    return Answer("ckpt.repair", "repair", document, blocks, ids)


def rebuilding(made: Rebuilt, verdict: Verdict) -> Answer:
    """Return the answer of ``ckpt repair --rebuild``.

    Args:
        made: The rebuilt folder.
        verdict: The judge's answer about the rebuilt folder.
    """
    rows = [(name, "known", source) for name, source in made.known.items()]
    rows += [(name, "LOST", follows) for name, follows in made.lost.items()]
    table = Table(("WHAT", "IS", "FROM, OR WHAT FOLLOWS"), tuple(rows))
    said = f"Step {made.step} is in {made.folder}; what is lost is in rebuilt.json too."
    document = {**asdict(made), "resumable": resumable(verdict)}
    blocks = (table, said, conclusion(verdict))
    return Answer("ckpt.repair", "rebuild", document, blocks, (made.folder,))


def _fix(fix: Fix, verdict: str) -> tuple[str, ...]:
    return (fix.file, verdict, NONE, fix.problem, fix.source, NONE)


def _loss(loss: Loss) -> tuple[str, ...]:
    span = f"{loss.start}-{loss.stop}" if loss.stop > loss.start else NONE
    return (loss.file, "LOST", span, loss.problem, NONE, join_names(loss.tensors) or NONE)


def _lines(plan: RepairPlan, resume: CheckpointId | None, *, done: bool) -> Iterator[str]:
    """Yield what was done, then what is lost and what can be salvaged, then what to go on from."""
    files, name = count(len(plan.fixes), "file"), plan.checkpoint
    if not plan.fixes:
        yield f"{name} is whole: nothing to repair." if plan.is_whole else "Nothing was changed."
    elif done:
        yield f"{files} rebuilt, each proved against the manifest before it was put."
    else:
        yield f"{files} would be rebuilt, with `--apply`. Nothing was changed."
    if plan.is_whole:
        return
    yield from _salvage(plan)
    yield f"Training can resume from {resume}." if resume else "Training cannot resume."


def _kept(aside: Mapping[str, str]) -> Iterator[str]:
    """Say where what was damaged can be found; of files that were missing there is nothing."""
    if aside:
        yield (
            f"What was damaged is kept until the checkpoint is pruned: {', '.join(aside.values())}."
        )


def _salvage(plan: RepairPlan) -> Iterator[str]:
    if plan.manifest is None:
        yield (
            "Lost: the manifest and its copy, so nothing of it can be proved. Its files are still "
            "there, and those that end in .safetensors can be opened one by one."
        )
        return
    lost, whole = plan.lost_tensors, plan.whole_tensors
    names = f": {', '.join(lost)}" if lost else ""
    yield f"Lost: {count(len(lost), 'tensor')}{names}."
    if any(one.file.startswith("rng_state_") for one in plan.losses):
        yield (
            "Random states that are lost do not follow from seed and step: other numbers were "
            "drawn since. Without them dropout and augmentation draw other numbers from here on."
        )
    hurt = [name for name, is_whole in plan.parts.items() if not is_whole]
    left = [name for name, is_whole in plan.parts.items() if is_whole]
    yield f"Whole: {count(len(whole), 'tensor')}. Parts that are whole: {', '.join(left) or NONE}."
    yield f"Parts that are not: {', '.join(hurt) or NONE}."
