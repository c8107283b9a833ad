"""Public checkpointer for a user's own training loop.

::

    checkpointer = Checkpointer("runs/mine", model=model, optimizer=optimizer)
    start = checkpointer.resume() or 0
    ...
        checkpointer.save(step)

:class:`Checkpointer` finds the ranks of the job, and turns each named object into a part of the
checkpoint. The checkpoint engine (:mod:`resilient.checkpoint_engine`) saves and resumes them.
"""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Self

from resilient import events
from resilient.checkpoint.events import CountersUnread, PartsIgnored, PartsMissing
from resilient.checkpoint.save.metadata import CheckpointInfo
from resilient.clock import SystemClock
from resilient.distributed.heartbeat import LoopHeartbeat, progress_reporter
from resilient.distributed.launch_env import publish_repository
from resilient.distributed.missed_saves import MissedSaveDetector
from resilient.distributed.rank_group import exit_barrier, join
from resilient.engine_factory import (
    claimant_of,
    events_file,
    keeper_of,
    mapping_of,
    open_engine,
    split_options,
)
from resilient.errors import ConfigError, ResilientError
from resilient.exit_hooks import register_exit_hook, unregister_exit_hook
from resilient.format.keys import CheckpointId, whole_step
from resilient.start_guard import StartGuard
from resilient.state_dict.changes import ChangePolicy
from resilient.state_dict.statefuls import TrackedObjects, collect_parts, plain_metrics, unwrap
from resilient.storage.open import local_reference

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping
    from types import TracebackType

    from torch.optim import Optimizer
    from torch.utils.hooks import RemovableHandle

    from resilient import checkpoint_engine
    from resilient.distributed.rank_group import RankGroup

_CHANGES_HINT = (
    "pass the objects that were saved, or allow the difference: Checkpointer(..., "
    "resume_changes=[{names}])"
)


