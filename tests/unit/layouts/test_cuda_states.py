"""Random states of CUDA that are lost are told, and no repair pretends to bring them back."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path

import pytest
import torch

from resilient.diff.foreign_verify import verify_foreign
from resilient.layout_repair.plan import plan_layout_repair
from resilient.layouts.detect import read_layout
from resilient.layouts.resumability import assess_resumability, remedy
from resilient.layouts.training_state import OF_DEVICES
from resilient.storage.folder import open_folder
from tests.helpers.foreign_folders import write_accelerate

GOLDEN = Path(__file__).parents[2] / "golden" / "transformers"
DEVICE = torch.arange(16, dtype=torch.uint8)


@pytest.fixture(params=["gpt2_all", "gpt2_ddp2_all"])
def folder(tmp_path, request):
    """Return a checkpoint of one rank, or of two, that trained on CUDA."""
    (source,) = (GOLDEN / request.param / "run").glob("checkpoint-*")
    path = Path(shutil.copytree(source, tmp_path / source.name))
    for one in files(path):
        change(one, cuda=DEVICE if one.name == "rng_state.pth" else [DEVICE, DEVICE])
    on_cuda(path / "optimizer.pt")
    return path


def files(path):
    return sorted(path.glob("rng_state*.pth"))


def change(file, **keys):
    state = torch.load(file, weights_only=False) | keys
    torch.save({key: one for key, one in state.items() if one is not None}, file)


def on_cuda(file):
    """Say in a file of torch that its tensors were on a GPU, as one that is saved there does."""
    with zipfile.ZipFile(file) as whole:
        members = [(one, whole.read(one)) for one in whole.namelist()]
    cpu, cuda = (b"X" + len(one).to_bytes(4, "little") + one for one in (b"cpu", b"cuda:0"))
    with zipfile.ZipFile(file, "w") as made:
        for name, data in members:
            made.writestr(name, data.replace(cpu, cuda) if name.endswith("data.pkl") else data)


def look(path):
    at = open_folder(str(path))
    contents = read_layout(at, at.list())
    problems = (*contents.problems, *verify_foreign(at, at.list(), contents))
    return assess_resumability(contents, str(path)), problems


def test_states_of_cuda_that_are_there_are_no_finding(folder):
    verdict, problems = look(folder)
    assert (verdict.answer, problems) == ("yes", ())
    at = open_folder(str(folder))
    assert "cuda" in read_layout(at, at.list()).rng.kinds


def test_states_of_cuda_that_no_file_has_are_told_where_it_trained_on_one(folder):
    for one in files(folder):
        change(one, cuda=None)
    verdict, (problem,) = look(folder)
    assert (verdict.answer, verdict.why) == ("partly", (OF_DEVICES,))
    assert problem.what == "no random states of CUDA are saved, but the optimizer was on cuda:0"
    assert remedy(problem, "x") == "resilient ckpt repair x --from COPY"


@pytest.mark.parametrize(
    "spoiled", [DEVICE[:3], [], 3, DEVICE.float(), [DEVICE, 1], {"a": 1}], ids=str
)
def test_a_state_that_no_generator_of_cuda_takes_is_told_and_stops_nothing(folder, spoiled):
    last = files(folder)[-1]
    change(last, cuda=spoiled)
    verdict, (problem,) = look(folder)
    assert (verdict.answer, problem.place, problem.is_fatal) == ("partly", last.name, False)
    assert "its `cuda` is not a state of" in problem.what


def test_the_states_of_another_number_of_ranks_are_told(folder):
    for one in files(folder):
        change(one, cuda=[DEVICE] if one.name == "rng_state.pth" else DEVICE)
    verdict, problems = look(folder)
    assert verdict.why == (OF_DEVICES,)
    assert all("as this many ranks store it" in one.what for one in problems)


@pytest.mark.parametrize("folder", ["gpt2_ddp2_all"], indirect=True)
def test_a_rank_that_lost_its_own_is_named(folder):
    change(files(folder)[1], cuda=None)
    verdict, (problem,) = look(folder)
    assert verdict.why == (OF_DEVICES,)
    assert (problem.place, problem.what) == (
        "rng_state_1.pth",
        "it has no state of CUDA, but rng_state_0.pth has one",
    )


def test_a_repair_keeps_what_is_whole_of_the_file_and_says_what_is_not(folder, tmp_path):
    copy = Path(shutil.copytree(folder, tmp_path / "copy" / folder.name))
    last = files(folder)[-1]
    change(last, cuda=DEVICE[:3])
    plan = plan_layout_repair(str(folder))
    assert (plan.steps, plan.is_whole) == ((), False)
    assert "a resume on CPUs does not need it" in plan.refused[last.name]
    assert last.name in plan.draft.list().sizes
    mended = plan_layout_repair(str(folder), [str(copy)])
    assert mended.is_whole, mended
    assert b"".join(mended.draft.blocks(last.name)) == (copy / last.name).read_bytes()


def test_what_accelerate_keeps_of_cuda_is_held_against_the_other_ranks(tmp_path):
    write_accelerate(tmp_path / "checkpoint_0", tmp_path / "checkpoint_1")
    path = tmp_path / "checkpoint_0"
    first = path / "random_states_0.pkl"
    state = torch.load(first, weights_only=False)
    torch.save(state | {"torch_cuda_manual_seed": [DEVICE]}, first)
    torch.save(state, path / "random_states_1.pkl")
    _, problems = look(path)
    assert [one.place for one in problems if one.loses == OF_DEVICES] == ["random_states_1.pkl"]
    torch.save(state | {"torch_cuda_manual_seed": [DEVICE]}, path / "random_states_1.pkl")
    assert not [one for one in look(path)[1] if one.loses == OF_DEVICES]
