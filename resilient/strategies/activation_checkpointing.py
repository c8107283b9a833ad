"""Activation checkpointing, which recomputes the activations of layers in the backward pass."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, cast

from resilient.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch import nn

_LIBRARY_OPTIONS = ("every_n_layers", "offload")
_TORCH_OPTIONS = ("use_reentrant", "preserve_rng_state", "determinism_check", "early_stop", "debug")
_RECOMPUTES_ATTRIBUTE = "_resilient_recomputes"


@dataclass(frozen=True, slots=True)
class ActivationCheckpointing:
    """Options of activation checkpointing.

    Attributes:
        every_n_layers: Recompute the activations of every N-th layer.
        offload: Whether the inputs of the layers are kept in host memory.
        options: Options of ``torch.utils.checkpoint.checkpoint``.
    """

    every_n_layers: int = 1
    offload: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)


def read_recomputing(options_given: Mapping[str, Any] | None) -> ActivationCheckpointing:
    """Parse ``activation_checkpointing_kwargs``.

    Raises:
        ConfigError: A key is unknown or a value is not accepted.
    """
    options = dict(options_given or {})
    names = (*_LIBRARY_OPTIONS, *_TORCH_OPTIONS)
    for name in options:
        if name not in names:
            similar_names = get_close_matches(name, names, n=1)
            raise ConfigError(
                f"`activation_checkpointing_kwargs`: `{name}` is none of {', '.join(names)}"
                + (f"; did you mean `{similar_names[0]}`?" if similar_names else "")
            )
    layer_interval = options.pop("every_n_layers", 1)
    if not isinstance(layer_interval, int) or layer_interval < 1:
        raise ConfigError(f"`every_n_layers`={layer_interval!r} is not accepted: use at least 1")
    offload = bool(options.pop("offload", False))
    return ActivationCheckpointing(layer_interval, offload, {"use_reentrant": False, **options})


def recompute(
    model: nn.Module, settings: ActivationCheckpointing, layer_classes: Collection[str] = ()
) -> None:
    """Make the layers of ``model`` recompute their activations, in place.

    With ``layer_classes``, the layers are the modules of these classes. Otherwise the function
    calls the model's own method ``activation_checkpointing_enable`` or
    ``gradient_checkpointing_enable``. If the model has neither method, the layers are the items of
    the outermost ``ModuleList`` and ``Sequential``. Parameter names and the saved state stay the
    same.

    Raises:
        ConfigError: The model has no such layers.
    """
    if getattr(model, _RECOMPUTES_ATTRIBUTE, False):
        return
    if not layer_classes and _enable_in_model(model, settings):
        setattr(model, _RECOMPUTES_ATTRIBUTE, True)
        return
    layers = layers_of(model, layer_classes)
    if not layers:
        raise ConfigError(
            f"`activation_checkpointing` found no layers in `{type(model).__name__}`",
            hint="name their classes in fsdp_transformer_layer_cls_to_wrap, hold them in a "
            "ModuleList, or give the model a method gradient_checkpointing_enable",
        )
    for layer in layers[:: settings.every_n_layers]:
        # The hooks of the layer stay outside the recomputed function, so FSDP gathers the layer
        # once for the forward pass.
        layer.forward = _recomputed(layer.forward, settings)
    setattr(model, _RECOMPUTES_ATTRIBUTE, True)


def _enable_in_model(model: nn.Module, settings: ActivationCheckpointing) -> bool:
    """Enable checkpointing by the model's own method; return False if the model has none."""
    options = dict(settings.options)
    if hasattr(model, "activation_checkpointing_enable"):
        cast("Any", model).activation_checkpointing_enable(
            activation_checkpointing_kwargs=options,
            every_n_layers=settings.every_n_layers,
            offload=settings.offload,
        )
        return True
    if not hasattr(model, "gradient_checkpointing_enable"):
        return False
    if settings.every_n_layers > 1 or settings.offload:
        raise ConfigError(
            f"`{type(model).__name__}.gradient_checkpointing_enable` has no `every_n_layers` and "
            "no `offload`: omit them"
        )
    cast("Any", model).gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    return True


def layers_of(model: nn.Module, layer_classes: Collection[str] = ()) -> Sequence[nn.Module]:
    """Return the repeated modules of a model, in model order, without nested repeated modules."""
    from torch import nn

    if layer_classes:
        layers = [module for module in model.modules() if type(module).__name__ in layer_classes]
    else:
        lists = _outermost(
            [
                module
                for module in model.modules()
                if isinstance(module, nn.ModuleList | nn.Sequential)
            ]
        )
        layers = [layer for value in lists for layer in value.children()]
    return [module for module in _outermost(layers) if any(True for _ in module.parameters())]


def _outermost(modules: Sequence[nn.Module]) -> list[nn.Module]:
    inner_ids = {
        id(inner) for module in modules for inner in module.modules() if inner is not module
    }
    return [module for module in modules if id(module) not in inner_ids]


def _recomputed(
    forward: Callable[..., Any], settings: ActivationCheckpointing
) -> Callable[..., Any]:
    from torch import is_grad_enabled
    from torch.utils.checkpoint import checkpoint

    checkpointed: Any = partial(checkpoint, **settings.options)

    @wraps(forward)
    def recomputed(*inputs: Any, **kwargs: Any) -> Any:
        if not is_grad_enabled():
            return forward(*inputs, **kwargs)
        if settings.options["use_reentrant"] and kwargs:
            # torch passes only positional arguments to a reentrant checkpoint.
            return checkpointed(partial(forward, **kwargs), *inputs)
        with _saved_tensors_context(offload=settings.offload):
            return checkpointed(forward, *inputs, **kwargs)

    return recomputed


def _saved_tensors_context(*, offload: bool) -> AbstractContextManager[Any]:
    if not offload:
        return nullcontext()
    import torch
    from torch.autograd.graph import save_on_cpu

    return cast("AbstractContextManager[Any]", save_on_cpu(torch.cuda.is_available()))
