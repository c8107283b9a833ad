"""Gradients sent in fewer bytes: DDP's communication hooks, with the state that they keep."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from resilient.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch
    from torch.nn.parallel import DistributedDataParallel

    from resilient.state_dict.snapshot import Part

HOOKS = ("no", "fp16", "bf16", "power_sgd", "batched_power_sgd")
WRAPPERS = ("no", "fp16", "bf16")
PARTS = ("gradient_compression", "gradient_errors")
_HOMES = "torch.distributed.algorithms.ddp_comm_hooks"
_KEEPS = ("use_error_feedback", "warm_start")
_OPTIONS = (
    *("matrix_approximation_rank", "start_powerSGD_iter", "min_compression_rate"),
    *("use_error_feedback", "warm_start", "orthogonalization_epsilon", "random_seed"),
    *("batch_tensors_with_same_shape", "compression_stats_logging_frequency"),
)


@dataclass(frozen=True, slots=True)
class Compression:
    """How gradients are sent.

    Attributes:
        hook: one of ``HOOKS``.
        wrapper: in which dtype a PowerSGD hook gets and sends them; one of ``WRAPPERS``.
        options: of ``PowerSGDState``.
    """

    hook: str = "no"
    wrapper: str = "no"
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_low_rank(self) -> bool:
        """Whether the hook is one of PowerSGD, which keeps a state."""
        return self.hook == "power_sgd"

    @property
    def remembers(self) -> bool:
        """Whether earlier gradients are in what is sent of later ones."""
        return self.is_low_rank and any(self.options.get(one, True) for one in _KEEPS)


def check_compression(compression: Compression) -> None:
    """Refuse options that the hook does not have.

    Raises:
        ConfigError: names them.
    """
    unknown = sorted(set(compression.options) - set(_OPTIONS))
    if unknown:
        raise ConfigError(
            f"`ddp_comm_state_option`: PowerSGD has no {', '.join(unknown)}; "
            f"it has {', '.join(_OPTIONS)}"
        )
    if not compression.is_low_rank and (compression.options or compression.wrapper != "no"):
        raise ConfigError(
            f"`ddp_comm_hook`={compression.hook!r} has no options and no wrapper: leave "
            "`ddp_comm_state_option` and `ddp_comm_wrapper` out, or write power_sgd"
        )
    start = compression.options.get("start_powerSGD_iter", 1000)
    if any(compression.options.get(one, True) for one in _KEEPS) and start < 2:  # noqa: PLR2004
        raise ConfigError(
            f"`start_powerSGD_iter`={start!r} is not accepted: torch wants at least 2 with "
            "error feedback or warm start"
        )


def compress(
    model: DistributedDataParallel, compression: Compression, layout: str
) -> dict[str, Part]:
    """Make DDP send gradients through a hook, and return what the hook keeps as parts.

    Args:
        model: before its first backward pass.
        compression: how.
        layout: what decides how gradients lie in buckets; a state of another layout is dropped.
    """
    from resilient.state_dict.snapshot import Part

    if compression.hook == "no":
        return {}
    state: Any = None
    if compression.is_low_rank:
        power = import_module(f"{_HOMES}.powerSGD_hook")
        state = power.PowerSGDState(process_group=None, **compression.options)
    model.register_comm_hook(state, _hook(compression))
    if state is None:
        return {}
    shared, own = PowerSGDState(state, layout), ErrorFeedback(state, layout)
    return {
        PARTS[0]: Part(shared, optional=True),
        PARTS[1]: Part(own, scope="rank", optional=True),
    }


def _hook(compression: Compression) -> Callable[[Any, Any], torch.futures.Future[torch.Tensor]]:
    default = import_module(f"{_HOMES}.default_hooks")
    power = import_module(f"{_HOMES}.powerSGD_hook")
    hooks: dict[str, Callable[[Any, Any], Any]] = {
        "fp16": default.fp16_compress_hook,
        "bf16": default.bf16_compress_hook,
        "power_sgd": power.powerSGD_hook,
    }
    hook = hooks[compression.hook]
    if compression.wrapper != "no":
        hook = getattr(default, f"{compression.wrapper}_compress_wrapper")(hook)
    # DDP refuses torch's own hook for bf16 by its name unless there is NCCL; gloo can do it.
    return lambda state, bucket: hook(state, bucket)  # noqa: PLW0108 - for its name


class PowerSGDState:
    """What all ranks know of PowerSGD: the step, the random stream, the low-rank factors.

    Args:
        state: torch's ``PowerSGDState``.
        layout: of the buckets.
    """

    def __init__(self, state: Any, layout: str) -> None:
        self._state = state
        self._layout = layout

    def state_dict(self) -> dict[str, Any]:
        """Return it; factors by the number of their bucket."""
        state = self._state
        return {
            "layout": self._layout,
            "iteration": state.iter,
            "random": state.rng.get_state(legacy=False),
            "p": _by_text(state.p_memory_dict),
            "q": _by_text(state.q_memory_dict),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take it back; without the factors if gradients lie in other buckets now."""
        state = self._state
        state.iter = state_dict["iteration"]
        state.rng.set_state(state_dict["random"])
        fits = state_dict["layout"] == self._layout
        state.p_memory_dict = _by_number(state_dict["p"]) if fits else {}
        state.q_memory_dict = _by_number(state_dict["q"]) if fits else {}


class ErrorFeedback:
    """What this rank's compression has left out and adds to its next gradients.

    Args:
        state: torch's ``PowerSGDState``.
        layout: of the buckets.
    """

    def __init__(self, state: Any, layout: str) -> None:
        self._state = state
        self._layout = layout

    def state_dict(self) -> dict[str, Any]:
        """Return it by the number of the bucket."""
        return {"layout": self._layout, "errors": _by_text(self._state.error_dict)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take it back, unless gradients lie in other buckets now."""
        fits = state_dict["layout"] == self._layout
        self._state.error_dict = _by_number(state_dict["errors"]) if fits else {}


def _by_text(tensors: Mapping[int, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {str(number): tensor for number, tensor in tensors.items()}


def _by_number(tensors: Mapping[str, torch.Tensor]) -> dict[int, torch.Tensor]:
    return {int(number): tensor.clone() for number, tensor in tensors.items()}
