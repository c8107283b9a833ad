"""The modules that one save and one resume run through, and the sizes of the tree."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tools import walk

MODULES_MAX = 400
REPEATED = {"WorkerFailed"}  # an error, and the event that reports it


def test_walk_save_and_resume_stay_within_limits(capsys):
    code = walk.main(["--json"])
    found = json.loads(capsys.readouterr().out)
    save, resume, sizes = found["save"], found["resume"], found["sizes"]
    assert (save["modules_max"], resume["modules_max"]) == (64, 62)
    assert save["modules"] <= 64, list(save["hops"])
    assert resume["modules"] <= 62, list(resume["hops"])
    assert code == 0
    # The trace is not empty, and it holds the work of the background thread.
    assert next(iter(save["hops"])) == "resilient.train.trainer"
    assert "resilient.checkpoint.commit" in save["hops"]
    assert "resilient.state_dict.load" in resume["hops"]
    assert sizes["modules"] <= MODULES_MAX
    assert sizes["cycles_at_import"] == sizes["cycles_with_lazy"] == []
    assert set(sizes["repeated_class_names"]) <= REPEATED


def test_walk_above_the_limit_exits_with_code_1(capsys, monkeypatch):
    crossed = walk.Walk("save", 0, {"resilient.events": {"emit": None}})
    monkeypatch.setattr(walk, "trace", lambda: (crossed,))
    monkeypatch.setattr(walk, "measure_tree", lambda: None)
    monkeypatch.setattr(walk, "render_sizes", lambda _: "")
    assert walk.main([]) == 1
    assert "TOO MANY" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("modules", "heavy"),
    [
        (
            [f"resilient_cli.commands.{one}" for one in ("ls", "inspect", "report", "cp", "logs")],
            ["torch", "numpy", "fsspec", "ssl", "asyncio"],
        ),
        (["resilient.elastic.launcher"], ["torch", "numpy", "fsspec"]),
        (["resilient.checkpoint.daemon.server"], ["torch", "numpy", "fsspec", "ssl"]),
        (["resilient.train.trainer"], ["torch.distributed.tensor", "torch.distributed.elastic"]),
    ],
    ids=["commands", "launcher", "daemon", "trainer"],
)
def test_import_of_entry_point_loads_no_heavy_package(modules, heavy):
    """A merged module must not import more at start-up than its parts did."""
    probe = "import importlib, sys\n" + "".join(
        f"importlib.import_module({one!r})\n" for one in modules
    )
    probe += f"print(*({{*{heavy!r}}} & {{*sys.modules}}))"
    done = subprocess.run(
        [sys.executable, "-c", probe], check=False, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr
