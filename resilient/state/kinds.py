"""Whether an optimizer can go on from what was saved of one: that of another kind it must refuse.

torch takes any state for any optimizer, and the first step then ends in a ``KeyError``, or in
moments that mean something else. What is told of groups says the kind, and so does what is kept of
each parameter. Options that come and go between releases of torch say nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import torch

_SAYS_NOTHING = frozenset(
    {
        *("params", "param_names", "lr", "weight_decay", "initial_lr"),
        # How a step is computed, and what one release or package of a kind has alone.
        *("foreach", "fused", "capturable", "differentiable", "maximize"),
        *("amsgrad", "bias_correction", "decoupled_weight_decay", "step"),
        # What torch's schedules leave in a group.
        *("max_lr", "min_lr", "swa_lr", "base_momentum", "initial_momentum"),
        *("max_momentum", "min_momentum"),
    }
)

_TWO_MOMENTS = frozenset({"exp_avg", "exp_avg_sq"})
_KEPT = {
    "ASGD": frozenset({"ax", "eta", "mu"}),
    "Adadelta": frozenset({"acc_delta", "square_avg"}),
    "Adagrad": frozenset({"sum"}),
    "Adam": _TWO_MOMENTS,
    "AdamW": _TWO_MOMENTS,
    "Adamax": frozenset({"exp_avg", "exp_inf"}),
    "NAdam": _TWO_MOMENTS | {"mu_product"},
    "RAdam": _TWO_MOMENTS,
    "RMSprop": frozenset({"square_avg"}),
    "Rprop": frozenset({"prev", "step_size"}),
    "SparseAdam": _TWO_MOMENTS,
}
"""What torch's own optimizers cannot make the next step without, once they made one."""


def require_same_kind(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Raise unless an optimizer can go on from what was saved of one.

    Args:
        optimizer: what would take the state.
        saved: ``state`` by parameter and ``param_groups``; only the names in it are looked at.

    Raises:
        ValueError: it is of another kind.
    """
    name = type(optimizer).__name__
    groups: Sequence[Mapping[str, Any]] = optimizer.param_groups
    own, found = _told(groups), _told(saved["param_groups"])
    missing = (optimizer.defaults.keys() & own) - found
    strange = found - own - optimizer.defaults.keys()
    if missing and strange:
        raise ValueError(
            f"it was saved by an optimizer that is told {_listed(found)}, and {name} is told "
            f"{_listed(own)}; make the optimizer that was saved"
        )
    needed = _KEPT.get(name) if type(optimizer).__module__.startswith("torch.optim.") else None
    # The user may keep values of another form in the state, under keys that name no parameter.
    members = {one for group in saved["param_groups"] for one in group["params"]}
    for parameter, kept in saved["state"].items():
        if needed and parameter in members and kept and not needed <= kept.keys():
            raise ValueError(
                f"it was saved by an optimizer that keeps {_listed(kept)} of `{parameter}`, and "
                f"{name} goes on from {_listed(needed)}; make the optimizer that was saved"
            )


def _told(groups: Iterable[Mapping[str, Any]]) -> set[str]:
    """Return what groups are told that says the kind of their optimizer."""
    return {name for group in groups for name in group} - _SAYS_NOTHING


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names)) or "nothing of its own"
