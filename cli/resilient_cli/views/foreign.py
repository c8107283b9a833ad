"""Results of ``ckpt inspect``, ``ckpt verify`` and ``ckpt ls`` for checkpoints of other tools.

The results include a line on resumability. This line has the same form for checkpoints of every
tool.
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

    from resilient.layouts.model import Optimizer, Problem, Resumability, Schedule, Tensor
    from resilient.layouts.run_folder import RunCheckpoint
    from resilient_cli.foreign import ForeignCheckpoint, ForeignRun

_ANSWERS = {"yes": "yes", "partly": "yes with loss of ", "no": "no, because "}


def conclusion(verdict: Resumability) -> KeyValues:
    """Return the line on resumability, and the next command if one helps."""
    text = _ANSWERS[verdict.answer] + "; ".join(verdict.why)
    next_pairs = (("next", verdict.command),) if verdict.command else ()
    return KeyValues((("resumable", text), *next_pairs))


def resumable(verdict: Resumability) -> dict[str, Any]:
    """Return the resumability as a JSON value."""
    return {"answer": verdict.answer, "why": list(verdict.why), "command": verdict.command}


_NAMED_MAX = 4
"""Largest number of places that are named for one fix."""


def build_inspect_result(checkpoint: ForeignCheckpoint, *, with_tensors: bool) -> CommandResult:
    """Return the result of ``ckpt inspect`` for a checkpoint of another tool."""
    contents = checkpoint.contents
    parts = [_part(name, contents.tensors) for name in (MODEL, OPTIMIZER, OTHER)]
    parts = [part for part in parts if part["tensors"]]
    document = {**_document(checkpoint), "parts": parts}
    blocks: tuple[Table | KeyValues | str, ...] = (
        _summary(checkpoint),
        Table(
            ("PART", "TENSORS", "ELEMENTS", "SIZE", "DTYPES"),
            tuple(
                (
                    part["name"],
                    str(part["tensors"]),
                    str(part["elements"]),
                    human_size(part["size_bytes"]),
                    ", ".join(part["dtypes"]),
                )
                for part in parts
            ),
        ),
        Table(
            ("PLACE", "PROBLEM", "COSTS"),
            tuple(
                (
                    problem.place,
                    problem.what,
                    "everything" if problem.is_fatal else problem.loses or NONE,
                )
                for problem in contents.problems
            ),
        ),
    )
    blocks = (*blocks, *_fixes(checkpoint))
    if with_tensors:
        document["tensors"] = [_tensor(tensor) for tensor in contents.tensors]
        blocks = (*blocks, _tensors(contents.tensors))
    blocks = (*blocks, conclusion(checkpoint.verdict))
    return CommandResult(
        "ckpt.inspect-foreign", "foreign_checkpoint", document, blocks, (checkpoint.url,)
    )


def build_verify_result(checkpoint: ForeignCheckpoint) -> CommandResult:
    """Return the result of ``ckpt verify`` for a checkpoint of another tool."""
    result = build_inspect_result(checkpoint, with_tensors=False)
    size_bytes = sum(checkpoint.listing.sizes.values())
    read_text = f"Read {human_size(checkpoint.read_bytes or 0)} of {human_size(size_bytes)}."
    return replace(
        result,
        command="ckpt.verify-foreign",
        document={**result.document, "read_bytes": checkpoint.read_bytes},
        blocks=(*result.blocks[:-1], read_text, result.blocks[-1]),
    )


def _document(checkpoint: ForeignCheckpoint) -> dict[str, Any]:
    contents = checkpoint.contents
    return {
        "url": checkpoint.url,
        "layout": contents.layout,
        "title": contents.title,
        "step": contents.step,
        "epoch": contents.epoch,
        "world_size": contents.world,
        "files": len(checkpoint.listing.sizes),
        "size_bytes": sum(checkpoint.listing.sizes.values()),
        "outside": list(checkpoint.listing.outside),
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
        "problems": [_problem(checkpoint, problem) for problem in contents.problems],
        "resumable": resumable(checkpoint.verdict),
    }


def _problem(checkpoint: ForeignCheckpoint, problem: Problem) -> dict[str, Any]:
    return {
        "place": problem.place,
        "what": problem.what,
        "severity": problem.severity,
        "loses": problem.loses,
        "is_fatal": problem.is_fatal,
        "fix": remedy(problem, checkpoint.url, checkpoint.others),
    }


def _fixes(checkpoint: ForeignCheckpoint) -> Iterator[str]:
    """Yield each fix once, except the fix that is shown as the next command."""
    places: dict[str, list[str]] = {}
    for problem in checkpoint.contents.problems:
        fix = remedy(problem, checkpoint.url, checkpoint.others)
        places.setdefault(fix, []).append(problem.place)
    for fix, names in places.items():
        if fix != checkpoint.verdict.command:
            names_text = ", ".join(dict.fromkeys(names[:_NAMED_MAX]))
            yield f"fix: {fix}" if len(places) == 1 else f"fix for {names_text}: {fix}"


def _summary(checkpoint: ForeignCheckpoint) -> KeyValues:
    contents = checkpoint.contents
    size = human_size(sum(checkpoint.listing.sizes.values()))
    schedule, rng = contents.schedule, contents.rng
    rows = (
        ("checkpoint", checkpoint.url),
        ("layout", f"{contents.title} ({contents.layout})"),
        ("step", _number_text(contents.step)),
        ("epoch", _number_text(contents.epoch)),
        ("ranks", _number_text(contents.world)),
        ("size", f"{size} in {count(len(checkpoint.listing.sizes), 'file')}"),
        ("optimizer", NONE if contents.optimizer is None else _optimizer_text(contents.optimizer)),
        ("schedule", NONE if schedule is None else _schedule_text(schedule)),
        (
            "random",
            NONE if rng is None else f"{', '.join(rng.kinds)} of {count(len(rng.ranks), 'rank')}",
        ),
        ("data", inline(contents.data)),
        ("versions", inline(contents.versions)),
        ("facts", inline(contents.facts)),
    )
    left_out = checkpoint.listing.outside
    return KeyValues(rows + ((("not read", ", ".join(left_out[:8])),) if left_out else ()))


def _number_text(value: float | None) -> str:
    return NONE if value is None else f"{value:.10g}"


def _schedule_text(schedule: Schedule) -> str:
    rates_text = ", ".join(f"{rate:.6g}" for rate in dict.fromkeys(schedule.rates))
    count_text = f"step {_number_text(schedule.step)}"
    if schedule.evaluations is not None:
        count_text = count(schedule.evaluations, "evaluation")
    return count_text + (f", rate {rates_text}" if rates_text else "")


def _optimizer_text(optimizer: Optimizer) -> str:
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
    part_tensors = [tensor for tensor in tensors if tensor.part == name]
    return {
        "type": "part",
        "name": name,
        "tensors": len(part_tensors),
        "elements": sum(tensor.elements for tensor in part_tensors),
        "size_bytes": sum(tensor.size_bytes for tensor in part_tensors),
        "dtypes": sorted({tensor.dtype for tensor in part_tensors}),
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
                tensor.name,
                tensor.part,
                tensor.dtype,
                "x".join(map(str, tensor.shape)) or "scalar",
                human_size(tensor.size_bytes),
                ", ".join(tensor.files),
            )
            for tensor in tensors
        ),
    )


_YEAR_10000_SECONDS = 253_402_300_800
_CUT = "The listing is cut, so newer checkpoints may be missing."


def build_run_result(
    run: ForeignRun, checkpoints_shown: Sequence[RunCheckpoint], now: str
) -> CommandResult:
    """Return the result of ``ckpt ls`` for a folder of checkpoints of another tool.

    Args:
        run: Run with all its checkpoints.
        checkpoints_shown: Checkpoints to show.
        now: Current time for ages, ISO 8601.
    """
    checkpoints, place = run.checkpoints, run.url.rstrip("/")
    size_bytes = sum(checkpoint.size_bytes for checkpoint in checkpoints)
    document = {
        "url": run.url,
        "size_bytes": size_bytes,
        "hidden": len(checkpoints) - len(checkpoints_shown),
        "whole": run.is_whole,
        "stale": dict(run.pointers.stale),
        "checkpoints": [
            {
                "type": "foreign_checkpoint_name",
                "name": checkpoint.name,
                "step": checkpoint.step,
                "changed": _changed_at(checkpoint),
                "layout": checkpoint.layout,
                "size_bytes": checkpoint.size_bytes,
                "files": checkpoint.files,
                "notes": _notes(run, checkpoint),
            }
            for checkpoint in checkpoints_shown
        ],
    }
    rows = tuple(
        (
            NONE if checkpoint.step is None else str(checkpoint.step),
            age(_changed_at(checkpoint) or "", now),
            human_size(checkpoint.size_bytes),
            str(checkpoint.files),
            checkpoint.layout,
            checkpoint.name,
            ", ".join(_notes(run, checkpoint)),
        )
        for checkpoint in checkpoints_shown
    )
    hidden_count = len(checkpoints) - len(checkpoints_shown)
    blocks: tuple[Table | str, ...] = (
        Table(("STEP", "AGE", "SIZE", "FILES", "LAYOUT", "NAME", "NOTE"), rows),
        *([f"{len(checkpoints_shown)} shown, {hidden_count} not chosen."] if hidden_count else []),
        f"{count(len(checkpoints), 'checkpoint')} of another tool, {human_size(size_bytes)}.",
        *([] if run.is_whole else [_CUT]),
        *(
            f"`{pointer}` names `{tag}`, which does not exist."
            for pointer, tag in run.pointers.stale.items()
        ),
        f"To see whether one can be resumed: resilient ckpt inspect latest {shell_quote(place)}",
    )
    # A name with a slash would be taken for a path, so each id is the whole path.
    ids = tuple(f"{place}/{checkpoint.name}" for checkpoint in checkpoints_shown)
    return CommandResult("ckpt.ls-foreign", "foreign_checkpoints", document, blocks, ids)


def _changed_at(checkpoint: RunCheckpoint) -> str | None:
    """Return the time of the last write to a checkpoint; None if the time is unknown.

    A user can set a file time beyond any calendar, which counts as unknown.
    """
    is_known = checkpoint.changed is not None and 0 <= checkpoint.changed < _YEAR_10000_SECONDS
    return moment(int(1000 * (checkpoint.changed or 0))) if is_known else None


def _notes(run: ForeignRun, checkpoint: RunCheckpoint) -> list[str]:
    """Return the marks of a checkpoint in its run."""
    names_by_word = (("latest", run.latest), ("best", run.pointers.best))
    kinds = (("unfinished", checkpoint.is_unfinished), ("repaired", checkpoint.is_repaired))
    return [
        *(word for word, names in names_by_word if checkpoint.name in names),
        *(word for word, is_it in kinds if is_it),
    ]
