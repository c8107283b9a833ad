"""A save beside training on all cores pauses until a caller waits for the save."""

from __future__ import annotations

import json
import subprocess
import sys

from resilient.checkpoint.catalog import committed
from resilient.checkpoint.verify import verify
from resilient.storage.local import LocalStore

SCRIPT = """
import hashlib, json, os, sys, threading, time
import torch
from resilient.checkpoint.save.metadata import CheckpointInfo
from resilient.engine_factory import open_engine
from resilient.state_dict.snapshot import Part

if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
torch.set_num_threads(1)
parts = {"model": Part(torch.nn.ParameterDict({
    str(number): torch.nn.Parameter(torch.zeros(1 << 22)) for number in range(12)
}))}
checkpointer = open_engine(sys.argv[1])
checkpointer.resume(parts)
checkpointer.warm(parts)
ending, content = threading.Event(), bytes(4 << 20)

def burn():
    while not ending.is_set():
        hashlib.sha256(content)

others = [threading.Thread(target=burn, daemon=True) for _ in range(2)]
for one in others:
    one.start()
# A look at the cores counts from the end of the last save: here is one while they are used.
time.sleep(1.0)
with torch.no_grad():
    for one in parts["model"].stateful.values():
        one.add_(1)
checkpointer._persister._throttles.end()
time.sleep(0.5)
checkpointer.save(1, parts, CheckpointInfo())
time.sleep(0.3)
rests = not checkpointer.committed()
done_bytes = checkpointer._persister._throttle._done_bytes
ending.set()
for one in others:
    one.join()
checkpointer.close()
print(json.dumps({"rests": rests, "done_bytes": done_bytes}))
"""
SIZE_BYTES = 12 * 4 << 22


def test_a_save_rests_while_every_core_is_used_and_ends_whole_when_somebody_waits(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    store = LocalStore(tmp_path)
    (checkpoint,) = committed(store)
    assert verify(store, checkpoint, "deep") == []
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["rests"]
    assert told["done_bytes"] < SIZE_BYTES
