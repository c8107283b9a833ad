"""The order of an epoch computed anew, without torch, to hold the ledger against it."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

SAMPLES_MAX = 20_000_000
"""Computing the order of more takes minutes; then an audit goes by its digest alone."""


def random_order(samples: int, seed: int) -> NDArray[np.int64]:
    """Return what ``torch.randperm(samples)`` draws on the CPU from a generator of this seed.

    Fisher and Yates' shuffle from the front: sample ``i`` changes places with one of those from
    ``i`` on, drawn as a 32-bit word of MT19937 modulo their number; the seed's low 32 bits begin
    the generator as in Matsumoto and Nishimura's ``init_genrand``.
    """
    if samples < 2:  # noqa: PLR2004 - there is nothing to shuffle
        return np.arange(samples, dtype=np.int64)
    # The legacy class alone seeds as `init_genrand` does.
    bits: Any = np.random.RandomState(seed % 2**32)._bit_generator  # noqa: SLF001 - as above
    words = bits.random_raw(samples - 1)
    ahead = (words % np.arange(samples, 1, -1, dtype=np.uint64)).tolist()
    order = list(range(samples))
    for place, distance in enumerate(ahead):
        other = place + distance
        order[place], order[other] = order[other], order[place]
    return np.array(order, dtype=np.int64)


def order_digest(order: Any) -> str:
    """Return the SHA-256 of an order: indices as 64-bit little-endian integers, in hex."""
    return hashlib.sha256(np.ascontiguousarray(order, dtype="<i8").data).hexdigest()


def expected_digest(kind: str, samples: int, seed: int, epoch: int) -> str:
    """Return the digest that an epoch's order must have; empty where it takes more than a seed.

    Args:
        kind: of sampling: ``random``, ``sequential``, or one that needs the samples themselves.
        samples: in the dataset.
        seed: of the run's order.
        epoch: which one.
    """
    if samples > SAMPLES_MAX:
        return ""
    if kind == "random":
        return order_digest(random_order(samples, seed + epoch))
    return order_digest(np.arange(samples)) if kind == "sequential" else ""
