"""What scripts ask a trainer, in the names of the field, and the callbacks that they give it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from resilient.train.arguments import TrainingArguments
    from resilient.train.callbacks.callback import CallbackHandler, TrainerCallback


class AskingMethods:
    """Questions that change nothing; see :class:`resilient.Trainer`."""

    args: TrainingArguments
    model: nn.Module
    optimizer: Optimizer | None
    callback_handler: CallbackHandler

    def is_world_process_zero(self) -> bool:
        """Say whether this is the first of all ranks."""
        return self.args.process_index == 0

    def is_local_process_zero(self) -> bool:
        """Say whether this is the first rank of its host."""
        return self.args.local_process_index == 0

    def num_examples(self, dataloader: Any) -> int:
        """Return the samples of a loader's dataset, or an estimate where that has no length."""
        try:
            return len(dataloader.dataset)
        except (AttributeError, TypeError):
            return len(dataloader) * self.args.per_device_train_batch_size

    def get_num_trainable_parameters(self) -> int:
        """Return how many numbers are trained; of a cut model, those of this rank."""
        return sum(one.numel() for one in self.model.parameters() if one.requires_grad)

    def get_learning_rates(self) -> list[float]:
        """Return the rate of each group of parameters.

        Raises:
            ValueError: there is no optimizer yet.
        """
        if self.optimizer is None:
            raise ValueError("there is no optimizer before training")
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def get_optimizer_group(self, param: Any = None) -> Any:
        """Return the group that holds ``param``, or the parameters of each group.

        As in Transformers, the parameters of all groups are returned if no group holds ``param``.

        Raises:
            ValueError: there is no optimizer yet.
        """
        if self.optimizer is None:
            raise ValueError("there is no optimizer before training")
        for group in self.optimizer.param_groups:
            if any(one is param for one in group["params"]):
                return group
        return [group["params"] for group in self.optimizer.param_groups]

    @property
    def best_checkpoint(self) -> str:
        """Where the best model's checkpoint is, for ``load_model``; empty if no checkpoint has it.

        ``state.best_model_checkpoint`` says its step alone, for it must not tell how often a run
        was restarted: the folder has the number of the life that saved it, too.
        """
        shelf = self.callback_handler.context.get("shelf")
        best = shelf.best.checkpoint if shelf is not None else None
        return f"{shelf.url.rstrip('/')}/{best}" if shelf is not None and best is not None else ""

    def add_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Call one more callback, after the others."""
        self.callback_handler.add_callback(callback)

    def pop_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> Any:
        """Remove and return a callback, given itself or its class; None if there is none."""
        return self.callback_handler.pop_callback(callback)

    def remove_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Remove a callback, given itself or its class."""
        self.callback_handler.pop_callback(callback)
