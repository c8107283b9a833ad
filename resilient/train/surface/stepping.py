"""What users override of a step: the batches that it is made of, and their loss."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any

from resilient.errors import ConfigError
from resilient.train.arguments.reduction import is_canonical
from resilient.train.measures.counting import transformer_flos
from resilient.train.model import losses
from resilient.train.model.batch import forward, require_loss
from resilient.train.surface.accelerating import Accelerator
from resilient.train.surface.preparing import PreparingHooks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from contextlib import AbstractContextManager

    import torch
    from torch import nn

    from resilient.strategies.strategy import Updates
    from resilient.train.data.sampling import ResumableSampler


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

    precision: Updates
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
