"""DDP strategy: torch's DistributedDataParallel averages the gradients of one replica per rank."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import TYPE_CHECKING, Any, cast

from torch.nn.parallel import DistributedDataParallel

from resilient.errors import ConfigError
from resilient.strategies.base import bind_plainly, broadcast_buffers
from resilient.strategies.gradient_compression import Compression, compress

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import torch
    from torch import nn
    from torch.optim import Optimizer

    from resilient.state_dict.snapshot import Part
    from resilient.strategies.base import BoundModel, OptimizerStepper

# torch 2.13 renamed this function, and the old name emits a warning.
_SYNC = "forward_sync_buffers"
if _SYNC not in signature(DistributedDataParallel).parameters:
    _SYNC = "broadcast_buffers"


class FixedBuckets(DistributedDataParallel):
    """DDP whose gradient buckets are laid out once, before the first step.

    DDP lays out its buckets again after the first step of a process, in the order in which
    gradients were ready. An all-reduce over a ring adds ranks in an order that depends on the place
    in the bucket. With three ranks or more, the first step after a resume would therefore differ in
    the last bits from an uninterrupted run. This class fixes the layout from the start, in reverse
    order of registration. ``tests/process/test_ddp.py`` verifies this property.
    """

    parts: dict[str, Part]
    """State that a communication hook keeps between steps."""

    def _build_params_for_reducer(self) -> tuple[list[Any], list[bool]]:
        built = super()._build_params_for_reducer()  # type: ignore[no-untyped-call]
        parameters, expect_sparse = built
        # The last layers' gradients are ready first, and buckets are reduced in order.
        return list(reversed(parameters)), list(reversed(expect_sparse))

    def fix_buckets(self) -> None:
        """Prevent the reducer from laying out its buckets again after the first step."""
        self.reducer._push_all_rebuilt_params()  # noqa: SLF001 - torch has no public way
        self.reducer._rebuild_buckets()  # noqa: SLF001


@dataclass(frozen=True, slots=True)
class DdpStrategy:
    """DDP over the default process group; replicas start as copies of rank 0.

    Attributes:
        device: Device of this rank's replica.
        find_unused_parameters: As in torch.
        bucket_cap_mb: Size of gradient buckets in MiB; None leaves it to torch.
        broadcast_buffers: Whether forward passes start with the buffers of rank 0.
        static_graph: As in torch.
        sync_each_batch: Whether gradients are reduced after every micro-batch.
        compression: Compression of gradients.
    """

    device: torch.device
    find_unused_parameters: bool = False
    bucket_cap_mb: float | None = None
    broadcast_buffers: bool = True
    static_graph: bool = False
    sync_each_batch: bool = False
    compression: Compression = field(default_factory=Compression)
    name: str = "ddp"

    def prepare(self, model: nn.Module) -> nn.Module:
        """Wrap the model and copy the parameters and buffers of rank 0 to every rank. Collective.

        Raises:
            ConfigError: The options let buffers differ between ranks.
        """
        self._check_buffers(model)
        wrapped = FixedBuckets(
            model,
            device_ids=[self.device.index] if self.device.type == "cuda" else None,
            find_unused_parameters=self.find_unused_parameters,
            bucket_cap_mb=self.bucket_cap_mb,
            static_graph=self.static_graph,
            **{_SYNC: self.broadcast_buffers},  # type: ignore[arg-type]
        )
        # With all other options, DDP itself keeps its first layout.
        if self.static_graph or not self.find_unused_parameters:
            wrapped.fix_buckets()
        numbers = sum(
            parameter.numel() for parameter in model.parameters() if parameter.requires_grad
        )
        layout = f"{self.compression.hook} {self.bucket_cap_mb} {numbers}"
        wrapped.parts = compress(wrapped, self.compression, layout)
        return wrapped

    def _check_buffers(self, model: nn.Module) -> None:
        names = [name for name, _ in model.named_buffers()]
        if names and not self.broadcast_buffers:
            raise ConfigError(
                f"`ddp_broadcast_buffers`=False would let {names[0]} and {len(names) - 1} more "
                "buffers differ between ranks, but a checkpoint holds only one copy: omit it"
            )

    def bind(self, model: nn.Module, optimizer: Optimizer, updates: OptimizerStepper) -> BoundModel:
        """Return the model and its stepper without changes."""
        bound = bind_plainly(self, model, optimizer, updates)
        return replace(bound, parts={**bound.parts, **cast("FixedBuckets", model).parts})

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the module inside DDP."""
        return cast("nn.Module", model.module)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return DDP's context without reduction."""
        if self.sync_each_batch:
            return nullcontext()
        return cast("DistributedDataParallel", model).no_sync()

    def align(self, model: nn.Module) -> None:
        """Copy the buffers of rank 0 to every rank, as DDP's next forward pass would. Collective.

        Running statistics differ between replicas after a step. Without this call a checkpoint
        could contain the statistics of another rank, and a resumed run would differ from an
        uninterrupted run.
        """
        broadcast_buffers(self.unwrap(model))
