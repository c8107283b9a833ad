"""The trainer's evaluation and prediction: every dataset, every sample once, metrics of it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.utils.data import Dataset

from resilient.errors import ConfigError
from resilient.state.numbers import plain_log, plain_value
from resilient.state.rng import RandomState
from resilient.strategies.pipeline.known import pipeline_of
from resilient.train.evaluation.batch_metrics import BatchMetrics
from resilient.train.evaluation.columns import Joining
from resilient.train.evaluation.evaluate import (
    EvalPrediction,
    PredictionOutput,
    Tally,
    prefixed,
)
from resilient.train.evaluation.evaluate_stream import StreamShare
from resilient.train.evaluation.own_loaders import counted
from resilient.train.model.batch import main_input
from resilient.train.model.lowering import evaluation_dtype, weights_in
from resilient.train.optimizers.create import set_mode
from resilient.train.reporting import MetricsLogged, timing
from resilient.train.stop import EvaluationCut
from resilient.train.surface.hooks import TrainerHooks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    import torch
    from torch import nn

    from resilient.events import Emitter, Event
    from resilient.train.callbacks.callback import CallbackHandler
    from resilient.train.data.sampling import ResumableSampler
    from resilient.train.evaluation.evaluate import Share
    from resilient.train.measures.memory import MemoryMeter
    from resilient.train.state import TrainerControl, TrainerState
    from resilient.train.stop import StopGate


class TrainerPrediction(TrainerHooks):
    """The part of a trainer that evaluates and predicts.

    Attributes:
        compute_metrics: ``EvalPrediction`` -> dict of numbers; with ``batch_eval_metrics`` also
            told ``compute_result``.
        preprocess_logits_for_metrics: ``(predictions, labels)`` of a batch -> what is kept of it.
    """

    compute_metrics: Callable[..., Mapping[str, Any]] | None
    preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None
    state: TrainerState
    control: TrainerControl
    callback_handler: CallbackHandler
    memory: MemoryMeter
    _emit: Emitter
    _gate: StopGate | None = None

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: Sequence[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, Any]:
        """Return metrics of a dataset, the trainer's if none is given. Collective.

        The history gets the metrics; speeds are only returned and told as an event.

        Args:
            eval_dataset: a dataset, a dict of them (metrics ``<prefix>_<name>_*``), or a name in
                the trainer's own dict (metrics ``<prefix>_*``).
            ignore_keys: outputs of the model that are no predictions; None: those that its config
                names.
            metric_key_prefix: begins the name of every metric.
        """
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, Mapping) and not isinstance(dataset, Dataset):
            metrics: dict[str, Any] = {}
            for name, one in dataset.items():
                of = one if eval_dataset is not None else name
                metrics |= self.evaluate(of, ignore_keys, f"{metric_key_prefix}_{name}")
            return metrics
        loss_only = self.args.prediction_loss_only or self.compute_metrics is None
        with draws_given_back(self.train_sampler):
            output, speed = self._predict_all(
                dataset, metric_key_prefix, ignore_keys, loss_only=loss_only, keep_outputs=False
            )
        self.log(output.metrics)
        self._tell(MetricsLogged(speed))
        metrics = {**output.metrics, **speed, "epoch": self.state.epoch}
        self.callback_handler.fire("on_evaluate", metrics=metrics)
        return metrics

    def predict(
        self,
        test_dataset: Any,
        ignore_keys: Sequence[str] | None = None,
        metric_key_prefix: str = "test",
    ) -> PredictionOutput:
        """Return predictions, labels and metrics in the dataset's order. Collective.

        Args:
            test_dataset: a dataset, with labels or without.
            ignore_keys: as in :meth:`evaluate`.
            metric_key_prefix: begins the name of every metric.
        """
        with draws_given_back(self.train_sampler):
            output, speed = self._predict_all(
                test_dataset,
                metric_key_prefix,
                ignore_keys,
                loss_only=self.args.prediction_loss_only,
                keep_outputs=True,
            )
        metrics = {**output.metrics, **speed}
        self.callback_handler.fire("on_predict", metrics=metrics)
        return PredictionOutput(output.predictions, output.label_ids, metrics)

    def log(self, logs: Mapping[str, Any], start_time: float | None = None) -> None:  # noqa: ARG002 - the field's signature
        """Add numbers to the history, with the epoch and the step, and tell them.

        Callbacks get a copy. NumPy numbers and tensors of one element become numbers. Speeds
        since ``start_time`` are no part of a history, which is the same in each run of the same
        training.

        Raises:
            UnsavableState: a value is neither a number nor text, nor a dict or list of them.
        """
        entry = {**plain_log(logs), "epoch": self.state.epoch, "step": self.state.global_step}
        if self.args.include_num_input_tokens_seen != "no":
            entry["num_input_tokens_seen"] = self.state.num_input_tokens_seen
        self.state.history.note(entry)
        self.callback_handler.fire("on_log", logs=dict(entry))
        self._tell(MetricsLogged(entry))

    def _predict_all(
        self,
        dataset: Any,
        prefix: str,
        ignore_keys: Sequence[str] | None,
        *,
        loss_only: bool,
        keep_outputs: bool,
    ) -> tuple[PredictionOutput, dict[str, float]]:
        """Run the model over a dataset; metrics hold the loss and what ``compute_metrics`` says."""
        clock, fire = self.session.clock, self.callback_handler.fire
        self.memory.start(prefix)
        began_seconds = clock.monotonic_seconds()
        load = self.get_test_dataloader if keep_outputs else self.get_eval_dataloader
        given = load(dataset)
        loader = counted(given, self.session.data_world, in_step=self._evaluates_in_step)
        share: Share = loader.share
        self.callback_handler.context["eval_dataloader"] = given
        by_batch = self._batch_metrics(share, loss_only=loss_only)
        keep = not loss_only and (keep_outputs or by_batch is None)
        tally = Tally(share, keep_outputs=keep, joining=Joining.of(self.args))
        step = self._prediction_step(ignore_keys, loss_only=loss_only)
        batches = 0
        with self._evaluating():
            for inputs in self._in_turn(loader, share):
                batches += 1
                self.session.pulse.again()
                batch = step(inputs)
                tally.add(*batch)
                if by_batch is not None:
                    by_batch.add(*batch)
                fire("on_prediction_step")
        if not batches:
            raise ConfigError(f"eval_dataset `{type(dataset).__name__}` is empty")
        output = self._judge_outputs(tally, share, by_batch, prefix)
        took_seconds = clock.monotonic_seconds() - began_seconds
        speed = speeds(prefix, took_seconds, share.samples, batches)
        return output, speed | self.memory.stop(prefix)

    def _evaluate_unless_stopped(
        self, gate: StopGate, ignore_keys: Sequence[str] | None
    ) -> dict[str, Any] | None:
        """Return metrics, or None if the ranks agreed to stop; then nothing is left of it."""
        before = RandomState().state_dict()
        self._gate = gate
        try:
            with self._timing("evaluating"):
                return self.evaluate(ignore_keys=ignore_keys)
        except EvaluationCut:
            RandomState().load_state_dict(before)
            # The next life makes it.
            self.control.should_evaluate = True
            return None
        finally:
            self._gate = None

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Have the model and the optimizer as an evaluation wants them, and then as before."""
        was_training = self.model.training
        self.model.eval()
        set_mode(self.optimizer, training=False)
        try:
            with weights_in(self.model, evaluation_dtype(self.args)):
                yield
        finally:
            self.model.train(was_training)
            set_mode(self.optimizer, training=was_training)

    def _in_turn(self, loader: Any, share: Share) -> Iterator[Any]:
        """Yield batches until the ranks agree to stop.

        Where ranks also meet between batches, and one may have more of them, all go to the end.
        """
        is_uneven = isinstance(share, StreamShare) or share.batches % share.world.size > 0
        gate = None if is_uneven and self.args.eval_accumulation_steps else self._gate
        for inputs in loader:
            if gate is not None and not gate.enter_batch():
                raise EvaluationCut
            yield inputs
        if gate is not None and not gate.enter_gathering():
            raise EvaluationCut

    def _judge_outputs(
        self, tally: Tally, share: Share, by_batch: BatchMetrics | None, prefix: str
    ) -> PredictionOutput:
        """Gather what all ranks have seen, and compute metrics of it. Collective."""
        losses, (predictions, labels, inputs) = tally.losses(), tally.outputs()
        metrics: dict[str, Any] = {} if losses is None else {"loss": share.mean(losses)}
        if by_batch is not None:
            metrics |= by_batch.result()
        elif self.compute_metrics is not None and predictions is not None and labels is not None:
            wanted = losses if "loss" in self.args.include_for_metrics else None
            spread = None if wanted is None else share.spread(wanted)
            metrics |= self.compute_metrics(EvalPrediction(predictions, labels, inputs, spread))
        named: dict[str, Any] = plain_value(prefixed(metrics, prefix))
        return PredictionOutput(predictions, labels, named)

    def _batch_metrics(self, share: Share, *, loss_only: bool) -> BatchMetrics | None:
        if loss_only or self.compute_metrics is None or not self.args.batch_eval_metrics:
            return None
        return BatchMetrics(self.compute_metrics, share, self.args.include_for_metrics)

    def _prediction_step(
        self, ignore_keys: Sequence[str] | None, *, loss_only: bool
    ) -> Callable[[Any], tuple[torch.Tensor | None, Any, Any, Any]]:
        """Return what does one batch: inputs -> loss, predictions, labels, main input."""
        told = {"prediction_loss_only": loss_only, "ignore_keys": ignore_keys}
        taken = inspect.signature(self.evaluation_step).parameters
        given: dict[str, Any] = {name: one for name, one in told.items() if name in taken}
        step: Callable[..., Any] = partial(self.evaluation_step, **given)
        with_inputs = "inputs" in self.args.include_for_metrics and not loss_only
        model: nn.Module = pipeline_of(self.model) or self.model
        reduce = self.preprocess_logits_for_metrics

        def run(inputs: Any) -> tuple[torch.Tensor | None, Any, Any, Any]:
            done = step(model, inputs)
            loss, predictions, labels = done if isinstance(done, tuple) else (done, None, None)
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

    def _tell(self, event: Event) -> None:
        """Emit a fact of the whole gang, which only rank zero tells."""
        if self.state.is_world_process_zero:
            self._emit(event, step=self.state.global_step)

    def _timing(self, phase: str, at_least_seconds: float = 0.0) -> AbstractContextManager[None]:
        return timing(phase, self.session.clock, self._tell, at_least_seconds)


@contextmanager
def draws_given_back(sampler: ResumableSampler | None) -> Iterator[None]:
    """Leave no trace in the random streams: what is trained after it is the same without it.

    In Transformers it leaves one, so a run that began there goes on like that.

    Args:
        sampler: knows where the run began, if one trains.
    """
    if sampler is not None and sampler.cursor.origin:
        yield
        return
    before = RandomState().state_dict()
    try:
        yield
    finally:
        RandomState().load_state_dict(before)


def speeds(
    prefix: str, took_seconds: float, samples: int, steps: int, tokens: int = 0
) -> dict[str, float]:
    """Return how long something took and how fast it went, with the field's names."""
    per_second = 1 / took_seconds if took_seconds > 0 else 0.0
    said = {
        f"{prefix}_runtime": took_seconds,
        f"{prefix}_samples_per_second": samples * per_second,
        f"{prefix}_steps_per_second": steps * per_second,
    }
    return {**said, f"{prefix}_tokens_per_second": tokens * per_second} if tokens else said
