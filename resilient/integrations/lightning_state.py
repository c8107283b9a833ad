"""State of Lightning's Trainer that only its hooks and its logger connector can access."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lightning.pytorch
from lightning.pytorch.callbacks import Callback, EarlyStopping
from lightning.pytorch.core.hooks import CheckpointHooks
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer import call
from torchmetrics import Metric

from resilient.integrations.hook_state import changes_of, host_copy, is_same, outline, with_changes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

_WEIGHTS, _CALLBACKS = "state_dict", "callbacks"


class HookState:
    """State of the checkpoint hooks of module, callbacks and precision plugin.

    On several ranks the state of rank 0 is saved, as in Lightning.

    Args:
        trainer: Trainer whose hooks are called.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._loaded_state: Mapping[str, Any] | None = None

    def exists(self) -> bool:
        """Return true if the module, a callback or the plugin overrides a checkpoint hook."""
        trainer = self._trainer
        owners = [
            (trainer.lightning_module, CheckpointHooks),
            (trainer.precision_plugin, Precision),
            *((callback, Callback) for callback in trainer.callbacks),
        ]
        names = ("on_save_checkpoint", "on_load_checkpoint")
        return any(_is_overridden(owner, name, base) for owner, base in owners for name in names)

    def state_dict(self) -> dict[str, Any]:
        """Call the hooks as at a save of Lightning, and return the changes of the hooks."""
        trainer = self._trainer
        checkpoint = _checkpoint_without_hooks(trainer)
        outline_before = outline(checkpoint)
        trainer.precision_plugin.on_save_checkpoint(checkpoint)
        call._call_callbacks_on_save_checkpoint(trainer, checkpoint)  # noqa: SLF001 - no public way
        _call_module(trainer, "on_save_checkpoint", checkpoint)
        return changes_of(outline_before, checkpoint)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep the changes until :meth:`restore`."""
        self._loaded_state = state

    def restore(self, callback_states: Mapping[str, Any]) -> None:
        """Call the hooks as at a load of Lightning. All parts must be loaded before.

        Args:
            callback_states: States of callbacks by their keys, which this method loads.
        """
        checkpoint: dict[str, Any] = {"callbacks": dict(callback_states)}
        if self._loaded_state is not None:
            checkpoint = self._call_hooks(callback_states)
        call._call_callbacks_load_state_dict(self._trainer, checkpoint)  # noqa: SLF001 - no public way
        self._loaded_state = None

    def _call_hooks(self, callback_states: Mapping[str, Any]) -> dict[str, Any]:
        trainer = self._trainer
        base = host_copy(_checkpoint_without_hooks(trainer))
        base[_CALLBACKS] = dict(callback_states)
        checkpoint = with_changes(base, self._loaded_state or {})
        outline_before = outline(checkpoint)
        trainer.precision_plugin.on_load_checkpoint(checkpoint)
        _call_module(trainer, "on_load_checkpoint", checkpoint)
        if not is_same(outline_before[_WEIGHTS], checkpoint.get(_WEIGHTS)):
            strict = trainer.lightning_module.strict_loading
            trainer.strategy.load_model_state_dict(checkpoint, strict=strict)
        call._call_callbacks_on_load_checkpoint(trainer, checkpoint)  # noqa: SLF001 - no public way
        if not is_same(outline_before["optimizer_states"], checkpoint.get("optimizer_states")):
            trainer.strategy.load_optimizer_state_dict(checkpoint)
        if not is_same(outline_before["lr_schedulers"], checkpoint.get("lr_schedulers")):
            states = checkpoint["lr_schedulers"]
            for config, state in zip(trainer.lr_scheduler_configs, states, strict=False):
                config.scheduler.load_state_dict(state)
        return checkpoint


class LoggedMetrics:
    """Values that the module logged, and the sums of this epoch.

    Lightning resets these values at a resume. The mean of an epoch would then cover only the
    remaining batches, and a plateau scheduler would have no metric.

    Args:
        trainer: Trainer of the module that logs.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._loaded_state: Mapping[str, Any] | None = None
        self._pending: dict[str, Mapping[str, Any]] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the logged values, sums and states of metrics."""
        connector = self._trainer._logger_connector  # noqa: SLF001 - no public way
        results = self._trainer.fit_loop.epoch_loop._results  # noqa: SLF001 - no public way
        return {
            "callback": dict(self._trainer.callback_metrics),
            "logged": dict(self._trainer.logged_metrics),
            "progress_bar": dict(connector._progress_bar_metrics),  # noqa: SLF001 - no public way
            "sums": {
                key: _sums(result)
                for key, result in results.items()
                if result.is_tensor and not result.has_reset
            },
            "modules": {name: _metric_state(metric) for name, metric in self._metrics()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep the state until :meth:`restore`."""
        self._loaded_state = state

    def restore(self, *, is_within_epoch: bool) -> None:
        """Restore the trainer's values, after the trainer has reset them.

        Args:
            is_within_epoch: Whether the sums of the epoch continue.
        """
        state, self._loaded_state = self._loaded_state, None
        if state is None:
            return
        connector = self._trainer._logger_connector  # noqa: SLF001 - no public way
        connector._callback_metrics.update(state["callback"])  # noqa: SLF001 - no public way
        connector._logged_metrics.update(state["logged"])  # noqa: SLF001 - no public way
        connector._progress_bar_metrics.update(state["progress_bar"])  # noqa: SLF001 - no public way
        for name, metric in self._metrics():
            if name in state["modules"]:
                _set_metric(metric, state["modules"][name])
        if is_within_epoch and state["sums"]:
            self._pending = dict(state["sums"])
            results = self._trainer.fit_loop.epoch_loop._results  # noqa: SLF001 - no public way
            results.update_metrics = self._adding_to(results.update_metrics)

    def end_epoch(self) -> None:
        """Discard sums that were not logged again."""
        if self._pending or "update_metrics" in vars(self._results()):
            self._pending = {}
            vars(self._results()).pop("update_metrics", None)

    def _results(self) -> Any:
        return self._trainer.fit_loop.epoch_loop._results  # noqa: SLF001 - no public way

    def _metrics(self) -> list[tuple[str, Any]]:
        module = self._trainer.lightning_module
        return [
            (name, submodule)
            for name, submodule in module.named_modules()
            if isinstance(submodule, Metric)
        ]

    def _adding_to(self, update: Callable[..., None]) -> Callable[..., None]:
        """Return a wrapper of ``update`` that first restores the saved sum of a key."""

        def added(key: str, value: Any, batch_size: int) -> None:
            saved_values, results = self._pending.pop(key, None), self._results()
            if saved_values is not None and results[key].is_tensor:
                for name, metric_value in saved_values.items():
                    setattr(results[key], name, metric_value.to(value.device))
            update(key, value, batch_size)

        return added


