"""PEFT adapters: which tensors of a model are theirs, under the names that PEFT's files have."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


def is_adapted(model: nn.Module) -> bool:
    """Say whether ``model`` is PEFT's; it has been imported then."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def adapter_of(model: Any) -> dict[str, Any]:
    """Return the active adapter's ``config`` and its ``names``: those of its file -> the model's.

    PEFT itself says which tensors it would save; no method of it is known here.
    """
    import peft

    name = model.active_adapters[0]
    state = model.state_dict()
    saved = peft.get_peft_model_state_dict(
        model, state_dict=dict(state), adapter_name=name, save_embedding_layers=False
    )
    own = {id(one): key for key, one in state.items()}
    with tempfile.TemporaryDirectory() as folder:
        model.peft_config[name].save_pretrained(folder)
        config = json.loads((Path(folder) / "adapter_config.json").read_text(encoding="utf-8"))
    return {"config": config, "names": {key: own[id(one)] for key, one in saved.items()}}
