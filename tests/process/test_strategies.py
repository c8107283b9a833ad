"""Each strategy trained, killed and resumed by real processes: the bits of an unbroken run.

A covering subset here; ``make matrix`` runs every strategy in every precision.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from resilient.checkpoint.catalog import committed, read_manifest
from resilient.storage.open import open_store
from tests.helpers.endings import differences, ending
from tests.process.deepspeed_forks import run_forks
from tests.process.overflowing import STEP
from tests.process.strategy_kinds import CARRIED, KINDS, in_ci, is_killed, worlds_of

WORKER = Path(__file__).with_name("strategies_worker.py")
pytestmark = [
    pytest.mark.timeout(1900),
    # All tests read what one process and its forks left.
    pytest.mark.xdist_group("strategies"),
]

BLOCKS = [f"blocks.{n}" for n in range(3)]
LINEARS = [f"{block}.{name}" for block in BLOCKS for name in ("up", "down")]


@pytest.fixture(scope="module")
def kinds(request):
    told = request.config.getoption("--kinds")
    if told:
        return told.split(",")
    return list(KINDS) if request.config.getoption("--matrix") else in_ci()


@pytest.fixture(scope="module")
def runs(tmp_path_factory, kinds):
    folder = tmp_path_factory.mktemp("runs")
    worlds = worlds_of(kinds)
    # The whole matrix has some two hundred.
    run_forks(WORKER, folder, len(worlds), *kinds, within_seconds=600 + 6 * len(worlds))
    return folder


@pytest.fixture
def seen(runs, kinds):
    """Return what each rank of a kind's unbroken run held and sent."""

    def read(kind):
        if kind not in kinds:
            pytest.skip("it is in `make matrix`")
        folder = runs / f"{kind}-unbroken"
        return [json.loads((folder / f"seen-{n}").read_text()) for n in range(KINDS[kind].ranks)]

    return read


def newest(folder):
    store = open_store(str(folder))
    return read_manifest(store, committed(store)[0])


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_run_that_was_killed_equals_an_unbroken_one(runs, seen, kinds, kind):
    seen(kind)
    if not is_killed(kind, kinds):
        pytest.skip("it is killed in `make matrix`")
    killed, unbroken = runs / f"{kind}-killed", runs / f"{kind}-unbroken"
    assert newest(killed).world == {"size": KINDS[kind].ranks, "strategy": KINDS[kind].strategy}
    assert newest(killed).checkpoint.generation == 2, "it did die"
    assert differences(ending(killed), ending(unbroken)) == []


@pytest.mark.parametrize("kind", [kind for kind in KINDS if KINDS[kind].is_exact])
def test_strategies_train_what_replicas_train(runs, seen, kind):
    like = KINDS[kind].like
    if like == "ddp" and KINDS[kind].ranks // KINDS[kind].tensor != KINDS["ddp"].ranks:
        pytest.skip("replicas of as many ranks are not run")
    ours, replicas = seen(kind)[0], seen(like)[0]
    assert ours["losses"] == pytest.approx(replicas["losses"], rel=1e-5)
    assert ours["norms"] == pytest.approx(replicas["norms"], rel=1e-4)
    assert ours["evaluations"] == pytest.approx(replicas["evaluations"], rel=1e-5)
    exported = load_file(runs / f"{kind}-unbroken" / "exported" / "model.safetensors")
    expected = load_file(runs / f"{like}-unbroken" / "exported" / "model.safetensors")
    assert exported.keys() == expected.keys()
    for name, whole in expected.items():
        assert torch.allclose(exported[name], whole, atol=1e-5), name


@pytest.mark.parametrize("kind", [kind for kind in KINDS if KINDS[kind].shards])
def test_parameters_and_moments_are_cut_over_ranks(seen, kind):
    found = seen(kind)
    groups = KINDS[kind].ranks // KINDS[kind].shards
    kinds = ["DTensor"] if KINDS[kind].version == 2 else ["Parameter"]
    has_moments = KINDS[kind].arguments.get("optim") in (None, "lion")
    for one in found:
        assert one["kinds"] == kinds
        assert one["held"] < 0.6 * one["total"]
        assert not has_moments or one["moments"] == one["held"]
    # A vector is filled up to what its ranks can share.
    is_filled = not found[0]["flat"].get("use_orig_params", True)
    filling = 2 * len(LINEARS) * groups if is_filled else 0
    surplus = sum(one["held"] for one in found) - groups * found[0]["total"]
    assert 0 <= surplus <= filling
    if KINDS[kind].version == 1:
        return
    mesh = [groups, KINDS[kind].shards] if groups > 1 else [KINDS[kind].shards]
    assert found[0]["strategy"]["mesh"] == mesh


def test_parameters_stay_gathered_after_the_forward_pass_when_told(seen):
    assert [one["after_forward"] for one in seen("mixed")] == [["cut"]] * 2
    assert [one["after_forward"] for one in seen("shard_grad_op")] == [["whole"]] * 2


