"""Redirection of calls from a module to the FSDP1 wrapper around the module.

FSDP1 puts a wrapper around a module and shards the module's parameters. The result is correct only
if the wrapper is called. If code calls the module itself (evaluation, ``generate``, a user's
callback), this module therefore redirects the call to the wrapper.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, cast
from weakref import ref

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from resilient.state_dict.snapshot import Stateful


class ParameterName(NamedTuple):
    """One name of a parameter; a tied parameter has several names.

    Attributes:
        name: Name in the module.
        number: ``id`` of the parameter; another object may get this id after the parameter is
            freed.
        numbers: Number of elements, on all ranks together.
        is_trained: Whether the parameter requires a gradient.
        held: Weak reference to the parameter.
    """

    name: str
    number: int
    numbers: int
    is_trained: bool
    held: ref[nn.Parameter]


class ForwardRedirect:
    """Callable that redirects calls of a module to its wrapper, which then calls the module.

    Args:
        module: Inner module; its calls are redirected from now on.
        wrapper: Wrapper that passes its arguments to ``module``.
        tensors: The module's parameters before it was wrapped.
    """

    def __init__(
        self, module: nn.Module, wrapper: nn.Module, tensors: Sequence[ParameterName]
    ) -> None:
        self.wrapper = wrapper
        self.named = tensors
        self._compute: Callable[..., Any] = (
            module._compiled_call_impl or module._call_impl  # noqa: SLF001 - torch has no public way
        )
        self._is_inside = False
        wrapper.register_forward_pre_hook(self._enter)
        wrapper.register_forward_hook(self._leave, always_call=True)
        # torch calls this attribute before hooks and `forward`; `Module.compile` also sets it.
        module._compiled_call_impl = self  # noqa: SLF001

    @property
    def numbers(self) -> int:
        """Number of trained elements of the module."""
        return sum(
            {entry.number: entry.numbers for entry in self.named if entry.is_trained}.values()
        )

    def _enter(self, *_: object) -> None:
        self._is_inside = True

    def _leave(self, *_: object) -> None:
        self._is_inside = False

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return the result of the module inside its wrapper."""
        call = self._compute if self._is_inside else self.wrapper
        return call(*inputs, **kwargs)


def find_redirect(module: nn.Module) -> ForwardRedirect | None:
    """Return the redirection of a module's calls; None if there is none."""
    call = module._compiled_call_impl  # noqa: SLF001 - see above
    return call if isinstance(call, ForwardRedirect) else None


def named_in(model: nn.Module) -> list[ParameterName]:
    """Return the parameters of a model by their names without a wrapper."""
    detour = find_redirect(model)
    if detour is not None:
        return list(detour.named)
    return [
        ParameterName(
            name, id(parameter), parameter.numel(), parameter.requires_grad, ref(parameter)
        )
        for name, parameter in model.named_parameters(remove_duplicate=False)
    ]


def stateful_of(model: nn.Module) -> Stateful:
    """Return a stateful with the state of a model by the names of the model's parameters."""
    detour = find_redirect(model)
    if detour is None:
        return model
    # Import torch's FSDP1 modules only for a model with FSDP1, because the import is slow.
    from resilient.state_dict.fsdp1 import Fsdp1Model

    return cast("Stateful", Fsdp1Model(detour.wrapper))
