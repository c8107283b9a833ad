"""Gradient compression: DDP's communication hooks and their saved state."""

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
    """Compression of gradients.

    Attributes:
        hook: One of ``HOOKS``.
        wrapper: Dtype in which a PowerSGD hook gets and sends gradients; one of ``WRAPPERS``.
        options: Options of ``PowerSGDState``.
    """

    hook: str = "no"
    wrapper: str = "no"
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_low_rank(self) -> bool:
        """True if the hook is one of PowerSGD, which keeps a state."""
        return self.hook == "power_sgd"

    @property
    def remembers(self) -> bool:
        """True if sent gradients depend on earlier gradients."""
        return self.is_low_rank and any(self.options.get(option, True) for option in _KEEPS)


def check_compression(compression: Compression) -> None:
    """Reject options that the hook does not have.

    Raises:
        ConfigError: The message names them.
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
    if any(compression.options.get(option, True) for option in _KEEPS) and start < 2:  # noqa: PLR2004
        raise ConfigError(
            f"`start_powerSGD_iter`={start!r} is not accepted: torch wants at least 2 with "
            "error feedback or warm start"
        )


def compress(
    model: DistributedDataParallel, compression: Compression, layout: str
) -> dict[str, Part]:
    """Install a communication hook in DDP, and return the state of the hook as parts.

    Args:
        model: Model before its first backward pass.
        compression: Compression of gradients.
        layout: Description of the bucket layout; a state of another layout is dropped.
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
    shared_state, error_feedback = PowerSGDState(state, layout), ErrorFeedback(state, layout)
    return {
        PARTS[0]: Part(shared_state, optional=True),
        PARTS[1]: Part(error_feedback, scope="rank", optional=True),
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
    # DDP rejects torch's own bf16 hook by its name without NCCL, although gloo supports it.
    return lambda state, bucket: hook(state, bucket)  # noqa: PLW0108 - for its name


class PowerSGDState:
    """PowerSGD state that is equal on all ranks: step, random generator, low-rank factors.

    Args:
        state: torch's ``PowerSGDState``.
        layout: Description of the bucket layout.
    """

    def __init__(self, state: Any, layout: str) -> None:
        self._state = state
        self._layout = layout

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with the low-rank factors by bucket number."""
        state = self._state
        return {
            "layout": self._layout,
            "iteration": state.iter,
            "random": state.rng.get_state(legacy=False),
            "p": _by_text(state.p_memory_dict),
            "q": _by_text(state.q_memory_dict),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the state, without the factors if the bucket layout has changed."""
        state = self._state
        state.iter = state_dict["iteration"]
        state.rng.set_state(state_dict["random"])
        fits = state_dict["layout"] == self._layout
        state.p_memory_dict = _by_number(state_dict["p"]) if fits else {}
        state.q_memory_dict = _by_number(state_dict["q"]) if fits else {}


class ErrorFeedback:
    """Compression error of this rank, which is added to its next gradients.

    Args:
        state: torch's ``PowerSGDState``.
        layout: Description of the bucket layout.
    """

    def __init__(self, state: Any, layout: str) -> None:
        self._state = state
        self._layout = layout

    def state_dict(self) -> dict[str, Any]:
        """Return the errors by bucket number."""
        return {"layout": self._layout, "errors": _by_text(self._state.error_dict)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the errors, unless the bucket layout has changed."""
        fits = state_dict["layout"] == self._layout
        self._state.error_dict = _by_number(state_dict["errors"]) if fits else {}


def _by_text(tensors: Mapping[int, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {str(number): tensor for number, tensor in tensors.items()}


def _by_number(tensors: Mapping[str, torch.Tensor]) -> dict[int, torch.Tensor]:
    return {int(number): tensor.clone() for number, tensor in tensors.items()}
