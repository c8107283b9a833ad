"""Saves to S3 under faults: acknowledged checkpoints lost or damaged, and saves too late.

A real server (Ceph's gateway on loopback) runs behind a proxy that injects faults. For both clients
and each fault there are some saves of 24 MiB, with the fault during each save. Then every
acknowledged checkpoint that retention kept is read back and verified (deep). `lost` counts missing
checkpoints, and `torn` damaged ones. `late` counts saves that took longer than the deadline of one
operation plus the fault's own time. `peak_mib` is the memory that the process added, including the
save's own buffers. `CONTENDERS` names a client.
"""

from __future__ import annotations

import tempfile
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import torch
from botocore.session import get_session
from torch import nn

from benchmarks.harness import Report
from benchmarks.peers.buckets import Bucket
from benchmarks.peers.rounds import Figures, costs, wants
from resilient.checkpoint.catalog import committed
from resilient.checkpoint.save.metadata import CheckpointInfo
from resilient.checkpoint.verify import verify
from resilient.clock import SystemClock
from resilient.engine_factory import open_engine
from resilient.errors import SaveFailed
from resilient.events import CheckpointCommitted, Emitter, Event
from resilient.state_dict.snapshot import Part
from resilient.storage.open import open_store
from tests.services.ceph import KEY, SECRET, Ceph, why_impossible
from tests.services.faultproxy import Fault, FaultProxy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

ROUNDS = 10
CLIENTS = ("obstore", "s3fs")
KEPT = 5
OPERATION_SECONDS = 60.0
REQUEST_SECONDS = 5.0
PART_BYTES = 5 << 20


@dataclass(frozen=True)
class Scene:
    """Server, the proxy in front of it, and the bucket seen through the proxy."""

    server: Ceph
    proxy: FaultProxy
    bucket: Bucket


@contextmanager
def during(scene: Scene, fault: Fault, seconds: float) -> Iterator[None]:
    """Apply ``fault`` from shortly after the block begins until ``seconds`` have passed."""
    begins = threading.Timer(0.05, lambda: setattr(scene.proxy, "fault", fault))
    ends = threading.Timer(seconds, lambda: setattr(scene.proxy, "fault", Fault()))
    begins.start()
    ends.start()
    yield
    begins.join()
    ends.join()


@contextmanager
def killed(scene: Scene, seconds: float) -> Iterator[None]:
    """Kill the server once the upload has begun, and start it again after ``seconds``."""

    def strike() -> None:
        requests_before = len(scene.proxy.requests)
        deadline = time.monotonic() + OPERATION_SECONDS
        while len(scene.proxy.requests) < requests_before + 4 and time.monotonic() < deadline:
            time.sleep(0.005)
        scene.server.kill_gateway()
        time.sleep(seconds)
        scene.server.start_gateway()

    striker = threading.Thread(target=strike)
    striker.start()
    yield
    striker.join()


FAULTS: Mapping[str, tuple[float, Callable[[Scene], object]]] = {
    "killed_5_s": (5.0, lambda scene: killed(scene, 5.0)),
    "resets_10_percent": (0.5, lambda scene: during(scene, Fault(reset_share=0.1), 0.5)),
    "storm_of_503": (3.0, lambda scene: during(scene, Fault(status=503), 3.0)),
    "stall_30_s": (30.0, lambda scene: during(scene, Fault(stalled=True), 30.0)),
}
FEWER = {"stall_30_s": 2, "killed_5_s": 6}
"""Maximum number of saves, because a stall or restart costs its whole time in each."""


def run(rounds: int) -> Report:
    """Save under every fault with both clients."""
    problem = why_impossible()
    if problem:
        raise SystemExit(f"no S3 server: {problem}")
    figures: dict[str, float] = {}
    with (
        tempfile.TemporaryDirectory(prefix="s3-") as folder,
        Ceph(Path(folder)) as server,
        FaultProxy(server.port) as proxy,
    ):
        scene = Scene(server, proxy, Bucket("faults", proxy.endpoint, KEY, SECRET))
        admin = get_session().create_client(
            "s3",
            endpoint_url=server.endpoint,
            aws_access_key_id=KEY,
            aws_secret_access_key=SECRET,
            region_name="us-east-1",
        )
        admin.create_bucket(Bucket=scene.bucket.name)
        for client in filter(wants, CLIENTS):
            for name in FAULTS:
                found = suffer(scene, client, name, min(rounds, FEWER.get(name, rounds)))
                figures |= {f"{client}_{name}_{what}": value for what, value in found.items()}
    sums = {
        what: sum(value for name, value in figures.items() if name.endswith(f"_{what}"))
        for what in ("saves", "failed", "lost", "torn", "late")
    }
    return Report("s3_faults", {}, {**sums, **figures})


def suffer(scene: Scene, client: str, name: str, saves: int) -> Figures:
    """Save ``saves`` times, each time with one fault, then read everything back."""
    url = f"s3://{scene.bucket.name}/{client}-{name}"
    options = {
        **scene.bucket.options(client),
        "request_seconds": REQUEST_SECONDS,
        "part_bytes": PART_BYTES,
    }
    acknowledged: list[str] = []

    def listen(_record: Mapping[str, object], event: Event) -> None:
        if isinstance(event, CheckpointCommitted):
            acknowledged.append(event.checkpoint)

    model = nn.Linear(2048, 3072)
    parts = {"model": Part(model)}
    checkpointer = open_engine(
        url,
        emit=Emitter(SystemClock(), (listen,)),
        keep_last=KEPT,
        storage_options=options,
    )
    checkpointer.resume(parts)
    lasts, fault = FAULTS[name]
    took: list[float] = []
    failed, broken = 0, scene.proxy.broken
    spent: Figures = {}
    with costs(spent, "all"):
        for step in range(1, saves + 1):
            with torch.no_grad():
                model.weight.add_(1)
            began = time.monotonic()
            with fault(scene):  # type: ignore[attr-defined]
                try:
                    checkpointer.save(step, parts, CheckpointInfo())
                    checkpointer.wait()
                except SaveFailed:
                    failed += 1
                took.append(time.monotonic() - began)
        checkpointer.close()
    scene.proxy.fault = Fault()
    return {
        **read_back(url, options, acknowledged),
        "saves": saves,
        "failed": failed,
        "late": sum(seconds > lasts + OPERATION_SECONDS + REQUEST_SECONDS for seconds in took),
        "broken_requests": scene.proxy.broken - broken,
        "seconds_longest": round(max(took), 2),
        "seconds_median": round(median(took), 2),
        "peak_mib": round(spent["all_peak_mib"], 1),
    }


def read_back(url: str, options: Mapping[str, object], acknowledged: list[str]) -> Figures:
    """Count the acknowledged checkpoints that should be kept, but are missing or damaged."""
    store = open_store(url, storage_options=options)
    found = committed(store)
    there = {checkpoint_id.folder for checkpoint_id in found}
    retained = acknowledged[-KEPT:]
    return {
        "lost": sum(checkpoint_id not in there for checkpoint_id in retained),
        "torn": sum(bool(verify(store, checkpoint_id, "deep")) for checkpoint_id in found),
        "verified": len(found),
    }
