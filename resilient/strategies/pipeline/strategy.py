"""Pipeline strategy, alone or combined with tensor parallelism, replicas or FSDP2."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils import clip_grads_with_norm_

from resilient.state_dict.pipeline import PipelineOptimizer
from resilient.state_dict.snapshot import Part
from resilient.strategies.base import BoundModel, broadcast, group_among, with_group_timeout
from resilient.strategies.pipeline import RANDOM, pipeline_of, remember
from resilient.strategies.pipeline.partition import StageModules, beside, split_model
from resilient.strategies.pipeline.runtime import PipelinedModel, PipelineRank, Stage

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.optim import Optimizer

    from resilient.strategies.base import OptimizerStepper
    from resilient.strategies.fsdp_options import FsdpOptions
    from resilient.strategies.parallelism_options import MeshSizes, PipelineOptions
    from resilient.strategies.pipeline.partition import StageSplit


@dataclass(frozen=True, slots=True)
class PipelineStrategy:
    """Pipeline of neighbouring ranks with a model's stages, for the micro-batches of a step.

    The ranks of one pipeline train on the same samples. Ranks at the same position in different
    pipelines have the same stages. These ranks replicate, shard or cut their stage as they would a
    whole model.

    Attributes:
        device: Device of this rank.
        sizes: Sizes of the mesh.
        options: Options of the pipeline.
        layer_classes: Classes of the layers to divide.
        tensor_plan: Plan of cut layers (``TensorParallelStrategy``).
        fsdp: FSDP2 options over pipelines; None if the pipelines are replicas.
    """

    device: torch.device
    sizes: MeshSizes
    options: PipelineOptions
    layer_classes: tuple[str, ...] = ()
    tensor_plan: Mapping[str, str] | None = None
    fsdp: FsdpOptions | None = None

    @property
    def name(self) -> str:
        """Name of the strategy in a checkpoint."""
        base_name = "tp+pp" if self.sizes.tensor > 1 else "pp"
        return base_name + ("" if self.sizes.data == 1 else "+fsdp" if self.fsdp else "+ddp")

    def prepare(self, model: nn.Module) -> nn.Module:
        """Cut the model, free the stages of other ranks, and return the trained model. Collective.

        Raises:
            ConfigError: The model cannot be cut in this way.
        """
        existing = pipeline_of(model)
        if existing is not None:
            return existing
        cut = split_model(model, self.options, self.layer_classes)
        broadcast([*model.parameters(), *model.buffers()])
        place, mesh = self._create_groups()
        trees = StageModules(model, cut)
        plan = trees.planner()
        numbers = range(place.number, cut.stages, self.options.ranks)
        stages = {number: Stage(number, *trees.stage(number), model) for number in numbers}
        _free_remote_parameters(model, cut, set(numbers))
        if mesh is not None:
            self._spread(model, cut, stages, mesh)
        pipelined = PipelinedModel(model, stages, plan, self.options, place)
        pipelined.units, pipelined.beside = cut.units, beside(model, cut)
        remember(model, pipelined)
        return pipelined

    def _create_groups(self) -> tuple[PipelineRank, DeviceMesh | None]:
        """Return the place of this rank, and the mesh of its stage's ranks if there are several."""
        sizes, rank = self.sizes, dist.get_rank()
        ranks = torch.arange(dist.get_world_size()).view(sizes.data, sizes.pipeline, sizes.tensor)
        pipelines = ranks.transpose(1, 2).reshape(-1, sizes.pipeline).tolist()
        peers = ranks.transpose(0, 1).reshape(sizes.pipeline, -1).tolist()
        number = next(nth for nth, group_ranks in enumerate(peers) if rank in group_ranks)
        own_ranks = next(group_ranks for group_ranks in pipelines if rank in group_ranks)
        group = group_among(pipelines)
        if len(peers[number]) == 1:
            return PipelineRank(self.device, number, tuple(own_ranks), group, (rank,), None), None
        peers_group = group_among(peers)
        # Each stage has its own mesh, and all ranks create all meshes.
        meshes = [
            DeviceMesh(
                self.device.type,
                torch.tensor(group_ranks).view(sizes.shape),
                mesh_dim_names=sizes.names,
            )
            for group_ranks in peers
        ]
        place = PipelineRank(
            self.device, number, tuple(own_ranks), group, tuple(peers[number]), peers_group
        )
        return place, with_group_timeout(meshes[number])

    def _spread(
        self, model: nn.Module, cut: StageSplit, stages: Mapping[int, Stage], mesh: DeviceMesh
    ) -> None:
        """Replicate or shard this rank's stages over the ranks with the same stages."""
        from resilient.strategies.fsdp import FsdpStrategy
        from resilient.strategies.fsdp_options import FsdpOptions
        from resilient.strategies.tensor_parallel import cut_layers

        if self.tensor_plan:
            own_units = [name for name, stage in cut.units.items() if stage in stages]
            cut_layers(
                model, self.tensor_plan, mesh["tp"] if self.sizes.data > 1 else mesh, own_units
            )
        if self.sizes.data == 1:
            return
        default_options = FsdpOptions(reshard_after_forward=False)
        fsdp_strategy = FsdpStrategy(self.device, self.fsdp or default_options)
        names = tuple(name for name in self.sizes.names if name != "tp")
        for stage in stages.values():
            fsdp_strategy.shard(stage, mesh[names])

    def bind(self, model: nn.Module, optimizer: Optimizer, updates: OptimizerStepper) -> BoundModel:
        """Return the pipeline and its stepper. Collective.

        The optimizer keeps only the parameters of this rank.
        """
        pipelined = cast("PipelinedModel", model)
        place = pipelined.place
        stage_optimizer = PipelineOptimizer(
            pipelined.whole, optimizer, writes=place.writes, exchange=place.exchange
        )
        parts = {
            "model": pipelined.part(),
            "optimizer": Part(stage_optimizer),
            RANDOM: Part(pipelined.random, scope="rank"),
        }
        return BoundModel(pipelined, StagedUpdates(updates, place), parts)

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the user's model."""
        return cast("PipelinedModel", model).whole

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:  # noqa: ARG002 - the seam
        """Return an empty context, because the schedule handles the last pass itself."""
        return nullcontext()

    def align(self, model: nn.Module) -> None:
        """Copy buffers from the first rank with the same stages to the others. Collective."""
        cast("PipelinedModel", model).align()


