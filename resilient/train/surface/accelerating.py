"""What scripts ask `trainer.accelerator` in Transformers: each the real thing, or refused."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist

from resilient.errors import ConfigError
from resilient.train.arguments.reduction import is_canonical
from resilient.train.evaluation.gather import gather_rows, nested

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import nn

    from resilient.train.surface.stepping import LossHooks

_INSTEAD = {
    "clip_grad_norm_": "the trainer clips before each step: set `max_grad_norm`",
    "clip_grad_value_": "clip in a callback's `on_pre_optimizer_step`",
    "prepare": "the trainer prepares model, optimizer and data: override `create_optimizer`, "
    "`get_train_dataloader` or `_wrap_model`",
    "prepare_model": "a second model is moved with `.to(trainer.args.device)`",
    "accumulate": "`gradient_accumulation_steps` says how many micro-batches a step has",
    "no_sync": "`gradient_accumulation_steps` says how many micro-batches a step has",
    "save_state": "the trainer saves: `save_steps`, or `control.should_save` in a callback",
    "load_state": "`train()` goes on from the newest checkpoint by itself",
    "register_for_checkpointing": "write `trainer.register(name, thing)`",
    "state": "arguments say how ranks train together: read `trainer.args`",
    "scaler": "read `trainer.precision.scaler`",
    "log": "write `trainer.log(...)`",
}
_SYNC = "micro-batches are joined in one fixed order, all at the end of the step (`reduction`)"


class Accelerator:
    """Answers for the trainer as the accelerator of Hugging Face would.

    Args:
        trainer: whose step it is.
    """

    def __init__(self, trainer: LossHooks) -> None:
        self._trainer = trainer

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """Back-propagate the loss of a micro-batch, as ``training_step`` does.

        Args:
            loss: divided by the micro-batches of its step already, if it has to be.
            **options: ``scale_wrt_gas`` may be there, and says what is done anyway.

        Raises:
            ConfigError: there are others.
        """
        asked = sorted(set(options) - {"scale_wrt_gas"})
        if asked or options.get("scale_wrt_gas"):
            name = asked[0] if asked else "scale_wrt_gas"
            raise ConfigError(
                f"`accelerator.backward` does not take `{name}`",
                hint="call `loss.backward(...)` on what only this rank needs, or leave it out",
            )
        self._trainer.make_backward(loss)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context of a forward pass in the precision of the run."""
        return self._trainer.precision.autocast()

    def unwrap_model(self, model: nn.Module, **_options: bool) -> nn.Module:
        """Return the model without what a strategy or a compiler put around it."""
        strategy = getattr(self._trainer, "strategy", None)
        found: nn.Module = model if strategy is None else strategy.unwrap(model)
        compiled: Any = getattr(found, "_orig_mod", None)
        return found if compiled is None else compiled

    def wait_for_everyone(self) -> None:
        """Wait until all ranks are here. Collective."""
        if self.num_processes > 1:
            dist.barrier()

    def gather(self, tensor: Any) -> Any:
        """Return the rows of all ranks, in the order of ranks. Collective.

        Ranks may have different numbers of rows. A number of each rank becomes a row; tensors in
        mappings and lists stay there.

        Raises:
            ConfigError: ranks evaluate, each as many batches as it has.
        """
        if self.num_processes == 1:
            return tensor
        if not self._trainer.model.training:
            raise ConfigError(
                "`accelerator.gather` waits for all ranks, and in an evaluation some may have "
                "one batch less",
                hint="return it from `prediction_step`: the trainer gathers that, each sample once",
            )
        ranks = self.num_processes
        return nested(lambda one: gather_rows(one if one.dim() else one[None], ranks), tensor)

    def gather_for_metrics(self, input_data: Any) -> Any:
        """Do as :meth:`gather`: no sample is there twice but to fill a last round of training.

        Raises:
            ConfigError: as there.
        """
        return self.gather(input_data)

    def print(self, *values: Any, **options: Any) -> None:
        """Write to standard output, on the first rank of each host."""
        if self.is_local_main_process:
            end = options.get("end", "\n")
            (options.get("file") or sys.stdout).write(
                options.get("sep", " ").join(map(str, values)) + end
            )

    @property
    def sync_gradients(self) -> bool:
        """Whether this micro-batch is the last of its step.

        Raises:
            ConfigError: a step has no such micro-batch.
        """
        if is_canonical(self._trainer.args):
            raise ConfigError(f"`accelerator.sync_gradients` is not known: {_SYNC}")
        return self._trainer.is_last_micro_batch

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self._trainer.session.device

    @property
    def num_processes(self) -> int:
        """How many ranks there are."""
        return self._trainer.session.world.size

    @property
    def process_index(self) -> int:
        """Which of all ranks this is."""
        return self._trainer.session.world.rank

    @property
    def local_process_index(self) -> int:
        """Which rank of its host this is."""
        return self._trainer.session.world.local_rank

    @property
    def is_main_process(self) -> bool:
        """Whether this is the first of all ranks."""
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first rank of its host."""
        return self.local_process_index == 0

    @property
    def mixed_precision(self) -> str:
        """``fp16``, ``bf16`` or ``no``."""
        args = self._trainer.args
        return "fp16" if args.fp16 else "bf16" if args.bf16 else "no"

    @property
    def distributed_type(self) -> str:
        """How ranks train together; equal to a ``DistributedType`` of accelerate."""
        kind = self._trainer.args.parallelism
        if kind in ("deepspeed", "fsdp"):
            return kind.upper()
        if self.num_processes == 1:
            return "NO"
        return "MULTI_CPU" if self.device.type == "cpu" else f"MULTI_{_maker(self.device)}"

    def __getattr__(self, name: str) -> NoReturn:
        said = _INSTEAD.get(name, "what the trainer does by itself is said by its arguments")
        raise AttributeError(f"`accelerator.{name}` is not there: {said}", name=name, obj=self)


def _maker(device: torch.device) -> str:
    return "GPU" if device.type == "cuda" else device.type.upper()
