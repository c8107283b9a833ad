"""Muon for the matrices inside a model, AdamW for everything else, as one optimizer.

Muon (Jordan et al. 2024) orthogonalises the momentum of a matrix; torch's takes nothing but
matrices. Embeddings are matrices too, but are trained by AdamW, as its author does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from resilient.errors import ConfigError
from resilient.train.optimizers.groups import given, parameter_groups
from resilient.train.optimizers.options import typed
from resilient.train.optimizers.own import adam_options

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient.train.arguments import TrainingArguments
    from resilient.train.optimizers.own import Groups, Recipe

_MATRIX = 2


class MuonWithAdamW(torch.optim.Optimizer):
    """One optimizer over two, which share its groups and its state.

    Args:
        params: groups for Muon: matrices.
        others: groups for AdamW.
        muon: options of Muon.
        adamw: options of AdamW.
    """

    def __init__(
        self, params: Groups, others: Groups, muon: Mapping[str, Any], adamw: Mapping[str, Any]
    ) -> None:
        self._inner: list[torch.optim.Optimizer] = []
        if params:
            self._inner.append(torch.optim.Muon(params, **muon))
        if others:
            self._inner.append(torch.optim.AdamW(others, **adamw))
        groups = [group for one in self._inner for group in one.param_groups]
        super().__init__(groups, {"lr": adamw["lr"]})
        self._share()

    def _share(self) -> None:
        """Let both see the groups and the state that this one has."""
        at = 0
        for one in self._inner:
            count = len(one.param_groups)
            one.param_groups = self.param_groups[at : at + count]
            one.state = self.state
            at += count

    def step(self, closure: Any = None) -> Any:
        """Step both."""
        loss = closure() if closure is not None else None
        for one in self._inner:
            one.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the state of both."""
        super().load_state_dict(state_dict)
        self._share()


def muon(args: TrainingArguments, options: dict[str, Any], model: nn.Module | None) -> Recipe:
    """Return Muon for matrices that are no embeddings, with AdamW beside it.

    Muon's step is scaled to the size of AdamW's (``match_rms_adamw``), so that one learning rate
    serves both.

    Raises:
        ConfigError: this torch has no Muon, or no model is given.
    """
    if not hasattr(torch.optim, "Muon"):
        raise ConfigError(f"torch {torch.__version__} has no Muon", hint="pip install 'torch>=2.9'")
    known = {"momentum": 0.95, "nesterov": True, "ns_steps": 5}
    more = typed(args.optim, options, known)
    found = given(args, model)
    embedded = {
        id(one)
        for module in found.modules()
        if isinstance(module, nn.Embedding)
        for one in module.parameters(recurse=False)
    }
    matrices, others = [], []
    for group in parameter_groups(found, args.weight_decay):
        turned = [p for p in group["params"] if p.dim() == _MATRIX and id(p) not in embedded]
        chosen = {id(one) for one in turned}
        rest = [one for one in group["params"] if id(one) not in chosen]
        matrices += [{**group, "params": turned}] if turned else []
        others += [{**group, "params": rest}] if rest else []
    rate = {"lr": args.learning_rate}
    return MuonWithAdamW, {
        "params": matrices,
        "others": others,
        "muon": {**rate, **more, "adjust_lr_fn": "match_rms_adamw"},
        "adamw": {**rate, **adam_options(args)},
    }
