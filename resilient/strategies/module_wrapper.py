"""A module that stays the outermost one although something was wrapped around it.

FSDP1 shards what is inside of a wrapper, and computes right only when that is called. Whoever
holds the module itself (evaluation, ``generate``, a callback of the user) calls the wrapper too,
without knowing it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, cast
from weakref import ref

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from resilient.state_dict.snapshot import Stateful


class Named(NamedTuple):
    """A name of a parameter; one that is tied has several.

    Attributes:
        name: in the module.
        number: ``id`` of the parameter, which another may have since.
        numbers: how many it holds, on all ranks together.
        is_trained: whether it requires a gradient.
        held: the parameter, as long as it is anywhere.
    """

    name: str
    number: int
    numbers: int
    is_trained: bool
    held: ref[nn.Parameter]


class ForwardRedirect:
    """What calling a module does: it calls the wrapper, which calls the module, which computes.

    Args:
        module: the one inside; its calls take the detour from now on.
        wrapper: calls ``module`` with what it is called with.
        named: the module's parameters as they were before it was wrapped.
    """

    def __init__(self, module: nn.Module, wrapper: nn.Module, named: Sequence[Named]) -> None:
        self.wrapper = wrapper
        self.named = named
        self._compute: Callable[..., Any] = (
            module._compiled_call_impl or module._call_impl  # noqa: SLF001 - torch has no public way
        )
        self._is_inside = False
        wrapper.register_forward_pre_hook(self._enter)
        wrapper.register_forward_hook(self._leave, always_call=True)
        # What torch looks up for each call before hooks and forward; `Module.compile` sets it too.
        module._compiled_call_impl = self  # noqa: SLF001

    @property
    def numbers(self) -> int:
        """How many numbers of the module are trained."""
        return sum({one.number: one.numbers for one in self.named if one.is_trained}.values())

    def _enter(self, *_: object) -> None:
        self._is_inside = True

    def _leave(self, *_: object) -> None:
        self._is_inside = False

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Return what the module computes inside of its wrapper."""
        call = self._compute if self._is_inside else self.wrapper
        return call(*inputs, **named)


def find_redirect(module: nn.Module) -> ForwardRedirect | None:
    """Return the way that calls of a module take; None if they go straight to it."""
    call = module._compiled_call_impl  # noqa: SLF001 - see above
    return call if isinstance(call, ForwardRedirect) else None


def named_in(model: nn.Module) -> list[Named]:
    """Return the parameters of a model by the names that they have without a wrapper."""
    detour = find_redirect(model)
    if detour is not None:
        return list(detour.named)
    return [
        Named(name, id(one), one.numel(), one.requires_grad, ref(one))
        for name, one in model.named_parameters(remove_duplicate=False)
    ]


def stateful_of(model: nn.Module) -> Stateful:
    """Return what has the state of a model by the names of its own parameters."""
    detour = find_redirect(model)
    if detour is None:
        return model
    # Only FSDP1 pays for loading torch's part about it.
    from resilient.state_dict.fsdp1 import Fsdp1Model

    return cast("Stateful", Fsdp1Model(detour.wrapper))
