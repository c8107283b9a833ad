"""Losses: the inputs that a model's loss needs, label counts, and label smoothing.

A mean loss over tokens must cover all tokens of an optimizer step. If micro-batches differ in
length, the average of their means gives tokens unequal weights. Labels are therefore counted before
the first forward pass of a step, over its micro-batches and over ranks. The loss is then divided by
that count (``num_items_in_batch``).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

# Label that the losses of torch and Transformers ignore.
IGNORED = -100


@dataclass(frozen=True, slots=True)
class LabelSmoother:
    """Cross entropy with a share of each target spread over all classes.

    ``(1 - epsilon) * nll + epsilon * mean over classes of -log p``, averaged over the counted
    labels. The formula and its order of operations are Transformers'.

    Attributes:
        epsilon: Share of each target that is spread.
        ignore_index: Label that is not counted.
    """

    epsilon: float = 0.1
    ignore_index: int = IGNORED

    def __call__(
        self,
        model_output: Any,
        labels: torch.Tensor,
        shift_labels: bool = False,  # noqa: FBT001, FBT002 - the field's signature
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        """Return the loss, a scalar.

        Args:
            model_output: Logits of shape (..., classes): a tensor, the first item, or ``logits``.
            labels: Classes, shape (...).
            shift_labels: Whether position i predicts label i + 1, as in causal language models.
            num_items_in_batch: Divisor; None: the number of counted labels in ``labels``.
        """
        logits = find_logits(model_output)
        if shift_labels:
            logits, labels = logits[..., :-1, :].contiguous(), labels[..., 1:].contiguous()
        surprise = -torch.log_softmax(logits, dim=-1)
        if labels.dim() == surprise.dim() - 1:
            labels = labels.unsqueeze(-1)
        ignored = labels.eq(self.ignore_index)
        nll = surprise.gather(dim=-1, index=torch.clamp(labels, min=0)).masked_fill(ignored, 0.0)
        class_sums = surprise.sum(dim=-1, keepdim=True, dtype=_sum_dtype(surprise)).masked_fill(
            ignored, 0.0
        )
        count: Any = num_items_in_batch
        if count is None:
            count = ignored.numel() - ignored.long().sum()
        elif isinstance(count, torch.Tensor):
            count = count.to(nll.device)
        classes = surprise.shape[-1]
        smoothed = self.epsilon * (class_sums.sum() / (count * classes))
        loss: torch.Tensor = (1 - self.epsilon) * (nll.sum() / count) + smoothed
        return loss


def _sum_dtype(values: torch.Tensor) -> torch.dtype:
    """Return the dtype for long sums: at least float32."""
    return torch.float64 if values.dtype == torch.float64 else torch.float32


def find_logits(outputs: Any) -> torch.Tensor:
    """Return the logits of a model's outputs: by name, a single tensor, or the first item."""
    if isinstance(outputs, torch.Tensor):
        return outputs
    logits: torch.Tensor = outputs["logits"] if isinstance(outputs, Mapping) else outputs[0]
    return logits


def base_of(model: nn.Module) -> nn.Module:
    """Return the model inside a PEFT adapter, or the model itself."""
    get_base = getattr(model, "get_base_model", None)
    base: nn.Module = get_base() if callable(get_base) else model
    return base


def accepts_loss_kwargs(model: nn.Module) -> bool:
    """Return whether a model divides its loss by a given ``num_items_in_batch``.

    If ``model.accepts_loss_kwargs`` exists, it decides. Otherwise the forward must have a parameter
    with this name, or the model must be a Transformers model with ``**kwargs``. For other models
    ``**kwargs`` is not evidence.
    """
    base = base_of(model)
    declared = getattr(base, "accepts_loss_kwargs", None)
    if declared is not None:
        return bool(declared)
    parameters = inspect.signature(base.forward).parameters
    open_ended = any(value.kind is value.VAR_KEYWORD for value in parameters.values())
    return "num_items_in_batch" in parameters or (open_ended and hasattr(base, "loss_function"))


def label_smoother_for(model: nn.Module, factor: float) -> LabelSmoother | None:
    """Return the label smoother; None without a factor, or if samples have several labels."""
    problem = getattr(getattr(model, "config", None), "problem_type", None)
    if not factor or problem == "multi_label_classification":
        return None
    return LabelSmoother(factor)


def shifts_labels(model: nn.Module) -> bool:
    """Return whether the model's own loss compares position i with label i + 1 (Transformers).

    The first label of a row is then never a target, and is not counted.
    """
    base = base_of(model)
    kind = getattr(base, "loss_type", None)
    if kind is None or "transformers" not in sys.modules:
        return False
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    two_parts = getattr(getattr(base, "config", None), "is_encoder_decoder", False)
    return LOSS_MAPPING.get(kind) is ForCausalLMLoss and not two_parts


def is_causal_lm(model: nn.Module) -> bool:
    """Return whether Transformers lists the model as a causal language model."""
    if "transformers" not in sys.modules:
        return False
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return type(base_of(model)).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def take_labels(inputs: Any) -> tuple[Any, Any]:
    """Return a batch without its labels, and the labels (None without labels).

    Labels are ``labels`` of a mapping, and the last item of a tuple of two or more.
    """
    if isinstance(inputs, Mapping):
        return {name: value for name, value in inputs.items() if name != "labels"}, inputs.get(
            "labels"
        )
    if isinstance(inputs, (list, tuple)) and len(inputs) > 1:
        return inputs[:-1], inputs[-1]
    return inputs, None


def count_labels(batches: Sequence[Any], *, shifted: bool) -> torch.Tensor | None:
    """Return the number of counted labels in batches, a scalar; None without labels."""
    counts = []
    for batch in batches:
        _, labels = take_labels(batch)
        shifted_labels = batch.get("shift_labels") if isinstance(batch, Mapping) else None
        if shifted_labels is not None:
            labels = shifted_labels
        elif shifted and isinstance(labels, torch.Tensor):
            labels = labels[..., 1:]
        if not isinstance(labels, torch.Tensor):
            return None
        counts.append(labels.ne(IGNORED).sum())
    return torch.stack(counts).sum() if counts else None


def count_over_ranks(
    count: torch.Tensor | None, device: torch.device, *, has_batches: bool
) -> torch.Tensor | None:
    """Return the sum of a count over all ranks; some ranks may have no batch. Collective.

    Returns:
        None if a rank with batches has no labels to count.
    """
    is_missing = count is None and has_batches
    counts = torch.tensor([0 if count is None else int(count), is_missing], device=device)
    dist.all_reduce(counts)
    return None if counts[1] else counts[0]


def sum_over_ranks(count: torch.Tensor, copies: int) -> torch.Tensor:
    """Return the sum of a count over ranks; ``copies`` ranks have each count. Collective."""
    dist.all_reduce(count)
    return count // copies if copies > 1 else count
