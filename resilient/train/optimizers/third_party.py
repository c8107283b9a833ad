"""Optimizers of other packages: bitsandbytes, torchao, GaLore, APOLLO, Muon and others.

Each optimizer gets the options that Transformers gives it. If its package is not installed, the
error shows the command that installs it.

Muon (Jordan et al. 2024) orthogonalises the momentum of a matrix, and torch's Muon accepts only
matrices. All other parameters are trained by AdamW in the same optimizer. Embeddings are matrices
too, but AdamW trains the embeddings, as Muon's author recommends. GaLore (Zhao et al. 2024) and
APOLLO (Zhu et al. 2024) keep moments of projected gradients.
"""

from __future__ import annotations

import importlib
import re
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from resilient.errors import ConfigError
from resilient.train.arguments.choices import text_of
from resilient.train.optimizers.builtin import adam_options, given, parameter_groups, typed
from resilient.train.state import absolute_steps

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient.train.arguments import TrainingArguments
    from resilient.train.optimizers.builtin import Groups, Recipe


def package(name: str, module: str, distribution: str) -> Any:
    """Import a module of a package.

    Raises:
        ConfigError: The package is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"the optimizer `{text_of(name)}` needs the package {distribution}, which cannot "
            f"be imported: {error}",
            hint=f"pip install {distribution}",
        ) from error


def lion(args: TrainingArguments, options: dict[str, Any], _: nn.Module | None) -> Recipe:
    """Return Lion (Chen et al. 2023) of lion-pytorch; betas that are not given are its defaults."""
    module = package(args.optim, "lion_pytorch", "lion-pytorch")
    lion_options = typed(args.optim, options, {"beta1": 0.9, "beta2": 0.99})
    betas = (lion_options.get("beta1", 0.9), lion_options.get("beta2", 0.99))
    return module.Lion, {"lr": args.learning_rate, "betas": betas}


def bitsandbytes(args: TrainingArguments, options: dict[str, Any], _: nn.Module | None) -> Recipe:
    """Return AdamW, Lion, RMSprop or AdEMAMix of bitsandbytes in 8 or 32 bits, paged or not."""
    name = args.optim
    module = package(name, "bitsandbytes.optim", "bitsandbytes")
    bits = {"optim_bits": 8 if "8bit" in name else 32}
    rate = {"lr": args.learning_rate}
    betas = (args.adam_beta1, args.adam_beta2)
    if "rmsprop" in name:
        rmsprop_options = typed(name, options, {"alpha": 0.99, "eps": 1e-8, "momentum": 0.0})
        return module.RMSprop, {**rate, **rmsprop_options, **bits}
    paged = {"is_paged": "paged" in name}
    if "ademamix" in name:
        return module.AdEMAMix, {**rate, **_ademamix(args, options), **bits, **paged}
    typed(name, options, {})
    if "lion" in name:
        return module.Lion, {**rate, "betas": betas, **bits, **paged}
    return module.AdamW, {**rate, **adam_options(args), **bits, **paged}


def _ademamix(args: TrainingArguments, options: dict[str, Any]) -> dict[str, Any]:
    defaults = {
        "beta1": args.adam_beta1,
        "beta2": args.adam_beta2,
        "beta3": 0.9999,
        "alpha": 5.0,
        "eps": args.adam_epsilon,
        "t_alpha": int,
        "t_beta3": int,
    }
    options_given = typed(args.optim, options, defaults)
    merged = {
        **{key: value for key, value in defaults.items() if value is not int},
        **options_given,
    }
    betas = (merged.pop("beta1"), merged.pop("beta2"), merged.pop("beta3"))
    return {"betas": betas, **merged}


def torchao(args: TrainingArguments, options: dict[str, Any], _: nn.Module | None) -> Recipe:
    """Return AdamW of torchao with moments in 8 or 4 bits; its step is compiled."""
    module = package(args.optim, "torchao.optim", "torchao")
    defaults = {"block_size": 256 if "8bit" in args.optim else 128, "bf16_stochastic_round": False}
    quantization_options = {**defaults, **typed(args.optim, options, defaults)}
    kind = module.AdamW4bit if "4bit" in args.optim else module.AdamW8bit
    return kind, {"lr": args.learning_rate, **adam_options(args), **quantization_options}


def schedule_free(args: TrainingArguments, options: dict[str, Any], _: nn.Module | None) -> Recipe:
    """Return AdamW, SGD or RAdam of schedulefree (Defazio et al. 2024).

    The optimizer has its own warm-up, so the schedule must be constant.

    Raises:
        ConfigError: The schedule is not constant, or ``load_best_model_at_end`` is set. The best
            model is evaluated with averaged weights, and training continues from other weights.
    """
    module = package(args.optim, "schedulefree", "schedulefree")
    if args.lr_scheduler_type != "constant":
        raise ConfigError(
            f"`{text_of(args.optim)}` has no use for "
            f"`lr_scheduler_type`={args.lr_scheduler_type!r}",
            hint='set lr_scheduler_type="constant"',
        )
    if args.load_best_model_at_end:
        raise ConfigError(
            f"`load_best_model_at_end` cannot be used with `{text_of(args.optim)}`: a checkpoint "
            "holds the training weights, but the evaluated weights are an average"
        )
    optimizer_options = typed(args.optim, options, {"weight_lr_power": 2.0, "r": 0.0})
    optimizer_options |= {"lr": args.learning_rate, "weight_decay": args.weight_decay}
    if args.optim == "schedule_free_radam":
        return module.RAdamScheduleFree, {**optimizer_options, **adam_options(args)}
    optimizer_options["warmup_steps"] = absolute_steps(args.warmup_steps, max(args.max_steps, 0))
    if args.optim == "schedule_free_adamw":
        return module.AdamWScheduleFree, {**optimizer_options, **adam_options(args)}
    return module.SGDScheduleFree, optimizer_options


def stable_adamw(args: TrainingArguments, options: dict[str, Any], _: nn.Module | None) -> Recipe:
    """Return StableAdamW of torch-optimi."""
    module = package(args.optim, "optimi", "torch-optimi")
    defaults = {"decouple_lr": False, "max_lr": float, "kahan_sum": bool}
    adamw_options = typed(args.optim, options, defaults)
    return module.StableAdamW, {"lr": args.learning_rate, **adam_options(args), **adamw_options}


_MATRIX = 2


class MuonWithAdamW(torch.optim.Optimizer):
    """Optimizer that combines Muon and AdamW; both share the groups and the state.

    Args:
        params: Groups for Muon; all parameters are matrices.
        others: Groups for AdamW.
        muon: Options of Muon.
        adamw: Options of AdamW.
    """

    def __init__(
        self, params: Groups, others: Groups, muon: Mapping[str, Any], adamw: Mapping[str, Any]
    ) -> None:
        self._inner: list[torch.optim.Optimizer] = []
        if params:
            self._inner.append(torch.optim.Muon(params, **muon))
        if others:
            self._inner.append(torch.optim.AdamW(others, **adamw))
        groups = [group for optimizer in self._inner for group in optimizer.param_groups]
        super().__init__(groups, {"lr": adamw["lr"]})
        self._share()

    def _share(self) -> None:
        """Let both inner optimizers use the groups and the state of this optimizer."""
        at = 0
        for optimizer in self._inner:
            count = len(optimizer.param_groups)
            optimizer.param_groups = self.param_groups[at : at + count]
            optimizer.state = self.state
            at += count

    def step(self, closure: Any = None) -> Any:
        """Step both inner optimizers."""
        loss = closure() if closure is not None else None
        for optimizer in self._inner:
            optimizer.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of both inner optimizers."""
        super().load_state_dict(state_dict)
        self._share()


