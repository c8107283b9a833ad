"""The call that a file of torch is loaded with, and weights that are alone: each is carried out."""

from __future__ import annotations

import argparse
import collections
import datetime as dt
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint

from tests.helpers.foreign_folders import look, verdict

WEIGHTS = {"weight": torch.ones(2, 3)}
NONE = "torch.load('{path}', weights_only=True)"
ALL = "torch.load('{path}', weights_only=False)"
NAMED = "torch.serialization.add_safe_globals([argparse.Namespace]); "


class Own:
    """Something of a script."""


@pytest.fixture(autouse=True)
def _nothing_is_safe_yet():
    torch.serialization.clear_safe_globals()
    yield
    torch.serialization.clear_safe_globals()


@pytest.mark.parametrize(
    ("value", "command", "loads"),
    [
        (collections.Counter("ab"), NONE, True),
        ({1, 2}, NONE, True),
        (torch.float16, NONE, True),
        (torch.nn.Parameter(torch.ones(2)), NONE, True),
        (torch.ones(4).to_sparse(), NONE, True),
        (argparse.Namespace(lr=1.0), NAMED + NONE, True),
        (np.random.RandomState(1).get_state(), ALL, True),
        (collections.deque([1]), ALL, True),
        (dt.timedelta(1), ALL, True),
        (Path("x"), ALL, True),
        ([argparse.Namespace(), Path("x")], ALL, True),
        (Own(), NONE, False),
    ],
    ids=lambda one: type(one).__name__,
)
def test_a_file_is_loaded_by_the_call_that_is_named(tmp_path, value, command, loads):
    path = tmp_path / "held.pt"
    torch.save({"model": WEIGHTS, "more": value}, path)
    contents, call = look(path), verdict(path).command
    assert call == command.format(path=path)
    told = [one.what for one in contents.problems if "rejects it" in one.what]
    is_safe = command == NONE and loads
    assert bool(told) is not is_safe, told
    if not is_safe:
        with pytest.raises(pickle.UnpicklingError):
            torch.load(path, weights_only=True)
    if loads:
        scope = {"torch": torch, "argparse": argparse}
        *before, last = call.split("; ")
        for one in before:
            exec(one, scope)  # noqa: S102 - what a user is told to type
        held = eval(last, scope)  # noqa: S307 - the same
        assert torch.equal(held["model"]["weight"], WEIGHTS["weight"])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_weights_alone_are_no_training_state_in_whatever_layout(tmp_path):
    folder = tmp_path / "dcp"
    torch.distributed.checkpoint.save({"model": WEIGHTS}, checkpoint_id=str(folder), no_dist=True)
    torch.save({"model": WEIGHTS}, tmp_path / "one.pt")
    for path in (folder, tmp_path / "one.pt"):
        assert verdict(path).answer == "no"
        assert "only weights" in verdict(path).why[0]
    torch.distributed.checkpoint.save(
        {"model": WEIGHTS, "scheduler": {"last_epoch": 3}},
        checkpoint_id=str(tmp_path / "more"),
        no_dist=True,
    )
    assert verdict(tmp_path / "more").answer == "partly"


def test_no_name_of_a_file_becomes_code_that_is_shown_to_be_pasted(tmp_path):
    path = tmp_path / "held.pt"
    torch.save({"model": WEIGHTS, "args": argparse.Namespace()}, path)
    with zipfile.ZipFile(path) as held:
        members = {one: held.read(one) for one in held.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as spoiled:
        for name, data in members.items():
            spoiled.writestr(name, data.replace(b"Namespace", b"N(1),a(2)"))
    told = [one.what for one in look(path).problems]
    assert any("N(1)" in one for one in told), "it is named, and not to be pasted"
    assert "N(1)" not in verdict(path).command


def test_an_optimizer_below_another_name_is_no_weights_alone(tmp_path):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    moments = {str(key): one for key, one in optimizer.state_dict()["state"].items()}
    state = {"app": {"model": model.state_dict(), "optim": moments}}
    path = tmp_path / "dcp"
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        torch.distributed.checkpoint.save(state, checkpoint_id=str(path), no_dist=True)
    assert verdict(path).answer == "partly"
