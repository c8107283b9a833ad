"""Which arguments work: the one table that says what is refused, and until when.

Every argument of the field is a field of ``TrainingArguments``. One whose feature is missing is
accepted with the values that ask for nothing, and refused with any other: nothing is ever taken
and ignored.

How to switch an argument on when its feature is there:

* the argument as a whole: delete its line in :data:`NOT_YET`;
* one name among several (an optimizer, a schedule, a tracker): delete its line in
  :data:`NAMES_NOT_YET`;
* where the default should become the field's: change the default in ``fields/`` too;
* say in ``changes.py`` what a resume does with it, if that is more than the row there says, and
  flip the rows of ``docs/parity.md``.

What depends on another argument needs no line of its own: what begins with ``hub_`` does nothing
without ``push_to_hub``, and ``liger_kernel_config`` nothing without ``use_liger_kernel``.
"""

from __future__ import annotations

from typing import Any

# Argument -> the values that ask for nothing; any other is refused until the feature is there.
NOT_YET: dict[str, tuple[Any, ...]] = {
    "push_to_hub": (False,),
    "use_liger_kernel": (False,),
}

# Argument -> names that the field knows and that are refused until they are there.
NAMES_NOT_YET: dict[str, set[str]] = {
    "report_to": {
        "azure_ml",
        "dagshub",
        "dvclive",
        "flyte",
        "kubeflow",
        "swanlab",
    },
}

# Argument -> the only values there will be, and why.
ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    "dataloader_in_order": (
        (True,),
        "batches in another order on every run cannot be resumed bit for bit",
    ),
    "ignore_data_skip": (
        (False,),
        "going on in an epoch costs nothing here, and beginning it again would repeat samples",
    ),
    "restore_callback_states_from_checkpoint": (
        (True,),
        "a callback that forgets would make the resumed run another one; give one without state",
    ),
    "trackio_static_space_id": (
        (None, False),
        "nothing freezes the Space at the end; call `trackio.freeze` after training",
    ),
    "save_on_each_node": (
        (False,),
        "all ranks write one checkpoint together; near_repo keeps a second copy near by",
    ),
}
_LAYERWISE = (
    *("lomo", "adalomo", "apollo_adamw_layerwise", "galore_adamw_layerwise"),
    *("galore_adafactor_layerwise", "galore_adamw_8bit_layerwise"),
)
# Names that cannot come, and why.
NEVER: dict[str, dict[str, str]] = {
    "optim": {
        **dict.fromkeys(
            _LAYERWISE, "it steps inside backward, where nothing can be saved or clipped"
        ),
        "grokadamw": "it keeps its moments where no checkpoint finds them (grokadamw 0.1.2), so no "
        "run with it could be resumed",
        "adamw_anyprecision": "it needs torchdistx, which is not maintained any more",
        "adamw_torch_npu_fused": "it needs torch_npu, which current torch does not support",
        "adamw_torch_xla": "it needs torch_xla, which current torch does not support",
    },
    "ddp_comm_hook": {
        "batched_power_sgd": "it fails an assertion of its own in torch 2.13; write power_sgd",
    },
    "debug": {"tpu_metrics_debug": "it needs torch_xla, which current torch does not support"},
}

# What to do instead, as long as an argument is refused.
INSTEAD = {
    "report_to": "or give a tracker of your own as `callbacks=[Reporting(...)]`",
    "push_to_hub": "push what `save_model` wrote with huggingface_hub",
}
