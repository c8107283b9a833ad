"""Mapping of OS error numbers and exceptions of client libraries to subclasses of StoreError."""

from __future__ import annotations

import errno
import re
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module

from resilient.errors import StoreDenied, StoreError, StoreFull, StoreUnavailable

_FULL = (errno.ENOSPC, errno.EDQUOT)
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)
# A network file system or an object store can recover from these by itself. EIO is not included:
# the device lost data, and only a person can find out which.
_TRANSIENT = (
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
    **dict.fromkeys(_TRANSIENT, StoreUnavailable),
}


def kind_of(error: OSError) -> type[StoreError]:
    """Return the kind of StoreError for an OSError."""
    if isinstance(error, TimeoutError | ConnectionError):
        return StoreUnavailable
    if isinstance(error, PermissionError):
        return StoreDenied
    return _KINDS.get(error.errno or 0, StoreError)


_AIOHTTP = "aiohttp:ClientError"
_S3 = ("botocore.exceptions:BotoCoreError", "botocore.exceptions:ClientError", _AIOHTTP)
_GCS = ("gcsfs.retry:HttpError", "google.auth.exceptions:GoogleAuthError", _AIOHTTP)
_AZURE = ("azure.core.exceptions:AzureError", _AIOHTTP)
_OWN_ERRORS = {
    "s3": _S3,
    "s3a": _S3,
    "gs": _GCS,
    "gcs": _GCS,
    "az": _AZURE,
    "abfs": _AZURE,
    "abfss": _AZURE,
    "http": (_AIOHTTP,),
    "https": (_AIOHTTP,),
    "hf": ("huggingface_hub.errors:HfHubHTTPError", "httpx:HTTPError", "httpx2:HTTPError"),
    "ftp": ("ftplib:Error",),
    "sftp": ("paramiko.ssh_exception:SSHException",),
    "ssh": ("paramiko.ssh_exception:SSHException",),
}

# The data was damaged or cut short in transit: the same request again solves it.
_BY_CODE: dict[str, type[StoreError]] = {
    "BadDigest": StoreUnavailable,
    "IncompleteBody": StoreUnavailable,
    "NoSuchBucket": StoreError,
    "RequestTimeout": StoreUnavailable,
    "SlowDown": StoreUnavailable,
    "XAmzContentChecksumMismatch": StoreUnavailable,
    "XAmzContentSHA256Mismatch": StoreUnavailable,
}
_BY_STATUS: dict[int, type[StoreError]] = {
    401: StoreDenied,
    403: StoreDenied,
    408: StoreUnavailable,
    409: StoreUnavailable,
    425: StoreUnavailable,
    429: StoreUnavailable,
    500: StoreUnavailable,
    502: StoreUnavailable,
    503: StoreUnavailable,
    504: StoreUnavailable,
    507: StoreFull,
}
# Names are looked up along the class's ancestors, so no package has to be installed.
_BY_NAME: dict[str, type[StoreError]] = {
    "ConnectionError": StoreUnavailable,  # botocore's own: no connection
    "HTTPClientError": StoreUnavailable,  # botocore: reset, timed out
    "ResponseParserError": StoreUnavailable,  # botocore: incomplete response
    "NoCredentialsError": StoreDenied,
    "PartialCredentialsError": StoreDenied,
    "CredentialRetrievalError": StoreDenied,
    "ClientConnectionError": StoreUnavailable,  # aiohttp
    "ClientPayloadError": StoreUnavailable,
    "ServiceRequestError": StoreUnavailable,  # azure
    "ServiceResponseError": StoreUnavailable,
    "ClientAuthenticationError": StoreDenied,
    "TransportError": StoreUnavailable,  # google and httpx
    "SSHException": StoreUnavailable,
    "error_temp": StoreUnavailable,  # ftplib
    "EOFError": StoreUnavailable,  # a connection that ended in the middle of a response
}
_UNREACHABLE = (StoreUnavailable, StoreDenied)
_DEPTH_MAX = 5


