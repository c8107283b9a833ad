"""Precision: autocast and loss scaling, fp8 layers, half-precision evaluation, device checks.

Mixed precision uses only torch. Here fp16 also works on a CPU, where accelerate ignores fp16.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from resilient.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from resilient.train.arguments import TrainingArguments

# Precision -> (required compute capability, name of its GPU generation, alternative).
_GENERATIONS = {
    "bf16": ((8, 0), "Ampere", "use fp16"),
    "bf16_full_eval": ((8, 0), "Ampere", "use fp16_full_eval"),
    "fp8": ((8, 9), "Ada", "use bf16"),
    "rowwise": ((9, 0), "Hopper", 'use fp8_recipe="tensorwise"'),
}
# torch multiplies fp8 matrices only if their sides are multiples of this number.
_FP8_MULTIPLE = 16


def require_precision_support(args: TrainingArguments, capability: tuple[int, int] | None) -> None:
    """Refuse a precision that the device lacks, or only emulates slowly.

    Args:
        args: Requested precision.
        capability: Compute capability of the GPU; None for a CPU, which supports all precisions
            except rowwise fp8.

    Raises:
        ConfigError: The device does not support the precision. The message names the device, the
            required GPU generation and an alternative.
    """
    options = [name for name in ("bf16", "bf16_full_eval", "fp8") if getattr(args, name)]
    if args.fp8 and args.fp8_recipe != "tensorwise":
        options.append("rowwise")
    for name in options:
        needed, generation, advice = _GENERATIONS[name]
        if capability is None and name != "rowwise":
            continue
        if capability is None or capability < needed:
            text = f"`fp8_recipe`={args.fp8_recipe!r}" if name == "rowwise" else f"`{name}`=True"
            device_text = "the CPU" if capability is None else f"a GPU of capability {capability}"
            raise ConfigError(
                f"{text} needs a GPU of the {generation} generation or newer, but this run trains "
                f"on {device_text}",
                hint=advice,
            )


def capability_of(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability of a GPU; None for any other device."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def to_fp8(model: nn.Module, recipe: str) -> None:
    """Make the linear layers of ``model`` multiply in fp8, in place; parameters are unchanged.

    Layers with a side that is not a multiple of 16 are left unchanged. Scales are measured at each
    step, so there is no state to save.

    Args:
        model: Model before sharding or wrapping.
        recipe: Recipe of torchao: ``tensorwise``, ``rowwise`` or ``rowwise_with_gw_hp``.

    Raises:
        ConfigError: torchao is not installed, or no layer supports fp8.
    """
    try:
        float8: Any = import_module("torchao.float8")
    except ImportError as error:
        raise ConfigError(
            "`fp8`=True needs torchao, which is not installed",
            hint="pip install 'resilient-train[optimizers]'",
        ) from error
    if any(isinstance(module, float8.float8_linear.Float8Linear) for module in model.modules()):
        return
    fitting = {name for name, module in model.named_modules() if _fits(module)}
    if not fitting:
        raise ConfigError(
            f"`fp8`=True: no linear layer of `{type(model).__name__}` has sides that are "
            f"multiples of {_FP8_MULTIPLE}",
            hint="use bf16=True, or other widths",
        )
    config = float8.Float8LinearConfig.from_recipe_name(recipe)
    float8.convert_to_float8_training(
        model, config=config, module_filter_fn=lambda _, name: name in fitting
    )


def _fits(module: nn.Module) -> bool:
    return type(module) is nn.Linear and not (
        module.in_features % _FP8_MULTIPLE or module.out_features % _FP8_MULTIPLE
    )


def evaluation_dtype(args: TrainingArguments) -> torch.dtype | None:
    """Return the dtype of the weights in evaluations; None: weights stay unchanged."""
    if args.fp16_full_eval:
        return torch.float16
    return torch.bfloat16 if args.bf16_full_eval else None


@contextmanager
def weights_in(model: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """Return a context in which the model's floating-point values and inputs have ``dtype``.

    Copies replace the weights in the modules, and the weights stay unchanged. If the data of the
    weights were replaced, torch would drop the hooks by which DDP reduces gradients.
    """
    if dtype is None:
        yield
        return
    weights = list(_numbers(model))
    copies = {id(tensor): _copy(tensor, dtype) for _, _, tensor in weights}

    def lowered(_: nn.Module, inputs: Any, kwargs: Any) -> tuple[Any, Any]:
        return _cast(inputs, dtype), _cast(kwargs, dtype)

    hook = model.register_forward_pre_hook(lowered, with_kwargs=True)
    try:
        for module, name, tensor in weights:
            setattr(module, name, copies[id(tensor)])
        yield
    finally:
        hook.remove()
        for module, name, tensor in weights:
            setattr(module, name, tensor)


def _numbers(model: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    """Yield the module, the name and the tensor of each floating-point parameter or buffer."""
    for module in model.modules():
        tensors = [
            *module.named_parameters(recurse=False, remove_duplicate=False),
            *module.named_buffers(recurse=False, remove_duplicate=False),
        ]
        for name, tensor in tensors:
            if tensor.is_floating_point():
                yield module, name, tensor


def _copy(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    lowered = tensor.detach().to(dtype)
    return (
        nn.Parameter(lowered, requires_grad=False) if isinstance(tensor, nn.Parameter) else lowered
    )


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        mapping: Mapping[str, Any] = value
        return {name: _cast(item, dtype) for name, item in mapping.items()}
    return tuple(_cast(item, dtype) for item in value) if isinstance(value, list | tuple) else value


_CLIP_EPSILON = 1e-6


# This context may be entered again and again.
_NOTHING = nullcontext()


class Precision:
    """Lower precision of forward, backward and the optimizer step.

    Args:
        args: ``fp16``, ``bf16``.
        device: Device of the model.

    Raises:
        ConfigError: The device does not support the precision.
    """

    def __init__(self, args: TrainingArguments, device: torch.device) -> None:
        require_precision_support(args, capability_of(device))
        self._device = device.type
        self._dtype = torch.float16 if args.fp16 else torch.bfloat16 if args.bf16 else None
        self.scaler = torch.amp.GradScaler(self._device) if args.fp16 else None

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context for a forward pass."""
        if self._dtype is None:
            return _NOTHING
        return torch.autocast(self._device, self._dtype)

    def backward(self, loss: torch.Tensor) -> None:
        """Back-propagate the loss, scaled so that small fp16 gradients do not vanish."""
        scaled = loss if self.scaler is None else self.scaler.scale(loss)
        scaled.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def clip(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[nn.Parameter],
        max_norm: float,
    ) -> torch.Tensor:
        """Clip gradients to ``max_norm`` and return their total norm before clipping (a scalar).

        ``max_norm`` 0 measures without clipping.
        """
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        norm = total_norm(gradients)
        if hasattr(norm, "full_tensor"):  # Sharded gradients give one norm for all ranks.
            norm = norm.full_tensor()
        if max_norm > 0 and not _is_surely_within(norm, max_norm):
            clip_grads_with_norm_(parameters, max_norm, norm, foreach=True)
        return norm

    def zero_grad(
        self, optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]
    ) -> None:
        """Free the gradients of the optimizer's parameters and of the model's ``parameters``.

        Otherwise gradients of a parameter outside the optimizer would add up from step to step and
        change the norm to which all are clipped.
        """
        if type(optimizer).zero_grad is not torch.optim.Optimizer.zero_grad:
            optimizer.zero_grad(set_to_none=True)
        else:
            # The same as torch's method, but without the profiler record that torch opens.
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
        for parameter in parameters:
            parameter.grad = None

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Step the optimizer; return False if the step was skipped because fp16 overflowed."""
        if self.scaler is None:
            optimizer.step()
            return True
        scale_before = self.scaler.get_scale()
        self.scaler.step(optimizer)
        self.scaler.update()
        return self.scaler.get_scale() >= scale_before


def total_norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    """Return the 2-norm of all gradients (a scalar), bit-identical to ``get_total_norm``.

    Gradients of one device and dtype need no grouping. The grouping would take as long as the norm
    of a small model.
    """
    kinds = {
        (type(gradient), gradient.device, gradient.dtype, gradient.layout) for gradient in gradients
    }
    if len(kinds) != 1 or type(gradients[0]) is not torch.Tensor:
        return get_total_norm(gradients, foreach=True)
    norms = torch._foreach_norm(gradients)  # noqa: SLF001 - as get_total_norm does
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total.detach()


def _is_surely_within(norm: torch.Tensor, max_norm: float) -> bool:
    """Return whether clipping would multiply every gradient by one.

    Torch multiplies by ``max_norm / (norm + 1e-6)``, at most 1; a factor of 1 changes no bit. On
    an accelerator the answer is False, because the norm would need a wait.
    """
    return norm.device.type == "cpu" and norm.item() + _CLIP_EPSILON <= max_norm
