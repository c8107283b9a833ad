"""Storage options for ``gs://`` and ``az://``: the names of ``s3://`` where they mean the same.

===================  =================================  ==========================================
ours                 gcsfs                              adlfs
===================  =================================  ==========================================
``endpoint``         ``endpoint_url``                   ``account_host``
``request_seconds``  ``requests_timeout`` (60)          ``read_timeout`` (60)
``connect_seconds``                                     ``connection_timeout`` (5)
``account`` ``key``                                     ``account_name`` ``account_key``
===================  =================================  ==========================================

Every other name is handed on as it is: ``token``, ``project`` (gcsfs), ``connection_string``,
``sas_token``, ``client_id`` (adlfs). What is not given, the libraries take from the standard
variables and the machine's identity. Values are never shown.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from resilient.storage.s3_options import S3Options

if TYPE_CHECKING:
    from collections.abc import Mapping

_SECONDS = S3Options()
_GCS = {"endpoint": "endpoint_url", "request_seconds": "requests_timeout"}
_AZURE = {
    "endpoint": "account_host",
    "request_seconds": "read_timeout",
    "connect_seconds": "connection_timeout",
    "account": "account_name",
    "key": "account_key",
}
_GCS_DEFAULTS = {"requests_timeout": _SECONDS.request_seconds}
_AZURE_DEFAULTS = {
    "read_timeout": _SECONDS.request_seconds,
    "connection_timeout": _SECONDS.connect_seconds,
}
_SPELLED = {
    "gs": (_GCS, _GCS_DEFAULTS),
    "gcs": (_GCS, _GCS_DEFAULTS),
    "az": (_AZURE, _AZURE_DEFAULTS),
    "abfs": (_AZURE, _AZURE_DEFAULTS),
    "abfss": (_AZURE, _AZURE_DEFAULTS),
}


def for_cloud(protocol: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of the library behind ``protocol``; others get what was given.

    Args:
        protocol: of the URL.
        given: storage options.
    """
    names, defaults = _SPELLED.get(protocol, ({}, {}))
    return {**defaults, **{names.get(name, name): value for name, value in given.items()}}
