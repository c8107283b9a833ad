"""Put a segment of the ledger beside the lives, and read it back.

Segments are immutable, named after the checkpoint whose save puts them, and no rotation touches
them: a manifest names its own by key and head, and every segment names the one before. With tiers
they lie in the durable one, where lives and tags lie.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from resilient.format.document import DOCUMENT_BYTES_MAX
from resilient.format.ledger import decode_segment, encode_segment
from resilient.format.names import LEDGER, parse_segment
from resilient.vault.access.fetch import fetch
from resilient.vault.registry.fenced_put import put_fenced
from resilient.vault.registry.generations import check_fence

if TYPE_CHECKING:
    from resilient.format.ledger import Segment
    from resilient.storage.store import Store


def put_segment(store: Store, segment: Segment, token: str = "") -> None:
    """Store a segment; the manifest that names it comes after.

    A second attempt to persist the same save puts the same bytes.

    Crash: the segment is there, whole, or not. Without a manifest that names it, nothing was
    committed: the records of a run that goes on lie in a later segment as well, and those of one
    that was lost are abandoned.

    Args:
        store: the repository.
        segment: what the save closes.
        token: token of the claim that saves; empty compares the number alone.

    Raises:
        Fenced: another claim replaced this one; nothing was changed.
        StoreError: the store failed; the checkpoint will not be committed.
    """
    fence = partial(check_fence, store, segment.checkpoint.generation, token)
    put_fenced(store, segment.key, encode_segment(segment), fence)


def list_segments(store: Store) -> list[str]:
    """Return the keys of all segments, by generation and step.

    Crash: reads only.
    """
    return sorted(one.key for one in store.list(LEDGER) if parse_segment(one.key))


def read_segment(store: Store, key: str) -> Segment:
    """Return a segment as it was put.

    Crash: reads only.

    Raises:
        KeyNotFound: there is none.
        IntegrityError: it is damaged, or belongs under another key.
    """
    return fetch(store, key, lambda data: decode_segment(data, key), DOCUMENT_BYTES_MAX)


def read_altered(store: Store, key: str) -> Segment:
    """Return a segment whatever its seal says, to name what was changed in it.

    Crash: reads only.

    Raises:
        KeyNotFound: there is none.
        IntegrityError: it is no segment any more, or belongs under another key.
    """
    return decode_segment(store.get(key), key, is_sealed=False)
