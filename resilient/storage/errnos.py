"""What an errno means to someone who stores objects."""

from __future__ import annotations

import errno

from resilient.errors import StoreDenied, StoreError, StoreFull, StoreUnavailable

_FULL = (errno.ENOSPC, errno.EDQUOT)
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)
# A network file system or an object store that comes back by itself. EIO is not among them: the
# device has lost something, and only a person can say what.
_PASSING = (
    errno.EAGAIN,
    errno.EBUSY,
    errno.ECONNABORTED,
    errno.ECONNREFUSED,
    errno.ECONNRESET,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.EINTR,
    errno.EMFILE,
    errno.ENETDOWN,
    errno.ENETUNREACH,
    errno.ENFILE,
    errno.ENOBUFS,
    errno.ENOMEM,
    errno.ENOTCONN,
    errno.EPIPE,
    errno.EREMOTEIO,
    errno.ESTALE,
    errno.ETIMEDOUT,
)
_KINDS: dict[int, type[StoreError]] = {
    **dict.fromkeys(_FULL, StoreFull),
    **dict.fromkeys(_DENIED, StoreDenied),
    **dict.fromkeys(_PASSING, StoreUnavailable),
}


def kind_of(error: OSError) -> type[StoreError]:
    """Return the class of error that ``error`` is to a user of a store."""
    if isinstance(error, TimeoutError | ConnectionError):
        return StoreUnavailable
    if isinstance(error, PermissionError):
        return StoreDenied
    return _KINDS.get(error.errno or 0, StoreError)
