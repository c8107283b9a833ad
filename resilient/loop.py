"""Checkpoints for a loop of one's own, in three lines.

::

    checkpointer = Checkpointer("runs/mine", model=model, optimizer=optimizer)
    start = checkpointer.resume() or 0
    ...
        checkpointer.save(step)

The spine does the work; this finds the ranks and turns what the user names into parts.
"""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Self

from resilient import events
from resilient.checkpointer import About
from resilient.clock import SystemClock
from resilient.ending import before_exit, forget
from resilient.errors import ConfigError, ResilientError
from resilient.format.names import CheckpointId, whole_step
from resilient.opening import (
    claimant_of,
    events_file,
    keeper_of,
    mapping_of,
    open_checkpointer,
    split_options,
)
from resilient.start_guard import StartGuard
from resilient.state.changes import ChangePolicy
from resilient.state.numbers import plain_metrics
from resilient.state.things import Things, gather_things, thing_in
from resilient.vault.facts import CountersUnread, PartsLeftOut, PartsStartedFresh
from resilient.world.beat import LoopBeat
from resilient.world.gang import join, say_farewell
from resilient.world.launch import tell_repository
from resilient.world.missed_saves import MissedSaveDetector
from resilient.world.pulse import own_pulse

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping
    from types import TracebackType

    from torch.optim import Optimizer
    from torch.utils.hooks import RemovableHandle

    from resilient import checkpointer
    from resilient.world.gang import Gang

_CHANGES_HINT = (
    "give the objects that saved it, or allow the difference: "
    "Checkpointer(..., resume_changes=[{names}])"
)


