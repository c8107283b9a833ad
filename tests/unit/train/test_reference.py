"""Which checkpoint of which repository a training takes, in the spellings people use."""

from __future__ import annotations

import pytest
import torch

from resilient.distributed.launch_env import read_launch
from resilient.distributed.start_identity import StartIdentity
from resilient.elastic.options import WorkerOptions
from resilient.elastic.resume_check import check_resume
from resilient.errors import (
    ConfigError,
    IncompatibleCheckpoint,
    IntegrityError,
    NothingToResume,
    RepositoryNotFound,
    UnknownLayout,
)
from tests.helpers.foreign_folders import write_titan, write_universal
from tests.unit.train.models import make_trainer


@pytest.fixture
def out(tmp_path):
    """Two lives: steps 2 and 4; then from 2 again, step 4."""
    folder = tmp_path / "out"
    for wanted in (None, "checkpoint-2-g1"):
        make_trainer(folder, max_steps=4, save_steps=2, size=20).train(wanted)
    return folder


@pytest.fixture
def resumed(out, capsys, monkeypatch):
    """Return the checkpoint that a training takes."""

    def take(wanted):
        monkeypatch.chdir(out.parent)
        trainer = make_trainer(out, max_steps=4, save_strategy="no", size=20)
        capsys.readouterr()
        trainer.train(wanted)
        said = capsys.readouterr().err
        return said.partition("resumed from ")[2].split()[0]

    return take


@pytest.mark.parametrize(
    ("spelling", "taken"),
    [
        ("checkpoint-4", "checkpoint-4-g2"),
        ("{out}/checkpoint-4", "checkpoint-4-g2"),
        ("{out}/checkpoint-2/", "checkpoint-2-g1"),
        ("{out.name}/checkpoint-2", "checkpoint-2-g1"),
        ("file://{out}/checkpoint-4-g1", "checkpoint-4-g1"),
        ("{out}", "checkpoint-4-g2"),
    ],
)
def test_a_checkpoint_is_found_by_the_names_people_use(out, resumed, spelling, taken):
    assert resumed(spelling.format(out=out)) == taken


def test_a_path_object_is_a_path(out, resumed):
    assert resumed(out / "checkpoint-4-g1") == "checkpoint-4-g1"


@pytest.mark.parametrize("elsewhere", ["{out}-2/checkpoint-4", "./checkpoint-4", "/checkpoint-4"])
def test_a_path_that_leads_elsewhere_is_refused(out, resumed, elsewhere):
    with pytest.raises(ConfigError, match="is not in the repository"):
        resumed(elsewhere.format(out=out))


def torchtitan(folder):
    write_titan(folder)
    return folder / "step-9"


def cut_torchtitan(folder):
    (file,) = (path := torchtitan(folder)).glob("*.distcp")
    file.write_bytes(file.read_bytes()[:-1])
    return path


def photographs(folder):
    folder.mkdir()
    (folder / "cat.jpg").write_bytes(b"\xff\xd8")
    return folder


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (torchtitan, IncompatibleCheckpoint),
        (write_universal, IncompatibleCheckpoint),
        (cut_torchtitan, IntegrityError),
        (photographs, UnknownLayout),
    ],
)
def test_checkpoint_of_another_tool_is_refused_as_by_the_agent(out, tmp_path, make, error):
    path = str(make(tmp_path / "theirs"))
    with pytest.raises(error) as of_trainer:
        make_trainer(out, size=20).train(path)
    with pytest.raises(error) as of_agent:
        check_resume(WorkerOptions(resume=path), StartIdentity("manual"))
    assert of_trainer.value.message == of_agent.value.message
    assert of_trainer.value.hint == of_agent.value.hint


def test_a_checkpoint_that_is_missing_is_missing_input(out, resumed, tmp_path):
    with pytest.raises(NothingToResume, match="no checkpoint `checkpoint-3`") as raised:
        resumed(f"{out}/checkpoint-3")
    assert raised.value.exit_code == 66
    with pytest.raises(RepositoryNotFound) as raised:
        make_trainer(tmp_path).train("checkpoint-3")
    assert raised.value.exit_code == 66


def test_a_second_training_at_the_same_repository_is_refused(tmp_path):
    repo = str(tmp_path / "repo")
    short = {"repo": repo, "max_steps": 1, "size": 20}
    make_trainer(tmp_path / "fold-0", **short).train()
    make_trainer(tmp_path / "fold-0", **short).train()
    fold = make_trainer(tmp_path / "fold-1", **short)
    before = [one.clone() for one in fold.model.parameters()]
    with pytest.raises(
        ConfigError, match=r"fold-1.*training into `.*fold-0`.* .*use one repository for each"
    ):
        fold.train()
    assert all(map(torch.equal, before, fold.model.parameters()))
    make_trainer(tmp_path / "fold-1", **{**short, "repo": f"{repo}-1"}).train()


def test_the_launchers_repository_is_one_too(tmp_path, monkeypatch):
    gang = make_trainer(tmp_path).session.rank_group
    monkeypatch.setattr(gang, "launch", read_launch({"RESILIENT_REPO": str(tmp_path)}))
    make_trainer(tmp_path / "a", max_steps=1, size=20).train()
    with pytest.raises(ConfigError, match=r"repository .*use one repository for each"):
        make_trainer(tmp_path / "b", max_steps=1, size=20).train()
