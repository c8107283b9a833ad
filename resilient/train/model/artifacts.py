"""Sidecar files of a model: configurations, tokenizer, special tokens and PEFT adapters.

The files are saved with every checkpoint, so that the model can be used without the training
script. The files are never read back, because the resumed script creates these objects itself.
Adapter tensors get the names that PEFT uses in its files.
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
    """Return whether ``model`` is a PEFT model; PEFT is imported in that case."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def adapters_of(model: Any) -> dict[str, Any]:
    """Return the active adapter as in :func:`adapter_of`, its ``name``, and the ``others``.

    PEFT saves and loads all adapters of a model, also adapters that are not active.
    """
    active, *_ = model.active_adapters
    others = {name: adapter_of(model, name) for name in model.peft_config if name != active}
    return {**adapter_of(model, active), "name": active, "others": others}


def adapter_of(model: Any, name: str) -> dict[str, Any]:
    """Return an adapter's ``config``, and ``names``: name in its file -> name in the model.

    PEFT selects the tensors to save, so this code is independent of PEFT's methods.
    """
    import peft

    state = model.state_dict()
    adapter_state = peft.get_peft_model_state_dict(
        model, state_dict=dict(state), adapter_name=name, save_embedding_layers=False
    )
    name_by_id = {id(value): key for key, value in state.items()}
    with tempfile.TemporaryDirectory() as folder:
        model.peft_config[name].save_pretrained(folder)
        config = json.loads((Path(folder) / "adapter_config.json").read_text(encoding="utf-8"))
    names = {
        key: name_by_id.get(id(value)) or _prompt_weight(value, state, name)
        for key, value in adapter_state.items()
    }
    return {"config": config, "names": {key: own for key, own in names.items() if own}}


def _prompt_weight(saved: torch.Tensor, state: Mapping[str, Any], adapter: str) -> str:
    """Return the weight that PEFT saves as a copy, as for a prompt; empty if it is computed."""
    copies = (
        name
        for name, value in state.items()
        if name.startswith(f"prompt_encoder.{adapter}.")
        and torch.equal(value.to(saved.device), saved)
    )
    return next(copies, "")


# Part -> its file in a model's folder.
DOCUMENTS = {"model_config": "config.json", "generation_config": "generation_config.json"}
PROCESSING = "processing_class"
ADAPTER = "adapter"
SIDECAR_FILES = (*DOCUMENTS, PROCESSING, ADAPTER)


class SidecarFile:
    """Stateful whose current state is saved and never restored.

    Args:
        read: Function that returns the current state.
    """

    def __init__(self, read: Callable[[], Mapping[str, Any]]) -> None:
        self._read = read

    def state_dict(self) -> Mapping[str, Any]:
        """Return the current state."""
        return self._read()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Ignore the saved state, because the script creates the object."""


def sidecar_parts(model: nn.Module, processing: Any) -> dict[str, Part]:
    """Return a model's sidecar files, if it has any, as checkpoint parts."""
    base = base_model(model)
    reader_by_name: dict[str, Callable[[], Mapping[str, Any]]] = {}
    if hasattr(getattr(base, "config", None), "to_json_string"):
        reader_by_name["model_config"] = lambda: _config(base)
    if _generates(base):
        reader_by_name["generation_config"] = lambda: _parsed(base.generation_config)
    parts = {
        name: Part(SidecarFile(value), document=DOCUMENTS[name], optional=True)
        for name, value in reader_by_name.items()
    }
    if is_adapted(model):
        parts[ADAPTER] = Part(SidecarFile(lambda: adapters_of(model)), optional=True)
    if processing is not None:
        # Read the files once, so that later saves find unchanged bytes and do not write them again.
        files = processing_files(processing)
        parts[PROCESSING] = Part(SidecarFile(lambda: files), optional=True)
    return parts


def processing_of(processing_class: Any, tokenizer: Any) -> Any:
    """Return the processing class, also if it was passed under its older name.

    Raises:
        ConfigError: Both names are used.
    """
    if tokenizer is None:
        return processing_class
    if processing_class is not None:
        raise ConfigError("`tokenizer` is the older name of `processing_class`: use one of them")
    warn_of_tokenizer(4)
    return tokenizer


def saved_processing(processing_class: Any, collator: Any) -> Any:
    """Return the processing class to save beside the model: as given, or from the collator."""
    processing = (
        getattr(collator, "tokenizer", None) if processing_class is None else processing_class
    )
    return (
        processing
        if processing_class is not None or hasattr(processing, "save_pretrained")
        else None
    )


def warn_of_tokenizer(level: int) -> None:
    """Warn the caller ``level`` frames above that it used an older name."""
    warnings.warn("`tokenizer` is now called `processing_class`", FutureWarning, stacklevel=level)


def base_model(model: Any) -> Any:
    """Return the model inside adapters, or the model itself."""
    inner = getattr(model, "get_base_model", None)
    return inner() if callable(inner) else model