class Checkpointer:
    """Saves and resumes what a training loop holds, under any launcher and any parallelism.

    Works under plain ``python``, ``torchrun`` and ``resilient train``; with several ranks call
    ``torch.distributed.init_process_group`` before ``resume``. Ranks that train a model each for
    itself are refused: what is saved once for all of them would be of none.

    Args:
        url: where checkpoints live; a path or any fsspec URL. What ``resilient train --repo``
            names wins.
        rng: save Python's, NumPy's and torch's random state too.
        overlap: copy what only the optimizers change beside the next step; they wait for it
            before their own. Change parameters in no other way between a save and the step
            after it: a save that catches you at it fails. torch does not tell of changes through
            ``.data``, as some clip weights: without overlap they may come at any time.
        resume_changes: names of things that may differ from the checkpoint's although the result
            is another run: a scheduler of another class starts fresh, weights are narrowed to
            another dtype, tied weights are tied otherwise, a saved thing that is not given here
            is lost. ``all`` allows it for every thing. Without it ``resume`` refuses.
        things: what to save, by name. Modules (DDP, FSDP or compiled ones too), optimizers over
            their parameters, anything with ``state_dict`` and ``load_state_dict``,
            ``torch.Generator``, and plain values; dicts and lists are given back in place,
            other values by ``checkpointer[name]``. On several ranks a thing is the same on all
            of them and is written once; what each rank has for itself is a
            ``Part(thing, "rank")``. The options of
            :func:`resilient.opening.open_checkpointer` (``keep_last``, ``retention``,
            ``storage_options``, ...) are taken by their names, and ``save_total_limit`` for
            ``keep_last``. A plain value whose name is close to an option's is refused as a slip;
            ``Part(value)`` is saved under any name.

    Attributes:
        guard: conditions of a start at step 0; adapters add folders to look at.
        beat: shows the agent that the loop gets on, by the steps of the first optimizer given;
            None before ``resume`` and without one.
        resumed: the checkpoint that ``resume`` loaded.

    Raises:
        ConfigError: a name is taken, or an option's that was misspelt.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        rng: bool = True,
        overlap: bool = False,
        resume_changes: str | Iterable[str] = (),
        **things: Any,
    ) -> None:
        self._url = os.fspath(url)
        self._allowed = frozenset(
            [resume_changes] if isinstance(resume_changes, str) else resume_changes
        )
        self._rng = rng
        self._overlap = overlap
        self._options, self._given = split_options(things)
        self._gang: Gang | None = None
        self._topic = ""
        self._things = Things({})
        self._hooks: list[RemovableHandle] = []
        self.guard = StartGuard()
        self.beat: LoopBeat | None = None
        self._spine: checkpointer.Checkpointer | None = None
        self._detector: MissedSaveDetector | None = None
        self._told: events.Emitter | None = None
        self.resumed: CheckpointId | None = None
        # Counters that were given as 0 and resumed as more, until the loop reads or sets them.
        self._unread: dict[str, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self._let_go()
        except ResilientError as failed:
            error.add_note(f"the save in flight failed as well: {failed}")

    def __getitem__(self, name: str) -> Any:
        """Return what was given under ``name``; of a plain value, what it is now."""
        self._unread.pop(name, None)
        value = self._things.values.get(name)
        return value.value if value is not None else self._given[name]

    def __setitem__(self, name: str, value: Any) -> None:
        """Give a plain value another value, to be saved by the next save."""
        if name not in self._things.values:
            raise KeyError(f"`{name}` is no plain value of this checkpointer, or resume() is due")
        self._unread.pop(name, None)
        self._things.values[name].value = value

    @property
    def generation(self) -> int:
        """This life's number, 0 before ``resume``."""
        return self._spine.generation if self._spine is not None else 0

    def resume(self, ref: str | None = None) -> int | None:
        """Load the newest checkpoint that all ranks can prove, and begin this life.

        Starting is resuming: in a place without checkpoints everything stays as it is.

        Collective: every rank, once, before the first save.
        Crash: the claimed number is used up; nothing else changed in the store.

        Args:
            ref: ``auto``, ``never`` or a reference to one checkpoint; by default the launcher's
                ``--resume``. It holds in every attempt until this run has a checkpoint.

        Returns:
            The step that was saved, None for a start from scratch.

        Raises:
            NoIntactCheckpoint: something was committed and nothing of it can be read whole.
            IncompatibleCheckpoint: whole, but this code or model cannot take it.
            WriterAlive: another process is proven alive and writes to the repository.
            StartOverRefused: the repository holds checkpoints of another tool. ``never`` starts.
            ConfigError: something cannot be saved, there is no place to meet, the ranks train
                each by itself, or it is the second call.
            NotExclusive: the store cannot fence and the user did not promise to be alone.
            StoreError: the store failed.
        """
        if self._spine is not None:
            raise ConfigError("resume() was called already, and a life begins once")
        optimizer = self._optimizers()[:1]
        # Before the others are met: who waits there for this rank has been heard of.
        self.beat = LoopBeat(own_pulse()) if optimizer else None
        gang = join()
        self._gang, self._topic = gang, gang.next_topic()
        self._things = gather_things(self._given, gang.world.size, rng=self._rng)
        launch, told = gang.launch, self._emitter(gang)
        self._told = told
        self._spine = self._open(gang, told)
        before_exit(self._end)
        wanted = self._spine.settle(ref or launch.resume, is_first=launch.is_first)
        policy = ChangePolicy(self._allowed, lost=self._things.left_out, hint=_CHANGES_HINT)
        parts, cause = self._things.parts, launch.cause
        found = self._spine.resume(parts, ref=wanted, cause=cause, guard=self.guard, policy=policy)
        if self._overlap:
            self._let_optimizers_wait(self._spine)
        self._unread = self._resumed_counters()
        self._detect_missed_saves(gang, self._spine)
        if self.beat is not None:
            self.beat.start(found.step if found else 0)
            self._hooks.append(optimizer[0].register_step_post_hook(self.beat.end_step))
        if found is None:
            return None
        self.resumed = found.checkpoint
        if found.absent:
            told(PartsStartedFresh(found.absent))
        if left := self._things.left_out(found.parts):
            told(PartsLeftOut(found.checkpoint.folder, left))
        return found.step

    def save(
        self,
        step: int,
        *,
        metrics: Mapping[str, Any] | None = None,
        keep: Collection[CheckpointId] = (),
    ) -> CheckpointId:
        """Copy the state to host memory and make it durable in the background.

        First waits for the save in flight, so there is at most one. When this returns, training
        may go on.

        Collective: every rank, same step, after ``resume``.
        Crash: the checkpoint exists if its manifest was put, and then it is whole; else it does
        not exist and older ones are untouched.

        Args:
            step: names the checkpoint; ``resume`` returns it. A whole number of any type.
            metrics: numbers measured at this step; retention finds the best by them.
            keep: checkpoints that rotation must not delete.

        Returns:
            The checkpoint that will exist once it is committed.

        Raises:
            SaveFailed: the save before this one failed; this one did not begin.
            ConfigError: it is no step, or this life has saved it already, or ``resume`` was not
                called, or the loop ignores a resumed counter that it gave as 0.
            UnsavableState: a value that only pickle could save, state that ``resume`` would
                refuse or change, or a metric that is no number.
            Fenced: a newer life began.
        """
        spine, things, step = self._begun("save()"), self._things, whole_step(step)
        self._report_unread_counters()
        about = About(strategy=things.strategy, metrics=plain_metrics(metrics or {}))
        with self._saving(spine):
            if things.is_collective:
                # A rank that saves alone must not begin a collective of the training backend.
                spine.meet()
                things.align()
            return spine.save(step, things.parts, about, keep=keep, overlap=self._overlap)

    def load(self, checkpoint: CheckpointId | str, name: str) -> None:
        """Load one thing from what ``save`` returned, or a reference such as ``best:loss`` names.

        Collective: every rank, same checkpoint and name.
        Crash: only this process's memory changed.

        Raises:
            KeyNotFound: the checkpoint was rotated away.
            IntegrityError: it is damaged.
            IncompatibleCheckpoint: it holds no such thing, or another shape.
            SaveFailed: the save in flight failed; nothing was loaded.
            NothingToResume: the reference names no checkpoint.
            ConfigError: there is no such thing here.
        """
        spine = self._begun("load()")
        if name not in self._things.parts:
            raise ConfigError(
                f"`{name}` is no thing of this checkpointer: {', '.join(self._things.parts)}"
            )
        if not isinstance(checkpoint, CheckpointId | str):
            raise ConfigError(f"load() takes a checkpoint or a reference, not {checkpoint!r}")
        spine.load_part(checkpoint, name, self._things.parts[name])

    def emit(self, event: events.Event) -> None:
        """Report an event where this checkpointer reports its own; nothing before ``resume``.

        Crash: nothing in the repository changes.
        """
        if self._told is not None:
            self._told(event)

    def wait(self) -> None:
        """Wait until the save in flight is durable.

        Crash: as in ``save``.

        Raises:
            SaveFailed: it could not be made durable; older ones are intact.
            Fenced: a newer life began, so nothing was committed.
        """
        self._begun("wait()").wait()

    def close(self) -> None:
        """Wait for the save in flight and let go of the repository. Collective.

        Leaving the ``with`` block does the same, and so does the end of the main program. What
        goes wrong there is printed; under ``resilient train`` it is how the worker ends, under
        any other launcher the exit code does not tell.

        Crash: as in ``save``.

        Raises:
            SaveFailed: the save in flight failed.
        """
        if self._spine is None:
            return
        if self._detector is not None:
            self._detector.decline("it closed its checkpointer")
        self._let_go()
        if self._gang is not None:
            say_farewell(self._gang, self._topic)

    @contextmanager
    def _saving(self, spine: checkpointer.Checkpointer) -> Iterator[None]:
        """Return a context of a save, for the agent and for the peers."""
        with ExitStack() as inside:
            if self.beat is not None:
                inside.enter_context(self.beat.saving())
            if self._detector is not None:
                inside.enter_context(self._detector.inside(spine.saves + 1))
            yield

    def _detect_missed_saves(self, gang: Gang, spine: checkpointer.Checkpointer) -> None:
        """Have peers that wait for a save hear that this rank trains on without it."""
        if gang.board is None or gang.world.size == 1:
            return
        beat = self.beat
        steps = (lambda: beat.steps) if beat is not None else (lambda: 0)
        board = gang.board.another()
        self._detector = MissedSaveDetector(spine.comms, board, lambda: spine.saves, steps)
        self._detector.start()

    def _resumed_counters(self) -> dict[str, int]:
        """Return the plain numbers that were given as 0 and that the checkpoint has as more."""
        return {
            name: one.value
            for name, one in self._things.values.items()
            if type(one.value) is int and one.value > 0 and _is_zero(thing_in(self._given[name]))
        }

    def _report_unread_counters(self) -> None:
        """Report resumed counters that the loop neither read nor set; once after a resume."""
        if self._unread:
            self.emit(CountersUnread(tuple(sorted(self._unread.items()))))
            self._unread = {}

    def _let_optimizers_wait(self, spine: checkpointer.Checkpointer) -> None:
        """Have optimizers wait before each step for what the last save is still copying."""
        for one in self._optimizers():
            self._hooks.append(one.register_step_pre_hook(lambda *_: spine.before_update()))

    def _optimizers(self) -> list[Optimizer]:
        from torch.optim import Optimizer

        return [one for one in map(thing_in, self._given.values()) if isinstance(one, Optimizer)]

    def _begun(self, what: str) -> checkpointer.Checkpointer:
        if self._spine is None:
            raise ConfigError(
                f"resume() comes before {what}",
                hint="it starts from scratch where nothing was saved, and never overwrites",
            )
        return self._spine

    def _let_go(self) -> None:
        spine, self._spine = self._spine, None
        while self._hooks:
            self._hooks.pop().remove()
        if self.beat is not None:
            self.beat.stop()
        forget(self._end)
        if self._detector is not None:
            self._detector.stop()
            self._detector = None
        if spine is not None:
            spine.close()

    def _end(self) -> None:
        """Close at the end of the process; a rank that died of an error says no farewell."""
        if getattr(sys, "last_value", None) is None:
            self.close()
        else:
            self._let_go()

    def _open(self, gang: Gang, told: events.Emitter) -> checkpointer.Checkpointer:
        launch, options = gang.launch, dict(self._options)
        url = launch.repo or self._url
        tell_repository(launch, url)
        # Whoever launches names the place, and so knows better how to get there.
        reach = {**mapping_of(options.pop("storage_options", None)), **launch.storage_options}
        alone = options.pop("single_writer", False) or launch.single_writer
        signed = options.pop("require_signature", False) or launch.require_signature
        opened = open_checkpointer(
            url,
            gang.world,
            gang.board,
            scope=self._topic,
            keeper=keeper_of(gang),
            storage_options=reach,
            single_writer=alone,
            require_signature=signed,
            **{"emit": told, **options},
        )
        opened.start, opened.claimant = gang.begin_training(), claimant_of(launch)
        return opened

    def _emitter(self, gang: Gang) -> events.Emitter:
        """Return where events go: ranks above zero show only what needs attention."""
        given: events.Emitter | None = self._options.get("emit")
        if given is not None:
            return given
        shown = events.Level.INFO if gang.world.is_coordinator else events.Level.WARNING
        sinks = [events.console(shown)]
        file = events_file(gang)
        if file:
            sinks.append(events.json_lines(file))
        return events.Emitter(SystemClock(), tuple(sinks), {"rank": gang.world.rank})


def _is_zero(value: Any) -> bool:
    return type(value) is int and value == 0
