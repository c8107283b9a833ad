"""A new, honest state for weights that lost theirs: what is known, from where, and what is lost.

Nothing is changed in place: what reads whole is written to a new folder as Transformers keeps it,
which its Trainer and ours go on from as far as that is possible. ``rebuilt.json`` beside it says
what was not there any more.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resilient.errors import ConfigError, IncompatibleCheckpoint, IntegrityError, NothingToResume
from resilient.layouts.incomplete import saved_name
from resilient.layouts.progress import schedule_of
from resilient.showing import quoted
from resilient.train.interop.files import (
    ADAPTER_WEIGHTS,
    INDEX,
    LAST,
    OPTIMIZER,
    SCALER,
    SCHEDULER,
    STATE,
    UNFINISHED,
    WEIGHTS,
    TransformersCheckpoint,
    TransformersFiles,
    adam_steps,
)
from resilient.train.state import TrainerControl, TrainerState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

REPORT = "rebuilt.json"
CONSEQUENCES = {
    "optimizer": "its moments are gone: a resume begins them at zero, and the schedule anew",
    "scheduler": "the schedule is gone: a resume begins it and the moments anew",
    "scaler": "the loss scale of fp16 begins anew",
    "random state": "dropout and augmentation draw other numbers than they would have",
    "place in the data": "the first epoch begins again, so samples are repeated",
    "history": "no losses and metrics before this step",
    "best model": "the next evaluation is the best so far",
    "callbacks": "their counters begin anew",
}


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """What a rebuilt checkpoint is made of.

    Attributes:
        folder: where it is.
        step: the optimizer steps that were made.
        known: what -> where that is from.
        lost: what -> what follows from that.
    """

    folder: str
    step: int
    known: Mapping[str, str] = field(default_factory=dict)
    lost: Mapping[str, str] = field(default_factory=dict)

    @property
    def can_go_on(self) -> bool:
        """Whether a resume continues the optimizer and the schedule, and not the weights alone."""
        return not {"optimizer", "scheduler"} & set(self.lost)


def rebuild_folder(source: str | Path, out: str | Path) -> Rebuilt:
    """Write a checkpoint of Transformers whose ``trainer_state.json`` is lost as one that has one.

    The step is that of the schedule, the optimizer and the folder's name, which must agree. What a
    sibling folder (another ``checkpoint-<step>`` beside it) knows of the run is taken from there:
    the length of an epoch, and the history up to this step.

    Crash: a folder beside ``out``, named ``.<name>.partial``; the source is only read.

    Args:
        source: its folder.
        out: where to, best ``.../checkpoint-<step>``; must not be there yet.

    Raises:
        ConfigError: ``out`` is there, the state is whole, or nothing says the step.
        IncompatibleCheckpoint: there are no weights.
        IntegrityError: the weights are damaged, or files are of several steps.
    """
    files, target = TransformersFiles(source), Path(out)
    require_new(target)
    _require_finished(files.folder)
    _require_lost(files)
    files.weights()
    whole, lost = _readable(files)
    step, said_by = _step_of(files, whole)
    state, known, gone = _state_beside(files.folder, step)
    made = Rebuilt(
        str(target),
        step,
        {"weights": str(files.folder), "step": said_by, **known},
        {name: CONSEQUENCES[name] for name in (*lost, *gone, "best model", "callbacks")},
    )
    skipped = {STATE, UNFINISHED, *(name for names in lost.values() for name in names)}

    def fill(draft: Path) -> None:
        for one in files.folder.iterdir():
            if one.is_file() and one.name not in skipped:
                shutil.copy2(one, draft / one.name)

    return write_rebuilt(target, made, state, fill)


def is_weights_folder(path: str | Path) -> bool:
    """Say whether a path is a folder with the weights of a model, and none of ours."""
    folder = Path(path)
    names = (WEIGHTS, INDEX, ADAPTER_WEIGHTS)
    return not (folder / "manifest.json").exists() and any(
        (folder / one).is_file() for one in names
    )


def require_new(target: Path) -> None:
    """Raise if a folder is there.

    Raises:
        ConfigError: says so.
    """
    if target.exists():
        raise ConfigError(f"`{target}` is there already", hint=f"ls -l {quoted(target)}")


def write_rebuilt(
    target: Path, made: Rebuilt, state: TrainerState, fill: Callable[[Path], None]
) -> Rebuilt:
    """Write a folder: what ``fill`` puts into it, the state, and the report of what is lost."""
    draft = target.with_name(f".{target.name}.partial")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    fill(draft)
    # A save of Transformers looks this callback up, and raises where its state is missing.
    callbacks = {"TrainerControl": TrainerControl().state(), **state.stateful_callbacks}
    state = replace(state, stateful_callbacks=callbacks)
    state.save_to_json(draft / STATE)
    text = json.dumps(asdict(made), indent=2, sort_keys=True) + "\n"
    (draft / REPORT).write_text(text, encoding="utf-8")
    draft.rename(target)
    return made


def _require_lost(files: TransformersFiles) -> None:
    try:
        TransformersCheckpoint(files.folder)
    except (NothingToResume, IntegrityError):
        return
    raise ConfigError(
        f"the {STATE} of `{files.folder}` is whole: there is nothing to rebuild",
        hint=f"resilient train --resume {quoted(files.folder)} SCRIPT",
    )


def _require_finished(folder: Path) -> None:
    """Refuse a save that never ended: nothing tells if its files are whole.

    Raises:
        IntegrityError: The folder holds the mark of such a save, or is a staging folder.
    """
    if not (folder / UNFINISHED).exists() and not saved_name(folder.name):
        return
    sibling = max(_whole(folder.absolute().parent.glob("checkpoint-*")), key=_step, default=None)
    raise IntegrityError(
        f"cannot rebuild `{folder}`: its save never ended. Nothing was written",
        key=str(folder),
        hint=f"resilient ckpt inspect {quoted(sibling.folder if sibling else folder)}",
    )


def _step(found: TransformersCheckpoint) -> int:
    return found.step


def _readable(files: TransformersFiles) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Return the content of files that read whole, and what is lost with the names of the others.

    A file that never was is lost too, but the scaler's: only fp16 has one.
    """
    names = {"optimizer": [OPTIMIZER], "scheduler": [SCHEDULER], "scaler": [SCALER]}
    names["random state"] = [one.name for one in files.folder.glob("rng_state*.pth")]
    whole: dict[str, Any] = {}
    lost: dict[str, list[str]] = {}
    for what, some in names.items():
        for name in some:
            if (files.folder / name).exists():
                try:
                    whole[name] = files.load(name)
                except IntegrityError:
                    lost.setdefault(what, []).append(name)
            elif what != "scaler":
                lost[what] = []
        if not some:
            lost[what] = []
    return whole, lost


