"""Storage options for s3/gs/az in one vocabulary.

Storage options for S3: one vocabulary, spelled for each client. Values are never shown.

==================  ==============================================================
``endpoint``        URL of the server; Amazon's by default
``region``          for example ``us-east-1``
``key`` ``secret``  the credentials; ``token`` goes with temporary ones
``anon``            true: do not sign
``ca_file``         PEM file of whom to trust for https, besides the machine's own authorities
``client``          ``obstore`` or ``s3fs``; the fastest one that is installed by default
``connect_seconds`` until a connection must stand (5)
``request_seconds`` until one request of at most ``part_bytes`` must be answered (60)
``part_bytes``      least size of one part of a large object (32 MiB with obstore, 16 MiB with
                    s3fs); parts are of equal size
``parts_in_flight`` parts on their way at once: per store (obstore), per transfer (s3fs) (8)
``sign_bodies``     true: sign the SHA-256 of large bodies over https too, also where the server
                    holds a checksum against them
==================  ==============================================================

What is not given, both clients take from the standard ``AWS_*`` variables (``AWS_CA_BUNDLE`` for
``ca_file``) and from the machine's role. s3fs also reads the profiles in ``~/.aws``, and obstore
does not. Names that s3fs alone knows (``client_kwargs``, ``config_kwargs``, ``profile``, ...)
choose s3fs.

Storage options for ``gs://`` and ``az://``: the names of ``s3://`` where they mean the same.

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

import difflib
import os
import ssl
from dataclasses import dataclass, field, fields
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resilient.errors import ConfigError
from resilient.storage.transfer import MultipartConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

CLIENTS = ("obstore", "s3fs")
_ALIASES = {
    "endpoint_url": "endpoint",
    "region_name": "region",
    "access_key_id": "key",
    "aws_access_key_id": "key",
    "secret_access_key": "secret",
    "aws_secret_access_key": "secret",
    "session_token": "token",
    "aws_session_token": "token",
    "anonymous": "anon",
}
_S3FS_ALONE = frozenset(
    {
        "asynchronous", "cache_regions", "client_kwargs", "config_kwargs", "default_block_size",
        "default_cache_type", "default_fill_cache", "max_concurrency", "profile",
        "requester_pays", "s3_additional_kwargs", "session", "use_ssl", "version_aware",
    }
)  # fmt: skip
_PART_BYTES_MIN = 5 << 20

OBSTORE_PART_BYTES = 64 << 20
"""A file of a checkpoint is mostly one or two requests then: they cost time, and money."""


@dataclass(frozen=True, slots=True)
class S3Options:
    """What was given; the table above says what each name means. Shown, it tells nothing."""

    endpoint: str = field(default="", repr=False)
    region: str = field(default="", repr=False)
    key: str = field(default="", repr=False)
    secret: str = field(default="", repr=False)
    token: str = field(default="", repr=False)
    anon: bool = field(default=False, repr=False)
    ca_file: str = field(default="", repr=False)
    client: str = ""
    connect_seconds: float = 5.0
    request_seconds: float = 60.0
    part_bytes: int = 0
    parts_in_flight: int = MultipartConfig().in_flight
    sign_bodies: bool = False
    for_s3fs: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def parts(self, part_bytes: int) -> MultipartConfig:
        """Return the back-pressure of one transfer, in parts of ``part_bytes`` by default."""
        return MultipartConfig(self.part_bytes or part_bytes, self.parts_in_flight)


_KNOWN = {one.name: one for one in fields(S3Options) if one.name != "for_s3fs"}


def read_s3_options(given: Mapping[str, Any]) -> S3Options:
    """Return the options that ``given`` spells.

    Raises:
        ConfigError: a name is unknown or a value has the wrong type; names are shown, values
            are not.
    """
    known: dict[str, Any] = {}
    for_s3fs: dict[str, Any] = {}
    for name, value in given.items():
        word = _ALIASES.get(name, name)
        if word in _KNOWN:
            known[word] = _checked(word, value)
        elif name in _S3FS_ALONE:
            for_s3fs[name] = value
        else:
            raise ConfigError(
                f"storage option `{name}` is unknown for s3://{_did_you_mean(name)}",
                hint=f"use some of: {', '.join(_KNOWN)}",
            )
    options = S3Options(**known, for_s3fs=for_s3fs)
    _check_limits(options)
    return options


def for_s3fs(options: S3Options) -> dict[str, Any]:
    """Return the arguments of ``s3fs.S3FileSystem``; its own retries are off."""
    plain = {
        "key": options.key,
        "secret": options.secret,
        "token": options.token,
        "anon": options.anon,
        "endpoint_url": options.endpoint,
        "client_kwargs": _given(region_name=options.region, verify=_ca_path(options)),
    }
    config = {
        "connect_timeout": options.connect_seconds,
        "read_timeout": options.request_seconds,
        # Over https too the SHA-256 of each body is signed, as obstore does. Its own checksums
        # come after the body in a form that many servers refuse (411 from Ceph 16).
        "request_checksum_calculation": "when_required",
        "s3": {"payload_signing_enabled": True},
    }
    ours: dict[str, Any] = {**_given(**plain), "config_kwargs": config}
    return merged(ours, options.for_s3fs)


def for_obstore(options: S3Options) -> dict[str, Any]:
    """Return the keyword arguments of ``obstore.store.S3Store``; its own retries are off."""
    plain = {
        "endpoint": options.endpoint,
        "region": options.region,
        "access_key_id": options.key,
        "secret_access_key": options.secret,
        "session_token": options.token,
        "skip_signature": options.anon,
    }
    config = _given(**plain)
    # One object, one DELETE: not every server has the request that deletes many.
    config["disable_bulk_delete"] = True
    return {
        "config": config,
        "client_options": {
            # Whether to encrypt is what the endpoint's URL says, and Amazon's says https.
            "allow_http": True,
            "connect_timeout": timedelta(seconds=options.connect_seconds),
            "timeout": timedelta(seconds=options.request_seconds),
            **_given(root_certificate=trusted(options)),
        },
        "retry_config": {"max_retries": 0, "retry_timeout": timedelta(0)},
    }


def trusted(options: S3Options) -> bytes:
    """Return the certificates, in PEM, of whom to trust for https besides the machine's own.

    Raises:
        ConfigError: the file that is named cannot be read, or holds no certificate.
    """
    path = _ca_path(options)
    if not path:
        return b""
    try:
        found = Path(path).expanduser().read_bytes()
        ssl.create_default_context().load_verify_locations(cadata=found.decode("ascii", "ignore"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot read certificates from `{path}` (storage option `ca_file` or AWS_CA_BUNDLE): "
            f"{getattr(error, 'strerror', None) or error}",
            hint=f"openssl x509 -noout -subject -in {path}",
        ) from error
    return found


def merged(ours: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return both, one level deep; what is given wins over ours."""
    both = {**ours, **given}
    for name in ours.keys() & given.keys():
        if isinstance(ours[name], dict) and isinstance(given[name], dict):
            both[name] = {**ours[name], **given[name]}
    return both


