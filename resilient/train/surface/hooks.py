"""What users override: how data is loaded and evaluated, and what optimises."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Dataset

from resilient.errors import ConfigError
from resilient.train.data.drawing import draw_for_loader
from resilient.train.data.orders import Sampling, sampling_for
from resilient.train.data.pruning import PruningCollator, prune_dataset, taken_columns
from resilient.train.data.sampling import (
    Cursor,
    ResumableSampler,
    deal_for,
    require_map_style,
    train_loader,
)
from resilient.train.data.stream_reading import is_stream
from resilient.train.data.streams import StreamLoader, place_in_stream, stream_loader
from resilient.train.evaluation.evaluate import Share, eval_loader, require_metric
from resilient.train.evaluation.evaluate_stream import (
    StreamEvaluation,
    StreamShare,
    stream_evaluation,
)
from resilient.train.model.batch import (
    find_labels,
    forward,
    ignored_outputs,
    label_names_of,
    returns_loss_alone,
    split_outputs,
)
from resilient.train.reduction.leaves import sampler_for, seats_of
from resilient.train.surface.making import MakingHooks
from resilient.train.surface.stepping import LossHooks
from resilient.train.surface.wrapping import WrappingHooks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn
    from torch.utils.data import DataLoader


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
            cursor = Cursor(size, self.args.order_seed)
            deal = deal_for(self.args, seats_of(self.args, world), size)
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

    def _share_of(self, dataset: Any) -> Share:
        streams = is_stream(dataset)
        size = 0 if streams else require_map_style(dataset, "eval_dataset")
        batch, world = self.args.per_device_eval_batch_size, self.session.data_world
        kind = StreamShare if streams else Share
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