def _step_of(files: TransformersFiles, whole: Mapping[str, Any]) -> tuple[int, str]:
    """Return the step, and what says it.

    Raises:
        ConfigError: nothing does.
        IntegrityError: what says it disagrees.
    """
    said: dict[str, int] = {}
    if named := LAST.fullmatch(files.folder.name):
        said["the folder's name"] = int(named[1])
    if SCHEDULER in whole:
        counted = schedule_of(whole[SCHEDULER])
        # A schedule that goes by a metric counts evaluations.
        if counted is not None and counted.step is not None:
            said[SCHEDULER] = counted.step
    if made := (adam_steps(whole[OPTIMIZER]) if OPTIMIZER in whole else set()):
        said[OPTIMIZER] = max(made)
    if not said:
        raise ConfigError(
            f"nothing in `{files.folder}` says of which step it is",
            hint="rename it to checkpoint-STEP",
        )
    step = max(said.values())
    # With fp16 some steps are skipped, by the optimizer and the schedule alike.
    skips = SCALER in whole and said.get("the folder's name") == step
    if len(set(said.values())) > 1 and not skips:
        shown = ", ".join(f"{name} {number}" for name, number in said.items())
        raise IntegrityError(
            f"the files of `{files.folder}` are of several steps: {shown}",
            key=str(files.folder),
            hint="the folder mixes two checkpoints: take another",
        )
    return step, ", ".join(name for name, number in said.items() if number == step)


def _state_beside(folder: Path, step: int) -> tuple[TrainerState, dict[str, str], list[str]]:
    """Return a basic state, what of it a sibling said, and what nothing says."""
    sibling = _nearest_sibling(folder, step)
    if sibling is None:
        return TrainerState(global_step=step), {}, ["place in the data", "history"]
    theirs = sibling.state
    entries = [one for one in theirs["log_history"] if one.get("step", 0) <= step]
    named = {name: theirs[name] for name in ("max_steps", "num_train_epochs") if name in theirs}
    state = TrainerState(
        global_step=step,
        epoch=_epoch_at(step, sibling),
        train_batch_size=int(theirs.get("train_batch_size") or 0),
        log_history=entries,
        **named,
    )
    state = replace(state, **{one: theirs[one] for one in _CADENCES if one in theirs})
    known = {"place in the data": str(sibling.folder), "history": str(sibling.folder)}
    if sibling.step >= step:
        return state, known, []
    known["history"] += f", up to step {sibling.step}"
    return state, known, ["history"]


_CADENCES = ("logging_steps", "eval_steps", "save_steps")


def _epoch_at(step: int, sibling: TransformersCheckpoint) -> float:
    """Return the epoch of a step: as it was logged, or by the sibling's steps per epoch."""
    logged = [one for one in sibling.state["log_history"] if one.get("step") == step]
    exact = next((one["epoch"] for one in logged if "epoch" in one), None)
    return float(sibling.state["epoch"]) * step / sibling.step if exact is None else float(exact)


def _nearest_sibling(folder: Path, step: int) -> TransformersCheckpoint | None:
    """Return the whole checkpoint beside a folder that knows most of the same run."""
    found = list(_whole(one for one in folder.absolute().parent.glob("checkpoint-*")))
    later = [one for one in found if one.step >= step]
    if later:
        return min(later, key=lambda one: one.step)
    return max(found, key=lambda one: one.step, default=None)


def _whole(folders: Iterable[Path]) -> Iterable[TransformersCheckpoint]:
    for one in folders:
        try:
            found = TransformersCheckpoint(one)
        except (NothingToResume, IntegrityError, IncompatibleCheckpoint):
            continue
        if found.step > 0:
            yield found
