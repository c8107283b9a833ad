"""A keeper's process and checkpointers that use it, without a trainer."""

from __future__ import annotations

import socket
import subprocess
import sys

import torch

from resilient.checkpoint.context import CheckpointContext, CheckpointOptions
from resilient.checkpoint.daemon.client import DaemonSaveExecutor
from resilient.checkpoint.daemon.connection import no_deadline
from resilient.checkpoint.daemon.messages import DaemonAddress
from resilient.checkpoint.save.executor import ThreadSaveExecutor
from resilient.checkpoint_engine import CheckpointEngine
from resilient.clock import SystemClock
from resilient.distributed.coordination import ControlGroup
from resilient.distributed.kv_store import InMemoryKVStore
from resilient.distributed.launch_env import World
from resilient.events import Emitter
from resilient.state_dict.snapshot import Part
from resilient.storage.open import open_store
from tests.helpers.manifests import Values


class Keeper:
    """A keeper's process with its socket and its shared memory in one folder."""

    def __init__(self, folder, *options) -> None:
        folder.mkdir(exist_ok=True)
        self.shared = folder / "shm"
        self.shared.mkdir(exist_ok=True)
        self.path = folder / "keeper"
        self.path.unlink(missing_ok=True)
        command = [
            sys.executable,
            "-m",
            "resilient.checkpoint.daemon.server",
            "--socket",
            str(self.path),
        ]
        self.process = subprocess.Popen(
            [*command, "--shared", str(self.shared), "--linger-seconds", "5", *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self.process.stdout.readline() == b"ready\n"

    def close(self) -> int:
        self.process.stdin.close()
        self.process.stdout.close()
        return self.process.wait(20)

    def kill(self) -> None:
        """Leave no process and no pipe, also where it has ended by itself."""
        self.process.kill()
        self.close()

    def talk(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(10)
        connection.connect(str(self.path))
        return connection


def open_one(daemon, url, *, kv_store=None, world=None, scope="life", **limits):
    world = world or World()
    events = []
    emit = Emitter(SystemClock(), (lambda _, event: events.append(event),))
    comms = ControlGroup(kv_store or InMemoryKVStore(), world, scope)
    context = CheckpointContext(
        open_store(str(url)), comms, CheckpointOptions(**limits), SystemClock(), emit
    )
    left_seconds = getattr(daemon, "left_seconds", no_deadline)
    address = DaemonAddress(str(daemon.path), url=str(url), left_seconds=left_seconds)
    persister = DaemonSaveExecutor(address, ThreadSaveExecutor())
    checkpointer = CheckpointEngine(context, persister)
    checkpointer.seen = events
    return checkpointer


def begin(daemon, url, **options):
    """Open a checkpointer that begins a life of a run and takes nothing over."""
    checkpointer = open_one(daemon, url, **options)
    checkpointer.resume({})
    return checkpointer


def resumed_from(daemon, url, scope="next"):
    """Begin another life; return which checkpoint it takes, its model's state, and the events."""
    target = Values()
    checkpointer = open_one(daemon, url, scope=scope)
    result = checkpointer.resume({"model": Part(target)})
    checkpointer.close()
    return result.checkpoint, target.state, checkpointer.seen


def weight(value, size=5000):
    """Return a model of one tensor that is the same everywhere."""
    return {"model": Part(Values(weight=torch.full((size,), float(value))))}


def resumed_weight(daemon, url, scope="next"):
    """Begin another life; return which checkpoint it takes, its weight, and the events."""
    checkpoint, state, events = resumed_from(daemon, url, scope)
    return checkpoint, float(state["weight"][0]), events


def names(events):
    return [type(event).__name__ for event in events]
