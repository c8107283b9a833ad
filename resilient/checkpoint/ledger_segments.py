"""Segments of the sample ledger in a repository, and the expected sample order of an epoch.

The ledger records the samples of each step. Segments are immutable and named after the checkpoint
whose save stores them. Garbage collection never deletes them. The manifest (table of contents) of a
checkpoint names its own segment by the segment's key and by the hash of the last record (head).
Every segment names the previous segment. With a near tier (fast local store), segments are in the
durable tier (permanent store), like tags and the records of attempts.

The audit of a ledger computes the order of an epoch again, without torch, and compares the ledger
with this order.
"""

from __future__ import annotations

import hashlib
from functools import partial
from typing import TYPE_CHECKING, Any

from resilient.checkpoint.fenced_put import put_fenced
from resilient.checkpoint.generations import check_fence
from resilient.checkpoint.verified_read import fetch
from resilient.format.document import DOCUMENT_BYTES_MAX
from resilient.format.keys import LEDGER, parse_segment
from resilient.format.ledger import decode_segment, encode_segment

if TYPE_CHECKING:
    from numpy import int64
    from numpy.typing import NDArray

    from resilient.format.ledger import Segment
    from resilient.storage.store import Store


def put_segment(store: Store, segment: Segment, token: str = "") -> None:
    """Store a segment; the manifest that names it is stored later.

    A second attempt to persist the same save stores the same bytes.

    Crash: the complete segment exists, or nothing. Without a manifest that names the segment,
        nothing was committed. If the run continues, a later segment repeats these records;
        otherwise they are abandoned.

    Args:
        store: Repository.
        segment: Segment that the save closes.
        token: Token of the claim that saves; empty compares the number alone.

    Raises:
        Fenced: Another claim replaced this claim; nothing was changed.
        StoreError: The store failed; the checkpoint will not be committed.
    """
    fence = partial(check_fence, store, segment.checkpoint.generation, token)
    put_fenced(store, segment.key, encode_segment(segment), fence)


def list_segments(store: Store) -> list[str]:
    """Return the keys of all segments, by generation and step.

    Crash: reads only.
    """
    return sorted(info.key for info in store.list(LEDGER) if parse_segment(info.key))


def read_segment(store: Store, key: str) -> Segment:
    """Read and verify a segment.

    Crash: reads only.

    Raises:
        KeyNotFound: There is none.
        IntegrityError: The segment is damaged, or belongs under another key.
    """
    return fetch(store, key, lambda data: decode_segment(data, key), DOCUMENT_BYTES_MAX)


def read_altered(store: Store, key: str) -> Segment:
    """Read a segment without checking its seal, to locate the change in it.

    Crash: reads only.

    Raises:
        KeyNotFound: There is none.
        IntegrityError: The object is no segment any more, or belongs under another key.
    """
    return decode_segment(store.get(key), key, is_sealed=False)


SAMPLES_MAX = 20_000_000
"""Largest dataset whose order is computed, which takes minutes; above, only digests are used."""


def random_order(samples: int, seed: int) -> NDArray[int64]:
    """Return the result of ``torch.randperm(samples)`` on the CPU from a generator of this seed.

    This is Fisher and Yates' shuffle from the front. Sample ``i`` changes places with a sample from
    ``i`` on. Its index is drawn as a 32-bit word of MT19937, modulo the number of these samples.
    The seed's low 32 bits start the generator as in Matsumoto and Nishimura's ``init_genrand``.
    """
    # Commands that only copy segments import this module, and do not need NumPy.
    import numpy as np

    if samples < 2:  # noqa: PLR2004 - there is nothing to shuffle
        return np.arange(samples, dtype=np.int64)
    # Only the legacy class seeds as `init_genrand` does.
    bits: Any = np.random.RandomState(seed % 2**32)._bit_generator  # noqa: SLF001 - as above
    words = bits.random_raw(samples - 1)
    distances = (words % np.arange(samples, 1, -1, dtype=np.uint64)).tolist()
    order = list(range(samples))
    for place, distance in enumerate(distances):
        swap_place = place + distance
        order[place], order[swap_place] = order[swap_place], order[place]
    return np.array(order, dtype=np.int64)


def order_digest(order: Any) -> str:
    """Return the SHA-256 of an order: indices as 64-bit little-endian integers, in hex."""
    import numpy as np

    return hashlib.sha256(np.ascontiguousarray(order, dtype="<i8").data).hexdigest()


def expected_digest(kind: str, samples: int, seed: int, epoch: int) -> str:
    """Return the digest of an epoch's order; empty if the order depends on more than the seed.

    Args:
        kind: Kind of sampling: ``random``, ``sequential``, or one that needs the samples.
        samples: Samples in the dataset.
        seed: Seed of the run's order.
        epoch: Number of the epoch.
    """
    import numpy as np

    if samples > SAMPLES_MAX:
        return ""
    if kind == "random":
        return order_digest(random_order(samples, seed + epoch))
    return order_digest(np.arange(samples)) if kind == "sequential" else ""