def _free_remote_parameters(model: nn.Module, cut: StageSplit, own_units: set[int]) -> None:
    """Free the memory of other ranks' parameters, but keep names and shapes."""
    meta_by_id: dict[int, Any] = {}
    for name, stage in cut.units.items():
        if stage in own_units:
            continue
        for module in model.get_submodule(name).modules():
            for tensors_by_name in (module._parameters, module._buffers):  # noqa: SLF001 - as nn.Module.to
                for key, value in tensors_by_name.items():
                    if value is not None and id(value) not in meta_by_id:
                        meta_by_id[id(value)] = (value, _on_meta(value))
                    if value is not None:
                        tensors_by_name[key] = meta_by_id[id(value)][1]


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    empty = tensor.detach().to("meta")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty


class StagedUpdates:
    """Optimizer steps of this rank's stages, with the norm of all gradients.

    Args:
        inner: Stepper of a single process.
        place: Place of this rank.
    """

    def __init__(self, inner: OptimizerStepper, place: PipelineRank) -> None:
        self._inner = inner
        self._place = place
        self.scaler = inner.scaler

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context for a forward pass."""
        return self._inner.autocast()

    def backward(self, loss: torch.Tensor) -> None:
        """Back-propagate the loss of a micro-batch."""
        self._inner.backward(loss)

    def clip(
        self, optimizer: Optimizer, parameters: Sequence[nn.Parameter], max_norm: float
    ) -> torch.Tensor:
        """Clip gradients by their norm over all stages, and return the norm. Collective."""
        own_parameters = [parameter for parameter in parameters if not parameter.is_meta]
        norm = self._inner.clip(optimizer, own_parameters, 0.0).detach().float()
        square = norm.to(self._place.device) ** 2
        dist.all_reduce(square, group=self._place.pipeline_group)
        norm = square.sqrt()
        if max_norm > 0:
            clip_grads_with_norm_(own_parameters, max_norm, norm, foreach=True)
        return norm

    def step(self, optimizer: Optimizer) -> bool:
        """Step the optimizer of this rank's parameters."""
        return self._inner.step(optimizer)

    def zero_grad(self, optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        """Free the gradients of the last step."""
        self._inner.zero_grad(optimizer, parameters)
