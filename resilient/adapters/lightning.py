"""Lightning's Trainer, saving and resuming through us.

::

    trainer = Trainer(callbacks=[ResilientCheckpoint("runs/mine", every_n_steps=100)])
    trainer.fit(module, loader)           # starting is resuming

It takes the place of ``ModelCheckpoint``. Lightning by itself goes on in mid-epoch only with
loaders that have a state, and keeps no random state. This brings any loader back to its place: an
epoch's order is drawn anew from what it was drawn from, and what was trained on is read and passed
over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.trainer import call

from resilient.adapters.held import Field, HeldRandomState
from resilient.errors import ConfigError
from resilient.loop import Checkpointer
from resilient.state.capture import Part
from resilient.state.rng import RandomState

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from resilient.world.beat import LoopBeat

_KNOWN_STRATEGIES = ("SingleDeviceStrategy", "DDPStrategy")


class ResilientCheckpoint(Checkpoint):
    """Makes a Trainer save to a repository and go on from what is there.

    Saved are module, optimizers, schedulers, precision, the loops' progress, callbacks, the
    datamodule and random state. A save that falls on an epoch's last batch is made when the epoch,
    with its validation, has ended.

    Args:
        url: the repository.
        every_n_steps: optimizer steps between saves; 0 saves at the ends of epochs alone.
        things: more to save, and options; see :class:`resilient.loop.Checkpointer`.

    Raises:
        ConfigError: ``every_n_steps`` is negative.
    """

    def __init__(self, url: str | os.PathLike[str], every_n_steps: int = 0, **things: Any) -> None:
        if every_n_steps < 0:
            raise ConfigError(f"every_n_steps={every_n_steps} is negative")
        self._url = url
        self._every = every_n_steps
        self._given = things
        self._saved_step = 0
        self._to_pass = 0
        self._rng = HeldRandomState()
        self._dawn: Mapping[str, Any] | None = None
        self._checkpointer: Checkpointer | None = None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002 - the seam's
        """Load everything, before the loader draws the order of its first epoch.

        Raises:
            ConfigError: the strategy keeps its state where this cannot take it.
        """
        strategy = type(trainer.strategy).__name__
        if strategy not in _KNOWN_STRATEGIES:
            raise ConfigError(
                f"a Trainer with {strategy} keeps its state where this cannot take it",
                hint=f"use one of {', '.join(_KNOWN_STRATEGIES)}",
            )
        self._checkpointer = Checkpointer(
            self._url, rng=False, **{**self._given, **self._things(trainer)}
        )
        self._saved_step = self._checkpointer.resume() or 0
        done = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        is_within = self._saved_step and 0 < done and not self._is_epoch_over(trainer)
        self._to_pass = done if is_within else 0
        if self._to_pass and self._dawn is not None:
            RandomState().load_state_dict(self._dawn)
            return
        self._rng.restore()
        self._dawn = RandomState().state_dict()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002 - the seam's
        """Pass over what this epoch has trained on already."""
        fetcher = trainer.fit_loop._data_fetcher  # noqa: SLF001 - no public way
        for _ in range(self._to_pass):
            next(fetcher)
        if self._to_pass:
            # The loop adds what it has trained on by itself.
            fetcher.fetched = 0
            self._rng.restore()
        self._to_pass = 0

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002 - the seam's
        """Note what a new epoch's order will be drawn from."""
        loop = trainer.fit_loop
        if trainer.current_epoch > 0 and not loop.is_resuming and not loop.epoch_loop.restarting:
            self._dawn = RandomState().state_dict()

    def on_train_batch_start(self, *_: Any, **__: Any) -> None:
        """Show that a step begins, or goes on with another batch."""
        if self._beat is not None:
            self._beat.begin_step()

    def on_validation_batch_end(self, *_: Any, **__: Any) -> None:
        """Show that an evaluation gets on."""
        if self._beat is not None:
            self._beat.between()

    def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        """Save every n optimizer steps."""
        if self._beat is not None:
            self._beat.between()
        is_last = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        if self._every and not is_last and self._is_due(trainer.global_step):
            self._save(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002 - the seam's
        """Save at the end of an epoch."""
        self._save(trainer)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002 - the seam's
        """Wait until everything is durable."""
        if self._checkpointer is not None:
            self._checkpointer.close()

    def _is_due(self, step: int) -> bool:
        """Say whether a step that is saved has come since the last; several optimizers leap."""
        return step // self._every > self._saved_step // self._every

    def _save(self, trainer: Any) -> None:
        step = trainer.global_step
        if step == self._saved_step or self._checkpointer is None:
            return
        metrics = {name: float(one) for name, one in trainer.callback_metrics.items()}
        self._checkpointer.save(step, metrics=metrics)
        self._saved_step = step

    @property
    def _beat(self) -> LoopBeat | None:
        return self._checkpointer.beat if self._checkpointer is not None else None

    @staticmethod
    def _is_epoch_over(trainer: Any) -> bool:
        return bool(trainer.fit_loop.epoch_loop.batch_progress.is_last_batch)

    def _things(self, trainer: Any) -> dict[str, Any]:
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        precision = trainer.precision_plugin
        loop = trainer.fit_loop
        return {
            "model": trainer.strategy.model,
            **_numbered("optimizer", trainer.optimizers),
            **_numbered("scheduler", schedulers),
            **({"precision": precision} if precision.state_dict() else {}),
            **({"datamodule": trainer.datamodule} if trainer.datamodule is not None else {}),
            "loops": Part(Field(loop.state_dict, loop.load_state_dict)),
            "callbacks": Part(Field(*_callbacks(trainer))),
            "dawn": Part(Field(lambda: {"streams": self._dawn}, self._put_dawn), "rank"),
            "rng_state": Part(self._rng, "rank"),
        }

    def _put_dawn(self, state: Mapping[str, Any]) -> None:
        self._dawn = state["streams"]


def _numbered(kind: str, found: list[Any]) -> dict[str, Any]:
    return {f"{kind}_{number}" if number else kind: one for number, one in enumerate(found)}


def _callbacks(trainer: Any) -> tuple[Any, Any]:
    """Return how the states of callbacks are taken and given."""

    def get() -> dict[str, Any]:
        return {"callbacks": call._call_callbacks_state_dict(trainer)}  # noqa: SLF001 - no public way

    def put(state: Mapping[str, Any]) -> None:
        call._call_callbacks_load_state_dict(trainer, dict(state))  # noqa: SLF001 - no public way

    return get, put
