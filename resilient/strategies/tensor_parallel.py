"""Tensor parallelism: DTensor plans split layers over ranks, alone or with DDP or FSDP2."""

from __future__ import annotations

import re
from collections import Counter
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from resilient.errors import ConfigError
from resilient.strategies.base import (
    begin_with_rank_0,
    bind_plainly,
    broadcast,
    broadcast_buffers,
    scale_jointly,
    with_group_timeout,
)
from resilient.strategies.fsdp import FsdpStrategy

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer

    from resilient.strategies.base import BoundModel, OptimizerStepper
    from resilient.strategies.fsdp_options import FsdpOptions
    from resilient.strategies.parallelism_options import MeshSizes


class Replicated(ParallelStyle):
    """Style of a module that every rank computes as a whole, on replicated tensors."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, None, _spread, _gather)


def _spread(_: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
    return tuple(
        DTensor.from_local(value, mesh, [Replicate()], run_check=False)
        if isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
        else value
        for value in inputs
    )


def _gather(_: nn.Module, outputs: Any, __: DeviceMesh) -> Any:
    return outputs.to_local() if isinstance(outputs, DTensor) else outputs


# Names that Transformers uses for the cuts of a linear layer or an embedding.
STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    "replicated": Replicated,
}


@dataclass(frozen=True, slots=True)
class TensorParallelStrategy:
    """Layers shared by groups of neighbouring ranks, with DDP or FSDP2 over the groups.

    Ranks of one group train on the same samples. Without FSDP options, the groups are replicas:
    FSDP2 with shards of one rank. FSDP2 then reduces gradients as DDP does. The placements define
    each rank's share of a checkpoint.

    Attributes:
        device: Device of this rank.
        sizes: Sizes of the mesh.
        plan: Names of modules, ``*`` for one part of a name, and their style (``STYLES``).
        options: FSDP2 options over groups; None if the groups are replicas.
    """

    device: torch.device
    sizes: MeshSizes
    plan: Mapping[str, str]
    options: FsdpOptions | None = None

    @property
    def name(self) -> str:
        """Name of the strategy over groups in a checkpoint."""
        suffix = "" if self.sizes.data == 1 else "+fsdp" if self.options else "+ddp"
        return f"tp{suffix}"

    def prepare(self, model: nn.Module) -> nn.Module:
        """Cut the layers in place and return the model. Collective.

        Raises:
            ConfigError: The plan names no module, or a parameter cannot be cut.
        """
        if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
            return model
        whole_plan(model, self.plan)
        broadcast([*model.parameters(), *model.buffers()])
        sizes = self.sizes
        mesh = init_device_mesh(self.device.type, sizes.shape, mesh_dim_names=sizes.names)
        with_group_timeout(mesh)
        cut_layers(model, self.plan, mesh["tp"])
        if sizes.data > 1:
            self._over_groups().shard(model, mesh[sizes.names[:-1]])
        model.register_forward_pre_hook(begin_with_rank_0)
        return model

    def _over_groups(self) -> FsdpStrategy:
        from resilient.strategies.fsdp_options import FsdpOptions

        default_options = FsdpOptions(reshard_after_forward=False)
        return FsdpStrategy(self.device, self.options or default_options)

    def bind(self, model: nn.Module, optimizer: Optimizer, updates: OptimizerStepper) -> BoundModel:
        """Return the cut model and its stepper."""
        scale_jointly(updates, self.device)
        return bind_plainly(self, model, optimizer, updates)

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the model itself, because it was cut in place."""
        return model

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Return a context in which gradients are not reduced over groups."""
        group_context = self._over_groups().no_sync(model) if self.sizes.data > 1 else nullcontext()
        with group_context:
            yield

    def align(self, model: nn.Module) -> None:
        """Copy the buffers of rank 0 to every rank, as the next forward pass would. Collective."""
        broadcast_buffers(model)


def cut_layers(
    model: nn.Module,
    plan: Mapping[str, str],
    mesh: DeviceMesh,
    parameter_ids: Collection[str] = ("",),
) -> None:
    """Cut layers in place over a mesh of one dimension. Collective.

    Args:
        model: Whole model; the plan refers to its module names.
        plan: Plan as in :class:`TensorParallelStrategy`.
        mesh: Mesh of the ranks that share the layers.
        parameter_ids: Names of the modules of this rank. Other modules stay unchanged.

    Raises:
        ConfigError: As for :func:`whole_plan`.
    """
    prefixes = tuple(f"{name}." if name else "" for name in parameter_ids)
    styles = whole_plan(model, plan)
    own_styles = {name: style for name, style in styles.items() if f"{name}.".startswith(prefixes)}
    parallelize_module(model, mesh, own_styles)


def whole_plan(model: nn.Module, plan: Mapping[str, str]) -> dict[str, ParallelStyle]:
    """Return a style for each module with own parameters; modules outside the plan are replicated.

    Raises:
        ConfigError: A name or style is unknown, or a parameter cannot be cut.
    """
    modules = dict(model.named_modules())
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    tied = [name for name, parameter in model.named_parameters() if uses[id(parameter)] > 1]
    if tied:
        raise ConfigError(f"parameter `{tied[0]}` is tied to another: a cut would untie them")
    styles: dict[str, ParallelStyle] = {}
    for pattern, style in plan.items():
        name_pattern = re.compile(re.escape(pattern).replace(r"\*", "[^.]+"))
        names = [name for name in modules if name_pattern.fullmatch(name)]
        if not names or style not in STYLES:
            text = f"style `{style}` is none of {', '.join(STYLES)}"
            raise ConfigError(
                f"`tp_plan`: `{pattern}`: " + (text if names else "no module has this name")
            )
        styles |= {name: STYLES[style]() for name in names}
    for name, module in modules.items():
        own_parameters = [tensor for tensor, _ in module.named_parameters(recurse=False)]
        if own_parameters and any(True for _ in module.children()):
            raise ConfigError(
                f"`{name}.{own_parameters[0]}` is beside modules, where it cannot be replicated",
                hint="give it its own module",
            )
        if own_parameters:
            styles.setdefault(name, Replicated())
    return styles