def _ca_path(options: S3Options) -> str:
    # s3fs would not look at the variable by itself.
    return options.ca_file or os.environ.get("AWS_CA_BUNDLE", "")


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value}


def _checked(name: str, value: Any) -> Any:
    kind = type(getattr(_DEFAULTS, name))
    accepted = int | float if kind is float else kind
    is_wrong = not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool)
    if is_wrong:
        raise ConfigError(
            f"storage option `{name}` is not accepted: it is a {type(value).__name__} and must be "
            f"a {kind.__name__}",
            hint="resilient ckpt ls --help",
        )
    return value


def _check_limits(options: S3Options) -> None:
    if options.client and options.client not in CLIENTS:
        raise ConfigError(
            f"storage option `client` is {options.client!r}, which is none of: "
            f"{', '.join(CLIENTS)}",
            hint="leave it out to take the fastest one that is installed",
        )
    if options.client == "obstore" and options.for_s3fs:
        names = ", ".join(sorted(options.for_s3fs))
        raise ConfigError(
            f"storage options {names} are of s3fs alone, and `client` says obstore",
            hint=f"use some of: {', '.join(_KNOWN)}",
        )
    if 0 < options.part_bytes < _PART_BYTES_MIN or options.parts_in_flight < 1:
        raise ConfigError(
            "storage options `part_bytes` and `parts_in_flight` must be at least "
            f"{_PART_BYTES_MIN} (S3's own limit) and 1",
            hint="leave them out",
        )
    if not (options.connect_seconds > 0 and options.request_seconds > 0):
        raise ConfigError(
            "storage options `connect_seconds` and `request_seconds` must be above 0",
            hint="leave them out",
        )


def _did_you_mean(name: str) -> str:
    near = difflib.get_close_matches(name, [*_KNOWN, *_ALIASES, *_S3FS_ALONE], n=1)
    return f"; did you mean `{near[0]}`?" if near else ""


_DEFAULTS = S3Options()

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
