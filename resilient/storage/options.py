"""Storage options with the same names for S3, Google Cloud Storage and Azure.

This table lists the options of S3. Their values are never shown.

==================  ==============================================================
``endpoint``        URL of the server; Amazon's by default
``region``          for example ``us-east-1``
``key`` ``secret``  credentials; temporary credentials also need ``token``
``anon``            true: do not sign requests
``ca_file``         PEM file of trusted authorities for https, besides those of the machine
``client``          ``obstore`` or ``s3fs``; by default the fastest installed client
``connect_seconds`` deadline of a connection (5)
``request_seconds`` deadline of one request of at most ``part_bytes`` (60)
``part_bytes``      minimum size of one part of a large object (64 MiB with obstore, 16 MiB
                    with s3fs); all parts but the last have equal size
``parts_in_flight`` parts in flight at once (8): per store with obstore, per transfer with s3fs
``sign_bodies``     true: sign the SHA-256 of large bodies even over https and with a server that
                    verifies a checksum of the body
==================  ==============================================================

obstore and s3fs take missing options from the standard ``AWS_*`` variables (``AWS_CA_BUNDLE`` for
``ca_file``) and from the machine's role. Only s3fs also reads the profiles in ``~/.aws``. Names
that only s3fs knows (``client_kwargs``, ``config_kwargs``, ``profile``, ...) select s3fs.

Options of ``gs://`` and ``az://`` have the names of the S3 options with the same meaning. The next
table lists the corresponding names of the libraries.

===================  =================================  ==========================================
option               gcsfs                              adlfs
===================  =================================  ==========================================
``endpoint``         ``endpoint_url``                   ``account_host``
``request_seconds``  ``requests_timeout`` (60)          ``read_timeout`` (60)
``connect_seconds``                                     ``connection_timeout`` (5)
``account`` ``key``                                     ``account_name`` ``account_key``
===================  =================================  ==========================================

Every other name is passed to the library unchanged: ``token``, ``project`` (gcsfs),
``connection_string``, ``sas_token``, ``client_id`` (adlfs). The libraries take missing options from
the standard variables and the machine's identity. Values are never shown.
"""

from __future__ import annotations

import difflib
import os
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
_S3FS_ONLY = frozenset(
    {
        "asynchronous", "cache_regions", "client_kwargs", "config_kwargs", "default_block_size",
        "default_cache_type", "default_fill_cache", "max_concurrency", "profile",
        "requester_pays", "s3_additional_kwargs", "session", "use_ssl", "version_aware",
    }
)  # fmt: skip
_PART_BYTES_MIN = 5 << 20

OBSTORE_PART_BYTES = 64 << 20
"""With this part size a checkpoint file mostly takes one or two requests. Requests cost time and
money.
"""


@dataclass(frozen=True, slots=True)
class S3Options:
    """Options as given; the module's table has their meanings. The repr hides secret values."""

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
        """Return the part size and concurrency of a transfer, ``part_bytes`` by default."""
        return MultipartConfig(self.part_bytes or part_bytes, self.parts_in_flight)


_KNOWN = {option.name: option for option in fields(S3Options) if option.name != "for_s3fs"}


def read_s3_options(values: Mapping[str, Any]) -> S3Options:
    """Parse storage options of ``s3://``.

    Raises:
        ConfigError: A name is unknown or a value has the wrong type. The message shows names, never
            values.
    """
    s3_values: dict[str, Any] = {}
    for_s3fs: dict[str, Any] = {}
    for name, value in values.items():
        word = _ALIASES.get(name, name)
        if word in _KNOWN:
            s3_values[word] = _checked(word, value)
        elif name in _S3FS_ONLY:
            for_s3fs[name] = value
        else:
            raise ConfigError(
                f"storage option `{name}` is unknown for s3://{_did_you_mean(name)}",
                hint=f"use some of: {', '.join(_KNOWN)}",
            )
    options = S3Options(**s3_values, for_s3fs=for_s3fs)
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
        "client_kwargs": _drop_empty(region_name=options.region, verify=_ca_path(options)),
    }
    config = {
        "connect_timeout": options.connect_seconds,
        "read_timeout": options.request_seconds,
        # Sign the SHA-256 of each body over https too, as obstore does. The client's own checksums
        # follow the body in a form that many servers refuse (411 from Ceph 16).
        "request_checksum_calculation": "when_required",
        "s3": {"payload_signing_enabled": True},
    }
    own_arguments: dict[str, Any] = {**_drop_empty(**plain), "config_kwargs": config}
    return merged(own_arguments, options.for_s3fs)


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
    config = _drop_empty(**plain)
    # Delete one object per request: not every server supports bulk deletes.
    config["disable_bulk_delete"] = True
    return {
        "config": config,
        "client_options": {
            # The endpoint's URL decides about encryption; Amazon's URL is https.
            "allow_http": True,
            "connect_timeout": timedelta(seconds=options.connect_seconds),
            "timeout": timedelta(seconds=options.request_seconds),
            **_drop_empty(root_certificate=read_trusted_certificates(options)),
        },
        "retry_config": {"max_retries": 0, "retry_timeout": timedelta(0)},
    }


