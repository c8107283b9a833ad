"""Overridable methods of the trainer: batches, losses, optimizer, wrapping, data loaders."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import nullcontext
from copy import deepcopy
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Dataset

from resilient.errors import ConfigError
from resilient.train import optimizers, schedules
from resilient.train.arguments.choices import text_of
from resilient.train.arguments.derived import copies_ahead, is_canonical
from resilient.train.canonical_reduction import micro_batch_owners, sampler_for
from resilient.train.data.collate import PruningCollator, prune_dataset, taken_columns
from resilient.train.data.loader_workers import end_persistent_workers
from resilient.train.data.ordering import Sampling, draw_for_loader, sampling_for
from resilient.train.data.sampler import (
    DataCursor,
    ResumableSampler,
    make_batch_layout,
    require_map_style,
    train_loader,
)
from resilient.train.data.streaming import StreamLoader, is_stream, place_in_stream, stream_loader
from resilient.train.evaluation.loop import (
    EvalShard,
    StreamEvaluation,
    StreamShare,
    eval_loader,
    require_metric,
    stream_evaluation,
)
from resilient.train.events import ColumnsUnused
from resilient.train.hf_compat import Accelerator, TransformersNames
from resilient.train.meters import transformer_flos
from resilient.train.model import loss as losses
from resilient.train.model.batch import (
    find_labels,
    forward,
    ignored_outputs,
    label_names_of,
    require_loss,
    returns_loss_alone,
    split_columns,
    split_outputs,
    to_device,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from torch import nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler
    from torch.utils.data import DataLoader

    from resilient.strategies.base import OptimizerStepper, Strategy
    from resilient.train.arguments import TrainingArguments
    from resilient.train.session import Session


# This context may be entered again and again.
_NOTHING = nullcontext()


class TrainerHooks(TransformersNames):
    """Overridable methods of :class:`resilient.Trainer`, with Transformers' names.

    An override of ``create_optimizer`` or ``create_scheduler`` sets the object on the trainer or
    returns it; the methods here do both.

    Attributes:
        compute_loss_func: ``(outputs, labels, num_items_in_batch) -> loss``, or None.
        label_smoother: Computes the loss from logits and labels, or None.
        model_accepts_loss_kwargs: Whether the model takes ``num_items_in_batch``.
        loss_is_scaled_for_ga: Whether ``compute_loss`` already normalises over the whole step.
            None: only if the loss was divided by ``num_items_in_batch``. Set True for an override
            of ``compute_loss`` that normalises the loss; the labels are then counted.
        current_gradient_accumulation_steps: Micro-batches of the current step.
        is_last_micro_batch: Whether gradients are reduced over ranks after this micro-batch.
        train_sampler: Yields micro-batches from the run's position. A train loader of your own
            uses it as its ``batch_sampler``, over a ``KeyedDataset``. A plain loader is rebuilt
            around it, and any other loader is refused.
        optimizer_cls_and_kwargs: Optimizer class and its options, used with our parameter groups.
        makes_scheduler: Whether this package made the scheduler and can rebuild it for another
            length.
        model_wrapped: Trained module: the model, or the strategy's wrapper around it.
        strategy: Parallel strategy, set when training starts.
    """

    args: TrainingArguments
    session: Session
    model: nn.Module
    model_wrapped: nn.Module
    strategy: Strategy
    precision: OptimizerStepper

    train_dataset: Any
    eval_dataset: Any
    data_collator: Callable[[Any], Any]
    processing_class: Any = None
    train_sampler: ResumableSampler | None = None
    _eval_loaders: Sequence[tuple[Any, tuple[int, Any], DataLoader[Any]]] = ()
    _is_unused_reported: bool = False

    compute_loss_func: Callable[..., torch.Tensor] | None = None
    label_smoother: losses.LabelSmoother | None = None
    model_accepts_loss_kwargs: bool = False
    loss_is_scaled_for_ga: bool | None = None
    current_gradient_accumulation_steps: int = 1
    is_last_micro_batch: bool = True
    _counts_parameters: bool = False
    _parameters: int = 0

    optimizer: Optimizer | None
    lr_scheduler: LRScheduler | None
    optimizer_cls_and_kwargs: tuple[type[Optimizer], dict[str, Any]] | None = None
    makes_scheduler: bool = True
    _given_optimizers: tuple[Any, Any] = (None, None)
    _given_states: tuple[Any, Any] | None = None

    def get_train_dataloader(self) -> DataLoader[Any] | StreamLoader:
        """Return a loader whose iterators begin at the run's position.

        An override may return a plain ``DataLoader`` with ``per_device_train_batch_size``, shuffled
        or not, which is rebuilt around ``self.train_sampler``. Any other loader must use that
        sampler as its ``batch_sampler``, or training does not begin.

        Raises:
            ConfigError: There is no dataset.
        """
        dataset, collate = self._pruned(self.train_dataset)
        world, sampler = self.session.data_world, self.train_sampler
        # A rank may have a sampler without samples, which is false in a boolean context.
        if is_stream(dataset):
            if sampler is None:
                sampler = ResumableSampler(*place_in_stream(self.args, world), world.rank)
            return stream_loader(self.args, dataset, sampler, collate, pin=self._on_gpu)
        size = require_map_style(dataset, "train_dataset")
        if sampler is None:
            cursor = DataCursor(size, self.args.order_seed)
            layout = make_batch_layout(self.args, micro_batch_owners(self.args, world), size)
            sampler = sampler_for(self.args, world, cursor, layout)
        return train_loader(self.args, dataset, sampler, collate, pin=self._on_gpu)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any] | StreamEvaluation:
        """Return a loader of this rank's share of a dataset, by default the trainer's.

        A text names a dataset of the trainer's own dict. With ``dataloader_persistent_workers`` one
        loader per dataset, with its processes, serves all evaluations.

        An override's loader is counted batch by batch. Several ranks share the batches of a plain
        ``DataLoader`` without shuffling. With several ranks, any other loader is refused.
        """
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, str):
            dataset = self._eval_set(dataset)
        if not (self.args.dataloader_persistent_workers and self.args.dataloader_num_workers):
            return self._loader_of_share(dataset)
        made_for = (self.args.per_device_eval_batch_size, self.data_collator)
        for loader_dataset, options, loader in self._eval_loaders:
            if loader_dataset is dataset and options == made_for:
                # Draw as for a new loader, because results must not depend on the attempt that made
                # the loader.
                self._draw_for_loader()
                return loader
        loader_of_share = self._loader_of_share(dataset, persistent=True)
        if not isinstance(loader_of_share, StreamEvaluation):
            self._eval_loaders = [*self._eval_loaders, (dataset, made_for, loader_of_share)]
        return loader_of_share

    def _end_eval_workers(self) -> None:
        """End the processes of all evaluation loaders; the next evaluation starts new ones."""
        for _, _, loader in self._eval_loaders:
            end_persistent_workers(loader)

    def _eval_set(self, name: str) -> Any:
        """Return a dataset of the trainer's own dict.

        Raises:
            ConfigError: There is no dataset of that name.
        """
        sets: Any = self.eval_dataset
        if isinstance(sets, Mapping) and name in sets:
            return sets[name]
        set_names = ", ".join(map(str, sets)) if isinstance(sets, Mapping) else "none"
        raise ConfigError(
            f"`eval_dataset` has no dataset named `{name}` (it names: {set_names})",
            hint="pass the Trainer `eval_dataset={name: dataset}`, or pass the dataset itself",
        )

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader[Any] | StreamEvaluation:
        """Return the loader for ``predict``; overrides as for :meth:`get_eval_dataloader`."""
        return self._loader_of_share(test_dataset)

    def require_eval_data(self) -> None:
        """Check before training for errors that would otherwise appear at the first evaluation.

        Raises:
            ConfigError: There is nothing to evaluate, or the best model is chosen by a metric
                that no dataset gives.
        """
        makes_own = type(self).get_eval_dataloader is not TrainerHooks.get_eval_dataloader
        if self.args.eval_strategy == "no":
            return
        if self.eval_sets is not None:
            metric = self.args.metric_for_best_model
            if metric is not None:
                require_metric(self.eval_sets, metric, "`metric_for_best_model`")
        elif not is_stream(self.eval_dataset) and not makes_own:
            require_map_style(self.eval_dataset, "eval_dataset")

    @property
    def eval_sets(self) -> Mapping[str, Any] | None:
        """Evaluation datasets by name, if there are several."""
        sets: Any = self.eval_dataset
        is_dict = isinstance(sets, Mapping) and not isinstance(sets, Dataset)
        evaluate: Any = getattr(type(self), "evaluate", None)
        # An override may return metrics under any name.
        is_ours = evaluate.__module__.startswith("resilient.train.")
        return sets if is_dict and is_ours else None

    def _loader_of_share(
        self, dataset: Any, *, persistent: bool = False
    ) -> DataLoader[Any] | StreamEvaluation:
        share = self._share_of(dataset)
        self._draw_for_loader()
        dataset, collate = self._pruned(dataset)
        if isinstance(share, StreamShare):
            return stream_evaluation(self.args, dataset, share, collate, pin=self._on_gpu)
        options = {"pin": self._on_gpu, "persistent": persistent}
        return eval_loader(self.args, dataset, share, collate, **options)

    def _draw_for_loader(self) -> None:
        if self.train_sampler is not None:
            draw_for_loader(self.train_sampler.cursor)

    def train_sampling(self) -> Sampling:
        """Return the order of the samples. Override this method for your own order.

        Raises:
            ConfigError: The order depends on lengths, and samples have none.
        """
        name = getattr(self.model, "main_input_name", "input_ids")
        return sampling_for(self.args, self.train_dataset, name)

    def _pruned(self, dataset: Any) -> tuple[Any, Callable[[Any], Any]]:
        """Return a dataset and its collator, without columns that the model does not take.

        If a step method is overridden, only a Hugging Face dataset is pruned: the override may read
        the other columns.
        """
        collate, name = self.data_collator, type(self.model).__name__
        accepted_columns = taken_columns(self.model, self.label_names)
        if not self.args.remove_unused_columns or accepted_columns is None:
            return dataset, collate
        dataset, unused_columns = prune_dataset(dataset, accepted_columns, name)
        self._report_unused(unused_columns)
        steps = ("compute_loss", "training_step", "prediction_step", "evaluation_step")
        if any(getattr(type(self), step) is not getattr(TrainerHooks, step) for step in steps):
            return dataset, collate
        return dataset, PruningCollator(collate, accepted_columns, name, self._report_unused)

    def _share_of(self, dataset: Any) -> EvalShard:
        streams = is_stream(dataset)
        size = 0 if streams else require_map_style(dataset, "eval_dataset")
        batch, world = self.args.per_device_eval_batch_size, self.session.data_world
        kind = StreamShare if streams else EvalShard
        return kind(size, batch, world, in_step=self._evaluates_in_step)

    @property
    def _evaluates_in_step(self) -> bool:
        """True if all ranks must run the same number of batches."""
        return self.session.computes_together or self.args.batch_eval_metrics

    @cached_property
    def label_names(self) -> tuple[str, ...]:
        """Batch keys that are labels: from the arguments, else from the forward's signature."""
        names = self.args.label_names
        return label_names_of(self.model) if names is None else tuple(names)

    def _used_columns(self, inputs: Any) -> Any:
        """Return the columns that the model's forward takes; report the other columns once."""
        if not self.args.remove_unused_columns:
            return inputs
        used_inputs, unused_names = split_columns(inputs, self.model)
        self._report_unused(unused_names)
        return used_inputs

    def _report_unused(self, unused: tuple[str, ...]) -> None:
        """Report once which columns the model does not get."""
        if unused and not self._is_unused_reported and self.session.world.is_coordinator:
            self.session.emit(ColumnsUnused(unused))
        self._is_unused_reported |= bool(unused)

    def _prepare_inputs(self, inputs: Any) -> Any:
        """Return a batch on the device; an override also prepares evaluation batches."""
        if type(self)._prepare_input is not TrainerHooks._prepare_input:  # noqa: SLF001
            return self._prepare_input(inputs)
        if not self._on_gpu:
            return inputs
        return to_device(inputs, self.session.device, ahead=copies_ahead(self.args))

    def _prepare_input(self, data: Any) -> Any:
        """Return a tensor on the device; an override is also called for containers of tensors."""
        if isinstance(data, Mapping):
            kind: Any = type(data)
            return kind({name: self._prepare_input(value) for name, value in data.items()})
        if isinstance(data, (tuple, list)):
            return type(data)(self._prepare_input(item) for item in data)
        return to_device(data, self.session.device, ahead=copies_ahead(self.args))

    @property
    def _on_gpu(self) -> bool:
        return self.session.device.type != "cpu"

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Any,
        return_outputs: bool = False,  # noqa: FBT001, FBT002 - the field's signature
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """Return the loss of a batch (a scalar), or ``(loss, outputs)``.

        The loss comes from ``compute_loss_func``, else the label smoother, else the model.

        Args:
            model: The trained model.
            inputs: A batch on the device.
            return_outputs: Whether to return the model's outputs too.
            num_items_in_batch: Number of labels that count in the whole optimizer step, over all
                ranks with ``average_tokens_across_devices``; None if uncounted, as in evaluation.

        Raises:
            ConfigError: The model returned no scalar loss.
        """
        function, smoother = self.compute_loss_func, self.label_smoother
        makes_own = function is None and smoother is None
        inputs, labels = (inputs, None) if makes_own else losses.take_labels(inputs)
        inputs = self._used_columns(inputs)
        has_count = num_items_in_batch is not None
        if has_count and self.model_accepts_loss_kwargs and isinstance(inputs, Mapping):
            inputs = {**inputs, "num_items_in_batch": num_items_in_batch}
        outputs = forward(model, inputs)
        if function is not None:
            loss = function(outputs, labels, num_items_in_batch=num_items_in_batch)
        elif smoother is not None and labels is not None:
            shifted = losses.is_causal_lm(self.model)
            loss = smoother(outputs, labels, shifted, num_items_in_batch)
        else:
            loss = require_loss(outputs, model)
        if has_count and self.args.average_tokens_across_devices:
            # Ranks average gradients, but the shares of one mean loss must be summed.
            loss = loss * self.data_ranks
        return (loss, outputs) if return_outputs else loss

    def training_step(
        self,
        model: nn.Module,
        inputs: Any,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        """Run forward and backward of one micro-batch; gradients accumulate.

        Args:
            model: The trained model.
            inputs: A batch from the loader.
            num_items_in_batch: As in ``compute_loss``; passed only if labels are counted.

        Returns:
            The micro-batch's share of its step's loss, detached (a scalar).
        """
        loss = self.step_loss(model, self._prepare_inputs(inputs), num_items_in_batch)
        self.make_backward(loss)
        detached: torch.Tensor = loss.detach()
        return detached

    def make_backward(self, loss: torch.Tensor) -> None:
        """Back-propagate a micro-batch's share of its step's loss. Collective."""
        self.session.progress.need_others()
        self.session.interpreter_idle.set()
        self.precision.backward(loss)

    def step_loss(
        self, model: nn.Module, inputs: Any, num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Return a micro-batch's share of its step's loss; ``inputs`` are on the device."""
        count_options: dict[str, Any] = {}
        if num_items_in_batch is not None:
            count_options["num_items_in_batch"] = num_items_in_batch
        with self.compute_loss_context_manager():
            loss: torch.Tensor = self.compute_loss(model, inputs, **count_options)
        is_scaled = self.loss_is_scaled_for_ga
        if is_scaled is None:
            is_scaled = bool(count_options)
        if not is_scaled and self.current_gradient_accumulation_steps > 1:
            loss = loss / self.current_gradient_accumulation_steps
        return loss

    def compute_loss_context_manager(self) -> AbstractContextManager[Any]:
        """Return the context in which a loss is computed, in training and evaluation."""
        return self.autocast_smart_context_manager()

    def autocast_smart_context_manager(
        self,
        cache_enabled: bool | None = True,  # noqa: ARG002, FBT001, FBT002 - the field's signature
    ) -> AbstractContextManager[Any]:
        """Return the context of a forward pass in the run's precision."""
        return self.precision.autocast()

    @cached_property
    def accelerator(self) -> Accelerator:
        """Facade for scripts that use Transformers' ``trainer.accelerator``."""
        return Accelerator(self)

    @property
    def has_own_training_step(self) -> bool:
        """True if ``training_step`` is overridden."""
        return type(self).training_step is not TrainerHooks.training_step

    def _with_count(self, inputs: Any) -> Any:
        """Return an evaluation batch with the label count that divides the loss in training."""
        makes_own = self.compute_loss_func is None and self.label_smoother is None
        if not (makes_own and self.model_accepts_loss_kwargs and isinstance(inputs, Mapping)):
            return inputs
        count = losses.count_labels([inputs], shifted=losses.shifts_labels(self.model))
        return inputs if count is None else {**inputs, "num_items_in_batch": count}

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[Iterable[Any], torch.Tensor | None]:
        """Return the micro-batches of a step, and the number of their labels that count.

        Labels are counted, and batches fetched ahead, only if a loss is divided by the count; else
        the count is None. Collective if the count covers all ranks.
        """
        if not self._counts_labels:
            return islice(epoch_iterator, num_batches), None
        batches = list(islice(epoch_iterator, num_batches))
        count, ranks = (
            losses.count_labels(batches, shifted=losses.shifts_labels(self.model)),
            self.session.world.size,
        )
        if is_canonical(self.args) and ranks > 1:
            count = losses.count_over_ranks(count, device, has_batches=bool(batches))
            return batches, None if count is None else count.clamp(min=1)
        if count is None:
            return batches, None
        count = count.to(device)
        if self.args.average_tokens_across_devices and ranks > 1:
            count = losses.sum_over_ranks(count, copies=ranks // self.data_ranks)
        # A step whose labels are all ignored has no loss; without the clamp its loss would be NaN.
        return batches, count.clamp(min=1)

    def floating_point_ops(self, inputs: Any) -> int:
        """Return the operations of forward and backward of a micro-batch; 0 if unknown.

        Models of Transformers report their number of parameters; override this method for others.
        """
        if not self._counts_parameters:
            return 0
        return transformer_flos(self.model, self._parameters, inputs)

    @property
    def knows_flos(self) -> bool:
        """True if ``floating_point_ops`` has a value for this model."""
        is_own = type(self).floating_point_ops is not TrainerHooks.floating_point_ops
        return is_own or self._counts_parameters

    def learn_losses(self) -> None:
        """Determine the source of the model's loss and the inputs that the loss needs."""
        self.label_smoother = losses.label_smoother_for(
            self.model, self.args.label_smoothing_factor
        )
        self.model_accepts_loss_kwargs = losses.accepts_loss_kwargs(self.model)
        count: Any = getattr(self.model, "num_parameters", None)
        self._counts_parameters = (
            callable(count) and "exclude_embeddings" in inspect.signature(count).parameters
        )
        # Count now, because flat shards do not show the size of the complete model.
        self._parameters = int(count(exclude_embeddings=True)) if self._counts_parameters else 0

    def require_counting(self) -> None:
        """Refuse overrides without a parameter for the count that divides the loss.

        Raises:
            ConfigError: A method lacks the parameter.
        """
        for method in (self.compute_loss, self.training_step) if self._counts_labels else ():
            parameters = inspect.signature(method).parameters
            if "num_items_in_batch" in parameters or any(
                value.kind is value.VAR_KEYWORD for value in parameters.values()
            ):
                continue
            raise ConfigError(
                f"`{type(self).__name__}.{method.__name__}` does not take `num_items_in_batch`, "
                "but the loss is divided by it: add `num_items_in_batch=None` to it and pass it "
                "on, or set `model_accepts_loss_kwargs = False` on the trainer"
            )

    @property
    def _counts_labels(self) -> bool:
        """True if a loss is divided by the labels of the whole step."""
        return (
            self.model_accepts_loss_kwargs
            or self.compute_loss_func is not None
            or self.label_smoother is not None
            or self.loss_is_scaled_for_ga is True
        )

    @property
    def data_ranks(self) -> int:
        """Number of ranks that train on separate samples."""
        sampler = self.train_sampler
        return self.session.world.size if sampler is None else sampler.layout.ranks

    def prediction_step(
        self,
        model: nn.Module,
        inputs: Any,
        prediction_loss_only: bool,  # noqa: FBT001 - the field's signature
        ignore_keys: Sequence[str] | None = None,
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """Return ``(loss, predictions, labels)`` of an evaluation batch.

        The loss is None without labels; predictions and labels are None if only the loss is wanted.
        ``ignore_keys`` None: the keys that the model's config names.
        """
        ignore_keys = ignored_outputs(self.model) if ignore_keys is None else ignore_keys
        inputs = self._prepare_inputs(inputs)
        labels = find_labels(inputs, self.label_names, finds_all=self.args.label_names is not None)
        with torch.no_grad(), self.compute_loss_context_manager():
            is_bare = labels is None and isinstance(inputs, Mapping)
            if is_bare and not returns_loss_alone(self.model):
                loss, outputs = None, forward(model, self._used_columns(inputs))
            else:
                counted_inputs = self._with_count(inputs)
                loss, outputs = self.compute_loss(model, counted_inputs, return_outputs=True)
        if prediction_loss_only:
            return loss, None, None
        return loss, split_outputs(outputs, ignore_keys), labels

    def evaluation_step(
        self,
        model: nn.Module,
        inputs: Any,
        prediction_loss_only: bool = False,  # noqa: FBT001, FBT002 - as in prediction_step
        ignore_keys: Sequence[str] | None = None,
    ) -> Any:
        """Evaluate one batch. This is the older name of ``prediction_step``; override one of them.

        An override may leave out the last two arguments, and may return only the loss.
        """
        return self.prediction_step(model, inputs, prediction_loss_only, ignore_keys)

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        """Make ``self.optimizer`` unless an optimizer was given, and return it.

        Parameters not listed by ``get_decay_parameter_names`` (biases and norms) form a separate
        group without weight decay.

        Args:
            model: Owner of the parameters; None: the trainer's model.
        """
        if self.optimizer is None:
            model = self.model if model is None else model
            recipe = self.optimizer_cls_and_kwargs
            if recipe is None:
                recipe = self.get_optimizer_cls_and_kwargs(self.args, model)
            self._require_decay_to_count(recipe[1])
            names = self.get_decay_parameter_names(model)
            self.optimizer = optimizers.make_optimizer(self.args, model, recipe, names)
        return self.optimizer

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Return the names of the parameters that weight decay applies to."""
        return optimizers.decay_parameter_names(model)

    def _require_decay_to_count(self, options: Mapping[str, Any]) -> None:
        """Refuse an override that this optimizer's parameter groups would ignore.

        Raises:
            ConfigError: The override names decayed parameters, but the options have their own
                groups.
        """
        kind, base_class = type(self), TrainerHooks
        makes_groups = (
            kind.get_optimizer_cls_and_kwargs is not base_class.get_optimizer_cls_and_kwargs
        )
        if makes_groups or kind.get_decay_parameter_names is base_class.get_decay_parameter_names:
            return
        if "params" in options and self.optimizer_cls_and_kwargs is None:
            raise ConfigError(
                f"`{kind.__name__}.get_decay_parameter_names` would have no effect: "
                f"`{text_of(self.args.optim)}` has its own groups",
                hint="override `get_optimizer_cls_and_kwargs`, and return those groups as `params`",
            )

    @staticmethod
    def get_optimizer_cls_and_kwargs(
        args: TrainingArguments, model: nn.Module | None = None
    ) -> tuple[type[Optimizer], dict[str, Any]]:
        """Return the class that ``args.optim`` names, and its options except the parameters.

        ``create_optimizer`` calls this method, so an override takes effect. Options may contain the
        parameters or their groups under the name ``params``, as for optimizers that treat modules
        differently (GaLore, APOLLO, Muon).

        Args:
            args: Arguments of the run.
            model: Owner of the parameters; only optimizers with own groups need it.

        Raises:
            ConfigError: The optimizer has no such option, its package is not installed, or it
                needs the model and none is given.
        """
        return optimizers.optimizer_recipe(args, model)

    def create_scheduler(
        self, num_training_steps: int, optimizer: Optimizer | None = None
    ) -> LRScheduler:
        """Make ``self.lr_scheduler`` unless a scheduler was given, and return it."""
        if self.lr_scheduler is None:
            self.lr_scheduler = schedules.create_scheduler(
                self.args, optimizer or self.create_optimizer(), num_training_steps
            )
        return self.lr_scheduler

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Make optimizer and scheduler; ``train`` calls this, and one override can do both."""
        self.optimizer = self.create_optimizer()
        self.lr_scheduler = self.create_scheduler(num_training_steps, self.optimizer)

    def make_optimizer_and_scheduler(self, steps: int) -> tuple[Optimizer, LRScheduler]:
        """Return optimizer and scheduler for a run of ``steps``, given, overridden or made here.

        Raises:
            ConfigError: An override made only one of both, or DeepSpeed's config names a schedule
                and another schedule is given.
        """
        self.create_optimizer_and_scheduler(steps)
        if self.optimizer is None or self.lr_scheduler is None:
            raise ConfigError(
                "`create_optimizer_and_scheduler` left `self.optimizer` or `self.lr_scheduler` None"
            )
        base_method = TrainerHooks.create_optimizer_and_scheduler
        if type(self).create_optimizer_and_scheduler is not base_method:
            # Only the override can make a schedule for another length.
            self.makes_scheduler = False
        schedules.require_own(self.args, self.lr_scheduler)
        return self.optimizer, self.lr_scheduler

    def _note_given_states(self) -> None:
        """Save the states of a given optimizer and scheduler before the first training."""
        if self._given_states is None:
            optimizer, scheduler = (
                None
                if optimizer_or_scheduler is None
                else deepcopy(optimizer_or_scheduler.state_dict())
                for optimizer_or_scheduler in self._given_optimizers
            )
            self._given_states = (optimizer, scheduler)

    def _make_optimizers_anew(self) -> None:
        """Discard the optimizer and the scheduler of an earlier training.

        Objects that the trainer made are made again. Given objects get the state that they had
        before the first training.
        """
        self.optimizer, self.lr_scheduler = self._given_optimizers
        for optimizer_or_scheduler, state in zip(
            self._given_optimizers, self._given_states or (), strict=False
        ):
            if optimizer_or_scheduler is not None:
                optimizer_or_scheduler.load_state_dict(deepcopy(state))

    def _take_optimizers(
        self,
        optimizers: tuple[Optimizer | None, LRScheduler | None],
        optimizer_class: tuple[type[Optimizer], dict[str, Any]] | None,
    ) -> None:
        self.optimizer, self.lr_scheduler = self._given_optimizers = optimizers
        self.makes_scheduler = self.lr_scheduler is None
        if optimizer_class is not None and self.optimizer is not None:
            raise ConfigError(
                "`optimizers` holds an optimizer and `optimizer_cls_and_kwargs` is given: omit "
                "one of them"
            )
        self.optimizer_cls_and_kwargs = optimizer_class

    @property
    def is_fsdp_enabled(self) -> bool:
        """True if FSDP is selected."""
        return self.args.parallelism == "fsdp"

    @property
    def is_deepspeed_enabled(self) -> bool:
        """True if DeepSpeed is selected."""
        return self.args.parallelism == "deepspeed"

    def _wrap_model(self, model: nn.Module, training: bool = True) -> nn.Module:  # noqa: FBT001, FBT002 - the field's signature
        """Wrap ``model`` and return the module to train. Override this method to wrap differently.

        Collective.

        Args:
            model: Model on its device.
            training: False returns the model unchanged.
        """
        return self.strategy.prepare(model) if training else model

    def _gradient_sync(self, model: nn.Module, remaining: int) -> AbstractContextManager[Any]:
        """Return the context of a micro-batch with ``remaining`` more micro-batches in its step."""
        self.is_last_micro_batch = remaining == 0
        return self.strategy.no_sync(model) if remaining else _NOTHING
