"""NEFTune: noise on embeddings while a model is trained."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from resilient.errors import ConfigError
from resilient.train.model.losses import base_of

if TYPE_CHECKING:
    from collections.abc import Iterator

# What an embedding of a batch has: samples, places, numbers of each.
_DIMENSIONS = 3


@contextmanager
def noisy_embeddings(model: nn.Module, alpha: float | None) -> Iterator[None]:
    """Add uniform noise of ``alpha / sqrt(L * d)`` to the embeddings of a model in training.

    The noise comes from the device's random stream, which every checkpoint holds, so a resumed
    run adds the same. Evaluation has none. Transformers' recipe, to the bit.

    Args:
        model: has ``get_input_embeddings``, or one ``nn.Embedding``.
        alpha: the strength; None or 0: no noise.

    Raises:
        ConfigError: the model does not say which embeddings are its inputs'.
    """
    if not alpha:
        yield
        return
    handle = input_embeddings(model).register_forward_hook(partial(_add_noise, alpha))
    try:
        yield
    finally:
        handle.remove()


def input_embeddings(model: nn.Module) -> nn.Module:
    """Return the module that embeds a model's inputs.

    Raises:
        ConfigError: the model does not say which it is, and has none or several.
    """
    base = base_of(model)
    get = getattr(base, "get_input_embeddings", None)
    if callable(get):
        said: nn.Module = get()
        return said
    found = [one for one in base.modules() if isinstance(one, nn.Embedding)]
    if len(found) != 1:
        raise ConfigError(
            f"`neftune_noise_alpha` cannot tell which of {len(found)} nn.Embedding modules of "
            f"`{type(base).__name__}` embeds its inputs: give the model a method "
            "`get_input_embeddings` that returns it"
        )
    return found[0]


def _add_noise(alpha: float, module: nn.Module, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
    if not module.training:
        return output
    if output.dim() != _DIMENSIONS:
        raise ConfigError(
            f"`neftune_noise_alpha` needs embeddings of shape (samples, length, size), and "
            f"`{type(module).__name__}` returned {tuple(output.shape)}"
        )
    most = float(alpha / torch.sqrt(torch.tensor(output.size(1) * output.size(2))))
    return output + torch.zeros_like(output).uniform_(-most, most)
