"""Overridable Trainer methods.

What users override of a batch on its way to the model: where it goes, and what is taken.

What users override of a step: the batches that it is made of, and their loss.

How a trainer gets its optimizer and its schedule: given, or made from the arguments.

What of the trainer is about several ranks, with the field's names.

What users override: how data is loaded and evaluated, and what optimises.
"""

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
from resilient.train.arguments.derived import copies_ahead, is_canonical
from resilient.train.canonical_reduction import micro_batch_owners, sampler_for
from resilient.train.data.collate import PruningCollator, prune_dataset, taken_columns
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
from resilient.train.hf_compat import Accelerator
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


class PreparingHooks:
    """The part of :class:`resilient.Trainer` that prepares batches, with the field's names."""

    model: nn.Module
    args: TrainingArguments
    session: Session
    _told_unused: bool = False

    def _used_columns(self, inputs: Any) -> Any:
        """Return what the model's forward takes; tell once what it does not."""
        if not self.args.remove_unused_columns:
            return inputs
        used, unused = split_columns(inputs, self.model)
        self._tell_unused(unused)
        return used

    def _tell_unused(self, unused: tuple[str, ...]) -> None:
        """Tell once which columns the model is not given."""
        if unused and not self._told_unused and self.session.world.is_coordinator:
            self.session.emit(ColumnsUnused(unused))
        self._told_unused |= bool(unused)

    def _prepare_inputs(self, inputs: Any) -> Any:
        """Return a batch on the device; overridden, it prepares those of evaluation too."""
        if type(self)._prepare_input is not PreparingHooks._prepare_input:  # noqa: SLF001
            return self._prepare_input(inputs)
        if not self._on_gpu:
            return inputs
        return to_device(inputs, self.session.device, ahead=copies_ahead(self.args))

    def _prepare_input(self, data: Any) -> Any:
        """Return a tensor on the device; called for whatever holds tensors, too (overridden)."""
        if isinstance(data, Mapping):
            kind: Any = type(data)
            return kind({name: self._prepare_input(one) for name, one in data.items()})
        if isinstance(data, (tuple, list)):
            return type(data)(self._prepare_input(one) for one in data)
        return to_device(data, self.session.device, ahead=copies_ahead(self.args))

    @property
    def _on_gpu(self) -> bool:
        return self.session.device.type != "cpu"


