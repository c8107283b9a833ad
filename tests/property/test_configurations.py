"""Random training configurations end as their unbroken twins, and as in Transformers.

`make configurations N=300 SEED=1` runs more of them. docs/transformers.md lists the differences.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "helpers" / "configurations.py"


@pytest.mark.slow
def test_configurations_end_as_unbroken_and_as_transformers(request):
    count, seed = (request.config.getoption(f"--configurations{one}") for one in ("", "-seed"))
    print(f"configurations 0 to {count - 1} of seed {seed}")  # noqa: T201 - shown with a failure
    environ = {name: one for name, one in os.environ.items() if not name.startswith("RESILIENT_")}
    found = subprocess.run(
        [sys.executable, str(SCRIPT), "--count", str(count), "--seed", str(seed)],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [json.loads(line) for line in found.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == count, found.stderr[-3000:]
    odd = [one for one in lines if any(one.get(name) for name in ("failed", "resumed", "theirs"))]
    assert not odd, "\n".join(
        f"{SCRIPT} --seed {seed} --only {one['number']}: {json.dumps(one)}" for one in odd
    )
    # What was killed at a step that it did not reach tells nothing.
    assert sum(one["killed"] > 0 for one in lines) >= count // 3
