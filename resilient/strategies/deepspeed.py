"""ZeRO strategy: DeepSpeed's engine reduces and clips gradients, and steps the optimizer."""

from __future__ import annotations

import logging
import os
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from resilient.distributed.rank_group import start_single_rank_group
from resilient.errors import ConfigError
from resilient.state_dict.deepspeed import ZeroModel, ZeroOptimizer
from resilient.state_dict.snapshot import Part
from resilient.strategies.base import BoundModel, begin_with_rank_0, broadcast, broadcast_buffers
from resilient.strategies.deepspeed_config import stage_in

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

    from torch import nn
    from torch.optim import Optimizer

    from resilient.strategies.base import OptimizerStepper

# A model belongs to its engine permanently, so a second training uses the same engine.
_engines: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class DeepSpeedStrategy:
    """Strategy with a DeepSpeed engine of any ZeRO stage, which partitions the model of rank 0.

    Attributes:
        device: Device of this rank.
        config: Complete config of DeepSpeed (:mod:`resilient.strategies.deepspeed_config`).
    """

    device: torch.device
    config: dict[str, Any] = field(repr=False)

    @property
    def name(self) -> str:
        """Name of the ZeRO stage in a checkpoint."""
        return f"zero-{stage_in(self.config)}"

    def prepare(self, model: nn.Module) -> nn.Module:
        """Copy the model of rank 0 to every rank; ``bind`` creates the engine. Collective.

        Raises:
            ConfigError: DeepSpeed is not installed, or does not support this device.
        """
        _require(self.config, self.device)
        if model not in _engines:
            broadcast([*model.parameters(), *model.buffers()])
            model.register_forward_pre_hook(begin_with_rank_0)
            model.register_forward_pre_hook(self._in_model_dtype, with_kwargs=True)
        return model

    def bind(self, model: nn.Module, optimizer: Optimizer, updates: OptimizerStepper) -> BoundModel:
        """Create the engine, which takes over the optimizer. Collective.

        Raises:
            ConfigError: The engine's state is in a place from which it cannot be saved.
        """
        engine = _engines.get(model)
        if engine is None:
            engine = _engines[model] = self._engine(model, optimizer)
        parts = {"model": Part(ZeroModel(engine)), "optimizer": Part(ZeroOptimizer(engine))}
        return BoundModel(engine, EngineUpdates(engine, updates), parts)

    def _engine(self, model: nn.Module, optimizer: Optimizer) -> Any:
        config = dict(self.config)
        if self._clips_by_itself:
            config["gradient_clipping"] = 0.0
        with refusing_config():
            engine_parts = import_module("deepspeed").initialize(
                model=model, optimizer=optimizer, config=config, dist_init_required=False
            )
        return engine_parts[0]

    @property
    def _clips_by_itself(self) -> bool:
        """True if the strategy clips gradients itself.

        An engine without ZeRO and half precision does not report its gradient norm.
        """
        half = any(self.config.get(section, {}).get("enabled") for section in ("bf16", "fp16"))
        return stage_in(self.config) == 0 and not half

    def _in_model_dtype(self, _: nn.Module, inputs: Any, kwargs: Any) -> tuple[Any, Any]:
        """Convert the batch to the half precision of the model."""
        for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
            if self.config.get(name, {}).get("enabled"):
                return _cast(inputs, dtype), _cast(kwargs, dtype)
        return inputs, kwargs

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the module inside the engine."""
        return cast("nn.Module", model.module)

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Return a context for backward passes that are not the last of their step."""
        engine: Any = model
        engine.set_gradient_accumulation_boundary(False)
        try:
            yield
        finally:
            engine.set_gradient_accumulation_boundary(True)

    def align(self, model: nn.Module) -> None:
        """Copy the buffers of rank 0 to every rank, as the next forward pass would. Collective."""
        broadcast_buffers(model)


class EngineUpdates:
    """Backward pass, clipping and step of an engine, which clips only in its step.

    Args:
        engine: DeepSpeed's engine.
        plain: Stepper that clips if the engine does not clip.
    """

    scaler = None  # The engine owns the loss scale of fp16.

    def __init__(self, engine: Any, plain: OptimizerStepper) -> None:
        self._engine = engine
        self._plain = plain
        self._norm = torch.zeros(())

    def autocast(self) -> AbstractContextManager[Any]:
        """Return an empty context: the model itself is in half precision."""
        return nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        """Back-propagate a loss that is already divided by the micro-batches of its step."""
        self._engine.backward(loss, scale_wrt_gas=False)

    def clip(
        self, optimizer: Optimizer, parameters: Sequence[nn.Parameter], max_norm: float
    ) -> torch.Tensor:
        """Return the tensor that ``step`` fills with the total norm (a scalar)."""
        if isinstance(self._engine.optimizer, torch.optim.Optimizer):
            return self._plain.clip(optimizer, parameters, max_norm)
        self._norm = torch.zeros(())
        return self._norm

    def step(self, optimizer: Optimizer) -> bool:  # noqa: ARG002 - the engine has it
        """Clip, step and free the gradients; return False if fp16 gradients overflowed."""
        self._engine.step()
        norm = self._engine.get_global_grad_norm()
        if norm is not None:
            self._norm.fill_(float(norm))
        return bool(self._engine.was_step_applied())

    def zero_grad(self, optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        """Do nothing: the engine frees the gradients that its norm has."""


def gathered(parameter: Any) -> torch.Tensor:
    """Return a parameter that ZeRO 3 has partitioned as a whole tensor on the CPU. Collective."""
    with import_module("deepspeed").zero.GatheredParameters([parameter]):
        return parameter.detach().cpu().clone()  # type: ignore[no-any-return]


@contextmanager
def refusing_config() -> Iterator[None]:
    """Convert DeepSpeed's errors about its config to configuration errors.

    Raises:
        ConfigError: The message names each rejected key.
    """
    # Catch these exact classes: their base classes, ValueError and Exception, would hide other
    # errors.
    invalid = import_module("pydantic").ValidationError
    config_error = import_module("deepspeed.runtime.config").DeepSpeedConfigError
    try:
        yield
    except invalid as error:
        problems = [
            f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors()
        ]
        raise ConfigError(f"the config of DeepSpeed: {'; '.join(problems)}") from error
    except config_error as error:
        raise ConfigError(f"the config of DeepSpeed: {error}") from error


def _require(config: dict[str, Any], device: torch.device) -> None:
    """Prepare the environment that DeepSpeed expects at its import."""
    if device.type == "cpu":
        if config.get("fp16", {}).get("enabled"):
            raise ConfigError(
                "DeepSpeed trains in fp16 on a GPU only",
                hint="write bf16=True, which works on a CPU too",
            )
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("LOCAL_RANK", "0")
    try:
        deepspeed = import_module("deepspeed")
    except ImportError as error:
        raise ConfigError(
            f"`parallelism`='deepspeed' needs DeepSpeed: {error}",
            hint="pip install --no-build-isolation deepspeed  (after torch)",
        ) from error
    # DeepSpeed logs to standard output, which belongs to the script.
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    if device.type == "cpu":
        # DeepSpeed would compile this kernel for inference here; the kernel names files in
        # /dev/shm.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if not dist.is_initialized():
        start_single_rank_group("nccl" if device.type == "cuda" else "gloo")


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {name: _cast(item, dtype) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_cast(item, dtype) for item in value)
    return value