class LossHooks(PreparingHooks):
    """The part of :class:`resilient.Trainer` that makes losses, with the field's names.

    Attributes:
        compute_loss_func: ``(outputs, labels, num_items_in_batch) -> loss``, or None.
        label_smoother: makes the loss from logits and labels, or None.
        model_accepts_loss_kwargs: whether the model takes ``num_items_in_batch``.
        loss_is_scaled_for_ga: whether the loss of ``compute_loss`` is normalised over the whole
            step already; None: it is when it was divided by ``num_items_in_batch``. An override
            of ``compute_loss`` that does so says True; the labels are then counted for it.
        current_gradient_accumulation_steps: micro-batches of the step that is being trained.
        train_sampler: yields micro-batches from the run's position; a train loader of your own
            uses it as its ``batch_sampler``, over a ``KeyedDataset``. A plain one is made again
            around it, any other is refused.
    """

    precision: OptimizerStepper
    is_last_micro_batch: bool
    compute_loss_func: Callable[..., torch.Tensor] | None = None
    label_smoother: losses.LabelSmoother | None = None
    model_accepts_loss_kwargs: bool = False
    loss_is_scaled_for_ga: bool | None = None
    current_gradient_accumulation_steps: int = 1
    train_sampler: ResumableSampler | None = None
    _counts_parameters: bool = False
    _parameters: int = 0

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Any,
        return_outputs: bool = False,  # noqa: FBT001, FBT002 - the field's signature
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """Return the loss of a batch (a scalar), or ``(loss, outputs)``.

        ``compute_loss_func`` makes it, else the label smoother, else the model.

        Args:
            model: the model as it is trained.
            inputs: a batch, on the device.
            return_outputs: whether the model's outputs are wanted too.
            num_items_in_batch: labels that count in the whole optimizer step, of all ranks with
                ``average_tokens_across_devices``; None where nobody counted, as in evaluation.

        Raises:
            ConfigError: the model returned no scalar loss.
        """
        function, smoother = self.compute_loss_func, self.label_smoother
        makes_own = function is None and smoother is None
        inputs, labels = (inputs, None) if makes_own else losses.take_labels(inputs)
        inputs = self._used_columns(inputs)
        counted = num_items_in_batch is not None
        if counted and self.model_accepts_loss_kwargs and isinstance(inputs, Mapping):
            inputs = {**inputs, "num_items_in_batch": num_items_in_batch}
        outputs = forward(model, inputs)
        if function is not None:
            loss = function(outputs, labels, num_items_in_batch=num_items_in_batch)
        elif smoother is not None and labels is not None:
            shifted = losses.is_causal_lm(self.model)
            loss = smoother(outputs, labels, shifted, num_items_in_batch)
        else:
            loss = require_loss(outputs, model)
        if counted and self.args.average_tokens_across_devices:
            # Ranks average gradients; of shares of one mean they must be added.
            loss = loss * self.data_ranks
        return (loss, outputs) if return_outputs else loss

    def training_step(
        self,
        model: nn.Module,
        inputs: Any,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        """Forward and backward of one micro-batch; gradients add up.

        Args:
            model: the model as it is trained.
            inputs: a batch as the loader made it.
            num_items_in_batch: as in ``compute_loss``; given only where it is counted.

        Returns:
            The micro-batch's part of the loss of its step, detached (a scalar).
        """
        loss = self.step_loss(model, self._prepare_inputs(inputs), num_items_in_batch)
        self.make_backward(loss)
        detached: torch.Tensor = loss.detach()
        return detached

    def make_backward(self, loss: torch.Tensor) -> None:
        """Back-propagate a micro-batch's part of the loss of its step. Collective."""
        self.session.pulse.need_others()
        self.session.lull.set()
        self.precision.backward(loss)

    def step_loss(
        self, model: nn.Module, inputs: Any, num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Return a micro-batch's part of the loss of its step; ``inputs`` are on the device."""
        counted: dict[str, Any] = {}
        if num_items_in_batch is not None:
            counted["num_items_in_batch"] = num_items_in_batch
        with self.compute_loss_context_manager():
            loss: torch.Tensor = self.compute_loss(model, inputs, **counted)
        is_scaled = self.loss_is_scaled_for_ga
        if is_scaled is None:
            is_scaled = bool(counted)
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
        """Return the context of a forward pass in the precision of the run."""
        return self.precision.autocast()

    @cached_property
    def accelerator(self) -> Accelerator:
        """What scripts ask the accelerator of Transformers' trainer; there is none beneath."""
        return Accelerator(self)

    @property
    def has_own_training_step(self) -> bool:
        """Whether ``training_step`` is overridden."""
        return type(self).training_step is not LossHooks.training_step

    def _with_count(self, inputs: Any) -> Any:
        """Return a batch of evaluation with what the model divides its loss by in training."""
        makes_own = self.compute_loss_func is None and self.label_smoother is None
        if not (makes_own and self.model_accepts_loss_kwargs and isinstance(inputs, Mapping)):
            return inputs
        count = losses.count_labels([inputs], shifted=losses.shifts_labels(self.model))
        return inputs if count is None else {**inputs, "num_items_in_batch": count}

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[Iterable[Any], torch.Tensor | None]:
        """Return the micro-batches of a step, and how many of their labels count.

        Nothing is counted (None), and nothing is fetched ahead, unless somebody divides by it.
        Collective, where it is counted over ranks.
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
        # A step whose labels are all ignored has no loss; it must not become one that is no number.
        return batches, count.clamp(min=1)

    def floating_point_ops(self, inputs: Any) -> int:
        """Return the operations of forward and backward of a micro-batch; 0 if nobody can say.

        Models of Transformers say how many parameters they have; override it for others.
        """
        if not self._counts_parameters:
            return 0
        return transformer_flos(self.model, self._parameters, inputs)

    @property
    def knows_flos(self) -> bool:
        """Whether ``floating_point_ops`` can say something of this model."""
        is_own = type(self).floating_point_ops is not LossHooks.floating_point_ops
        return is_own or self._counts_parameters

    def learn_losses(self) -> None:
        """Look at the model: what makes its loss, and what it takes for that."""
        self.label_smoother = losses.label_smoother_for(
            self.model, self.args.label_smoothing_factor
        )
        self.model_accepts_loss_kwargs = losses.accepts_loss_kwargs(self.model)
        count: Any = getattr(self.model, "num_parameters", None)
        self._counts_parameters = (
            callable(count) and "exclude_embeddings" in inspect.signature(count).parameters
        )
        # Now: of a model in flat shards none knows its size any more.
        self._parameters = int(count(exclude_embeddings=True)) if self._counts_parameters else 0

    def require_counting(self) -> None:
        """Refuse overrides that cannot be given a count which the model needs.

        Raises:
            ConfigError: names the method.
        """
        for method in (self.compute_loss, self.training_step) if self._counts_labels else ():
            taken = inspect.signature(method).parameters
            if "num_items_in_batch" in taken or any(
                one.kind is one.VAR_KEYWORD for one in taken.values()
            ):
                continue
            raise ConfigError(
                f"`{type(self).__name__}.{method.__name__}` does not take `num_items_in_batch`, "
                "and the loss is divided by it: add `num_items_in_batch=None` to it and pass it "
                "on, or set `model_accepts_loss_kwargs = False` on the trainer"
            )

    @property
    def _counts_labels(self) -> bool:
        """Whether somebody divides the loss by the labels of the whole step."""
        return (
            self.model_accepts_loss_kwargs
            or self.compute_loss_func is not None
            or self.label_smoother is not None
            or self.loss_is_scaled_for_ga is True
        )

    @property
    def data_ranks(self) -> int:
        """How many ranks train on samples of their own."""
        sampler = self.train_sampler
        return self.session.world.size if sampler is None else sampler.deal.ranks


class MakingHooks:
    """What optimises, overridable by the field's names.

    An override of ``create_optimizer`` or ``create_scheduler`` sets what it makes on the trainer,
    or returns it; both are done here.

    Attributes:
        optimizer_cls_and_kwargs: a class and its options, over our groups of parameters.
        makes_scheduler: whether the scheduler is ours, and may be made anew for another length.
    """

    args: TrainingArguments
    model: nn.Module
    optimizer: Optimizer | None
    lr_scheduler: LRScheduler | None
    optimizer_cls_and_kwargs: tuple[type[Optimizer], dict[str, Any]] | None = None
    makes_scheduler: bool = True
    _given: tuple[Any, Any] = (None, None)
    _given_states: tuple[Any, Any] | None = None

    def create_optimizer(self) -> Optimizer:
        """Make ``self.optimizer`` unless one was given, and return it.

        What ``get_decay_parameter_names`` leaves out (biases and norms) is in a group of its own,
        without weight decay.
        """
        if self.optimizer is None:
            recipe = self.optimizer_cls_and_kwargs
            if recipe is None:
                recipe = self.get_optimizer_cls_and_kwargs(self.args, self.model)
            self._require_decay_to_count(recipe[1])
            names = self.get_decay_parameter_names(self.model)
            self.optimizer = optimizers.make_optimizer(self.args, self.model, recipe, names)
        return self.optimizer

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Return the names of the parameters that weight decay applies to."""
        return optimizers.decay_parameter_names(model)

    def _require_decay_to_count(self, options: Mapping[str, Any]) -> None:
        """Refuse an override that the groups of such an optimizer would not heed.

        Raises:
            ConfigError: it names what decays, and the options hold groups of their own.
        """
        kind, ours = type(self), MakingHooks
        makes_groups = kind.get_optimizer_cls_and_kwargs is not ours.get_optimizer_cls_and_kwargs
        if makes_groups or kind.get_decay_parameter_names is ours.get_decay_parameter_names:
            return
        if "params" in options and self.optimizer_cls_and_kwargs is None:
            raise ConfigError(
                f"`{kind.__name__}.get_decay_parameter_names` would not count: "
                f"`{self.args.optim}` has groups of its own",
                hint="override `get_optimizer_cls_and_kwargs`, and return those groups as `params`",
            )

    @staticmethod
    def get_optimizer_cls_and_kwargs(
        args: TrainingArguments, model: nn.Module | None = None
    ) -> tuple[type[Optimizer], dict[str, Any]]:
        """Return the class that ``args.optim`` names, and its options but for the parameters.

        ``create_optimizer`` calls it, so an override is obeyed. Options may hold the parameters
        or their groups by the name ``params``, as they do for optimizers that treat modules
        differently (GaLore, APOLLO, Muon).

        Args:
            args: of the run.
            model: whose parameters they will be; only such optimizers need it.

        Raises:
            ConfigError: an option is not the optimizer's, the package that it comes from is not
                installed, or it needs the model and none is given.
        """
        return optimizers.optimizer_recipe(args, model)

    def create_scheduler(
        self, num_training_steps: int, optimizer: Optimizer | None = None
    ) -> LRScheduler:
        """Make ``self.lr_scheduler`` unless one was given, and return it."""
        if self.lr_scheduler is None:
            self.lr_scheduler = schedules.create_scheduler(
                self.args, optimizer or self.create_optimizer(), num_training_steps
            )
        return self.lr_scheduler

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Make both; this is what ``train`` calls, and what may be overridden in one."""
        self.optimizer = self.create_optimizer()
        self.lr_scheduler = self.create_scheduler(num_training_steps, self.optimizer)

    def make_optimizer_and_scheduler(self, steps: int) -> tuple[Optimizer, LRScheduler]:
        """Return both for a run of ``steps``, from whatever was given or overridden.

        Raises:
            ConfigError: an override left one of them out, or DeepSpeed's config names a schedule
                and another one is here.
        """
        self.create_optimizer_and_scheduler(steps)
        if self.optimizer is None or self.lr_scheduler is None:
            raise ConfigError(
                "`create_optimizer_and_scheduler` left `self.optimizer` or `self.lr_scheduler` None"
            )
        both = MakingHooks.create_optimizer_and_scheduler
        if type(self).create_optimizer_and_scheduler is not both:
            # Only the override knows how to make its schedule for another length.
            self.makes_scheduler = False
        schedules.require_own(self.args, self.lr_scheduler)
        return self.optimizer, self.lr_scheduler

    def _note_given_states(self) -> None:
        """Remember how a given optimizer and scheduler are before the first training."""
        if self._given_states is None:
            optimizer, scheduler = (
                None if one is None else deepcopy(one.state_dict()) for one in self._given
            )
            self._given_states = (optimizer, scheduler)

    def _make_optimizers_anew(self) -> None:
        """Forget the optimizer and the scheduler of an earlier training.

        What the trainer made is made again. What was given goes back to the state that it had
        before the first training.
        """
        self.optimizer, self.lr_scheduler = self._given
        for one, state in zip(self._given, self._given_states or (), strict=False):
            if one is not None:
                one.load_state_dict(deepcopy(state))

    def _take_optimizers(
        self,
        optimizers: tuple[Optimizer | None, LRScheduler | None],
        given: tuple[type[Optimizer], dict[str, Any]] | None,
    ) -> None:
        self.optimizer, self.lr_scheduler = self._given = optimizers
        self.makes_scheduler = self.lr_scheduler is None
        if given is not None and self.optimizer is not None:
            raise ConfigError(
                "`optimizers` holds an optimizer and `optimizer_cls_and_kwargs` is given: leave "
                "one of them out"
            )
        self.optimizer_cls_and_kwargs = given


# It may be entered again and again.
_NOTHING = nullcontext()


class WrappingHooks:
    """How the trainer's model becomes the one that is trained.

    Attributes:
        model_wrapped: what is trained: the model itself, or what a strategy made around it.
        strategy: how it is parallel, from the start of training on.
        is_last_micro_batch: whether gradients are joined over ranks after this one.
    """

    args: TrainingArguments
    model_wrapped: nn.Module
    strategy: Strategy
    is_last_micro_batch: bool = True

    @property
    def is_fsdp_enabled(self) -> bool:
        """Whether FSDP was asked for."""
        return self.args.parallelism == "fsdp"

    @property
    def is_deepspeed_enabled(self) -> bool:
        """Whether DeepSpeed was asked for."""
        return self.args.parallelism == "deepspeed"

    def _wrap_model(self, model: nn.Module, training: bool = True) -> nn.Module:  # noqa: FBT001, FBT002 - the field's signature
        """Return what is trained in place of ``model``; override it to wrap otherwise. Collective.

        Args:
            model: on its device.
            training: False returns the model as it is.
        """
        return self.strategy.prepare(model) if training else model

    def _joining(self, model: nn.Module, left: int) -> AbstractContextManager[Any]:
        """Return the context of a micro-batch after which ``left`` more come in its step."""
        self.is_last_micro_batch = left == 0
        return self.strategy.no_sync(model) if left else _NOTHING


class TrainerHooks(MakingHooks, WrappingHooks, LossHooks):
    """The overridable half of :class:`resilient.Trainer`, with the field's names."""

    train_dataset: Any
    eval_dataset: Any
    data_collator: Callable[[Any], Any]
    processing_class: Any = None
    model_init: Callable[..., nn.Module] | None = None
    _eval_loaders: Sequence[tuple[Any, tuple[int, Any], DataLoader[Any]]] = ()

    def prediction_step(
        self,
        model: nn.Module,
        inputs: Any,
        prediction_loss_only: bool,  # noqa: FBT001 - the field's signature
        ignore_keys: Sequence[str] | None = None,
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """Return ``(loss, predictions, labels)`` of a batch of evaluation.

        The loss is None when there are no labels; predictions and labels are None when only
        the loss is wanted. ``ignore_keys`` None: those that the model's config names.
        """
        ignore_keys = ignored_outputs(self.model) if ignore_keys is None else ignore_keys
        inputs = self._prepare_inputs(inputs)
        labels = find_labels(inputs, self.label_names, every=self.args.label_names is not None)
        with torch.no_grad(), self.compute_loss_context_manager():
            is_bare = labels is None and isinstance(inputs, Mapping)
            if is_bare and not returns_loss_alone(self.model):
                loss, outputs = None, forward(model, self._used_columns(inputs))
            else:
                counted = self._with_count(inputs)
                loss, outputs = self.compute_loss(model, counted, return_outputs=True)
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
        """Do one batch of evaluation; the older name of ``prediction_step``, override either.

        An override may leave out the last two arguments, and may return only the loss.
        """
        return self.prediction_step(model, inputs, prediction_loss_only, ignore_keys)

    def get_train_dataloader(self) -> DataLoader[Any] | StreamLoader:
        """Return a loader whose iterators begin at the position of the run.

        An override may return a plain ``DataLoader`` of ``per_device_train_batch_size``, shuffled
        or not: it is made again around ``self.train_sampler``. Another needs that as its own
        ``batch_sampler``, or training does not begin.

        Raises:
            ConfigError: there is no dataset.
        """
        dataset, collate = self._pruned(self.train_dataset)
        world, sampler = self.session.data_world, self.train_sampler
        # A rank may have a sampler that has nothing for it, and is empty.
        if is_stream(dataset):
            if sampler is None:
                sampler = ResumableSampler(*place_in_stream(self.args, world), world.rank)
            return stream_loader(self.args, dataset, sampler, collate, pin=self._on_gpu)
        size = require_map_style(dataset, "train_dataset")
        if sampler is None:
            cursor = DataCursor(size, self.args.order_seed)
            deal = make_batch_layout(self.args, micro_batch_owners(self.args, world), size)
            sampler = sampler_for(self.args, world, cursor, deal)
        return train_loader(self.args, dataset, sampler, collate, pin=self._on_gpu)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any] | StreamEvaluation:
        """Return a loader of this rank's share of a dataset, the trainer's if none is given.

        A text names a dataset of the trainer's own dict. With ``dataloader_persistent_workers``
        the loader of a dataset, and so its processes, serves all evaluations.

        What an override returns is counted batch by batch. Several ranks share the batches of a
        plain ``DataLoader`` that is not shuffled; another is refused there.
        """
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, str):
            dataset = self._eval_set(dataset)
        if not (self.args.dataloader_persistent_workers and self.args.dataloader_num_workers):
            return self._loader_of_share(dataset)
        made_for = (self.args.per_device_eval_batch_size, self.data_collator)
        for kept, how, loader in self._eval_loaders:
            if kept is dataset and how == made_for:
                # As for a new loader: whether an earlier attempt made it must not matter.
                self._draw_for_loader()
                return loader
        made = self._loader_of_share(dataset, persistent=True)
        if not isinstance(made, StreamEvaluation):
            self._eval_loaders = [*self._eval_loaders, (dataset, made_for, made)]
        return made

    def _eval_set(self, name: str) -> Any:
        """Return a dataset of the trainer's own dict.

        Raises:
            ConfigError: there is no dataset of that name.
        """
        sets: Any = self.eval_dataset
        if isinstance(sets, Mapping) and name in sets:
            return sets[name]
        known = ", ".join(map(str, sets)) if isinstance(sets, Mapping) else "none"
        raise ConfigError(
            f"`eval_dataset` has no dataset named `{name}` (it names: {known})",
            hint="give the Trainer `eval_dataset={name: dataset}`, or give the dataset itself",
        )

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader[Any] | StreamEvaluation:
        """Return what ``predict`` loads a dataset with; an override as in ``evaluate``."""
        return self._loader_of_share(test_dataset)

    def require_eval_data(self) -> None:
        """Raise now for what would fail at the first evaluation, hours from now.

        Raises:
            ConfigError: there is nothing to evaluate, or the best model is chosen by a metric
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
        """The datasets of evaluation by name, if there are several."""
        sets: Any = self.eval_dataset
        is_dict = isinstance(sets, Mapping) and not isinstance(sets, Dataset)
        evaluate: Any = getattr(type(self), "evaluate", None)
        # An override may give metrics by any name.
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
        how = {"pin": self._on_gpu, "persistent": persistent}
        return eval_loader(self.args, dataset, share, collate, **how)

    def _draw_for_loader(self) -> None:
        if self.train_sampler is not None:
            draw_for_loader(self.train_sampler.cursor)

    def train_sampling(self) -> Sampling:
        """Return the order of the samples; override it for one of your own.

        Raises:
            ConfigError: it goes by lengths, and samples do not say theirs.
        """
        name = getattr(self.model, "main_input_name", "input_ids")
        return sampling_for(self.args, self.train_dataset, name)

    def _pruned(self, dataset: Any) -> tuple[Any, Callable[[Any], Any]]:
        """Return a dataset and how to collate it, without columns that the model does not take.

        What an override of a step may want to read stays, but in a dataset of Hugging Face.
        """
        collate, name = self.data_collator, type(self.model).__name__
        taken = taken_columns(self.model, self.label_names)
        if not self.args.remove_unused_columns or taken is None:
            return dataset, collate
        dataset, unused = prune_dataset(dataset, taken, name)
        self._tell_unused(unused)
        steps = ("compute_loss", "training_step", "prediction_step", "evaluation_step")
        if any(getattr(type(self), one) is not getattr(TrainerHooks, one) for one in steps):
            return dataset, collate
        return dataset, PruningCollator(collate, taken, name, self._tell_unused)

    def _share_of(self, dataset: Any) -> EvalShard:
        streams = is_stream(dataset)
        size = 0 if streams else require_map_style(dataset, "eval_dataset")
        batch, world = self.args.per_device_eval_batch_size, self.session.data_world
        kind = StreamShare if streams else EvalShard
        return kind(size, batch, world, in_step=self._evaluates_in_step)

    @property
    def _evaluates_in_step(self) -> bool:
        """Whether ranks must run equally many batches."""
        return self.session.computes_together or self.args.batch_eval_metrics

    @cached_property
    def label_names(self) -> tuple[str, ...]:
        """The keys of a batch that are labels: those told, else those that forward names so."""
        told = self.args.label_names
        return label_names_of(self.model) if told is None else tuple(told)
