"""Configs, tokenizer, PEFT adapters.

PEFT adapters: which tensors of a model are theirs, under the names that PEFT's files have.

What belongs to a model besides its weights: its configurations and its tokenizer.

They are saved with every checkpoint, so that it can be used without the script that made it, and
not read back: the script that goes on has its own.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from resilient.errors import ConfigError
from resilient.state_dict.snapshot import Part

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

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


# Part -> the file of a model's folder that it is.
DOCUMENTS = {"model_config": "config.json", "generation_config": "generation_config.json"}
PROCESSING = "processing_class"
ADAPTER = "adapter"
PAPERS = (*DOCUMENTS, PROCESSING, ADAPTER)


class SidecarFile:
    """Something that is saved as it is at the time, and never read back.

    Args:
        read: returns it.
    """

    def __init__(self, read: Callable[[], Mapping[str, Any]]) -> None:
        self._read = read

    def state_dict(self) -> Mapping[str, Any]:
        """Return what it is now."""
        return self._read()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Leave alone what the script has."""


def sidecar_parts(model: nn.Module, processing: Any) -> dict[str, Part]:
    """Return the papers of a model that has any, as parts of its checkpoints."""
    base = base_model(model)
    read: dict[str, Callable[[], Mapping[str, Any]]] = {}
    if hasattr(getattr(base, "config", None), "to_json_string"):
        read["model_config"] = lambda: _config(base)
    if _generates(base):
        read["generation_config"] = lambda: _parsed(base.generation_config)
    parts = {
        name: Part(SidecarFile(one), document=DOCUMENTS[name], optional=True)
        for name, one in read.items()
    }
    if is_adapted(model):
        parts[ADAPTER] = Part(SidecarFile(lambda: adapter_of(model)), optional=True)
    if processing is not None:
        # Read once: bytes that do not change are not written again.
        files = processing_files(processing)
        parts[PROCESSING] = Part(SidecarFile(lambda: files), optional=True)
    return parts


def processing_of(processing_class: Any, tokenizer: Any) -> Any:
    """Return what turns data into a model's inputs, also where its older name is used.

    Raises:
        ConfigError: both names are.
    """
    if tokenizer is None:
        return processing_class
    if processing_class is not None:
        raise ConfigError("`tokenizer` is the older name of `processing_class`: use one of them")
    warn_of_tokenizer(4)
    return tokenizer


def saved_processing(processing_class: Any, collator: Any) -> Any:
    """Return the processing class that is saved beside the model: the given, or the collator's."""
    own = getattr(collator, "tokenizer", None) if processing_class is None else processing_class
    return own if processing_class is not None or hasattr(own, "save_pretrained") else None


def warn_of_tokenizer(level: int) -> None:
    """Tell whoever called, ``level`` calls above the warning, that it used an older name."""
    warnings.warn("`tokenizer` is called `processing_class` today", FutureWarning, stacklevel=level)


def base_model(model: Any) -> Any:
    """Return the model inside adapters, or the model itself."""
    inner = getattr(model, "get_base_model", None)
    return inner() if callable(inner) else model


def processing_files(processing: Any) -> dict[str, torch.Tensor]:
    """Return the files that a tokenizer or processor saves itself as: bytes by name.

    Raises:
        ConfigError: it cannot save itself.
    """
    if not hasattr(processing, "save_pretrained"):
        raise ConfigError(
            f"`processing_class` {type(processing).__name__} has no save_pretrained",
            hint="give a tokenizer or a processor of Transformers",
        )
    with tempfile.TemporaryDirectory() as folder:
        processing.save_pretrained(folder)
        return {
            one.relative_to(folder).as_posix(): torch.frombuffer(
                bytearray(one.read_bytes() or b"\n"), dtype=torch.uint8
            )
            for one in sorted(Path(folder).rglob("*"))
            if one.is_file()
        }


def write_papers(folder: Path, states: Mapping[str, Mapping[str, Any]]) -> None:
    """Write saved papers into a model's folder.

    Args:
        folder: is there.
        states: of the parts of :data:`PAPERS` that there are.
    """
    for part, name in DOCUMENTS.items():
        if part in states:
            text = json.dumps(states[part], indent=2, sort_keys=True) + "\n"
            (folder / name).write_text(text, encoding="utf-8")
    for name, data in states.get(PROCESSING, {}).items():
        file = folder / name
        if not file.resolve().is_relative_to(folder.resolve()):
            raise ConfigError(f"a tokenizer's file `{name}` would lie outside of `{folder}`")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data.numpy().tobytes())


def write_beside(folder: Path, processing: Any, args: Mapping[str, Any]) -> None:
    """Write the tokenizer and the arguments of the run into a model's folder.

    Args:
        folder: is there.
        processing: a tokenizer or processor, or None.
        args: JSON-able.
    """
    if processing is not None:
        processing.save_pretrained(folder)
    text = json.dumps(args, indent=2, sort_keys=True) + "\n"
    (folder / "training_args.json").write_text(text, encoding="utf-8")


def _generates(model: Any) -> bool:
    able = getattr(model, "can_generate", None)
    return callable(able) and bool(able()) and getattr(model, "generation_config", None) is not None


def _config(model: Any) -> dict[str, Any]:
    """Return a model's configuration with what ``save_pretrained`` would add."""
    dtype = str(getattr(model, "dtype", "")).removeprefix("torch.")
    own = {"architectures": [type(model).__name__], **({"dtype": dtype} if dtype else {})}
    return {**_parsed(model.config), **own}


def _parsed(config: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(config.to_json_string())
    return found