def muon(args: TrainingArguments, options: dict[str, Any], model: nn.Module | None) -> Recipe:
    """Return Muon for matrices other than embeddings, and AdamW for all other parameters.

    Muon's step is scaled to the size of AdamW's step (``match_rms_adamw``), so both use one
    learning rate.

    Raises:
        ConfigError: This torch has no Muon, or no model is given.
    """
    if not hasattr(torch.optim, "Muon"):
        raise ConfigError(f"torch {torch.__version__} has no Muon", hint="pip install 'torch>=2.9'")
    defaults = {"momentum": 0.95, "nesterov": True, "ns_steps": 5}
    muon_options = typed(args.optim, options, defaults)
    given_model = given(args, model)
    embedded = {
        id(parameter)
        for module in given_model.modules()
        if isinstance(module, nn.Embedding)
        for parameter in module.parameters(recurse=False)
    }
    muon_groups, adamw_groups = [], []
    for group in parameter_groups(given_model, args.weight_decay):
        muon_parameters = [
            p for p in group["params"] if p.dim() == _MATRIX and id(p) not in embedded
        ]
        parameter_ids = {id(parameter) for parameter in muon_parameters}
        adamw_parameters = [
            parameter for parameter in group["params"] if id(parameter) not in parameter_ids
        ]
        muon_groups += [{**group, "params": muon_parameters}] if muon_parameters else []
        adamw_groups += [{**group, "params": adamw_parameters}] if adamw_parameters else []
    rate = {"lr": args.learning_rate}
    return MuonWithAdamW, {
        "params": muon_groups,
        "others": adamw_groups,
        "muon": {**rate, **muon_options, "adjust_lr_fn": "match_rms_adamw"},
        "adamw": {**rate, **adam_options(args)},
    }


