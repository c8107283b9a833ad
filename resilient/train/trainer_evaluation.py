"""Evaluation, prediction and logging of the trainer, and the files of metrics.

Every sample of a dataset is evaluated exactly once.
"""

from __future__ import annotations

import datetime as dt
import inspect
import json
import math
from collections.abc import Mapping
from contextlib import closing, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.utils.data import Dataset

from resilient.errors import ConfigError
from resilient.state_dict.rng_state import RandomState
from resilient.state_dict.statefuls import plain_log, plain_value
from resilient.strategies.pipeline import pipeline_of
from resilient.train.data.loader_workers import read_batches
from resilient.train.evaluation.custom_loader import BatchMetrics, counted
from resilient.train.evaluation.loop import (
    EvalAccumulator,
    EvalLoopOutput,
    EvalPrediction,
    OutputJoin,
    PredictionOutput,
    StreamShare,
    prefixed,
)
from resilient.train.events import MetricsLogged, timing
from resilient.train.model.batch import main_input
from resilient.train.model.precision import evaluation_dtype, weights_in
from resilient.train.optimizers.factory import set_mode
from resilient.train.preemption import EvaluationInterrupted
from resilient.train.trainer_hooks import TrainerHooks

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    import torch
    from torch import nn

    from resilient.events import Emitter, Event
    from resilient.train.callbacks.base import CallbackHandler
    from resilient.train.data.sampler import ResumableSampler
    from resilient.train.evaluation.loop import EvalShard
    from resilient.train.memory import MemoryMeter
    from resilient.train.preemption import StopCoordinator
    from resilient.train.state import TrainerControl, TrainerState


EVALUATION, PREDICTION = "Evaluation", "Prediction"
"""Descriptions of the two uses of ``evaluation_loop``, as in Transformers."""