def test_modules_are_gathered_by_class_or_by_size(seen):
    assert seen("mixed")[0]["strategy"]["units"] == ["", *BLOCKS]
    assert seen("shard_grad_op")[0]["strategy"]["units"] == ["", *LINEARS]


def test_prefetch_and_offload_reach_torch(seen):
    plain = seen("mixed")[0]["strategy"]
    assert (plain["forward_prefetch"], plain["backward_prefetch"]) == (0, [])
    assert plain["offload"] == "OffloadPolicy"
    told = seen("shard_grad_op")[0]["strategy"]
    assert told["forward_prefetch"] == 1
    assert told["backward_prefetch"] == [True]
    assert told["offload"] == "CPUOffloadPolicy"


def test_a_mixed_precision_policy_computes_and_sends_in_its_dtypes(seen):
    found = seen("mixed")[0]
    assert found["dtypes"] == ["torch.bfloat16"]
    assert found["sent"]["all_gather_single"] == ["bfloat16"]
    assert found["sent"]["reduce_scatter_single"] == ["float32"]
    plain = seen("shard_grad_op")[0]
    assert plain["dtypes"] == ["torch.float32"]
    assert plain["sent"]["all_gather_single"] == ["float32"]


def test_activations_are_computed_again(seen):
    plain, every_second = seen("ddp")[0]["calls"], seen("recompute")[0]["calls"]
    micro_batches = 2 * 6
    assert every_second == [plain[0] + micro_batches, plain[1], plain[2] + micro_batches]
    assert seen("mixed")[0]["calls"] == [plain[0] + micro_batches] * 3
    assert seen("recompute")[0]["losses"] == seen("ddp")[0]["losses"]


def test_ddp_is_told(seen):
    told, plain = seen("told")[0]["ddp"], seen("ddp")[0]["ddp"]
    assert (plain["buckets"], plain["timeout_seconds"]) == (1, 1800)
    assert told["find_unused_parameters"]
    assert told["buckets"] == 3
    assert told["timeout_seconds"] == 77
    assert told["backend"] == "gloo"


def test_a_static_graph_is_told(seen):
    found = seen("static_graph")[0]["ddp"]
    assert found["static_graph"]
    assert not found["broadcast_buffers"]


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("ddp_comm_fp16", "float16"), ("ddp_comm_bf16", "bfloat16"), ("power_sgd_bf16", "bfloat16")],
)
def test_gradients_are_sent_in_fewer_bytes(seen, kind, dtype):
    assert [one["sent"]["all_reduce"] for one in seen(kind)] == [[dtype]] * 2


def test_power_sgd_sends_fewer_numbers_and_keeps_what_it_left_out(runs, seen):
    plain, compressed = 6 * seen("ddp")[0]["total"], seen("power_sgd")[0]["numbers"]["all_reduce"]
    assert compressed < 0.6 * plain
    manifest = newest(runs / "power_sgd-unbroken")
    names = {one.name for one in manifest.parts}
    assert {"gradient_compression", "gradient_errors_0", "gradient_errors_1"} <= names
    errors = [ending(runs / f"power_sgd-{end}") for end in ("unbroken", "killed")]
    own = [
        {name: one for name, one in found.items() if "gradient_errors" in name} for found in errors
    ]
    assert own[0]
    assert own[0].keys() == own[1].keys()


@pytest.mark.parametrize("kind", ["ddp_fp8", "fsdp_fp8"])
def test_layers_multiply_in_fp8(seen, kind):
    assert [one["linear"] for one in seen(kind)] == ["Float8Linear"] * 2


def test_evaluations_are_made_in_half_and_training_is_not(seen):
    half, whole = seen("ddp_half_eval")[0], seen("ddp")[0]
    assert half["losses"] == whole["losses"]
    assert half["evaluations"] != whole["evaluations"]
    assert half["evaluations"] == pytest.approx(whole["evaluations"], rel=0.05)
    assert half["dtypes"] == ["torch.bfloat16", "torch.float32"]


@pytest.mark.parametrize(
    ("kind", "mesh", "most"), [("tp_fsdp", [2, 2], 0.3), ("tp_ddp", [2, 1, 2], 0.6)]
)
def test_layers_are_cut_over_neighbours_and_each_region_is_written_once(
    runs, seen, kind, mesh, most
):
    found = seen(kind)
    assert {tuple(one["kinds"]) for one in found} == {("DTensor",)}
    assert all(one["moments"] == one["held"] < most * one["total"] for one in found)
    assert found[0]["strategy"]["mesh"] == mesh
    # Ranks of one group train on the same samples.
    assert all(one["losses"] == found[0]["losses"] for one in found)
    tensors = {one.name: one for one in newest(runs / f"{kind}-unbroken").tensors}
    for place in ("model", "optimizer/state"):
        names = [one for one in tensors if one.startswith(f"{place}/blocks.0.up.weight")]
        for name in (one for one in names if not one.endswith("/step")):
            assert tensors[name].shape == (20, 10)
            assert len(tensors[name].regions) >= 2
            assert sum(one.region.size for one in tensors[name].regions) == 200


