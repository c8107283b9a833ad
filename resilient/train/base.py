"""The trainer without its loop: construction, evaluation, logs, and what is written by hand."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch.utils.data import Dataset

from resilient.errors import ConfigError
from resilient.state.capture import Part, Stateful
from resilient.train.arguments import TrainingArguments
from resilient.train.assembly import RESERVED
from resilient.train.callbacks import CallbackHandler, TrainerCallback, default_callbacks
from resilient.train.collate import default_data_collator
from resilient.train.evaluation import (
    EvalPrediction,
    PredictionOutput,
    Tally,
    plain_numbers,
    prefixed,
)
from resilient.train.export import gather_state, write_model
from resilient.train.hooks import TrainerHooks
from resilient.train.optimizers.create import set_mode
from resilient.train.precision import Precision
from resilient.train.reporting import MetricsLogged
from resilient.train.run import set_seed
from resilient.train.session import open_session
from resilient.train.state import TrainerControl, TrainerState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import torch
    from torch import nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from resilient.events import Event


class TrainerBase(TrainerHooks):
    """Everything of a trainer but ``train``; see :class:`resilient.Trainer` for the arguments."""

    def __init__(  # noqa: PLR0913 - the field's signature
        self,
        model: nn.Module,
        args: TrainingArguments | None = None,
        *,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        data_collator: Callable[[Any], Any] | None = None,
        compute_loss_func: Callable[..., torch.Tensor] | None = None,
        compute_metrics: Callable[[EvalPrediction], Mapping[str, Any]] | None = None,
        callbacks: Iterable[TrainerCallback | type[TrainerCallback]] = (),
        optimizers: tuple[Optimizer | None, LRScheduler | None] = (None, None),
    ) -> None:
        self.args = args or TrainingArguments()
        self.session = open_session(self.args)
        # Ranks draw different dropout masks; replicas begin as rank 0's all the same.
        set_seed(self.args.seed + self.session.world.rank)
        self.model = model.to(self.session.device)
        self.train_dataset = train_dataset
        self.eval_dataset = eval_dataset
        self.data_collator = data_collator or default_data_collator
        self.compute_loss_func = compute_loss_func
        self.compute_metrics = compute_metrics
        self.optimizer, self.lr_scheduler = optimizers
        self.makes_scheduler = self.lr_scheduler is None
        self.precision = Precision(self.args, self.session.device)
        self.state = TrainerState(
            is_local_process_zero=self.session.world.local_rank == 0,
            is_world_process_zero=self.session.world.is_coordinator,
        )
        self.control = TrainerControl()
        self.callback_handler = CallbackHandler(
            default_callbacks(self.args, callbacks), self.args, self.state, self.control
        )
        self.callback_handler.context["model"] = self.model
        self._emit = self.session.emit
        self._registered: dict[str, Part] = {}
        self.learn_losses()
        self.callback_handler.fire("on_init_end")

    def register(
        self,
        name: str,
        stateful: Stateful,
        scope: Literal["replicated", "rank"] = "replicated",
    ) -> None:
        """Save and restore something of yours with every checkpoint.

        Args:
            name: the part's name in the checkpoint.
            stateful: has ``state_dict`` and ``load_state_dict``.
            scope: ``replicated`` if all ranks hold the same, ``rank`` if each has its own.

        Raises:
            ConfigError: the name is taken, by another part of yours or by one of ours.
        """
        if name in RESERVED:
            raise ConfigError(
                f"cannot register `{name}`: the trainer's own parts have this name (reserved: "
                f"{', '.join(RESERVED)}); give it another"
            )
        if name in self._registered:
            raise ConfigError(f"a part named `{name}` is registered already")
        self._registered[name] = Part(stateful, scope)

    def add_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Call one more callback, after the others."""
        self.callback_handler.add_callback(callback)

    def pop_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> Any:
        """Remove and return a callback, given itself or its class; None if there is none."""
        return self.callback_handler.pop_callback(callback)

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: Sequence[str] = (),
        metric_key_prefix: str = "eval",
    ) -> dict[str, Any]:
        """Return metrics of a dataset, the trainer's if none is given. Collective.

        The history gets the metrics; speeds are only returned and told as an event.

        Args:
            eval_dataset: a dataset, or a dict of them (metrics ``<prefix>_<name>_*``).
            ignore_keys: outputs of the model that are no predictions.
            metric_key_prefix: begins the name of every metric.
        """
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, Mapping) and not isinstance(dataset, Dataset):
            metrics: dict[str, Any] = {}
            for name, one in dataset.items():
                metrics |= self.evaluate(one, ignore_keys, f"{metric_key_prefix}_{name}")
            return metrics
        keep = self.compute_metrics is not None
        output, speed = self._predict_all(
            dataset, metric_key_prefix, ignore_keys, keep_outputs=keep
        )
        self.log(output.metrics)
        self._tell(MetricsLogged(speed))
        metrics = {**output.metrics, **speed, "epoch": self.state.epoch}
        self.callback_handler.fire("on_evaluate", metrics=metrics)
        return metrics

    def predict(
        self,
        test_dataset: Any,
        ignore_keys: Sequence[str] = (),
        metric_key_prefix: str = "test",
    ) -> PredictionOutput:
        """Return predictions, labels and metrics in the dataset's order. Collective."""
        output, speed = self._predict_all(
            test_dataset, metric_key_prefix, ignore_keys, keep_outputs=True
        )
        metrics = {**output.metrics, **speed}
        self.callback_handler.fire("on_predict", metrics=metrics)
        return PredictionOutput(output.predictions, output.label_ids, metrics)

    def log(self, logs: Mapping[str, Any]) -> None:
        """Add numbers to the history, with the epoch and the step, and tell them."""
        entry = {**logs, "epoch": self.state.epoch, "step": self.state.global_step}
        self.state.log_history.append(entry)
        self.callback_handler.fire("on_log", logs=entry)
        self._tell(MetricsLogged(entry))

    def save_model(self, output_dir: str | None = None) -> None:
        """Write the model's weights for use elsewhere, on rank zero (``model.safetensors``).

        Collective if the model is sharded: its weights are gathered on rank zero.
        """
        state = gather_state(self.model, keep=self.state.is_world_process_zero)
        if self.state.is_world_process_zero:
            write_model(self.model, state, Path(output_dir or self.args.output_dir))

    def save_state(self) -> None:
        """Write ``trainer_state.json`` into the output folder, on rank zero."""
        if self.state.is_world_process_zero:
            self.state.save_to_json(Path(self.args.output_dir) / "trainer_state.json")

    def _predict_all(
        self, dataset: Any, prefix: str, ignore_keys: Sequence[str], *, keep_outputs: bool
    ) -> tuple[PredictionOutput, dict[str, float]]:
        """Run the model over a dataset; metrics hold the loss and what ``compute_metrics`` says."""
        clock, fire = self.session.clock, self.callback_handler.fire
        began_seconds, was_training = clock.monotonic_seconds(), self.model.training
        loader = self.get_eval_dataloader(dataset)
        tally = Tally(self._share_of(dataset), keep_outputs=keep_outputs)
        self.model.eval()
        set_mode(self.optimizer, training=False)
        for inputs in loader:
            tally.add(*self.prediction_step(self.model, inputs, not keep_outputs, ignore_keys))
            fire("on_prediction_step", eval_dataloader=loader)
        self.model.train(was_training)
        set_mode(self.optimizer, training=was_training)
        predictions, labels = tally.outputs()
        loss, metrics = tally.mean_loss(), {}
        if loss is not None:
            metrics["loss"] = loss
        if self.compute_metrics is not None and labels is not None:
            metrics |= self.compute_metrics(EvalPrediction(predictions, labels))
        took_seconds = clock.monotonic_seconds() - began_seconds
        return (
            PredictionOutput(predictions, labels, dict(plain_numbers(prefixed(metrics, prefix)))),
            speeds(prefix, took_seconds, len(dataset), len(loader)),
        )

    def _tell(self, event: Event) -> None:
        """Emit a fact of the whole gang, which only rank zero tells."""
        if self.state.is_world_process_zero:
            self._emit(event, step=self.state.global_step)


def speeds(prefix: str, took_seconds: float, samples: int, steps: int) -> dict[str, float]:
    """Return how long something took and how fast it went, with the field's names."""
    per_second = 1 / took_seconds if took_seconds > 0 else 0.0
    return {
        f"{prefix}_runtime": took_seconds,
        f"{prefix}_samples_per_second": samples * per_second,
        f"{prefix}_steps_per_second": steps * per_second,
    }