_UNTRUSTED = re.compile(r"CERTIFICATE_VERIFY_FAILED|InvalidCertificate")
TRUST_HINT = "set storage option `ca_file` to the PEM file of the certificate's authority"


def is_untrusted(text: str) -> bool:
    """Return whether a message of ``ssl`` or rustls reports an untrusted certificate.

    A retry does not help in this case. Without this check, an untrusted certificate would look like
    an unreachable server.
    """
    return _UNTRUSTED.search(text) is not None


def errors_of(protocol: str) -> tuple[type[Exception], ...]:
    """Return every class that the library behind ``protocol`` is known to raise."""
    error_types: list[type[Exception]] = [OSError, ValueError, EOFError, NotImplementedError]
    for name in _OWN_ERRORS.get(protocol, ()):
        module, _, attribute = name.partition(":")
        with suppress(ImportError, AttributeError):
            error_types.append(getattr(import_module(module), attribute))
    return tuple(error_types)


def kind_of_foreign(error: BaseException) -> type[StoreError]:
    """Classify ``error`` by S3 code, HTTP status, errno and class name, in this order."""
    error_type: type[StoreError] | None = _kind_of_response(code_of(error), status_of(error))
    if error_type is None and any(is_untrusted(str(cause)) for cause in _chain(error)):
        return StoreDenied
    if error_type is None and isinstance(error, OSError):
        error_type = kind_of(error)
    if error_type is None or error_type is StoreError:
        names = (cls.__name__ for cause in _chain(error) for cls in type(cause).__mro__)
        error_type = next((_BY_NAME[name] for name in names if name in _BY_NAME), error_type)
    return error_type or StoreError


def kind_of_answer(code: str, status: int) -> type[StoreError]:
    """Classify a server's response by its S3 code and HTTP status."""
    return _kind_of_response(code, status) or StoreError


def _kind_of_response(code: str, status: int) -> type[StoreError] | None:
    return _BY_CODE.get(code) or _BY_STATUS.get(status)


def is_missing(error: BaseException) -> bool:
    """Return whether ``error`` means a missing object, as opposed to a missing bucket."""
    if code_of(error) == "NoSuchBucket":
        return False
    # The HTTP filesystem also raises FileNotFoundError if the server was unreachable or refused.
    if error.__cause__ is not None and kind_of_foreign(error.__cause__) in _UNREACHABLE:
        return False
    absence_errors = FileNotFoundError | IsADirectoryError | NotADirectoryError
    return isinstance(error, absence_errors) or status_of(error) == 404  # noqa: PLR2004 - the HTTP status


def status_of(error: BaseException) -> int:
    """Return the HTTP status in ``error`` or its causes, or 0."""
    for cause in _chain(error):
        response = _response(cause).get("ResponseMetadata", {}).get("HTTPStatusCode")
        # aiohttp warns on access to ``code``, the old name of ``status``.
        names = ("status_code", "status" if hasattr(cause, "status") else "code")
        for status in (response, *(getattr(cause, name, None) for name in names)):
            if isinstance(status, int) and 400 <= status < 600:  # noqa: PLR2004 - HTTP's range
                return status
    return 0


def code_of(error: BaseException) -> str:
    """Return the S3 error code in ``error`` or its causes, or an empty string."""
    codes = (_response(cause).get("Error", {}).get("Code", "") for cause in _chain(error))
    return next((str(code) for code in codes if code), "")


def _response(error: BaseException) -> Mapping[str, dict[str, object]]:
    response = getattr(error, "response", None)
    return response if isinstance(response, Mapping) else {}


def _chain(error: BaseException) -> list[BaseException]:
    chain = [error]
    while len(chain) < _DEPTH_MAX and (cause := chain[-1].__cause__) is not None:
        chain.append(cause)
    return chain
