"""Factory of preemption notice sources, named by ``--notice`` or detected on this machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from resilient.clock import SystemClock
from resilient.elastic.preemption.cloud_sources import (
    GCP_ENDPOINT,
    METADATA_ENDPOINT,
    AwsSource,
    AzureSource,
    GcpSource,
)
from resilient.elastic.preemption.local_sources import (
    FileSource,
    HookSource,
    PolledSource,
    SlurmSource,
)
from resilient.elastic.preemption.metadata_http import check_endpoint
from resilient.environment import read_flag
from resilient.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient.clock import Clock
    from resilient.elastic.preemption.notice import NoticeSource

TOKEN = "RESILIENT_NOTICE_TOKEN"  # noqa: S105 - the name of a variable
_DMI = Path("/sys/class/dmi/id")
# Asset tag that only Azure sets; other Hyper-V machines do not have it.
_AZURE_TAG = "7783-7084-3265-9085-8269-3286-77"
_CLOUDS = {"aws": ("rebalance",), "gcp": (), "azure": ("ack",)}
_HINT = (
    "--notice takes auto, off, or a comma-separated list of aws, gcp, azure, slurm, file:PATH, "
    "http:PORT, http://URL; aws+rebalance also stops for recommendations, azure+ack acknowledges, "
    "aws=http://HOST:PORT sets the endpoint"
)


def choose_sources(
    text: str, environ: Mapping[str, str], clock: Clock, dmi: Path = _DMI
) -> list[NoticeSource]:
    """Return the sources that the user chose.

    Args:
        text: ``auto``, ``off``, or names separated by commas.
        environ: Environment of this process: variables of SLURM, and addresses of metadata
            servers (``AWS_EC2_METADATA_SERVICE_ENDPOINT``, ``GCE_METADATA_HOST``,
            ``RESILIENT_AZURE_METADATA``).
        clock: Clock of the sources.
        dmi: Folder with the machine's vendor and product.

    Raises:
        ConfigError: A name, an option or an address is invalid.
    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    if words == ["auto"]:
        words = detect(environ, dmi)
    elif words == ["off"] or not words:
        words = []
    return [source for word in words for source in _sources(word, environ, clock)]


def names_of_sources(text: str) -> list[str]:
    """Return the names of the chosen sources on this machine, and close the sources.

    Raises:
        ConfigError: As :func:`choose_sources`.
    """
    sources = choose_sources(text, os.environ, SystemClock())
    for source in sources:
        source.close()
    return [source.name for source in sources]


def detect(environ: Mapping[str, str], dmi: Path = _DMI) -> list[str]:
    """Return the sources of this machine from local information, without any request."""
    vendor, name = _read(dmi / "sys_vendor"), _read(dmi / "product_name")
    tag = _read(dmi / "chassis_asset_tag")
    is_off = read_flag(environ, "AWS_EC2_METADATA_DISABLED")
    providers = []
    if (vendor.startswith("Amazon EC2") or tag.startswith("Amazon EC2")) and not is_off:
        providers.append("aws")
    if name.startswith("Google Compute Engine") or vendor == "Google":
        providers.append("gcp")
    if tag == _AZURE_TAG:
        providers.append("azure")
    if environ.get("SLURM_JOB_ID"):
        providers.append("slurm")
    return providers


def _sources(word: str, environ: Mapping[str, str], clock: Clock) -> list[NoticeSource]:
    kind, _, location = word.partition(":")
    if kind == "file" and location:
        return [FileSource(location)]
    if kind in ("http", "https") and location.startswith("//"):
        return [PolledSource(clock, check_endpoint(word, "--notice"))]
    if kind == "http" and location:
        host, _, port = location.rpartition(":")
        if port.isdecimal():
            # `http::8080` means all addresses, as in other tools.
            address = "127.0.0.1" if ":" not in location else host or "0.0.0.0"  # noqa: S104 - asked for
            return [HookSource(clock, address, int(port), environ.get(TOKEN, ""))]
    if word == "slurm":
        return [SlurmSource(environ)]
    return _cloud(word, environ, clock)


def _cloud(word: str, environ: Mapping[str, str], clock: Clock) -> list[NoticeSource]:
    head, _, endpoint = word.partition("=")
    name, _, option = head.partition("+")
    if name not in _CLOUDS or (option and option not in _CLOUDS[name]):
        raise ConfigError(f"--notice: `{word}` is unknown", hint=_HINT)
    url = check_endpoint(endpoint or _endpoint(name, environ), f"--notice {name}")
    if name == "aws":
        return [AwsSource(clock, url, stops_on_rebalance=option == "rebalance")]
    if name == "azure":
        return [AzureSource(url, acknowledges=option == "ack")]
    return [GcpSource(clock, value, url) for value in ("preempted", "maintenance-event")]


def _endpoint(name: str, environ: Mapping[str, str]) -> str:
    """Return the address of a metadata server; the variables of AWS and GCP are the clouds' own."""
    if name == "aws":
        return environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT") or METADATA_ENDPOINT
    if name == "azure":
        return environ.get("RESILIENT_AZURE_METADATA") or METADATA_ENDPOINT
    host = environ.get("GCE_METADATA_HOST", "")
    return f"http://{host}" if host else GCP_ENDPOINT


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
