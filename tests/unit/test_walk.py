"""The modules that one save and one resume run through, and the sizes of the tree."""

from __future__ import annotations

import json

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
