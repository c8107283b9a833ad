"""What a pipeline is told, and which schedule can take how many micro-batches."""

from __future__ import annotations

import pytest
from torch.distributed.pipelining import ScheduleGPipe, ScheduleLoopedBFS

from resilient.errors import ConfigError
from resilient.strategies.parallelism_options import (
    PipelineOptions,
    mesh_sizes,
    micro_batches_fit,
    read_pipeline,
)
from resilient.strategies.pipeline.runtime import class_for
from resilient.train.arguments import TrainingArguments


def arguments(config, **more):
    given = {"gradient_accumulation_steps": 4, "parallelism_config": {"pp_size": 2, **config}}
    return TrainingArguments(**{**given, **more})


def test_what_is_not_said_is_the_plain_schedule():
    assert read_pipeline(arguments({}).parallelism_config) == PipelineOptions(2, "1f1b", 1)
    told = {"pp_schedule": "Interleaved1F1B", "pp_split_points": ["a", "b", "c"]}
    options = read_pipeline(arguments(told).parallelism_config)
    assert options == PipelineOptions(2, "interleaved1f1b", 2, ("a", "b", "c"))
    assert options.stages == 4
    assert read_pipeline(None) == PipelineOptions()


def test_neighbours_hold_a_pipeline_and_other_ranks_replicas_of_it():
    sizes = mesh_sizes({"pp_size": 2, "tp_size": 2}, 8, shards=False)
    assert (sizes.replicate, sizes.shard, sizes.tensor, sizes.pipeline) == (2, 1, 2, 2)
    assert (sizes.shape, sizes.names) == ((2, 1, 2), ("dp_replicate", "dp_shard", "tp"))
    with pytest.raises(ConfigError, match=r"has 1 x 1 x 1 x 2 ranks .*stages\), but there are 3"):
        mesh_sizes({"pp_size": 2}, 3, shards=False)
    with pytest.raises(ConfigError, match="there are 1"):
        mesh_sizes({"pp_size": 2}, 1, shards=False)


@pytest.mark.parametrize(
    ("config", "more", "said"),
    [
        ({"pp_size": 0}, {}, "at least 1"),
        ({"pp_schedule": "1f2b"}, {}, "use gpipe, 1f1b"),
        ({"pp_split_points": "blocks.1"}, {}, "a list of names"),
        ({"pp_stages": 2}, {}, "did you mean `pp_stages_per_rank`"),
        ({"pp_stages_per_rank": 2}, {}, "with `pp_schedule`='1f1b' each rank holds 1 stage"),
        (
            {"pp_schedule": "loopedbfs", "pp_stages_per_rank": 1},
            {},
            "each rank holds at least 2 stages",
        ),
        ({"pp_split_points": ["a", "b"]}, {}, "names 2 modules, but 2 stages start at 1"),
        ({"pp_size": 1, "pp_schedule": "gpipe"}, {}, "`pp_size` gives no ranks to a pipeline"),
        ({}, {"parallelism": "deepspeed"}, "cannot be combined with DeepSpeed"),
        ({}, {"fp16": True}, "`fp16` cannot be combined with `pp_size`: stages would have"),
        ({}, {"torch_compile": True}, "`torch_compile` cannot be combined"),
        ({}, {"auto_find_batch_size": True}, "`auto_find_batch_size` cannot be combined"),
        ({}, {"fp8": True}, "`fp8` cannot be combined"),
        ({}, {"bf16_full_eval": True}, "needs whole replicas"),
        ({}, {"ddp_comm_hook": "fp16"}, "needs whole replicas"),
        (
            {},
            {"fsdp": True, "fsdp_config": {"mixed_precision": "bf16"}},
            "`mixed_precision` in fsdp_config cannot be combined",
        ),
        (
            {"pp_schedule": "interleavedzerobubble"},
            {"activation_checkpointing": True},
            "halves the backward pass",
        ),
        ({}, {"gradient_accumulation_steps": 1}, "does not allow it: use 2, 3, 4, or"),
        (
            {"pp_schedule": "interleaved1f1b"},
            {"gradient_accumulation_steps": 5},
            "over 4 stages does not allow it: use 3, 4, 6",
        ),
    ],
)
def test_what_a_pipeline_cannot_do_is_refused(config, more, said):
    with pytest.raises(ConfigError, match=said):
        arguments(config, **more)


def test_a_section_says_it_too():
    section = {"strategy": "fsdp", "pp_size": 2, "pp_schedule": "gpipe"}
    args = TrainingArguments(parallelism=section)
    assert args.parallelism_config == {"pp_size": 2, "pp_schedule": "gpipe"}


def test_so_few_micro_batches_as_an_epochs_end_leaves_take_the_plain_schedule_of_their_kind():
    assert class_for(PipelineOptions(4, "1f1b"), 3) is ScheduleGPipe
    assert class_for(PipelineOptions(4, "1f1b"), 4).__name__ == "Schedule1F1B"
    several = PipelineOptions(2, "interleaved1f1b", 2)
    assert class_for(several, 5) is ScheduleLoopedBFS
    assert class_for(several, 6).__name__ == "ScheduleInterleaved1F1B"
    assert micro_batches_fit(PipelineOptions(4, "gpipe"), 1)
