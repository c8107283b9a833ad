"""Which way of being parallel is chosen, by a table: sizes and machines in, arguments out."""

from __future__ import annotations

import pytest

from resilient.errors import ConfigError
from resilient.strategies.auto import MachineFacts, ModelFacts, choose
from resilient.train.arguments import TrainingArguments

GIB = 1 << 30
# A billion parameters under AdamW take 16 GB.
BILLION = 10**9


def model(billions, **more):
    given = {"largest_layer_parameters": int(billions * BILLION / 32), "layers": 32, **more}
    return ModelFacts(int(billions * BILLION), **given)


def machine(ranks, beside=8, gib=80, micro_batches=1):
    return MachineFacts(ranks, min(ranks, beside), gib * GIB, micro_batches)


def hybrid(size):
    return {"parallelism": "fsdp", "fsdp": "hybrid_shard", "fsdp_config": {"shard_size": size}}


DDP = {"parallelism": "ddp"}
FSDP = {"parallelism": "fsdp", "fsdp": "full_shard"}
PLANNED = {"has_tensor_parallel_plan": True, "largest_layer_parameters": 4 * BILLION}
SMALL_BETWEEN = {"activation_bytes": 32 << 20}


def mesh(parallelism, **sizes):
    return {"parallelism": parallelism, "parallelism_config": sizes}


@pytest.mark.parametrize(
    ("facts", "machines", "chosen"),
    [
        # It fits: replicas, however many.
        (model(0.1), machine(1), DDP),
        (model(3), machine(8), DDP),
        (model(3), machine(64), DDP),
        # With less memory, or an optimizer that keeps more, it does not.
        (model(3), machine(8, gib=40), FSDP),
        (model(3, number_bytes=32), machine(8), FSDP),
        (model(3, number_bytes=6), machine(8, gib=40), DDP),
        # Inside one host, over hosts, and where only all hosts together have the memory.
        (model(13), machine(8), FSDP),
        (model(13), machine(32), hybrid(8)),
        (model(70, largest_layer_parameters=BILLION), machine(32), FSDP),
        # Where steps are long and little is sent between layers, stages send far less.
        (
            model(13, **SMALL_BETWEEN),
            machine(8, micro_batches=32),
            mesh("ddp", pp_size=8, pp_schedule="1f1b"),
        ),
        (
            model(4, **SMALL_BETWEEN),
            machine(16, micro_batches=16),
            mesh("ddp", pp_size=2, pp_schedule="1f1b"),
        ),
        # Too few micro-batches, too much between layers, or too few layers.
        (model(13, **SMALL_BETWEEN), machine(8, micro_batches=8), FSDP),
        (model(13, activation_bytes=40 * GIB), machine(8, micro_batches=32), FSDP),
        (model(13, layers=4, **SMALL_BETWEEN), machine(8, micro_batches=32), FSDP),
        # A layer that is too large for a rank is cut, replicated or sharded beside.
        (model(16, **PLANNED), machine(8), mesh("fsdp", tp_size=4)),
        (model(9, **PLANNED), machine(16), mesh("ddp", tp_size=4)),
    ],
)
def test_as_little_is_cut_as_memory_allows(facts, machines, chosen):
    found = choose(facts, machines)
    assert found.arguments == chosen
    # What is chosen are arguments, and they are accepted.
    steps = machines.micro_batches
    TrainingArguments(gradient_accumulation_steps=steps, **found.arguments)


def test_reasons_say_the_numbers():
    said = choose(model(13), machine(32)).reasons
    assert said[0].startswith("parameters, gradients and optimizer take 193.72 GiB, and a rank has")
    assert said[-1].startswith(
        "the 8 ranks of a host hold the whole model: weights are sent inside hosts"
    )
    said = choose(model(13, **SMALL_BETWEEN), machine(16, micro_batches=32)).reasons
    assert said[1].startswith("in a step of 32 micro-batches shards would send 3147.87 GiB")
    assert said[2] == "it is cut into 8 stages in a host, and such pipelines are replicas"


@pytest.mark.parametrize(
    ("facts", "machines", "said"),
    [
        (
            model(70, largest_layer_parameters=BILLION),
            machine(8),
            "does not fit: .* so it needs 19 ranks, and there are 8",
        ),
        (model(70), machine(1), "so it needs 19 ranks, and there are 1"),
        (
            model(20, largest_layer_parameters=4 * BILLION),
            machine(16),
            "it must be cut over 4 ranks, and the model does not define how",
        ),
        (
            model(60, largest_layer_parameters=40 * BILLION, has_tensor_parallel_plan=True),
            machine(64),
            "on all ranks of a host as well",
        ),
    ],
)
def test_what_fits_nowhere_is_refused_with_what_would_do(facts, machines, said):
    with pytest.raises(ConfigError, match=said):
        choose(facts, machines)
