"""Whether an optimizer's groups and states belong together, as torch takes them (pure).

Source: ``torch.optim.Optimizer.load_state_dict``, which raises at another number of groups, and
takes the rest as it is.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any

from resilient.layouts.pickled import TensorRef
from resilient.layouts.values import Cure, Problem

if TYPE_CHECKING:
    from collections.abc import Iterator

    from resilient.layouts.archives import Archive

_EMPTIED = "it has nothing of any parameter: what it had gathered of each begins anew"
_REPAIR = "resilient ckpt repair {path}"
_SCALARS = (
    *("lr", "initial_lr", "betas", "eps", "weight_decay", "momentum", "dampening", "alpha"),
    *("lr_decay", "rho", "lambd"),
)
"""Of these a number that is not finite makes every weight NaN; others may have a bound that is."""
_OPTIONS = set(_SCALARS) - {"initial_lr"}
_OF_ADAM = {"betas", "eps", "weight_decay"}
_ADAM_ALONE = {"amsgrad", "maximize", "capturable", "differentiable"}
"""What the groups of Adam as torch has it say, and nobody else's."""
_STATE_OF_ADAM = ("step", "exp_avg", "exp_avg_sq")
"""What the first step of Adam asks of each state that is not empty."""
_KEPT_OF_EACH = {
    *("exp_avg", "exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "sum", "acc_delta"),
    *("prev", "state1", "exp_avg_sq_row"),
}
"""What is kept of every parameter that a gradient reached; L-BFGS keeps all with its first one."""
_GROUPS_MAX = 4096


def odd_groups(place: str, value: Any, archive: Archive) -> list[Problem]:
    """Return what of ``{state, param_groups}`` no optimizer goes on from as it was.

    Args:
        place: the file.
        value: of it.
        archive: that reads its numbers.

    Raises:
        StoreError: it could not be read.
    """
    groups, state = value["param_groups"], value["state"]
    if not groups or not all(isinstance(one, dict) for one in groups):
        return [_fatal(place, "it has no parameter groups, and its tool stops at that")]
    sayings = (
        *_without(groups[:_GROUPS_MAX], state),
        *_of_another(groups, state),
        *_strangers(groups, state),
        *_not_finite(groups[:_GROUPS_MAX], archive),
    )
    return [_fatal(place, one) for one in sayings]


def odd_optimizer(
    place: str, value: Any, archive: Archive, *, is_begun: bool = True
) -> list[Problem]:
    """Return what of ``{state, param_groups}`` is wrong, and whether nothing is in it.

    Args:
        place: the file.
        value: of it.
        archive: that reads its numbers.
        is_begun: whether steps were made; before that nothing is gathered yet.

    Raises:
        StoreError: it could not be read.
    """
    odd = odd_groups(place, value, archive)
    if is_begun and _is_emptied(value, archive):
        odd.append(Problem(place, _EMPTIED, "the optimizer's state", cure=Cure.COPY))
    return [*odd, *_few(place, value)]


def _few(place: str, value: Any) -> list[Problem]:
    """Return whether there are states of some of the parameters alone."""
    states = [one for one in value["state"].values() if isinstance(one, dict)]
    held = (one.get("params") for one in value["param_groups"] if isinstance(one, dict))
    count = sum(len(one) for one in held if isinstance(one, list | tuple))
    if not 0 < len(states) < count or not _KEPT_OF_EACH.intersection(*states[:1]):
        return []
    lacking = count - len(states)
    what = (
        f"it has no state of {lacking} of its {count} parameters: unless no gradient ever reached "
        "them, what it had gathered of each begins anew"
    )
    loses = f"the optimizer's state of {lacking} parameters"
    return [Problem(place, what, loses, cure=Cure.COPY)]


def _is_emptied(value: Any, archive: Archive) -> bool:
    """Say whether an optimizer that keeps something of each parameter has nothing of any."""
    first: Any = next(iter(value["param_groups"]), {})
    if value["state"] or not isinstance(first, dict):
        return False
    return "betas" in first or bool(archive.number(first.get("momentum")))


def _strangers(groups: list[dict[Any, Any]], state: dict[Any, Any]) -> Iterator[str]:
    """Yield a parameter in two places, and a state that is of none."""
    named = [
        one
        for group in groups
        if isinstance(held := group.get("params"), list | tuple)
        for one in held
        if isinstance(one, int | str)
    ]
    own = set(named)
    if len(own) != len(named):
        twice = Counter(named).most_common(1)[0][0]
        yield f"parameter `{str(twice)[:80]}` is twice in its groups: another goes on without state"
    elif own == set(range(len(own))) and named != sorted(named, key=int):
        yield "the numbers of its parameters are not in order: torch would give them to others"
    lost = [key for key, held in state.items() if isinstance(held, dict) and key not in own]
    if own and lost:
        yield (
            f"the state of `{str(lost[0])[:80]}` is of no parameter in its groups: whose it was "
            "goes on without"
        )


def _without(groups: list[dict[Any, Any]], state: dict[Any, Any]) -> Iterator[str]:
    """Yield the first option that a group lacks and its optimizer does not put in by itself."""
    keys = [{one for one in group if isinstance(one, str)} for group in groups]
    is_adam = any(isinstance(one, dict) and "exp_avg_sq" in one for one in state.values())
    for at, own in enumerate(keys):
        wanted = {"lr"} | (_OF_ADAM if is_adam and _ADAM_ALONE <= own else set())
        for other in keys:
            # Groups of an optimizer that does with some as another one does differ both ways.
            wanted |= (other & _OPTIONS) if own < other else set()
        if lacking := sorted(wanted - own):
            yield f"its group {at} has no `{lacking[0]}`: the first step stops at that"
            return


def _of_another(groups: list[dict[Any, Any]], state: dict[Any, Any]) -> Iterator[str]:
    """Yield the first state that lacks what the groups' optimizer asks of it: torch's Adam."""
    if not all(_OF_ADAM | _ADAM_ALONE <= group.keys() for group in groups):
        return
    for key, held in state.items():
        lacking = [one for one in _STATE_OF_ADAM if one not in held] if _is_full(held) else []
        if lacking:
            yield (
                f"its groups are of Adam, and the state of `{str(key)[:80]}` has no "
                f"`{lacking[0]}`: the first step stops at that"
            )
            return


def _is_full(held: Any) -> bool:
    return isinstance(held, dict) and bool(held)


def _not_finite(groups: list[dict[Any, Any]], archive: Archive) -> Iterator[str]:
    for at, group in enumerate(groups):
        for name in _SCALARS:
            held = group.get(name)
            for one in held if isinstance(held, list | tuple) else (held,):
                number = archive.number(one) if isinstance(one, TensorRef | float) else None
                if number is not None and not math.isfinite(number):
                    yield f"`{name}` of its group {at} is {number}: a step spoils all weights"
                    return


def _fatal(place: str, what: str) -> Problem:
    return Problem(place, what, is_fatal=True, help=_REPAIR)
