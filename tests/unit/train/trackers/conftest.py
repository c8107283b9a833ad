from __future__ import annotations

from itertools import groupby
from operator import itemgetter

import pytest

from resilient.train import session
from tests.unit.train.fakes import MemoryRepository
from tests.unit.train.models import DieAfter, Dies, make_trainer

# What differs from life to life: how fast it went.
SPEEDS = ("runtime", "per_second")


@pytest.fixture
def lives(tmp_path, monkeypatch):
    """Return a function that trains through deaths, into one folder and one memory."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "RESILIENT_RESUME"):
        monkeypatch.delenv(name, raising=False)

    def live(folder, deaths, **options):
        monkeypatch.setattr(session, "open_engine", MemoryRepository().open)
        options = {"eval_strategy": "steps", "eval_steps": 4, "eval_size": 7, **options}
        callbacks = options.pop("callbacks", list)
        where = tmp_path / folder
        for step in deaths:
            dying = [*callbacks(), DieAfter(step)]
            with pytest.raises(Dies):
                make_trainer(where, callbacks=dying, **options).train()
        trainer = make_trainer(where, callbacks=callbacks(), **options)
        trainer.train()
        return trainer

    return live


@pytest.fixture
def timeless():
    """Return a function that drops what differs from life to life.

    The points of a step have no order: a checkpoint has the numbers of an entry by name.
    """

    def drop(curve):
        kept = [point for point in curve if not point[0].endswith(SPEEDS)]
        steps = groupby(kept, key=itemgetter(1))
        return [point for _, of_step in steps for point in sorted(of_step, key=itemgetter(0))]

    return drop
