"""Save and resume of Lightning's Trainer.

::

    trainer = Trainer(callbacks=[ResilientCheckpoint("runs/mine", every_n_steps=100)])
    trainer.fit(module, loader)           # resumes if a checkpoint exists

The callback replaces ``ModelCheckpoint``. Without the callback, Lightning can resume within an
epoch only with stateful loaders, and saves no random state. The callback restores the position of
any loader: it draws the order of the epoch again, and skips the batches that were already trained.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    Checkpoint,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
)
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.exceptions import SIGTERMException

from resilient.checkpointer import Checkpointer
from resilient.diff.verification import JudgedCheckpoint, judge_checkpoint
from resilient.errors import ConfigError
from resilient.integrations.events import (
    CheckpointLossReported,
    CheckpointPathIgnored,
    EarlyStopKept,
)
from resilient.integrations.lightning_state import (
    DeferredGroups,
    HookState,
    LoggedMetrics,
    TrainingChanges,
    stopping_callback,
)
from resilient.integrations.random_state import (
    DeferredRandomState,
    RandomSnapshot,
    StateField,
    generators_of,
    set_generators,
)
from resilient.state_dict.snapshot import Part

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping

    import torch

    from resilient.distributed.heartbeat import LoopHeartbeat

_KNOWN_STRATEGIES = ("SingleDeviceStrategy", "DDPStrategy")
_TUNERS = (BatchSizeFinder, LearningRateFinder)
"""Callbacks that train a few steps before the run; they must not see the loaded state."""
_REFUSED_CALLBACKS = (
    (
        StochasticWeightAveraging,
        "Lightning begins its average and its schedule at the start of an epoch only",
        "use WeightAveraging or EMAWeightAveraging from lightning.pytorch.callbacks",
    ),
    (
        ModelPruning,
        "it renames the weights in training, so a new model cannot load them",
        "remove ModelPruning, and prune the model after the training",
    ),
)


class ResilientCheckpoint(Checkpoint):
    """A callback that saves a Trainer to a repository and resumes its newest checkpoint.

    A checkpoint contains the module, optimizers, schedulers, precision, progress of the loops and
    states of callbacks. It also contains the datamodule, the state of stateful loaders, logged
    metrics and random state. The hooks ``on_save_checkpoint`` of module, callbacks and precision
    plugin may add to the checkpoint. The state of hooks must consist of tensors, arrays, plain
    values and containers of them.

    ``fit(ckpt_path=...)`` applies only if the repository has no checkpoint. Before Lightning loads
    that file, the callback verifies the file as ``resilient ckpt verify`` does. The callback
    refuses a damaged file and reports a loss.

    The states of callbacks are loaded before the hooks ``on_fit_start``, as in Lightning. A save
    follows the validation and the plateau schedulers of its step. If ``EarlyStopping`` stopped a
    run, a new start of this run trains no steps.

    Args:
        url: URL or path of the repository.
        every_n_steps: Optimizer steps between saves; 0 saves at the ends of epochs only.
        **objects: More objects to save, and options; see
            :class:`resilient.checkpointer.Checkpointer`.

    Raises:
        ConfigError: ``every_n_steps`` is negative.
    """

    def __init__(self, url: str | os.PathLike[str], every_n_steps: int = 0, **objects: Any) -> None:
        if every_n_steps < 0:
            raise ConfigError(f"every_n_steps={every_n_steps} is negative")
        self._url = url
        self._save_interval = every_n_steps
        self._extra_objects = objects
        self._saved_step = 0
        self._rng = DeferredRandomState()
        self._order = _EpochOrder()
        self._resume: _Resume | None = None
        self._best_checkpoint: JudgedCheckpoint | None = None
        self._is_resumed_epoch = False
        self._seams: list[tuple[Any, str]] = []
        self._groups: list[DeferredGroups] = []
        self._changes: TrainingChanges | None = None
        self._checkpointer: Checkpointer | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:  # noqa: ARG002 - signature of Lightning
        """Replace methods of the loops before any code iterates over the loader.

        Raises:
            ConfigError: The callback cannot access the strategy's state, or another callback cannot
                be resumed.
        """
        if stage != "fit":
            return
        _require_resumable(trainer)
        self._remove_seams()
        self._order, self._best_checkpoint, self._groups = _EpochOrder(), None, []
        fit, epoch = trainer.fit_loop, trainer.fit_loop.epoch_loop
        others = (callback for callback in trainer.callbacks if not isinstance(callback, _TUNERS))
        seams: list[tuple[Any, str, Callable[..., None]]] = [
            (next(others), "on_fit_start", self._load_first),
            (trainer._checkpoint_connector, "resume_start", self._load_lightning),  # noqa: SLF001
            (fit, "setup_data", self._set_up_data),
            (fit, "on_advance_start", self._begin_epoch),
            (fit, "on_advance_end", self._end_epoch),
            (epoch, "on_run_start", self._begin_batches),
            (epoch, "on_advance_end", self._end_batch),
        ]
        for loop, name, method in seams:
            setattr(loop, name, partial(method, trainer, getattr(loop, name)))
            self._seams.append((loop, name))

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002 - signature of Lightning
        """Restore the loaded parameter groups of the optimizers.

        The hooks ``on_fit_start`` of other callbacks do not see the loaded groups, because
        Lightning itself loads optimizers after these hooks. Lightning calls this hook last.
        """
        for deferred_groups in self._groups:
            deferred_groups.restore_loaded_groups()
        if self._changes is not None:
            self._changes.begin()

    def _load_first(
        self, trainer: Any, original: Callable[..., None], *hook_arguments: Any
    ) -> None:
        """Load everything before the first callback's ``on_fit_start``, as Lightning does."""
        groups = [DeferredGroups(optimizer) for optimizer in trainer.optimizers]
        self._load(trainer)
        if self._checkpointer is not None and self._checkpointer.resumed is not None:
            self._groups = groups
            for deferred_groups in groups:
                deferred_groups.hold()
        original(*hook_arguments)

    def _load(self, trainer: Any) -> None:
        """Load everything, before the loader draws the order of its first epoch.

        Raises:
            ConfigError: A name is taken.
            IntegrityError: The repository is empty, and ``ckpt_path`` names a damaged checkpoint.
            IncompatibleCheckpoint: ``ckpt_path`` lost a part, and ``--strict-resume`` refuses a
                loss.
        """
        hooks, metrics, callbacks = HookState(trainer), LoggedMetrics(trainer), _Callbacks(trainer)
        self._changes = TrainingChanges(trainer)
        was_iterated = trainer.fit_loop._data_fetcher is not None  # noqa: SLF001 - no public way
        resume = _Resume(trainer, metrics, self._changes, was_iterated=was_iterated)
        trainer_parts = self._parts(trainer) | {
            "callbacks": Part(callbacks),
            "progress": Part(StateField(resume.progress, resume.put_progress), optional=True),
            "metrics": Part(metrics, "rank", optional=True),
            **({"hooks": Part(hooks, optional=True)} if hooks.exists() else {}),
        }
        if duplicate_names := sorted(set(trainer_parts) & set(self._extra_objects)):
            raise ConfigError(
                f"`{duplicate_names[0]}` is the name of a part that the trainer sets",
                hint=f"give `{duplicate_names[0]}` another name",
            )
        self._checkpointer = Checkpointer(
            self._url, rng=False, **{**self._extra_objects, **trainer_parts}
        )
        self._saved_step = self._checkpointer.resume() or 0
        if self._checkpointer.resumed is not None:
            hooks.restore(callbacks.loaded)
            resume.begin()
            self._resume, self._is_resumed_epoch = resume, resume.is_within_epoch
            self._report_start(trainer, resume)
        elif self._best_checkpoint is not None:
            if self._best_checkpoint.refusal is not None:
                raise self._best_checkpoint.refusal
            if self._best_checkpoint.lost:
                self._checkpointer.emit(
                    CheckpointLossReported(self._best_checkpoint.path, self._best_checkpoint.lost)
                )

    def on_train_batch_start(self, *_: Any, **__: Any) -> None:
        """Send a heartbeat at the start of a batch."""
        if self._beat is not None:
            self._beat.begin_step()

    def on_validation_batch_end(self, *_: Any, **__: Any) -> None:
        """Send a heartbeat for the progress of an evaluation."""
        if self._beat is not None:
            self._beat.between()

    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        """Send a heartbeat at the end of a step."""
        if self._beat is not None:
            self._beat.between()

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002 - signature of Lightning
        """Wait until all saves are durable."""
        self._remove_seams()
        if self._checkpointer is not None:
            self._checkpointer.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:  # noqa: ARG002
        """Restore the methods of the loops."""
        self._remove_seams()

    def _report_start(self, trainer: Any, resume: _Resume) -> None:
        """Report a preserved early stop, and an ignored checkpoint of Lightning."""
        checkpointer, connector = self._checkpointer, trainer._checkpoint_connector  # noqa: SLF001
        if checkpointer is None:
            return
        if connector._loaded_checkpoint or self._best_checkpoint is not None:  # noqa: SLF001 - no public way
            # Lightning would overwrite the optimizers and loops from the repository with its own.
            connector._loaded_checkpoint = {}  # noqa: SLF001 - no public way
            at = str(checkpointer.resumed)
            checkpointer.emit(CheckpointPathIgnored(str(trainer.ckpt_path), at))
        if resume.stopped_by:
            checkpointer.emit(EarlyStopKept(resume.stopped_by, trainer.global_step))

    def _load_lightning(
        self,
        trainer: Any,
        original: Callable[..., None],
        path: Any = None,
        *rest: Any,
        **options: Any,
    ) -> None:
        """Verify a checkpoint of Lightning before its load, and skip the load if it is refused."""
        trusts = (rest[0] if rest else options.get("weights_only")) is False
        module = trainer.lightning_module
        buffers = () if module is None else {name for name, _ in module.named_buffers()}
        self._best_checkpoint = (
            judge_checkpoint(str(path), trusts_pickle=trusts, buffers=buffers) if path else None
        )
        if self._best_checkpoint is None or self._best_checkpoint.refusal is None:
            original(path, *rest, **options)
            return
        # `on_fit_start` raises the refusal only if the repository has no checkpoint.
        trainer._checkpoint_connector._ckpt_path = path  # noqa: SLF001 - no public way

    def _set_up_data(self, trainer: Any, original: Callable[[], None]) -> None:
        """Record the random state of a new iterator, or create a resumed epoch's iterator again."""
        loop, resume = trainer.fit_loop, self._resume
        previous_fetcher = loop._data_fetcher  # noqa: SLF001 - no public way
        if resume is not None and resume.is_within_epoch and previous_fetcher is None:
            self._order.iterated.restore_streams()
        point = RandomSnapshot()
        point.note(None)
        original()
        if resume is not None:
            resume.load_loaders()
        elif loop._data_fetcher is not previous_fetcher:  # noqa: SLF001 - no public way
            self._order.iterated = point

    def _begin_epoch(self, trainer: Any, original: Callable[[], None]) -> None:
        """Restore metrics and, between epochs, random state as late as the loop allows."""
        resume = self._resume
        if resume is not None:
            resume.restore_metrics()
            if not resume.is_within_epoch:
                self._resume = None
                self._restore_random(trainer)
        original()

    def _begin_batches(self, trainer: Any, original: Callable[[Any], None], fetcher: Any) -> None:
        """Skip trained batches, or record the random state of a new epoch."""
        loaders = loaders_of(trainer)
        resume, self._resume = self._resume, None
        if resume is not None:
            if not resume.is_loader_stateful:
                self._order.begin_again(loaders, fetcher, is_new=resume.was_iterated)
                for _ in range(resume.trained_batches):
                    next(fetcher)
                # The loop itself counts the trained batches.
                fetcher.fetched = 0
            original(fetcher)
            self._restore_random(trainer)
            return
        if trainer.current_epoch > 0 and not trainer.fit_loop.is_resuming:
            self._order.iterated.note(loaders)
        original(fetcher)
        self._order.fetched.note(loaders)

    def _end_batch(self, trainer: Any, original: Callable[[Any], None], fetcher: Any) -> None:
        """Save every n optimizer steps, after the validation and the schedulers of the step."""
        epoch = trainer.fit_loop.epoch_loop
        if epoch.restarting and epoch._skip_next_val:  # noqa: SLF001 - no public way
            # The checkpoint was saved after this work, and Lightning would repeat the work.
            epoch._skip_next_val = False  # noqa: SLF001 - no public way
            return
        self._run_and_save(trainer, partial(original, fetcher), is_epoch_over=False)

    def _end_epoch(self, trainer: Any, original: Callable[[], None]) -> None:
        """Save at the end of an epoch, after its schedulers."""
        if self._is_resumed_epoch:
            # Lightning skips plateau schedulers after a resume, because it loses its metrics. The
            # callback restored the metrics.
            trainer.fit_loop._restarting = False  # noqa: SLF001 - no public way
            self._is_resumed_epoch = False
        self._run_and_save(trainer, original, is_epoch_over=True)

    def _run_and_save(
        self, trainer: Any, original: Callable[[], None], *, is_epoch_over: bool
    ) -> None:
        try:
            original()
        except SIGTERMException:
            self._save_if_due(trainer, is_epoch_over=is_epoch_over)
            raise
        self._save_if_due(trainer, is_epoch_over=is_epoch_over)

    def _save_if_due(self, trainer: Any, *, is_epoch_over: bool) -> None:
        """Save a new step; several optimizers can skip step numbers."""
        step, saved_step = trainer.global_step, self._saved_step
        is_last = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        is_due = (
            self._save_interval
            and not is_last
            and step // self._save_interval > saved_step // self._save_interval
        )
        if self._checkpointer is None or step == saved_step or not (is_epoch_over or is_due):
            return
        metrics = {name: float(metric) for name, metric in trainer.callback_metrics.items()}
        self._checkpointer.save(step, metrics=metrics)
        self._saved_step = step

    def _restore_random(self, trainer: Any) -> None:
        self._order.restore_generators(trainer)
        self._rng.restore()

    def _remove_seams(self) -> None:
        while self._seams:
            loop, name = self._seams.pop()
            vars(loop).pop(name, None)

    @property
    def _beat(self) -> LoopHeartbeat | None:
        return self._checkpointer.beat if self._checkpointer is not None else None

    def _parts(self, trainer: Any) -> dict[str, Any]:
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        precision, loop = trainer.precision_plugin, trainer.fit_loop
        self._order.trainer = trainer
        return {
            "model": trainer.strategy.model,
            **_numbered("optimizer", trainer.optimizers),
            **_numbered("scheduler", schedulers),
            **({"precision": precision} if precision.state_dict() else {}),
            **({"datamodule": trainer.datamodule} if trainer.datamodule is not None else {}),
            "loops": Part(StateField(loop.state_dict, loop.load_state_dict)),
            "dawn": Part(self._order, "rank"),
            "rng_state": Part(self._rng, "rank"),
        }


