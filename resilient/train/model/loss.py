"""Losses: what a model takes about them, labels and how many there are, and smoothing (no state).

A loss that is a mean over tokens must be one over all tokens of an optimizer step: means of
micro-batches of uneven length, averaged, weigh tokens unevenly. So labels are counted before the
first forward pass of a step, over its micro-batches and over ranks, and whoever computes the loss
divides by that count (``num_items_in_batch``).
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

# A label that no loss counts (torch's and Transformers').
IGNORED = -100


@dataclass(frozen=True, slots=True)
class LabelSmoother:
    """Cross entropy with a share of each target spread over all classes.

    ``(1 - epsilon) * nll + epsilon * mean over classes of -log p``, averaged over the labels that
    count; the formula and its order of operations are Transformers'.

    Attributes:
        epsilon: the share that is spread.
        ignore_index: the label that does not count.
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
            model_output: logits, shape (..., classes), alone, first, or as ``logits``.
            labels: classes, shape (...).
            shift_labels: position i predicts label i + 1, as in causal language models.
            num_items_in_batch: what to divide by; None: the labels here that count.
        """
        logits = find_logits(model_output)
        if shift_labels:
            logits, labels = logits[..., :-1, :].contiguous(), labels[..., 1:].contiguous()
        surprise = -torch.log_softmax(logits, dim=-1)
        if labels.dim() == surprise.dim() - 1:
            labels = labels.unsqueeze(-1)
        ignored = labels.eq(self.ignore_index)
        nll = surprise.gather(dim=-1, index=torch.clamp(labels, min=0)).masked_fill(ignored, 0.0)
        spread = surprise.sum(dim=-1, keepdim=True, dtype=_wide(surprise)).masked_fill(ignored, 0.0)
        count: Any = num_items_in_batch
        if count is None:
            count = ignored.numel() - ignored.long().sum()
        elif isinstance(count, torch.Tensor):
            count = count.to(nll.device)
        classes = surprise.shape[-1]
        smoothed = self.epsilon * (spread.sum() / (count * classes))
        loss: torch.Tensor = (1 - self.epsilon) * (nll.sum() / count) + smoothed
        return loss


def _wide(values: torch.Tensor) -> torch.dtype:
    """Return the type in which many numbers are added: float32 for what is narrower."""
    return torch.float64 if values.dtype == torch.float64 else torch.float32


def find_logits(outputs: Any) -> torch.Tensor:
    """Return the logits of what a model returned: by name, alone, or the first item."""
    if isinstance(outputs, torch.Tensor):
        return outputs
    found: torch.Tensor = outputs["logits"] if isinstance(outputs, Mapping) else outputs[0]
    return found


def base_of(model: nn.Module) -> nn.Module:
    """Return the model that an adapter of PEFT wraps, or the model itself."""
    get_base = getattr(model, "get_base_model", None)
    base: nn.Module = get_base() if callable(get_base) else model
    return base


def accepts_loss_kwargs(model: nn.Module) -> bool:
    """Say whether a model divides its loss by ``num_items_in_batch`` when it is given that.

    ``model.accepts_loss_kwargs`` says it; else a forward that takes it by name, or a model of
    Transformers whose forward has ``**kwargs``. Of other models ``**kwargs`` says nothing.
    """
    base = base_of(model)
    said = getattr(base, "accepts_loss_kwargs", None)
    if said is not None:
        return bool(said)
    taken = inspect.signature(base.forward).parameters
    open_ended = any(one.kind is one.VAR_KEYWORD for one in taken.values())
    return "num_items_in_batch" in taken or (open_ended and hasattr(base, "loss_function"))


def label_smoother_for(model: nn.Module, factor: float) -> LabelSmoother | None:
    """Return what smooths labels; None where nothing is asked, or a sample has several labels."""
    problem = getattr(getattr(model, "config", None), "problem_type", None)
    if not factor or problem == "multi_label_classification":
        return None
    return LabelSmoother(factor)


def shifts_labels(model: nn.Module) -> bool:
    """Say whether the model's own loss compares position i with label i + 1 (Transformers).

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
    """Say whether Transformers knows the model as a causal language model."""
    if "transformers" not in sys.modules:
        return False
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return type(base_of(model)).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def take_labels(inputs: Any) -> tuple[Any, Any]:
    """Return a batch without its labels, and the labels (None if there are none).

    They are ``labels`` of a mapping, and the last item of a tuple of two or more.
    """
    if isinstance(inputs, Mapping):
        return {name: one for name, one in inputs.items() if name != "labels"}, inputs.get("labels")
    if isinstance(inputs, (list, tuple)) and len(inputs) > 1:
        return inputs[:-1], inputs[-1]
    return inputs, None


def count_labels(batches: Sequence[Any], *, shifted: bool) -> torch.Tensor | None:
    """Return how many labels of these batches count, a scalar; None if they have none to count."""
    counts = []
    for batch in batches:
        _, labels = take_labels(batch)
        ready = batch.get("shift_labels") if isinstance(batch, Mapping) else None
        if ready is not None:
            labels = ready
        elif shifted and isinstance(labels, torch.Tensor):
            labels = labels[..., 1:]
        if not isinstance(labels, torch.Tensor):
            return None
        counts.append(labels.ne(IGNORED).sum())
    return torch.stack(counts).sum() if counts else None


def count_over_ranks(
    count: torch.Tensor | None, device: torch.device, *, has_batches: bool
) -> torch.Tensor | None:
    """Return the sum of a count over all ranks, of which some may have no batch. Collective.

    Returns:
        None if a rank with batches has nothing to count.
    """
    missing = count is None and has_batches
    shown = torch.tensor([0 if count is None else int(count), missing], device=device)
    dist.all_reduce(shown)
    return None if shown[1] else shown[0]


def sum_over_ranks(count: torch.Tensor, copies: int) -> torch.Tensor:
    """Return the sum of a count over all ranks, of which ``copies`` hold each. Collective."""
    dist.all_reduce(count)
    return count // copies if copies > 1 else count