def test_a_run_goes_on_without_tensor_parallelism(runs, seen):
    folder = runs / "from-tp-to-ddp"
    manifest = newest(folder)
    assert manifest.world == {"size": 2, "strategy": "ddp"}
    assert manifest.checkpoint.generation == 2
    said = json.loads((folder / "seen-0").read_text())
    expected = seen("ddp")[0]["losses"]
    assert said["losses"][:2] == pytest.approx(expected[:2], rel=1e-5)
    # Another rank goes on with this rank's random numbers, so dropout differs from there on.
    assert said["losses"] == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("folder", [one for one in CARRIED if "flat" in one])
def test_a_run_goes_on_with_flat_shards_and_without_them(runs, seen, kinds, folder):
    if not set(CARRIED[folder]) <= set(kinds):
        pytest.skip("one of them is not run")
    manifest = newest(runs / folder)
    assert manifest.checkpoint.generation == 2
    assert manifest.world["strategy"] == KINDS[CARRIED[folder][1]].strategy
    said = json.loads((runs / folder / "seen-0").read_text())
    expected = seen("ddp")[0]
    assert said["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert said["norms"] == pytest.approx(expected["norms"], rel=1e-4)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (
            "flat",
            {
                "units": ["", *BLOCKS],
                "sharding_strategy": "FULL_SHARD",
                "backward_prefetch": "BACKWARD_POST",
                "forward_prefetch": False,
                "use_orig_params": True,
                "limit_all_gathers": False,
                "offload": False,
                "dtypes": ["None"] * 3,
                "device": "cpu",
                "groups": [[0, 1]],
            },
        ),
        (
            "flat_grad_op",
            {
                "units": ["", *LINEARS],
                "sharding_strategy": "SHARD_GRAD_OP",
                "backward_prefetch": None,
                "forward_prefetch": True,
                "use_orig_params": False,
                "limit_all_gathers": True,
                "offload": False,
            },
        ),
        (
            "flat_hybrid",
            {
                "sharding_strategy": "HYBRID_SHARD",
                "backward_prefetch": "BACKWARD_PRE",
                "groups": [[0, 1], [0, 2]],
            },
        ),
        ("flat_zero2", {"sharding_strategy": "_HYBRID_SHARD_ZERO2", "groups": [[0, 1], [0, 2]]}),
        ("flat_mixed", {"dtypes": ["torch.bfloat16", "torch.float32", "torch.bfloat16"]}),
    ],
)
def test_fsdp1_is_told(seen, kind, expected):
    found = seen(kind)[0]
    told = found["flat"]
    assert {name: told[name] for name in expected} == expected
    assert told["numbers"] == found["total"]


def test_flat_shards_are_gathered_and_sent_as_they_were_told(seen):
    assert [one["after_forward"] for one in seen("flat")] == [["cut"]] * 2
    assert [one["after_forward"] for one in seen("flat_grad_op")] == [["whole"]] * 2
    mixed, plain = seen("flat_mixed")[0], seen("flat")[0]
    assert mixed["dtypes"] == mixed["buffers"] == ["torch.bfloat16"]
    assert "bfloat16" in mixed["sent"]["all_gather"]
    assert mixed["sent"]["reduce_scatter_single"] == ["float32"]
    assert plain["dtypes"] == ["torch.float32"]
    assert plain["sent"]["all_gather"] == ["float32"]


def test_gradients_of_flat_shards_are_sent_once_a_step(seen):
    found, steps = seen("flat")[0], 6
    # What goes in is whole, what comes out is a half.
    assert found["numbers"]["reduce_scatter_single"] < 1.1 * steps * 1.5 * found["total"]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if KINDS[kind].overflows])
def test_an_overflow_in_the_shard_of_one_rank_is_one_for_all(runs, seen, kind):
    folder, ranks = runs / f"{kind}-unbroken", range(len(seen(kind)))
    told = [json.loads((folder / f"scaled-{rank}").read_text()) for rank in ranks]
    for line in zip(*told, strict=True):
        assert all({**one, "shards": ""} == {**line[0], "shards": ""} for one in line)
    for before, overflowed, after in (steps[STEP - 2 : STEP + 1] for steps in told):
        assert overflowed == {**before, "scale": before["scale"] / 2}, "no rank steps"
        assert after["scale"] == overflowed["scale"]
        assert after["steps"] == [one + 1 for one in before["steps"]]
        assert after["rate"] != before["rate"]
        assert after["shards"] != before["shards"]