def read_trusted_certificates(options: S3Options) -> bytes:
    """Return the PEM certificates to trust for https besides those of the machine.

    Raises:
        ConfigError: The file cannot be read, or contains no certificate.
    """
    path = _ca_path(options)
    if not path:
        return b""
    # Commands on a local folder import this module, and do not need TLS.
    import ssl

    try:
        certificates = Path(path).expanduser().read_bytes()
        ssl.create_default_context().load_verify_locations(
            cadata=certificates.decode("ascii", "ignore")
        )
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot read certificates from `{path}` (storage option `ca_file` or AWS_CA_BUNDLE): "
            f"{getattr(error, 'strerror', None) or error}",
            hint=f"openssl x509 -noout -subject -in {path}",
        ) from error
    return certificates


def merged(defaults: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Merge both mappings one level deep; ``options`` wins over ``defaults``."""
    merged_options = {**defaults, **options}
    for name in defaults.keys() & options.keys():
        if isinstance(defaults[name], dict) and isinstance(options[name], dict):
            merged_options[name] = {**defaults[name], **options[name]}
    return merged_options


def _ca_path(options: S3Options) -> str:
    # s3fs does not read the variable itself.
    return options.ca_file or os.environ.get("AWS_CA_BUNDLE", "")


def _drop_empty(**options: Any) -> dict[str, Any]:
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
            hint="omit it to use the fastest installed client",
        )
    if options.client == "obstore" and options.for_s3fs:
        names = ", ".join(sorted(options.for_s3fs))
        raise ConfigError(
            f"storage options {names} belong to s3fs only, and `client` is obstore",
            hint=f"use some of: {', '.join(_KNOWN)}",
        )
    if 0 < options.part_bytes < _PART_BYTES_MIN or options.parts_in_flight < 1:
        raise ConfigError(
            "storage options `part_bytes` and `parts_in_flight` must be at least "
            f"{_PART_BYTES_MIN} (S3's own limit) and 1",
            hint="omit them",
        )
    if not (options.connect_seconds > 0 and options.request_seconds > 0):
        raise ConfigError(
            "storage options `connect_seconds` and `request_seconds` must be above 0",
            hint="omit them",
        )


def _did_you_mean(name: str) -> str:
    close_names = difflib.get_close_matches(name, [*_KNOWN, *_ALIASES, *_S3FS_ONLY], n=1)
    return f"; did you mean `{close_names[0]}`?" if close_names else ""


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
_NAMES_BY_PROTOCOL = {
    "gs": (_GCS, _GCS_DEFAULTS),
    "gcs": (_GCS, _GCS_DEFAULTS),
    "az": (_AZURE, _AZURE_DEFAULTS),
    "abfs": (_AZURE, _AZURE_DEFAULTS),
    "abfss": (_AZURE, _AZURE_DEFAULTS),
}


def for_cloud(protocol: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of the library behind ``protocol``.

    An unknown protocol gets ``options`` unchanged.

    Args:
        protocol: Protocol of the URL.
        options: Storage options.
    """
    names, defaults = _NAMES_BY_PROTOCOL.get(protocol, ({}, {}))
    return {**defaults, **{names.get(name, name): value for name, value in options.items()}}
