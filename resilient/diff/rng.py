"""States of random generators in a common form, and the number of draws between two states.

All functions are pure.

Sources of the layouts:

* MT19937 of Matsumoto and Nishimura as CPython and NumPy store it: 624 words and a position.
* ``at::CPUGeneratorImplState`` of torch, 5056 bytes: seed u64, words left u32, seeded u32, next
  u64, 624 words of u64, then cached normals.
* Philox of ``at::CUDAGeneratorImpl``: seed u64, offset u64.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import numpy as np

from resilient.diff.model import RandomChange, RngState

if TYPE_CHECKING:
    from collections.abc import Mapping

WORDS = 624
AHEAD_WORDS_MAX = 4_000_000
"""Search limit in words for the distance of two states, some tenths of a second."""
_TORCH_BYTES = 5056
_TORCH_HEAD = struct.Struct("<QIIQ")
_TORCH_NORMALS = struct.Struct("<3di4xf?3x")
_PHILOX = struct.Struct("<QQ")


def of_python(value: Any) -> RngState | None:
    """Return the state of ``random.getstate()``: version, 624 words with the position, a normal."""
    if not isinstance(value, list | tuple) or len(value) != 3:  # noqa: PLR2004
        return None
    words, cached = value[1], value[2]
    if not isinstance(words, list | tuple) or len(words) != WORDS + 1:
        return None
    if not all(type(word) is int and 0 <= word < 1 << 32 for word in words):
        return None
    return RngState(_packed(words[:WORDS]), words[WORDS], repr(cached).encode())


def of_numpy(key: bytes, position: Any, has_gauss: Any, gauss: Any) -> RngState | None:
    """Return the state of NumPy's global generator; ``key`` is its words as bytes."""
    if len(key) != 4 * WORDS or type(position) is not int:
        return None
    return RngState(key, position, repr(float(gauss)).encode() if has_gauss else b"")


def of_torch(data: bytes) -> RngState | None:
    """Return the state in the bytes of ``torch.get_rng_state()``."""
    if len(data) != _TORCH_BYTES:
        return None
    _, words_left, _, following = _TORCH_HEAD.unpack_from(data)
    wide = np.frombuffer(data, "<u8", WORDS, _TORCH_HEAD.size)
    *normals, is_valid, single, is_single = _TORCH_NORMALS.unpack_from(
        data, _TORCH_HEAD.size + 8 * WORDS
    )
    cached = (normals if is_valid else None, single if is_single else None)
    # With one remaining word, the next draw computes a new block for any value of `next`.
    position = WORDS if words_left == 1 else int(following)
    return RngState(wide.astype("<u4").tobytes(), position, repr(cached).encode())


def of_philox(data: bytes) -> RngState | None:
    """Return the state in the bytes of ``torch.cuda.get_rng_state()``."""
    if len(data) != _PHILOX.size:
        return None
    seed, offset = _PHILOX.unpack(data)
    return RngState(b"", offset, seed=seed)


def compare(
    before: Mapping[tuple[int, str], RngState], after: Mapping[tuple[int, str], RngState]
) -> tuple[RandomChange, ...]:
    """Compare each generator of both sides."""
    changes = []
    for rank, kind in sorted({*before, *after}):
        before_state, after_state = before.get((rank, kind)), after.get((rank, kind))
        if before_state is None or after_state is None:
            changes.append(
                RandomChange(rank, kind, None, is_in="a" if after_state is None else "b")
            )
            continue
        draws = draws_between(before_state, after_state)
        changes.append(
            RandomChange(rank, kind, _normal(before_state) == _normal(after_state), draws)
        )
    return tuple(changes)


def draws_between(before: RngState, after: RngState) -> int | None:
    """Return the number of words by which ``after`` is ahead of ``before``; negative if behind.

    The result is None if the streams differ, or the distance exceeds :data:`AHEAD_WORDS_MAX`.
    """
    if not before.words or not after.words:
        has_same_seed = before.seed is not None and before.seed == after.seed
        return after.position - before.position if has_same_seed else None
    blocks_ahead = _blocks_to(before.words, after.words)
    if blocks_ahead is None:
        blocks_behind = _blocks_to(after.words, before.words)
        if blocks_behind is None:
            return None
        blocks_ahead = -blocks_behind
    return blocks_ahead * WORDS + after.position - before.position


def _normal(state: RngState) -> RngState:
    """Return a state with the next block in place of a used-up block, as after the next draw."""
    if state.words and state.position >= WORDS:
        return RngState(_following(state.words), 0, state.rest)
    return state


def _blocks_to(words: bytes, goal: bytes) -> int | None:
    """Return the number of new blocks until the block equals ``goal``; None if too many."""
    if words == goal:
        return 0
    generator = _generator(words)
    goal_words = np.frombuffer(goal, "<u4")
    for count in range(1, AHEAD_WORDS_MAX // WORDS + 1):
        generator.random_raw(WORDS, output=False)
        if np.array_equal(generator.state["state"]["key"], goal_words):
            return count
    return None


def _following(words: bytes) -> bytes:
    generator = _generator(words)
    generator.random_raw(1, output=False)
    return _packed(generator.state["state"]["key"])


def _generator(words: bytes) -> Any:
    generator = np.random.MT19937()
    key = np.frombuffer(words, "<u4").astype(np.uint32)
    generator.state = {"bit_generator": "MT19937", "state": {"key": key, "pos": WORDS}}
    return generator


def _packed(words: Any) -> bytes:
    return np.asarray(words, dtype="<u4").tobytes()
