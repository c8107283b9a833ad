"""The modules that one save and one resume run through, and the sizes of the tree."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from tools import walk
from tools.tree_sizes import REPEATED_NAMES, TreeSizes

MODULES_MAX = 400
SIZES = TreeSizes(
    modules=400,
    package_files=44,
    lines_median=249,
    lines_p90=480,
    lines_max=900,
    code_lines_mean=176,
    modules_with_one_importer=80,
    cycles_at_import=[],
    cycles_with_lazy=[],
    cycles_with_types=[["a", "b"]],
    repeated_class_names={"WorkerFailed": ["resilient.elastic.events", "resilient.errors"]},
)


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
    assert "resilient.state_dict.resharding" in resume["hops"]
    assert sizes["modules"] <= MODULES_MAX
    assert sizes["cycles_at_import"] == sizes["cycles_with_lazy"] == []
    assert set(sizes["repeated_class_names"]) <= set(REPEATED_NAMES)


def printed(monkeypatch, capsys, sizes, modules_max=1):
    crossed = walk.Walk("save", modules_max, {"resilient.events": {"emit": None}})
    monkeypatch.setattr(walk, "trace", lambda: (crossed,))
    monkeypatch.setattr(walk, "measure_tree", lambda: sizes)
    return walk.main([]), capsys.readouterr().out


def test_walk_within_limits_prints_targets(capsys, monkeypatch):
    code, text = printed(monkeypatch, capsys, SIZES)
    assert code == 0
    assert "MISSED" not in text
    rows = {tuple(line.rsplit(maxsplit=4)) for line in text.splitlines()}
    assert ("modules that run in one save", "1", "at", "most", "1") in rows
    assert ("modules with code", "400", "at", "most", "400") in rows
    assert "the error of a failed worker" in text


def test_walk_above_the_limit_exits_with_code_1(capsys, monkeypatch):
    code, text = printed(monkeypatch, capsys, SIZES, modules_max=0)
    assert code == 1
    assert "TOO MANY" in text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("modules", MODULES_MAX + 1),
        ("lines_median", 199),
        ("lines_median", 301),
        ("cycles_at_import", [["a", "b"]]),
        ("cycles_with_lazy", [["a", "b"]]),
        ("repeated_class_names", {"Store": ["a", "b"]}),
    ],
)
def test_walk_size_beyond_limit_exits_with_code_1(name, value, capsys, monkeypatch):
    code, text = printed(monkeypatch, capsys, replace(SIZES, **{name: value}))
    assert code == 1
    assert text.count("MISSED") == 1


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