class Checkpointer:
    """Checkpointer of a training loop, under any launcher and any parallelism.

    The checkpointer works under plain ``python``, ``torchrun`` and ``resilient train``. With
    several ranks, call ``torch.distributed.init_process_group`` before ``resume``. Ranks that train
    different models are refused, because an object that is saved once must be equal on all ranks.

    Args:
        url: Repository of the checkpoints; a path or any fsspec URL. ``resilient train --repo``
            takes precedence.
        rng: Save the random state of Python, NumPy and torch too.
        overlap: Copy state that only the optimizers change during the next step. Each optimizer
            waits for the copy before its own step. Do not change parameters in any other way
            between a save and the step after it. A save that detects such a change fails. Changes
            through ``.data``, which some weight clipping uses, are not detected. Without
            ``overlap`` such changes are allowed at any time.
        resume_changes: Names of things that may differ from the checkpoint although the result is a
            different run. Examples: a scheduler of another class, which starts fresh; weights in a
            narrower dtype; weights that are tied differently. A saved object that is not given here
            is lost. ``all`` allows differences in every thing. ``resume`` refuses a difference in
            any thing that is not named.
        **objects: Objects to save, by name. Modules (also wrapped by DDP, FSDP or ``compile``),
            optimizers over their parameters, objects with ``state_dict`` and ``load_state_dict``,
            ``torch.Generator``, and plain values. Dicts and lists are restored in place; read
            other values with ``checkpointer[name]``. With several ranks, a thing must be equal on
            all ranks and is written once. Wrap per-rank state in ``Part(thing, "rank")``. The
            options of :func:`resilient.engine_factory.open_engine` (``keep_last``, ``retention``,
            ``storage_options``, ...) are accepted under their names, and ``save_total_limit`` for
            ``keep_last``. A plain value with a name close to an option's is refused as a likely
            typo. ``Part(value)`` is saved under any name.

    Attributes:
        guard: Conditions of a start at step 0; integrations add folders to search for other
            checkpoints.
        beat: Heartbeat that reports progress to the agent, counted in steps of the first optimizer
            given. None before ``resume`` and without an optimizer.
        resumed: Checkpoint that ``resume`` loaded.

    Raises:
        ConfigError: A name is reserved, or is a misspelt option.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        rng: bool = True,
        overlap: bool = False,
        resume_changes: str | Iterable[str] = (),
        **objects: Any,
    ) -> None:
        self._url = os.fspath(url)
        self._allowed_changes = frozenset(
            [resume_changes] if isinstance(resume_changes, str) else resume_changes
        )
        self._rng = rng
        self._overlap = overlap
        self._options, self._objects = split_options(objects)
        self._rank_group: RankGroup | None = None
        self._topic = ""
        self._tracked = TrackedObjects({})
        self._hooks: list[RemovableHandle] = []
        self.guard = StartGuard()
        self.beat: LoopHeartbeat | None = None
        self._engine: checkpoint_engine.CheckpointEngine | None = None
        self._detector: MissedSaveDetector | None = None
        self._emit: events.Emitter | None = None
        self.resumed: CheckpointId | None = None
        # Counters that were given as 0 and resumed with a higher value. A counter is removed
        # when the loop reads or sets it.
        self._unread_counters: dict[str, int] = {}

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
            self._release()
        except ResilientError as save_error:
            error.add_note(f"the save in flight failed too: {save_error}")

    def __getitem__(self, name: str) -> Any:
        """Return the object given under ``name``; for a plain value, its current value."""
        self._unread_counters.pop(name, None)
        value = self._tracked.values.get(name)
        return value.value if value is not None else self._objects[name]

    def __setitem__(self, name: str, value: Any) -> None:
        """Set a plain value; the next save stores it."""
        if name not in self._tracked.values:
            raise KeyError(
                f"`{name}` is not a plain value of this checkpointer, or resume() was not called "
                "yet"
            )
        self._unread_counters.pop(name, None)
        self._tracked.values[name].value = value

    @property
    def generation(self) -> int:
        """Generation number of this attempt; 0 before ``resume``."""
        return self._engine.generation if self._engine is not None else 0

    def resume(self, ref: str | None = None) -> int | None:
        """Load the newest checkpoint that all ranks can verify, and claim a generation.

        A repository without checkpoints leaves all objects as they are.

        Collective: every rank, once, before the first save.
        Crash: the claimed number is used up; nothing else changed in the store.

        Args:
            ref: ``auto``, ``never`` or a reference to one checkpoint; by default the value of the
                launcher's ``--resume``. It applies in every attempt until this run has a
                checkpoint.

        Returns:
            Step of the loaded checkpoint; None for a start from scratch.

        Raises:
            NoIntactCheckpoint: Checkpoints were committed, but none of them is intact.
            IncompatibleCheckpoint: The checkpoint is whole, but this code or model cannot load it.
            WriterAlive: Another process is proven alive and writes to the repository.
            StartOverRefused: The repository has checkpoints of another tool; with ``never``
                training starts anyway.
            ConfigError: A thing cannot be saved, the ranks have no key-value store, each rank
                trains its own model, or ``resume`` was already called.
            NotExclusive: The store cannot fence and the user did not set ``single_writer``.
            StoreError: The store failed.
        """
        if self._engine is not None:
            raise ConfigError("resume() was already called, and an attempt starts only once")
        optimizer = self._optimizers()[:1]
        # Before join(): a rank that waits for its peers must already have sent a heartbeat.
        self.beat = LoopHeartbeat(progress_reporter()) if optimizer else None
        rank_group = join()
        self._rank_group, self._topic = rank_group, rank_group.next_topic()
        self._tracked = collect_parts(self._objects, rank_group.world.size, rng=self._rng)
        launch, emit = rank_group.launch, self._emitter(rank_group)
        self._emit = emit
        self._engine = self._open(rank_group, emit)
        register_exit_hook(self._close_at_exit)
        resume_option = local_reference(ref or launch.resume)
        reference = self._engine.settle(resume_option, is_first=launch.is_first)
        policy = ChangePolicy(
            self._allowed_changes, lost=self._tracked.left_out, hint=_CHANGES_HINT
        )
        parts, cause = self._tracked.parts, launch.cause
        result = self._engine.resume(
            parts, ref=reference, cause=cause, guard=self.guard, policy=policy
        )
        if self._overlap:
            self._make_optimizers_wait(self._engine)
        self._unread_counters = self._resumed_counters()
        self._detect_missed_saves(rank_group, self._engine)
        if self.beat is not None:
            self.beat.start(result.step if result else 0)
            self._hooks.append(optimizer[0].register_step_post_hook(self.beat.end_step))
        if result is None:
            return None
        self.resumed = result.checkpoint
        if result.absent:
            emit(PartsMissing(result.absent))
        if ignored_parts := self._tracked.left_out(result.parts):
            emit(PartsIgnored(result.checkpoint.folder, ignored_parts))
        return result.step

    def save(
        self,
        step: int,
        *,
        metrics: Mapping[str, Any] | None = None,
        keep: Collection[CheckpointId] = (),
    ) -> CheckpointId:
        """Copy the state to host memory and make it durable in the background.

        This method first waits for the save in flight, so at most one save is in flight. Training
        may continue when this method returns.

        Collective: every rank, same step, after ``resume``.
        Crash: if its manifest was stored, the checkpoint exists and is whole. Otherwise it does not
            exist. Older checkpoints are untouched in both cases.

        Args:
            step: Step that names the checkpoint; ``resume`` returns it. Any integer type.
            metrics: Numbers measured at this step; retention ranks checkpoints by them.
            keep: Checkpoints that retention must not delete.

        Returns:
            Id of the checkpoint, which exists once it is committed.

        Raises:
            SaveFailed: The previous save failed; this save did not begin.
            ConfigError: The step is not a valid step, this attempt has already saved it, or
                ``resume`` was not called. Also raised if the loop ignores a resumed counter that it
                gave as 0.
            UnsavableState: A value needs pickle, ``resume`` would refuse or change some state, or
                a metric is not a number.
            Fenced: A newer generation exists.
        """
        engine, tracked, step = self._require_engine("save()"), self._tracked, whole_step(step)
        self._report_unread_counters()
        checkpoint_info = CheckpointInfo(
            strategy=tracked.strategy, metrics=plain_metrics(metrics or {})
        )
        with self._saving(engine):
            if tracked.is_collective:
                # The save is collective in the training backend: a rank that saves alone would
                # hang.
                engine.meet()
                tracked.align()
            return engine.save(
                step, tracked.parts, checkpoint_info, keep=keep, overlap=self._overlap
            )

    def load(self, checkpoint: CheckpointId | str, name: str) -> None:
        """Load one thing from a checkpoint, given by the id from ``save`` or by a reference.

        Collective: every rank, same checkpoint and name.
        Crash: only this process's memory changed.

        Raises:
            KeyNotFound: The checkpoint was deleted by retention.
            IntegrityError: The checkpoint is damaged.
            IncompatibleCheckpoint: The checkpoint has no such thing, or another shape of it.
            SaveFailed: The save in flight failed; nothing was loaded.
            NothingToResume: The reference names no checkpoint.
            ConfigError: This checkpointer has no such thing.
        """
        engine = self._require_engine("load()")
        if name not in self._tracked.parts:
            raise ConfigError(
                f"`{name}` is not registered with this checkpointer: "
                f"{', '.join(self._tracked.parts)}"
            )
        if not isinstance(checkpoint, CheckpointId | str):
            raise ConfigError(f"load() takes a checkpoint or a reference, not {checkpoint!r}")
        engine.load_part(checkpoint, name, self._tracked.parts[name])

    def emit(self, event: events.Event) -> None:
        """Emit an event to the sinks of this checkpointer; before ``resume`` it is discarded.

        Crash: nothing in the repository changes.
        """
        if self._emit is not None:
            self._emit(event)

    def wait(self) -> None:
        """Wait until the save in flight is durable.

        Crash: as in ``save``.

        Raises:
            SaveFailed: The save could not be made durable; older checkpoints are intact.
            Fenced: A newer generation exists, so nothing was committed.
        """
        self._require_engine("wait()").wait()

    def close(self) -> None:
        """Wait for the save in flight and close the repository. Collective.

        The end of the ``with`` block and of the main program also close the checkpointer. Errors at
        the end of the program are printed. Under ``resilient train`` they also decide how the
        worker ends. Under any other launcher the exit code does not show them.

        Crash: as in ``save``.

        Raises:
            SaveFailed: The save in flight failed.
        """
        if self._engine is None:
            return
        if self._detector is not None:
            self._detector.decline("it closed its checkpointer")
        self._release()
        if self._rank_group is not None:
            exit_barrier(self._rank_group, self._topic)

    @contextmanager
    def _saving(self, engine: checkpoint_engine.CheckpointEngine) -> Iterator[None]:
        """Report a save to the agent and to the peers while the block runs."""
        with ExitStack() as contexts:
            if self.beat is not None:
                contexts.enter_context(self.beat.saving())
            if self._detector is not None:
                contexts.enter_context(self._detector.inside(engine.saves + 1))
            yield

    def _detect_missed_saves(
        self, rank_group: RankGroup, engine: checkpoint_engine.CheckpointEngine
    ) -> None:
        """Start a thread that informs waiting peers when this rank continues without saving."""
        if rank_group.board is None or rank_group.world.size == 1:
            return
        beat = self.beat
        steps = (lambda: beat.steps) if beat is not None else (lambda: 0)
        kv_store = rank_group.board.another()
        self._detector = MissedSaveDetector(engine.comms, kv_store, lambda: engine.saves, steps)
        self._detector.start()

    def _resumed_counters(self) -> dict[str, int]:
        """Return the plain numbers that were given as 0 and that the checkpoint has as more."""
        return {
            name: value.value
            for name, value in self._tracked.values.items()
            if type(value.value) is int
            and value.value > 0
            and _is_zero(unwrap(self._objects[name]))
        }

    def _report_unread_counters(self) -> None:
        """Report resumed counters that the loop neither read nor set; once after a resume."""
        if self._unread_counters:
            self.emit(CountersUnread(tuple(sorted(self._unread_counters.items()))))
            self._unread_counters = {}

    def _make_optimizers_wait(self, engine: checkpoint_engine.CheckpointEngine) -> None:
        """Make each optimizer wait before its step until the last save has copied the state."""
        for optimizer in self._optimizers():
            self._hooks.append(optimizer.register_step_pre_hook(lambda *_: engine.before_update()))

    def _optimizers(self) -> list[Optimizer]:
        from torch.optim import Optimizer

        return [
            optimizer
            for optimizer in map(unwrap, self._objects.values())
            if isinstance(optimizer, Optimizer)
        ]

    def _require_engine(self, call: str) -> checkpoint_engine.CheckpointEngine:
        if self._engine is None:
            raise ConfigError(
                f"call resume() before {call}",
                hint="resume() starts from scratch if nothing was saved, and never overwrites",
            )
        return self._engine

    def _release(self) -> None:
        engine, self._engine = self._engine, None
        while self._hooks:
            self._hooks.pop().remove()
        if self.beat is not None:
            self.beat.stop()
        unregister_exit_hook(self._close_at_exit)
        if self._detector is not None:
            self._detector.stop()
            self._detector = None
        if engine is not None:
            engine.close()

    def _close_at_exit(self) -> None:
        """Close at the end of the process; after an uncaught error, skip the exit barrier."""
        if getattr(sys, "last_value", None) is None:
            self.close()
        else:
            self._release()

    def _open(
        self, rank_group: RankGroup, emit: events.Emitter
    ) -> checkpoint_engine.CheckpointEngine:
        launch, options = rank_group.launch, dict(self._options)
        url = launch.repo or self._url
        publish_repository(launch, url)
        # The launcher names the place, so its storage options take precedence.
        storage_options = {
            **mapping_of(options.pop("storage_options", None)),
            **launch.storage_options,
        }
        is_single_writer = options.pop("single_writer", False) or launch.single_writer
        signed = options.pop("require_signature", False) or launch.require_signature
        engine = open_engine(
            url,
            rank_group.world,
            rank_group.board,
            scope=self._topic,
            keeper=keeper_of(rank_group),
            storage_options=storage_options,
            single_writer=is_single_writer,
            require_signature=signed,
            **{"emit": emit, **options},
        )
        engine.start, engine.claimant = rank_group.begin_training(), claimant_of(launch)
        return engine

    def _emitter(self, rank_group: RankGroup) -> events.Emitter:
        """Return the emitter; on ranks above 0 the console shows only warnings and errors."""
        emitter: events.Emitter | None = self._options.get("emit")
        if emitter is not None:
            return emitter
        console_level = (
            events.Level.INFO if rank_group.world.is_coordinator else events.Level.WARNING
        )
        sinks = [events.console(console_level)]
        file = events_file(rank_group)
        if file:
            sinks.append(events.json_lines(file))
        return events.Emitter(SystemClock(), tuple(sinks), {"rank": rank_group.world.rank})


def _is_zero(value: Any) -> bool:
    return type(value) is int and value == 0
