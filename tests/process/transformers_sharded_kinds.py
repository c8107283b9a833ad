"""How stock Transformers shards a run, and how ours goes on with it; loads nothing of torch."""

from __future__ import annotations

SAVED, STEPS = 4, 8
LAYERS = {"transformer_layer_cls_to_wrap": ["GPT2Block"]}


def _fsdp(version, state):
    told = {"version": version, "state_dict_type": state, "sync_module_states": "false"}
    return {"fsdp": True, "fsdp_config": {**LAYERS, **told}, "ddp_backend": "gloo"}


def _zero(stage):
    auto = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_clipping")
    return {
        "deepspeed": {
            "zero_optimization": {"stage": stage},
            **dict.fromkeys((*auto, "gradient_accumulation_steps"), "auto"),
            "zero_allow_untested_optimizer": True,
        }
    }


FLAT = {"fsdp": True, "fsdp_config": {**LAYERS, "version": 1}}
SHARDS = {"fsdp": True, "fsdp_config": LAYERS}
# Name -> (their arguments, ours, what ours names it, how many losses after it are the same bits).
# FSDP1's are all four on an Intel Xeon, nine times of nine; on an AMD EPYC the fourth differs in
# its last bits, always by as much, and why is not known.
KINDS = {
    "fsdp1_sharded": (_fsdp(1, "SHARDED_STATE_DICT"), FLAT, "fsdp", 3),
    "fsdp2_sharded": (_fsdp(2, "SHARDED_STATE_DICT"), SHARDS, "fsdp", STEPS - SAVED),
    "fsdp2_full": (_fsdp(2, "FULL_STATE_DICT"), {}, "ddp", 1),
    "zero_1": (_zero(1), _zero(1), "zero-1", STEPS - SAVED),
    "zero_2": (_zero(2), {}, "ddp", 1),
    "zero_3": (_zero(3), _zero(3), "zero-3", STEPS - SAVED),
}
