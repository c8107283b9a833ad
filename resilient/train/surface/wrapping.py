"""What of the trainer is about several ranks, with the field's names."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import nn

    from resilient.strategies.strategy import Strategy
    from resilient.train.arguments import TrainingArguments

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