def processing_files(processing: Any) -> dict[str, torch.Tensor]:
    """Return the files that a tokenizer or processor saves: bytes by name.

    Raises:
        ConfigError: The processing class has no ``save_pretrained``.
    """
    if not hasattr(processing, "save_pretrained"):
        raise ConfigError(
            f"`processing_class` {type(processing).__name__} has no save_pretrained",
            hint="give a tokenizer or a processor of Transformers",
        )
    with tempfile.TemporaryDirectory() as folder:
        processing.save_pretrained(folder)
        return {
            path.relative_to(folder).as_posix(): torch.frombuffer(
                bytearray(path.read_bytes() or b"\n"), dtype=torch.uint8
            )
            for path in sorted(Path(folder).rglob("*"))
            if path.is_file()
        }


def write_sidecar_files(folder: Path, states: Mapping[str, Mapping[str, Any]]) -> None:
    """Write saved sidecar files into a model's folder.

    Args:
        folder: Existing folder.
        states: States of the present parts of :data:`SIDECAR_FILES`.
    """
    for part, name in DOCUMENTS.items():
        if part in states:
            text = json.dumps(states[part], indent=2, sort_keys=True) + "\n"
            (folder / name).write_text(text, encoding="utf-8")
    for name, data in states.get(PROCESSING, {}).items():
        file = path_inside(folder, name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data.numpy().tobytes())


def path_inside(folder: Path, name: str) -> Path:
    """Return the path of a file of a model, whose name comes from a checkpoint.

    Raises:
        ConfigError: The path is outside of ``folder``.
    """
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        raise ConfigError(f"a file of the model, `{name}`, would lie outside of `{folder}`")
    return path


def write_processing_and_arguments(folder: Path, processing: Any, args: Mapping[str, Any]) -> None:
    """Write the tokenizer and the run's arguments into a model's folder.

    Args:
        folder: Existing folder.
        processing: Tokenizer or processor, or None.
        args: Arguments as JSON values.
    """
    if processing is not None:
        processing.save_pretrained(folder)
    text = json.dumps(args, indent=2, sort_keys=True) + "\n"
    (folder / "training_args.json").write_text(text, encoding="utf-8")


def _generates(model: Any) -> bool:
    can_generate = getattr(model, "can_generate", None)
    return (
        callable(can_generate)
        and bool(can_generate())
        and getattr(model, "generation_config", None) is not None
    )


def _config(model: Any) -> dict[str, Any]:
    """Return a model's configuration with the entries that ``save_pretrained`` would add."""
    dtype = str(getattr(model, "dtype", "")).removeprefix("torch.")
    model_fields = {"architectures": [type(model).__name__], **({"dtype": dtype} if dtype else {})}
    return {**_parsed(model.config), **model_fields}


def _parsed(config: Any) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(config.to_json_string())
    return fields


# Name of a special token -> whether a generation config may have several of this token.
_TOKENS = {"eos_token_id": True, "bos_token_id": False, "pad_token_id": False}


def align_special_tokens(model: Any, processing: Any) -> dict[str, int]:
    """Write a tokenizer's special tokens into a model's configurations, like Transformers.

    Existing end-of-text IDs are kept beside the new ID. A token that the tokenizer does not define
    changes nothing.

    Args:
        model: May have ``config`` and ``generation_config``.
        processing: Tokenizer or processor of Transformers; any other object changes nothing.

    Returns:
        The changed tokens, by name.
    """
    tokenizer = _tokenizer_of(processing)
    config = getattr(model, "config", None)
    if tokenizer is None or config is None:
        return {}
    if callable(getattr(config, "get_text_config", None)):
        config = config.get_text_config()
    generation = getattr(model, "generation_config", None)
    tokens = {name: getattr(tokenizer, name, None) for name in _TOKENS}
    return {
        name: token
        for name, token in tokens.items()
        if token is not None and _align(name, token, config, generation)
    }


def _tokenizer_of(processing: Any) -> Any:
    if processing is None or "transformers" not in sys.modules:
        return None
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

    if isinstance(processing, ProcessorMixin):
        return getattr(processing, "tokenizer", None)
    return processing if isinstance(processing, PreTrainedTokenizerBase) else None


def _align(name: str, token: int, config: Any, generation: Any) -> bool:
    """Write one token; return whether a configuration lacked it."""
    current = getattr(config, name, None)
    ids = current if isinstance(current, list) else [current]
    generated = getattr(generation, name, None)
    stops = generated if isinstance(generated, list) else [generated]
    if token in ids and (generation is None or token in stops):
        return False
    is_list = _TOKENS[name]
    keeps = is_list and isinstance(current, list)
    setattr(
        config, name, [token, *(number for number in ids if number != token)] if keeps else token
    )
    if generation is not None:
        other_stops = [stop for stop in stops if stop is not None and stop != token]
        setattr(generation, name, [token, *other_stops] if is_list else token)
    return True