class DeferredGroups:
    """Groups of an optimizer while the hooks ``on_fit_start`` run.

    Lightning loads optimizers after these hooks, so the hooks get the groups that the module
    created. A hook may add groups, or replace groups by groups with the options of an earlier
    epoch.

    Args:
        optimizer: Optimizer before its load.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._made = [
            {**group, "params": list(group["params"])} for group in optimizer.param_groups
        ]
        self._loaded: list[dict[str, Any]] = []

    def hold(self) -> None:
        """Keep the loaded groups, and put the groups of the module into the optimizer."""
        self._loaded, self._optimizer.param_groups = self._optimizer.param_groups, self._made

    def restore_loaded_groups(self) -> None:
        """Put the loaded groups into the optimizer, and keep groups of new parameters."""
        members = {id(parameter) for group in self._loaded for parameter in group["params"]}
        self._loaded += (
            group
            for group in self._optimizer.param_groups
            if group["params"] and members.isdisjoint(map(id, group["params"]))
        )
        self._optimizer.param_groups = self._loaded


_FLAGS = ("requires_grad", "training", "track_running_stats")


class TrainingChanges:
    """Changes that training makes to flags of the module, and to gradient accumulation.

    A callback may unfreeze a layer in a later epoch. The script sets the initial flags at each
    start, so a checkpoint stores only later changes.

    Args:
        trainer: Trainer whose module and accumulation factor change.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._made: dict[str, dict[str, bool]] | None = None
        self._made_factor: int = trainer.accumulate_grad_batches
        self._loaded: Mapping[str, Any] = {}

    def begin(self) -> None:
        """Record the initial flags, and restore the loaded changes."""
        self._made = {flag: self._flags(flag) for flag in _FLAGS}
        for flag in _FLAGS:
            owners = dict(self._owners(flag))
            for name, value in self._loaded.get(flag, {}).items():
                if name in owners:
                    setattr(owners[name], flag, value)

    def restore_accumulation(self) -> None:
        """Restore the accumulation factor; callbacks check it before the first epoch."""
        if factor := self._loaded.get("accumulate_grad_batches"):
            self._trainer.accumulate_grad_batches = factor

    def state(self) -> dict[str, Any]:
        """Return the flags that differ from the initial flags, and a changed factor."""
        factor: int = self._trainer.accumulate_grad_batches
        made = self._made or {}
        changed = {
            flag: {
                name: value
                for name, value in self._flags(flag).items()
                if made.get(flag, {}).get(name, value) != value
            }
            for flag in _FLAGS
        }
        return {**changed, "accumulate_grad_batches": factor if factor != self._made_factor else 0}

    def load(self, state: Mapping[str, Any]) -> None:
        """Keep the changes until :meth:`begin` and :meth:`restore_accumulation`."""
        self._loaded = state

    def _flags(self, flag: str) -> dict[str, bool]:
        return {name: getattr(owner, flag) for name, owner in self._owners(flag)}

    def _owners(self, flag: str) -> Iterable[tuple[str, Any]]:
        module = self._trainer.lightning_module
        if flag == "requires_grad":
            return module.named_parameters()  # type: ignore[no-any-return]  # Lightning is untyped
        return [pair for pair in module.named_modules() if hasattr(pair[1], flag)]