class TrainerEvaluation(TrainerHooks):
    """Evaluation and prediction of a trainer.

    Attributes:
        compute_metrics: Function from ``EvalPrediction`` to a dict of numbers; with
            ``batch_eval_metrics`` it also gets ``compute_result``.
        preprocess_logits_for_metrics: Function from ``(predictions, labels)`` of a batch to the
            part to keep.
    """

    compute_metrics: Callable[..., Mapping[str, Any]] | None
    preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None
    state: TrainerState
    control: TrainerControl
    callback_handler: CallbackHandler
    memory: MemoryMeter
    _emit: Emitter
    _gate: StopCoordinator | None = None

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: Sequence[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, Any]:
        """Return metrics of a dataset, by default the trainer's. Collective.

        The metrics go to the history; speeds are only returned and emitted as an event.

        Args:
            eval_dataset: A dataset, a dict of datasets (metrics ``<prefix>_<name>_*``), or a name
                in the trainer's own dict (metrics ``<prefix>_*``).
            ignore_keys: Model outputs that are not predictions; None: the keys that the model's
                config names.
            metric_key_prefix: Prefix of every metric's name.
        """
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, Mapping) and not isinstance(dataset, Dataset):
            metrics: dict[str, Any] = {}
            for name, value in dataset.items():
                dataset_or_name = value if eval_dataset is not None else name
                metrics |= self.evaluate(
                    dataset_or_name, ignore_keys, f"{metric_key_prefix}_{name}"
                )
            return metrics
        loss_only = True if self.compute_metrics is None else None
        with random_state_restored(self.train_sampler):
            output, speed = self._run_loop(
                lambda: self.get_eval_dataloader(dataset),
                EVALUATION,
                (loss_only, ignore_keys, metric_key_prefix),
            )
        self.log(output.metrics or {})
        self._emit_on_first_rank(MetricsLogged(speed))
        metrics = {**(output.metrics or {}), **speed, "epoch": self.state.epoch}
        self.callback_handler.fire("on_evaluate", metrics=metrics)
        return metrics

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,  # noqa: FBT001 - the field's signature
        ignore_keys: Sequence[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Run the model over a loader; ``evaluate`` and ``predict`` call this method. Collective.

        An override gets the batches of its rank, and every rank gets equally many batches.

        Args:
            dataloader: Loader of ``get_eval_dataloader`` or ``get_test_dataloader``.
            description: ``Evaluation``, ``Prediction`` or another description. A prediction keeps
                the outputs even if ``batch_eval_metrics`` is set.
            prediction_loss_only: Whether to compute only the loss; None: the argument of that name.
            ignore_keys: As in :meth:`evaluate`.
            metric_key_prefix: Prefix of every metric's name.

        Returns:
            Predictions and labels in the dataset's order, prefixed metrics and the number of
            samples, equal on all ranks.

        Raises:
            ConfigError: The loader has no batch, or several ranks cannot share its samples.
        """
        loss_only = prediction_loss_only
        if loss_only is None:
            loss_only = self.args.prediction_loss_only
        with random_state_restored(self.train_sampler):
            self.callback_handler.context["eval_dataloader"] = dataloader
            loader = counted(dataloader, self.session.data_world, in_step=self._evaluates_in_step)
            share: EvalShard = loader.share
            by_batch = self._batch_metrics(share, loss_only=loss_only)
            keep = not loss_only and (description == PREDICTION or by_batch is None)
            accumulator = EvalAccumulator(
                share, keep_outputs=keep, joining=OutputJoin.of(self.args)
            )
            takers = [accumulator.add, *([by_batch.add] if by_batch is not None else [])]
            step = self._prediction_step(ignore_keys, loss_only=loss_only)
            if not self._run_batches(loader, step, takers):
                kind = type(getattr(dataloader, "dataset", dataloader)).__name__
                raise ConfigError(f"eval_dataset `{kind}` is empty")
            return self._judge_outputs(accumulator, share, by_batch, metric_key_prefix)

    def prediction_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,  # noqa: FBT001 - the field's signature
        ignore_keys: Sequence[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Call :meth:`evaluation_loop`, whose older name this is."""
        return self.evaluation_loop(
            dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
        )

    @property
    def _evaluates_in_step(self) -> bool:
        """True if all ranks must run the same number of batches, also for an override's loop."""
        has_own_loop = type(self).evaluation_loop is not TrainerEvaluation.evaluation_loop
        return has_own_loop or super()._evaluates_in_step

    def predict(
        self,
        test_dataset: Any,
        ignore_keys: Sequence[str] | None = None,
        metric_key_prefix: str = "test",
    ) -> PredictionOutput:
        """Return predictions, labels and metrics in the dataset's order. Collective.

        Args:
            test_dataset: A dataset, with or without labels.
            ignore_keys: As in :meth:`evaluate`.
            metric_key_prefix: Prefix of every metric's name.
        """
        with random_state_restored(self.train_sampler):
            output, speed = self._run_loop(
                lambda: self.get_test_dataloader(test_dataset),
                PREDICTION,
                (None, ignore_keys, metric_key_prefix),
            )
        metrics = {**(output.metrics or {}), **speed}
        self.callback_handler.fire("on_predict", metrics=metrics)
        return PredictionOutput(output.predictions, output.label_ids, metrics)

    def metrics_format(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Return metrics for people: rounded numbers, durations, and sizes with units."""
        return formatted(metrics)

    def log(self, logs: Mapping[str, Any], start_time: float | None = None) -> None:  # noqa: ARG002 - signature of Transformers
        """Add numbers to the history, with the epoch and the step, and emit an event.

        Callbacks get a copy. NumPy numbers and one-element tensors become numbers. Speeds since
        ``start_time`` are left out, so that the history is equal in each run of the same training.

        Raises:
            UnsavableState: A value is neither a number nor text, nor a dict or list of them.
        """
        entry = {**plain_log(logs), "epoch": self.state.epoch, "step": self.state.global_step}
        if self.args.include_num_input_tokens_seen != "no":
            entry["num_input_tokens_seen"] = self.state.num_input_tokens_seen
        self.state.history.note(entry)
        self.callback_handler.fire("on_log", logs=dict(entry))
        self._emit_on_first_rank(MetricsLogged(entry))

    def _run_loop(
        self,
        load: Callable[[], Any],
        description: str,
        options: tuple[bool | None, Sequence[str] | None, str],
    ) -> tuple[EvalLoopOutput, dict[str, float]]:
        """Call ``evaluation_loop`` and measure its speed.

        Args:
            load: Function that makes the loader.
            description: ``Evaluation`` or ``Prediction``.
            options: ``prediction_loss_only``, ``ignore_keys`` and ``metric_key_prefix``.
        """
        clock, (loss_only, ignore_keys, prefix) = self.session.clock, options
        self.memory.start(prefix)
        began_seconds = clock.monotonic_seconds()
        output = self.evaluation_loop(
            load(),
            description=description,
            prediction_loss_only=loss_only,
            ignore_keys=ignore_keys,
            metric_key_prefix=prefix,
        )
        took_seconds = clock.monotonic_seconds() - began_seconds
        samples = output.num_samples or 0
        batch = self.args.per_device_eval_batch_size * self.session.data_world.size
        speed = speeds(prefix, took_seconds, samples, math.ceil(samples / batch))
        return output, speed | self.memory.stop(prefix)

    def _run_batches(
        self, loader: Any, step: Callable[[Any], Any], takers: Sequence[Callable[..., None]]
    ) -> int:
        """Pass the outputs of each batch to the takers; return the number of batches."""
        batches = 0
        # Close the iterator at once, because an error's traceback would keep the loader's
        # processes.
        with self._evaluating(), closing(self._in_turn(loader, loader.share)) as inputs_in_turn:
            for inputs in inputs_in_turn:
                batches += 1
                self.session.progress.again()
                outputs = step(inputs)
                for take in takers:
                    take(*outputs)
                self.callback_handler.fire("on_prediction_step")
        return batches

    def _evaluate_unless_stopped(
        self, gate: StopCoordinator, ignore_keys: Sequence[str] | None
    ) -> dict[str, Any] | None:
        """Return metrics. If the ranks agreed to stop, restore the random state and return None."""
        random_state = RandomState().state_dict()
        self._gate = gate
        try:
            with self._timing("evaluating"):
                return self.evaluate(ignore_keys=ignore_keys)
        except EvaluationInterrupted:
            RandomState().load_state_dict(random_state)
            # The next attempt runs this evaluation.
            self.control.should_evaluate = True
            return None
        finally:
            self._gate = None

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Set the model and the optimizer to evaluation mode, and restore them afterwards."""
        was_training = self.model.training
        self.model.eval()
        set_mode(self.optimizer, training=False)
        try:
            with weights_in(self.model, evaluation_dtype(self.args)):
                yield
        finally:
            self.model.train(was_training)
            set_mode(self.optimizer, training=was_training)

    def _in_turn(self, loader: Any, share: EvalShard) -> Generator[Any]:
        """Yield batches until the ranks agree to stop.

        If ranks also synchronize between batches and have different numbers of batches, no stop is
        possible before the end.
        """
        is_uneven = isinstance(share, StreamShare) or share.batches % share.world.size > 0
        gate = None if is_uneven and self.args.eval_accumulation_steps else self._gate
        for inputs in read_batches(loader):
            if gate is not None and not gate.enter_batch():
                raise EvaluationInterrupted
            yield inputs
        if gate is not None and not gate.enter_gathering():
            raise EvaluationInterrupted

    def _judge_outputs(
        self,
        accumulator: EvalAccumulator,
        share: EvalShard,
        by_batch: BatchMetrics | None,
        prefix: str,
    ) -> EvalLoopOutput:
        """Gather the outputs of all ranks and compute their metrics. Collective."""
        losses, (predictions, labels, inputs) = accumulator.losses(), accumulator.outputs()
        metrics: dict[str, Any] = {} if losses is None else {"loss": share.mean(losses)}
        if by_batch is not None:
            metrics |= by_batch.result()
        elif self.compute_metrics is not None and predictions is not None and labels is not None:
            losses_or_none = losses if "loss" in self.args.include_for_metrics else None
            sample_losses = None if losses_or_none is None else share.per_sample(losses_or_none)
            metrics |= self.compute_metrics(
                EvalPrediction(predictions, labels, inputs, sample_losses)
            )
        prefixed_metrics: dict[str, Any] = plain_value(prefixed(metrics, prefix))
        return EvalLoopOutput(predictions, labels, prefixed_metrics, share.samples)

    def _batch_metrics(self, share: EvalShard, *, loss_only: bool) -> BatchMetrics | None:
        if loss_only or self.compute_metrics is None or not self.args.batch_eval_metrics:
            return None
        return BatchMetrics(self.compute_metrics, share, self.args.include_for_metrics)

    def _prediction_step(
        self, ignore_keys: Sequence[str] | None, *, loss_only: bool
    ) -> Callable[[Any], tuple[torch.Tensor | None, Any, Any, Any]]:
        """Return the function for one batch: inputs -> loss, predictions, labels, main input."""
        arguments = {"prediction_loss_only": loss_only, "ignore_keys": ignore_keys}
        parameters = inspect.signature(self.evaluation_step).parameters
        arguments_taken: dict[str, Any] = {
            name: value for name, value in arguments.items() if name in parameters
        }
        step: Callable[..., Any] = partial(self.evaluation_step, **arguments_taken)
        with_inputs = "inputs" in self.args.include_for_metrics and not loss_only
        model: nn.Module = pipeline_of(self.model) or self.model
        reduce = self.preprocess_logits_for_metrics

        def run(inputs: Any) -> tuple[torch.Tensor | None, Any, Any, Any]:
            outputs = step(model, inputs)
            loss, predictions, labels = (
                outputs if isinstance(outputs, tuple) else (outputs, None, None)
            )
            if loss_only:
                return loss, None, None, None
            if reduce is not None and predictions is not None:
                predictions = reduce(predictions, labels)
            return (
                loss,
                predictions,
                labels,
                main_input(inputs, self.model) if with_inputs else None,
            )

        return run

    def _emit_on_first_rank(self, event: Event) -> None:
        """Emit an event of the whole rank group, on rank 0 only."""
        if self.state.is_world_process_zero:
            self._emit(event, step=self.state.global_step)

    def _timing(self, phase: str, at_least_seconds: float = 0.0) -> AbstractContextManager[None]:
        return timing(phase, self.session.clock, self._emit_on_first_rank, at_least_seconds)


@contextmanager
def random_state_restored(sampler: ResumableSampler | None) -> Iterator[None]:
    """Restore the random streams on exit, so that an evaluation does not change training.

    In Transformers an evaluation changes the streams. A run that Transformers began therefore keeps
    that behavior.

    Args:
        sampler: Training sampler; its cursor records whether another trainer began the run. None
            outside of training.
    """
    if sampler is not None and sampler.cursor.origin:
        yield
        return
    random_state = RandomState().state_dict()
    try:
        yield
    finally:
        RandomState().load_state_dict(random_state)


def speeds(
    prefix: str, took_seconds: float, samples: int, steps: int, tokens: int = 0
) -> dict[str, float]:
    """Return the duration and the speeds of an operation, with Transformers' names."""
    per_second = 1 / took_seconds if took_seconds > 0 else 0.0
    figures = {
        f"{prefix}_runtime": took_seconds,
        f"{prefix}_samples_per_second": samples * per_second,
        f"{prefix}_steps_per_second": steps * per_second,
    }
    return {**figures, f"{prefix}_tokens_per_second": tokens * per_second} if tokens else figures


_DIGITS = 4


def formatted(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics for people: rounded numbers, durations, and sizes with units."""
    return {name: _short(name, value) for name, value in metrics.items()}


def shown(split: str, metrics: Mapping[str, Any]) -> str:
    """Return formatted metrics as aligned lines under a heading, sorted by name."""
    lines = {
        name: f"{value:.{_DIGITS}f}" if isinstance(value, float) else str(value)
        for name, value in metrics.items()
    }
    names, values = max(map(len, lines), default=0), max(map(len, lines.values()), default=0)
    rows = [f"  {name:<{names}} = {lines[name]:>{values}}\n" for name in sorted(lines)]
    return "".join([f"***** {split} metrics *****\n", *rows])


def save(folder: Path, split: str, metrics: Mapping[str, Any], *, combined: bool) -> None:
    """Write ``<split>_results.json``, and add to ``all_results.json`` if ``combined``."""
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / f"{split}_results.json", metrics)
    if combined:
        path = folder / "all_results.json"
        saved_metrics = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        _write(path, {**saved_metrics, **metrics})


def _write(path: Path, metrics: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(metrics, indent=4, sort_keys=True), encoding="utf-8")


def _short(name: str, value: Any) -> Any:
    if "_mem_" in name:
        return f"{value >> 20}MB"
    if name.endswith("_runtime"):
        return str(dt.timedelta(seconds=round(value, 2)))
    if name == "total_flos":
        return f"{int(value) >> 30}GF"
    return round(value, _DIGITS) if isinstance(value, float) else value
