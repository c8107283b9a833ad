"""A certificate authority of the tests' own, and a certificate of it for 127.0.0.1."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_EXTENSIONS = """
subjectAltName = IP:127.0.0.1, DNS:localhost
basicConstraints = critical, CA:FALSE
extendedKeyUsage = serverAuth
"""
_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
_DAYS = ("-days", "2")


@dataclass(frozen=True)
class Certificate:
    """Files in PEM.

    Attributes:
        authority: whose certificate a client must trust.
        certificate: of the server.
        key: the server's private key.
    """

    authority: Path
    certificate: Path
    key: Path


def make_certificate(folder: Path, name: str = "resilient tests") -> Certificate:
    """Make an authority and a certificate for loopback, valid for two days.

    Args:
        folder: where the files go.
        name: of the authority.
    """
    folder.mkdir(parents=True, exist_ok=True)
    made = Certificate(folder / "ca.pem", folder / "server.pem", folder / "server.key")
    extensions, request, authority_key = (folder / one for one in ("ext", "csr", "ca.key"))
    extensions.write_text(_EXTENSIONS)
    subject = ("-subj", f"/CN={name}")
    _run(
        "req",
        "-x509",
        *_NEW_KEY,
        *_DAYS,
        *subject,
        "-keyout",
        authority_key,
        "-out",
        made.authority,
    )
    _run("req", *_NEW_KEY, "-subj", "/CN=127.0.0.1", "-keyout", made.key, "-out", request)
    signed_by = ("-CA", made.authority, "-CAkey", authority_key, "-CAcreateserial")
    signs = ("-in", request, "-extfile", extensions, "-out", made.certificate)
    _run("x509", "-req", *_DAYS, *signed_by, *signs)
    return made


def _run(*arguments: object) -> None:
    command = ["openssl", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