_GALORE = {"rank": 128, "update_proj_gap": 200, "scale": 0.25, "proj_type": "std"}
_APOLLO = {
    "rank": 128,
    "proj": "random",
    "scale_type": "channel",
    "update_proj_gap": 200,
    "scale": 1.0,
    "proj_type": "std",
}


def galore(args: TrainingArguments, options: dict[str, Any], model: nn.Module | None) -> Recipe:
    """Return AdamW or Adafactor of galore-torch, with projections for ``optim_target_modules``."""
    module = package(args.optim, "galore_torch", "galore-torch")
    projection_options = {**_GALORE, **typed(args.optim, options, _GALORE)}
    optimizer_options = {
        "params": project(args, projection_options, model),
        "lr": args.learning_rate,
    }
    if args.optim == "galore_adafactor":
        return module.GaLoreAdafactor, {
            **optimizer_options,
            "scale_parameter": False,
            "relative_step": False,
        }
    kind = module.GaLoreAdamW8bit if "8bit" in args.optim else module.GaLoreAdamW
    return kind, {**optimizer_options, **adam_options(args)}


def apollo(args: TrainingArguments, options: dict[str, Any], model: nn.Module | None) -> Recipe:
    """Return AdamW of apollo-torch, with projections for ``optim_target_modules``."""
    module = package(args.optim, "apollo_torch", "apollo-torch")
    projection_options = {**_APOLLO, **typed(args.optim, options, _APOLLO)}
    optimizer_options = {
        "params": project(args, projection_options, model),
        "lr": args.learning_rate,
    }
    return module.APOLLOAdamW, {**optimizer_options, **adam_options(args)}


def project(args: TrainingArguments, options: dict[str, Any], model: nn.Module | None) -> Groups:
    """Return groups without projection, then groups of the projected weights with ``options``.

    Transformers has the same two groups, and ignores ``weight_decay`` for them. Here a
    ``weight_decay`` other than 0 splits each group, so that biases and norms do not decay.

    Raises:
        ConfigError: ``optim_target_modules`` names no linear module, or no model is given.
    """
    given_model = given(args, model)
    targets = target_weights(args, given_model)
    if not args.weight_decay:
        trained_parameters = [
            parameter for parameter in given_model.parameters() if parameter.requires_grad
        ]
        groups: Groups = [{"params": trained_parameters, "weight_decay": 0.0}]
    else:
        groups = parameter_groups(given_model, args.weight_decay)
    other_groups = [{**group, "params": _outside(group["params"], targets)} for group in groups]
    projected_groups = [
        {**group, **options, "params": _inside(group["params"], targets)} for group in groups
    ]
    return [group for group in (*other_groups, *projected_groups) if group["params"]]


def _inside(parameters: list[Any], targets: set[int]) -> list[Any]:
    return [parameter for parameter in parameters if id(parameter) in targets]


def _outside(parameters: list[Any], targets: set[int]) -> list[Any]:
    return [parameter for parameter in parameters if id(parameter) not in targets]


def target_weights(args: TrainingArguments, model: nn.Module) -> set[int]:
    """Return the ids of the weights of the linear modules that ``optim_target_modules`` names.

    A list holds parts of names or patterns for whole names, as in Transformers. A text is a
    pattern for whole names, and ``all-linear`` means all linear modules. A tied weight has only the
    name of its first module, so the name of an output layer does not select the embeddings.
    """
    patterns = args.optim_target_modules
    if not patterns:
        raise ConfigError(
            f"`{text_of(args.optim)}` needs `optim_target_modules`: which modules to project",
            hint='set optim_target_modules="all-linear", or ["q_proj", "v_proj"]',
        )
    linear = {
        name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)
    }
    target_names = {f"{name}.weight" for name in linear if _names(patterns, name)}
    if not target_names:
        raise ConfigError(
            f"no linear module of the model is named by `optim_target_modules`={patterns!r}; "
            f"it has {', '.join(linear) or 'none'}"
        )
    return {id(value) for name, value in model.named_parameters() if name in target_names}


def _names(patterns: list[str] | str, module: str) -> bool:
    if isinstance(patterns, str):
        takes_all = patterns.replace("_", "-") == "all-linear"
        return takes_all or re.fullmatch(patterns, module) is not None
    return any(pattern in module or re.fullmatch(pattern, module) for pattern in patterns)