class _EpochOrder:
    """Random state that determined the order of this epoch, and generators of the loaders.

    Attributes:
        iterated: State when the iteration over the loader began.
        fetched: State before the first batch was fetched.
        trainer: Trainer of the loaders that own the generators.
    """

    def __init__(self) -> None:
        self.iterated = RandomSnapshot()
        self.fetched = RandomSnapshot()
        self.trainer: Any = None
        self._now: list[torch.Tensor] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the random states at both moments, and the present state of the generators."""
        loaders = loaders_of(self.trainer, with_validation=True)
        return {
            "streams": self.iterated.streams,
            "iterated": self.iterated.state_dict(),
            "fetched": self.fetched.state_dict(),
            "now": [generator.get_state() for generator in generators_of(loaders)],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state; a checkpoint of release 0.1 has only ``iterated``."""
        self.iterated.load_state_dict(
            state.get("iterated", {"streams": state["streams"], "generators": None})
        )
        if "fetched" in state:
            self.fetched.load_state_dict(state["fetched"])
        self._now = state.get("now")

    def begin_again(self, loaders: list[Any], fetcher: Any, *, is_new: bool) -> None:
        """Draw the order of a resumed epoch again.

        Args:
            loaders: Loaders of the epoch.
            fetcher: Iterator over them.
            is_new: Whether the iteration over the fetcher began before the load of the checkpoint.
        """
        if is_new or self.iterated.generators is not None:
            self.iterated.restore(loaders)
            iter(fetcher)
        self.fetched.restore(loaders)

    def restore_generators(self, trainer: Any) -> None:
        """Restore the generators of all loaders to their state at the save."""
        generator_states, self._now = self._now, None
        if generator_states is not None:
            set_generators(loaders_of(trainer, with_validation=True), generator_states)


