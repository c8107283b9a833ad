"""Results of ``ckpt inspect``, ``ckpt verify`` and ``ckpt ls`` for checkpoints of other tools.

The results include the line on resumability, which is the same for checkpoints of every tool.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from resilient.layouts.model import MODEL, OPTIMIZER, OTHER
from resilient.layouts.resumability import remedy
from resilient.redaction import shell_quote
from resilient_cli.output import CommandResult, KeyValues, Table, human_size
from resilient_cli.views.goodput import moment
from resilient_cli.views.text import NONE, age, count, inline

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from resilient.layouts.detect import RunCheckpoint
    from resilient.layouts.model import Optimizer, Problem, Resumability, Schedule, Tensor
    from resilient_cli.foreign import ForeignCheckpoint, ForeignRun

_ANSWERS = {"yes": "yes", "partly": "yes with loss of ", "no": "no, because "}


def conclusion(verdict: Resumability) -> KeyValues:
    """Return the line on resumability, and the next command if one helps."""
    said = _ANSWERS[verdict.answer] + "; ".join(verdict.why)
    after = (("next", verdict.command),) if verdict.command else ()
    return KeyValues((("resumable", said), *after))


def resumable(verdict: Resumability) -> dict[str, Any]:
    """Return the resumability as a JSON value."""
    return {"answer": verdict.answer, "why": list(verdict.why), "command": verdict.command}


_NAMED_MAX = 4
"""Largest number of places that are named for one fix."""


def looked_at(looked: ForeignCheckpoint, *, with_tensors: bool) -> CommandResult:
    """Return the result of ``ckpt inspect`` for a checkpoint of another tool."""
    contents = looked.contents
    parts = [_part(name, contents.tensors) for name in (MODEL, OPTIMIZER, OTHER)]
    parts = [one for one in parts if one["tensors"]]
    document = {**_document(looked), "parts": parts}
    blocks: tuple[Table | KeyValues | str, ...] = (
        _about(looked),
        Table(
            ("PART", "TENSORS", "ELEMENTS", "SIZE", "DTYPES"),
            tuple(
                (
                    one["name"],
                    str(one["tensors"]),
                    str(one["elements"]),
                    human_size(one["size_bytes"]),
                    ", ".join(one["dtypes"]),
                )
                for one in parts
            ),
        ),
        Table(
            ("PLACE", "PROBLEM", "COSTS"),
            tuple(
                (one.place, one.what, "everything" if one.is_fatal else one.loses or NONE)
                for one in contents.problems
            ),
        ),
    )
    blocks = (*blocks, *_fixes(looked))
    if with_tensors:
        document["tensors"] = [_tensor(one) for one in contents.tensors]
        blocks = (*blocks, _tensors(contents.tensors))
    blocks = (*blocks, conclusion(looked.verdict))
    return CommandResult(
        "ckpt.inspect-foreign", "foreign_checkpoint", document, blocks, (looked.url,)
    )


def proved(looked: ForeignCheckpoint) -> CommandResult:
    """Return the result of ``ckpt verify`` for a checkpoint of another tool."""
    found = looked_at(looked, with_tensors=False)
    size_bytes = sum(looked.listing.sizes.values())
    read = f"Read {human_size(looked.read_bytes or 0)} of {human_size(size_bytes)}."
    return replace(
        found,
        command="ckpt.verify-foreign",
        document={**found.document, "read_bytes": looked.read_bytes},
        blocks=(*found.blocks[:-1], read, found.blocks[-1]),
    )


def _document(looked: ForeignCheckpoint) -> dict[str, Any]:
    contents = looked.contents
    return {
        "url": looked.url,
        "layout": contents.layout,
        "title": contents.title,
        "step": contents.step,
        "epoch": contents.epoch,
        "world_size": contents.world,
        "files": len(looked.listing.sizes),
        "size_bytes": sum(looked.listing.sizes.values()),
        "outside": list(looked.listing.outside),
        "optimizer": None if contents.optimizer is None else _optimizer(contents.optimizer),
        "schedule": None
        if contents.schedule is None
        else {"step": contents.schedule.step, "rates": list(contents.schedule.rates)},
        "rng": None
        if contents.rng is None
        else {"ranks": list(contents.rng.ranks), "kinds": list(contents.rng.kinds)},
        "data": dict(contents.data),
        "versions": dict(contents.versions),
        "facts": dict(contents.facts),
        "problems": [_problem(looked, one) for one in contents.problems],
        "resumable": resumable(looked.verdict),
    }


def _problem(looked: ForeignCheckpoint, problem: Problem) -> dict[str, Any]:
    return {
        "place": problem.place,
        "what": problem.what,
        "severity": problem.severity,
        "loses": problem.loses,
        "is_fatal": problem.is_fatal,
        "fix": remedy(problem, looked.url, looked.sibling),
    }


def _fixes(looked: ForeignCheckpoint) -> Iterator[str]:
    """Yield each fix once, except the one that is shown as the next command."""
    places: dict[str, list[str]] = {}
    for one in looked.contents.problems:
        places.setdefault(remedy(one, looked.url, looked.sibling), []).append(one.place)
    for fix, named in places.items():
        if fix != looked.verdict.command:
            whose = ", ".join(dict.fromkeys(named[:_NAMED_MAX]))
            yield f"fix: {fix}" if len(places) == 1 else f"fix for {whose}: {fix}"


def _about(looked: ForeignCheckpoint) -> KeyValues:
    contents = looked.contents
    size = human_size(sum(looked.listing.sizes.values()))
    schedule, rng = contents.schedule, contents.rng
    rows = (
        ("checkpoint", looked.url),
        ("layout", f"{contents.title} ({contents.layout})"),
        ("step", _or_none(contents.step)),
        ("epoch", _or_none(contents.epoch)),
        ("ranks", _or_none(contents.world)),
        ("size", f"{size} in {count(len(looked.listing.sizes), 'file')}"),
        ("optimizer", NONE if contents.optimizer is None else _said(contents.optimizer)),
        ("schedule", NONE if schedule is None else _scheduled(schedule)),
        (
            "random",
            NONE if rng is None else f"{', '.join(rng.kinds)} of {count(len(rng.ranks), 'rank')}",
        ),
        ("data", inline(contents.data)),
        ("versions", inline(contents.versions)),
        ("facts", inline(contents.facts)),
    )
    left_out = looked.listing.outside
    return KeyValues(rows + ((("not read", ", ".join(left_out[:8])),) if left_out else ()))


def _or_none(value: float | None) -> str:
    return NONE if value is None else f"{value:.10g}"


def _scheduled(schedule: Schedule) -> str:
    said = ", ".join(f"{one:.6g}" for one in dict.fromkeys(schedule.rates))
    counted = f"step {_or_none(schedule.step)}"
    if schedule.evaluations is not None:
        counted = count(schedule.evaluations, "evaluation")
    return counted + (f", rate {said}" if said else "")


def _said(optimizer: Optimizer) -> str:
    parts = [
        *(() if optimizer.step is None else (f"step {optimizer.step}",)),
        *((count(optimizer.states, "state"),) if optimizer.states else ()),
        count(optimizer.groups, "group"),
        *((", ".join(optimizer.slots),) if optimizer.slots else ()),
    ]
    return "; ".join(parts)


def _optimizer(optimizer: Optimizer) -> dict[str, Any]:
    return {
        "step": optimizer.step,
        "states": optimizer.states,
        "params": optimizer.params,
        "groups": optimizer.groups,
        "rates": list(optimizer.rates),
        "slots": list(optimizer.slots),
    }


def _part(name: str, tensors: Iterable[Tensor]) -> dict[str, Any]:
    mine = [one for one in tensors if one.part == name]
    return {
        "type": "part",
        "name": name,
        "tensors": len(mine),
        "elements": sum(one.elements for one in mine),
        "size_bytes": sum(one.size_bytes for one in mine),
        "dtypes": sorted({one.dtype for one in mine}),
    }


def _tensor(tensor: Tensor) -> dict[str, Any]:
    return {
        "type": "tensor",
        "name": tensor.name,
        "part": tensor.part,
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "size_bytes": tensor.size_bytes,
        "files": list(tensor.files),
    }


def _tensors(tensors: Iterable[Tensor]) -> Table:
    return Table(
        ("TENSOR", "PART", "DTYPE", "SHAPE", "SIZE", "FILES"),
        tuple(
            (
                one.name,
                one.part,
                one.dtype,
                "x".join(map(str, one.shape)) or "scalar",
                human_size(one.size_bytes),
                ", ".join(one.files),
            )
            for one in tensors
        ),
    )


_YEAR_10000_SECONDS = 253_402_300_800
_CUT = "The listing is cut, so newer checkpoints may be missing."


def listed_run(run: ForeignRun, shown: Sequence[RunCheckpoint], now: str) -> CommandResult:
    """Return the result of ``ckpt ls`` for a folder of checkpoints of another tool.

    Args:
        run: Run with all its checkpoints.
        shown: Checkpoints to show.
        now: Current time for ages, ISO 8601.
    """
    found, place = run.checkpoints, run.url.rstrip("/")
    size_bytes = sum(one.size_bytes for one in found)
    document = {
        "url": run.url,
        "size_bytes": size_bytes,
        "hidden": len(found) - len(shown),
        "whole": run.is_whole,
        "stale": dict(run.pointers.stale),
        "checkpoints": [
            {
                "type": "foreign_checkpoint_name",
                "name": one.name,
                "step": one.step,
                "changed": _changed(one),
                "layout": one.layout,
                "size_bytes": one.size_bytes,
                "files": one.files,
                "notes": _notes(run, one),
            }
            for one in shown
        ],
    }
    rows = tuple(
        (
            NONE if one.step is None else str(one.step),
            age(_changed(one) or "", now),
            human_size(one.size_bytes),
            str(one.files),
            one.layout,
            one.name,
            ", ".join(_notes(run, one)),
        )
        for one in shown
    )
    hidden = len(found) - len(shown)
    blocks: tuple[Table | str, ...] = (
        Table(("STEP", "AGE", "SIZE", "FILES", "LAYOUT", "NAME", "NOTE"), rows),
        *([f"{len(shown)} shown, {hidden} not chosen."] if hidden else []),
        f"{count(len(found), 'checkpoint')} of another tool, {human_size(size_bytes)}.",
        *([] if run.is_whole else [_CUT]),
        *(
            f"`{one}` names `{tag}`, which does not exist."
            for one, tag in run.pointers.stale.items()
        ),
        f"To see whether one can be resumed: resilient ckpt inspect latest {shell_quote(place)}",
    )
    # A name with a slash would be taken for a path, so each id is the whole path.
    ids = tuple(f"{place}/{one.name}" for one in shown)
    return CommandResult("ckpt.ls-foreign", "foreign_checkpoints", document, blocks, ids)


def _changed(one: RunCheckpoint) -> str | None:
    """Return when the last file of a checkpoint was written; None if it is unknown.

    A user can set a file time beyond any calendar, which counts as unknown.
    """
    is_told = one.changed is not None and 0 <= one.changed < _YEAR_10000_SECONDS
    return moment(int(1000 * (one.changed or 0))) if is_told else None


def _notes(run: ForeignRun, one: RunCheckpoint) -> list[str]:
    """Return the marks of a checkpoint in its run."""
    named = (("latest", run.latest), ("best", run.pointers.best))
    kinds = (("unfinished", one.is_unfinished), ("repaired", one.is_repaired))
    return [
        *(word for word, names in named if one.name in names),
        *(word for word, is_it in kinds if is_it),
    ]
