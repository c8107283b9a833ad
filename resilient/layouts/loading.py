"""Which call of torch loads a file, by the names in its pickle (pure).

Source: ``torch._weights_only_unpickler._get_allowed_globals`` of torch 2.13.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from resilient.layouts.callables import Effect, effect_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from resilient.layouts.pickled import Name

LOAD = "torch.load('{path}', weights_only=True)"
_LOAD_ALL = "torch.load('{path}', weights_only=False)"
_LOAD_NAMED = "torch.serialization.add_safe_globals([{names}]); " + LOAD
_NAMED_MAX = 4
_ALLOWED = {
    *("collections.OrderedDict", "collections.Counter", "_codecs.encode"),
    *("builtins.bytearray", "builtins.set", "builtins.complex"),
    *("__builtin__.bytearray", "__builtin__.set", "__builtin__.complex"),
}
_REFUSED = {
    *("torch.layout", "torch.dtype", "torch.Generator"),
    "torch._utils._rebuild_sparse_csr_tensor",
}


def how_to_load(names: Iterable[Name]) -> tuple[str, str]:
    """Return the call that loads a file, and what the safe one says no to; empty where it does not.

    Of code that nobody knows, or that is known to run commands, the safe call stays.

    Args:
        names: what its pickle would import.
    """
    stops = {one.dotted: effect_of(one) for one in names if not _is_allowed(one)}
    if not stops:
        return LOAD, ""
    shown = sorted(stops)
    more = f" and {len(shown) - 1} more" if shown[1:] else ""
    what = f"it names `{shown[0][:80]}`{more}: `torch.load` with `weights_only` stops at it"
    effects = set(stops.values())
    if effects == {Effect.LIBRARY} and len(shown) <= _NAMED_MAX:
        return _LOAD_NAMED.replace("{names}", ", ".join(shown)), what
    return _LOAD_ALL if effects <= {Effect.LIBRARY, Effect.REBUILDS} else LOAD, what


def _is_allowed(name: Name) -> bool:
    is_torch = name.module.partition(".")[0] == "torch" and effect_of(name) is Effect.REBUILDS
    return name.dotted in _ALLOWED or (is_torch and name.dotted not in _REFUSED)
