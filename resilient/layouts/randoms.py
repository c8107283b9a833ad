"""Whether a random state is one that its generator takes (pure).

Source: ``random.setstate``, ``numpy.random.set_state`` and ``torch.random.set_rng_state``, which
raise at anything else.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

from resilient.layouts.pickled import Made, TensorRef

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from resilient.layouts.archives import Archive

WANTED = ("python", "numpy", "cpu")
"""What the Trainer of Transformers takes from each file without asking whether it is there."""
_PYTHON_VERSION, _PYTHON_NUMBERS = 3, 625
_NUMPY_WORDS = 624
_NUMPY_FIELDS = (3, 5)
_CPU_BYTES = 5056
_CPU_WORDS = 624
_CPU_HEAD = struct.Struct("<QiiQ")
"""The seed, how many words are left, whether it was seeded, and which word is next."""
OF_DEVICES = "the random state of CUDA"
"""What is lost with it: dropout on a GPU draws other numbers. CPUs take none of it."""
_DEVICE_KEYS = ("cuda", "torch_cuda_manual_seed")
_DEVICE_BYTES = ((16,), (8,))
"""A seed and how far it was drawn, or the seed alone."""
_OLDER_BYTES = 816
"""The state of a GPU before torch 2.1: 800 bytes of no use, the seed, and how far it was drawn."""
OLDER = "its state of CUDA has 816 bytes, as torch before 2.1 writes it: torch from 2.1 refuses it"
OLDER_HELP = "none: every copy has the same state, and only torch before 2.1 takes it"


def misfit(value: dict[Any, Any], kinds: dict[str, str]) -> str:
    """Return which state in a file no generator takes; empty when all are taken.

    Args:
        value: of the file.
        kinds: which generator each of its keys is for.
    """
    for name, state in value.items():
        kind = kinds.get(name, "") if isinstance(name, str) else ""
        takes = _TAKEN.get(kind)
        if takes and not takes(state):
            return f"its `{name}` is no state that the generator of {_OWNERS[kind]} takes"
    return ""


def unset(value: dict[Any, Any], kinds: dict[str, str], archive: Archive) -> str:
    """Return which state of torch's generator it refuses for what is in it; empty when none.

    Source: ``at::mt19937::is_valid``, and ``CPUGeneratorImplStateLegacy`` of ATen for the layout.

    Args:
        value: of the file; ``misfit`` finds nothing.
        kinds: which generator each of its keys is for.
        archive: that reads the bytes.

    Raises:
        StoreError: it could not be read.
    """
    for name, state in value.items():
        if not isinstance(name, str) or kinds.get(name) != "cpu":
            continue
        head = archive.head(state, _CPU_HEAD.size)
        if len(head) != _CPU_HEAD.size:
            continue
        _, left, is_seeded, drawn = _CPU_HEAD.unpack(head)
        if not (is_seeded == 1 and 0 < left <= _CPU_WORDS and drawn <= _CPU_WORDS):
            return f"its `{name}` is no state that the generator of torch takes: it was never set"
    return ""


def odd_devices(states: Mapping[str, Any], *, is_alone: bool) -> Iterator[tuple[str, str]]:
    """Yield each file whose states of CUDA are lost or none, and why; tools log it and go on.

    Args:
        states: of each file.
        is_alone: whether one device is kept, and not a list of all that a process sees.
    """
    held = {name: _of_devices(one) for name, one in states.items()}
    for name, (key, state) in held.items():
        if not key:
            if others := [other for other, (its, _) in held.items() if its]:
                yield name, f"it has no state of CUDA, and {others[0]} has one"
            continue
        devices = [state] if is_alone else state
        is_taken = isinstance(devices, list | tuple) and all(map(_is_device, devices))
        if not is_taken or not devices:
            kept = "one device" if is_alone else "a list of devices"
            yield name, f"its `{key}` is no state of {kept}, as this many ranks keep it"


def has_devices(state: Any) -> bool:
    """Say whether a file has states of CUDA."""
    return bool(_of_devices(state)[0])


def has_older_devices(state: Any) -> bool:
    """Return True for a file whose states of CUDA torch before 2.1 wrote."""
    found = _of_devices(state)[1]
    devices = found if isinstance(found, list | tuple) else [found]
    return any(isinstance(one, TensorRef) and one.shape == (_OLDER_BYTES,) for one in devices)


def _of_devices(state: Any) -> tuple[str, Any]:
    value = state if isinstance(state, dict) else {}
    key = next((one for one in _DEVICE_KEYS if one in value), "")
    return key, value.get(key)


def _is_device(state: Any) -> bool:
    return isinstance(state, TensorRef) and state.dtype == "U8" and state.shape in _DEVICE_BYTES


def _is_python(state: Any) -> bool:
    if not isinstance(state, tuple) or len(state) != 3 or state[0] != _PYTHON_VERSION:  # noqa: PLR2004
        return False
    numbers = state[1]
    is_row = isinstance(numbers, tuple) and all(type(one) is int for one in numbers)
    return is_row and len(numbers) == _PYTHON_NUMBERS and 0 <= numbers[-1] < _PYTHON_NUMBERS


def _is_numpy(state: Any) -> bool:
    if not isinstance(state, tuple) or len(state) not in _NUMPY_FIELDS or state[0] != "MT19937":
        return False
    shape = _shape(state[1])
    return shape is None or shape == (_NUMPY_WORDS,)


def _shape(array: Any) -> Any:
    """Return the shape of an array, None where this is kept in another way."""
    if isinstance(array, list | tuple):
        return (len(array),)
    state = array.state if isinstance(array, Made) else None
    return state[1] if isinstance(state, tuple) and len(state) > 1 else None


def _is_cpu(state: Any) -> bool:
    return isinstance(state, TensorRef) and state.dtype == "U8" and state.shape == (_CPU_BYTES,)


_TAKEN = {"python": _is_python, "numpy": _is_numpy, "cpu": _is_cpu}
_OWNERS = {"python": "Python", "numpy": "NumPy", "cpu": "torch"}
