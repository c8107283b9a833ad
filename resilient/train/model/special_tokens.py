"""Special tokens of a processing class in a model's configuration."""

from __future__ import annotations

import sys
from typing import Any

# Name -> whether a generation config may hold several of them.
_TOKENS = {"eos_token_id": True, "bos_token_id": False, "pad_token_id": False}


def align_special_tokens(model: Any, processing: Any) -> dict[str, int]:
    """Write a tokenizer's special tokens into a model's configurations, like Transformers.

    Existing end-of-text IDs stay beside the new one. A token that the tokenizer does not define
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
    found = {name: getattr(tokenizer, name, None) for name in _TOKENS}
    return {
        name: token
        for name, token in found.items()
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
    known = getattr(config, name, None)
    ids = known if isinstance(known, list) else [known]
    generated = getattr(generation, name, None)
    stops = generated if isinstance(generated, list) else [generated]
    if token in ids and (generation is None or token in stops):
        return False
    several = _TOKENS[name]
    keeps = several and isinstance(known, list)
    setattr(
        config, name, [token, *(number for number in ids if number != token)] if keeps else token
    )
    if generation is not None:
        more = [stop for stop in stops if stop is not None and stop != token]
        setattr(generation, name, [token, *more] if several else token)
    return True