class _Callbacks:
    """States of a trainer's callbacks, kept until the trainer has called the hooks."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.loaded: Mapping[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each callback."""
        return {"callbacks": call._call_callbacks_state_dict(self._trainer)}  # noqa: SLF001 - no public way

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep the states."""
        self.loaded = state["callbacks"]


class _Resume:
    """Progress of the loops, and the resume position within the epoch of a checkpoint.

    Args:
        trainer: The trainer that resumes.
        metrics: Logged metrics, which the trainer resets again before training.
        changes: Changes that training made to flags.
        was_iterated: Whether the iteration over the loader began before the load.

    Attributes:
        is_within_epoch: Whether batches of the epoch are left.
        trained_batches: Number of trained batches of the epoch.
        stopped_by: Name of the callback that had stopped the run early, else empty.
    """

    def __init__(
        self,
        trainer: Any,
        metrics: LoggedMetrics,
        changes: TrainingChanges,
        *,
        was_iterated: bool,
    ) -> None:
        self._loop = trainer.fit_loop
        self._trainer = trainer
        self._metrics = metrics
        self._changes = changes
        self.was_iterated = was_iterated
        self.is_within_epoch = False
        self.is_loader_stateful = False
        self.trained_batches = 0
        self.stopped_by = ""
        self._reloaded_epoch: float | None = None

    def progress(self) -> dict[str, Any]:
        """Return the progress that the states of the loops do not contain."""
        return {
            "stopped_by": stopping_callback(self._trainer),
            "reloaded_epoch": self._loop._last_train_dl_reload_epoch,  # noqa: SLF001 - no public way
            "changes": self._changes.state(),
        }

    def put_progress(self, state: Mapping[str, Any]) -> None:
        """Load the progress, and stop a run that had stopped early."""
        self.stopped_by = state["stopped_by"]
        self._trainer.should_stop = bool(self.stopped_by)
        self._reloaded_epoch = state["reloaded_epoch"]
        self._changes.load(state.get("changes", {}))

    def begin(self) -> None:
        """Find the position in the epoch, after all parts have been loaded."""
        loop, batches = self._loop, self._loop.epoch_loop.batch_progress
        epochs = loop.epoch_progress
        is_over = batches.is_last_batch or epochs.current.completed == epochs.current.ready
        self.trained_batches = batches.current.ready
        self.is_within_epoch = not is_over and self.trained_batches > 0
        self.is_loader_stateful = bool(loop._combined_loader_states_to_load)  # noqa: SLF001 - no public way
        if is_over:
            if epochs.current.completed < epochs.current.processed:
                # Release 0.1 saved a checkpoint before the loop counted this batch.
                epochs.increment_completed()
            loop.restarting = False
            loop._resuming_from_checkpoint = False  # noqa: SLF001 - no public way

    def load_loaders(self) -> None:
        """Load the states of stateful loaders that Lightning has not loaded."""
        loop = self._loop
        states, combined = loop._combined_loader_states_to_load, loop._combined_loader  # noqa: SLF001
        if states and combined is not None:
            loop._combined_loader_states_to_load = []  # noqa: SLF001 - no public way
            combined._load_state_dicts(states)  # noqa: SLF001 - no public way
            iter(loop._data_fetcher)  # noqa: SLF001 - no public way

    def restore_metrics(self) -> None:
        """Restore logged metrics, gradient accumulation, and the epoch of the loaders."""
        self._changes.restore_accumulation()
        self._metrics.restore(is_within_epoch=self.is_within_epoch)
        if self._reloaded_epoch is not None:
            self._loop._last_train_dl_reload_epoch = self._reloaded_epoch  # noqa: SLF001 - no public way


def _require_resumable(trainer: Any) -> None:
    """Refuse a strategy or a callback whose state cannot be resumed.

    Raises:
        ConfigError: Names the strategy or callback.
    """
    strategy = type(trainer.strategy).__name__
    if strategy not in _KNOWN_STRATEGIES:
        raise ConfigError(
            f"a Trainer with {strategy} keeps its state where this library cannot read it",
            hint=f"use one of {', '.join(_KNOWN_STRATEGIES)}",
        )
    for kind, reason, hint in _REFUSED_CALLBACKS:
        if any(isinstance(callback, kind) for callback in trainer.callbacks):
            raise ConfigError(
                f"a run with {kind.__name__} cannot be resumed exactly: {reason}", hint=hint
            )


def loaders_of(trainer: Any, *, with_validation: bool = False) -> list[Any]:
    """Return the training loaders and the validation loaders of a trainer."""
    loops = [trainer.fit_loop, *([trainer.fit_loop.epoch_loop.val_loop] if with_validation else [])]
    combined = [loop._combined_loader for loop in loops]  # noqa: SLF001 - no public way
    return [
        loader
        for combined_loader in combined
        if combined_loader is not None
        for loader in combined_loader.flattened
    ]


def _numbered(kind: str, objects: list[Any]) -> dict[str, Any]:
    return {f"{kind}_{number}" if number else kind: item for number, item in enumerate(objects)}
