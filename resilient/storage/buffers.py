"""What a caller hands to a store, checked once and in one way."""

from __future__ import annotations

from typing import TYPE_CHECKING

from resilient.errors import StoreError

if TYPE_CHECKING:
    from resilient.storage.store import Data


def byte_view(data: Data, key: str = "") -> memoryview:
    """Return ``data`` as one flat view of bytes, copying nothing.

    Raises:
        StoreError: the buffer has gaps, or is not one.
    """
    try:
        view = memoryview(data)
        # An empty view of several dimensions cannot be cast.
        return view.cast("B") if view.nbytes else memoryview(b"")
    except TypeError as error:
        raise StoreError(
            f"cannot put `{key}`: the data is no contiguous buffer of bytes", key=key
        ) from error


def check_range(key: str, start: int, length: int) -> None:
    """Refuse a range that begins or ends before it starts.

    Raises:
        StoreError: ``start`` or ``length`` is negative.
    """
    if start < 0 or length < 0:
        raise StoreError(
            f"cannot read `{key}`: the range of {length} bytes from {start} is negative", key=key
        )