def stopping_callback(trainer: Any) -> str:
    """Return the name of the EarlyStopping callback that stops this run; empty without one."""
    for callback in trainer.callbacks:
        if isinstance(callback, EarlyStopping) and trainer.should_stop:
            is_out_of_patience = callback.wait_count >= callback.patience
            if is_out_of_patience or (
                callback.stopped_epoch and callback.stopped_epoch == _epoch(trainer)
            ):
                return type(callback).__name__
    return ""


def _epoch(trainer: Any) -> int:
    """Return the last trained epoch, even if its end was already counted."""
    return int(trainer.fit_loop.epoch_progress.current.ready) - 1


def _is_overridden(owner: Any, name: str, base: type) -> bool:
    if name in vars(owner):
        return True
    return getattr(type(owner), name, None) is not getattr(base, name)


def _call_module(trainer: Any, hook: str, checkpoint: dict[str, Any]) -> None:
    call._call_lightning_module_hook(trainer, hook, checkpoint)  # noqa: SLF001 - no public way


def _checkpoint_without_hooks(trainer: Any) -> dict[str, Any]:
    """Return the checkpoint dictionary for hooks, with the live tensors."""
    connector, precision = trainer._checkpoint_connector, trainer.precision_plugin  # noqa: SLF001
    module, datamodule = trainer.lightning_module, trainer.datamodule
    checkpoint: dict[str, Any] = {
        "epoch": trainer.current_epoch,
        "global_step": trainer.global_step,
        "pytorch-lightning_version": lightning.pytorch.__version__,
        _WEIGHTS: trainer.strategy.lightning_module_state_dict(),
        "loops": connector._get_loops_state_dict(),  # noqa: SLF001 - no public way
        _CALLBACKS: call._call_callbacks_state_dict(trainer),  # noqa: SLF001 - no public way
        "optimizer_states": [
            trainer.strategy.optimizer_state(optimizer) for optimizer in trainer.optimizers
        ],
        "lr_schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
    }
    if state := precision.state_dict():
        checkpoint[type(precision).__qualname__] = state
    for owner in (module, datamodule):
        if owner is not None and owner.hparams:
            checkpoint[owner.CHECKPOINT_HYPER_PARAMS_KEY] = dict(owner.hparams)
    if datamodule is not None and (state := datamodule.state_dict()):
        checkpoint[type(datamodule).__qualname__] = state
    return checkpoint


def _sums(metric: Any) -> dict[str, Any]:
    names = ("value", "cumulated_batch_size")
    return {name: getattr(metric, name) for name in names if hasattr(metric, name)}


def _metric_state(metric: Any) -> dict[str, Any]:
    return {
        "states": {name: getattr(metric, name) for name in metric._defaults},  # noqa: SLF001
        "updates": metric._update_count,  # noqa: SLF001 - no public way
    }


def _set_metric(metric: Any, saved: Mapping[str, Any]) -> None:
    for name, value in saved["states"].items():
        if name in metric._defaults:  # noqa: SLF001 - no public way
            is_list = isinstance(value, list)
            moved_tensors = [item.to(metric.device) for item in (value if is_list else [value])]
            setattr(metric, name, moved_tensors if is_list else moved_tensors[0])
    metric._update_count, metric._computed = saved["updates"], None  # noqa: SLF001 - no public way
