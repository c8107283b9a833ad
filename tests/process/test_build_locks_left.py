"""A rank killed inside a build of torch leaves a lock, and the next attempt goes on."""

from __future__ import annotations

import json

import pytest
import torch.utils.file_baton as baton

# The second attempt would wait for ever where the lock stayed. `torch` takes seconds to import.
BUILDS = """
import importlib.util
spec = importlib.util.spec_from_file_location("file_baton", {module!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
os.makedirs("cache/fused_adam", exist_ok=True)
held = module.FileBaton("cache/fused_adam/lock")
if held.try_acquire():
    say("acquired", life)
    if life == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    held.release()
else:
    held.wait()
"""


@pytest.mark.smoke
def test_rank_killed_inside_a_build_next_attempt_goes_on(train):
    script = BUILDS.format(module=baton.__file__)
    agent = train(script, "--events", "events", environ={"TORCH_EXTENSIONS_DIR": "cache"})
    assert agent.process.wait(120) == 0, agent.err
    assert agent.said("acquired") == ["1", "2"]
    assert "removed the build lock" in agent.err
    lines = (agent.folder / "events" / "agent.jsonl").read_text(encoding="utf-8").splitlines()
    (told,) = [one for one in map(json.loads, lines) if one["event"] == "BuildLockRemoved"]
    assert told["path"].endswith("cache/fused_adam/lock")
    assert not (agent.folder / "cache" / "fused_adam" / "lock").exists()
