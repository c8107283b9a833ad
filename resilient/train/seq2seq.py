"""Sequence-to-sequence training: evaluation of generated sequences."""

from __future__ import annotations

import os
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from resilient.errors import ConfigError
from resilient.train.arguments import TrainingArguments
from resilient.train.arguments.choices import refused
from resilient.train.arguments.fields import option
from resilient.train.model.batch import find_labels
from resilient.train.trainer import Trainer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from resilient.train.callbacks.base import TrainerCallback
    from resilient.train.evaluation.loop import EvalPrediction, PredictionOutput

# Decoder inputs that are made from the labels. For generation the model makes its own.
_DECODERS = ("decoder_input_ids", "decoder_attention_mask")


@dataclass
class Seq2SeqTrainingArguments(TrainingArguments):
    """Training arguments with arguments for generation.

    >>> args = Seq2SeqTrainingArguments("out", predict_with_generate=True)
    """

    predict_with_generate: bool = option(
        default=False, help="evaluate what `model.generate` returns, for metrics of texts"
    )
    generation_max_length: int | None = option(
        None, "`max_length` of generation in evaluations; None: the model's own"
    )
    generation_num_beams: int | None = option(
        None, "`num_beams` of generation in evaluations; None: the model's own"
    )
    generation_config: str | None = option(
        None, "folder or file with a GenerationConfig of Transformers for the model"
    )
    sortish_sampler: bool = option(
        default=False, help="removed from Transformers' trainer; write train_sampling_strategy"
    )

    def __post_init__(self) -> None:
        if self.sortish_sampler:
            hint = 'write train_sampling_strategy="group_by_length"'
            raise refused("sortish_sampler", self.sortish_sampler, hint)
        super().__post_init__()


class Seq2SeqTrainer(Trainer):
    """Trainer whose predictions are generated sequences.

    With ``predict_with_generate`` the predictions for ``compute_metrics`` are tokens of shape
    (samples, longest), filled with the padding token. The loss is still computed from the labels.
    The model needs ``generate(**inputs, **options)``.
    """

    args: Any
    _gen_kwargs: Mapping[str, Any] | None = None

    def __init__(  # noqa: PLR0913, PLR0917 - the field's signature, in its order
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        data_collator: Callable[[Any], Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Callable[..., nn.Module] | None = None,
        compute_loss_func: Callable[..., torch.Tensor] | None = None,
        compute_metrics: Callable[[EvalPrediction], Mapping[str, Any]] | None = None,
        callbacks: Iterable[TrainerCallback | type[TrainerCallback]] | None = None,
        optimizers: tuple[Optimizer | None, LRScheduler | None] = (None, None),
        preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
        *,
        optimizer_cls_and_kwargs: tuple[type[Optimizer], dict[str, Any]] | None = None,
        tokenizer: Any = None,
    ) -> None:
        super().__init__(
            model=model,
            args=args,
            data_collator=data_collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            model_init=model_init,
            compute_loss_func=compute_loss_func,
            compute_metrics=compute_metrics,
            callbacks=callbacks,
            optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
            tokenizer=tokenizer,
        )
        if getattr(self.args, "generation_config", None):
            self.model.generation_config = self.load_generation_config(self.args.generation_config)

    @staticmethod
    def load_generation_config(gen_config_arg: Any) -> Any:
        """Return the GenerationConfig of a folder or a file; a GenerationConfig is copied.

        Raises:
            ConfigError: There is no such config, or Transformers is not installed.
        """
        is_place = isinstance(gen_config_arg, str | os.PathLike)
        return _read_config(os.fspath(gen_config_arg)) if is_place else deepcopy(gen_config_arg)

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: Sequence[str] | None = None,
        metric_key_prefix: str = "eval",
        **gen_kwargs: Any,
    ) -> dict[str, Any]:
        """Evaluate a dataset; ``gen_kwargs`` are passed to ``generate``. Collective."""
        self._gen_kwargs = self._generation(gen_kwargs)
        return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def predict(
        self,
        test_dataset: Any,
        ignore_keys: Sequence[str] | None = None,
        metric_key_prefix: str = "test",
        **gen_kwargs: Any,
    ) -> PredictionOutput:
        """Predict a dataset; ``gen_kwargs`` are passed to ``generate``. Collective."""
        self._gen_kwargs = self._generation(gen_kwargs)
        return super().predict(test_dataset, ignore_keys, metric_key_prefix)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: Any,
        prediction_loss_only: bool,  # noqa: FBT001 - the field's signature
        ignore_keys: Sequence[str] | None = None,
        **gen_kwargs: Any,
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """Return ``(loss, generated tokens, labels)`` of a batch.

        Raises:
            ConfigError: The model cannot generate.
        """
        generates = getattr(self.args, "predict_with_generate", False)
        if not generates or prediction_loss_only:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        loss, labels = None, find_labels(inputs, self.label_names)
        if labels is not None:
            loss, _, _ = super().prediction_step(model, inputs, True, ignore_keys)  # noqa: FBT003
        options = gen_kwargs or self._gen_kwargs or self._generation({})
        with torch.no_grad(), self.precision.autocast():
            tokens = self._generate(self._prepare_inputs(inputs), options)
        return loss, self._padded(tokens, options), labels

    def _generation(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return generation options: as given, else from the arguments, else from the model."""
        options = dict(arguments)
        longest = getattr(self.args, "generation_max_length", None)
        if options.get("max_length") is None and options.get("max_new_tokens") is None:
            options["max_length"] = longest
        if options.get("num_beams") is None:
            options["num_beams"] = getattr(self.args, "generation_num_beams", None)
        return {name: value for name, value in options.items() if value is not None}

    def _generate(self, inputs: Any, options: Mapping[str, Any]) -> torch.Tensor:
        generate: Any = getattr(self.model, "generate", None)
        if generate is None or not isinstance(inputs, Mapping):
            raise ConfigError(
                "`predict_with_generate` needs a model with `generate` and batches with names, "
                f"but got `{type(self.model).__name__}` and `{type(inputs).__name__}`"
            )
        model_inputs = {
            name: value for name, value in inputs.items() if name not in self.label_names
        }
        if find_labels(inputs, self.label_names) is not None:
            model_inputs = {
                name: value for name, value in model_inputs.items() if name not in _DECODERS
            }
        # Ranks that share one model must all run as many decoding steps as the slowest rank.
        sync_options = {"synced_gpus": True} if self.session.computes_together else {}
        tokens: torch.Tensor = generate(**model_inputs, **{**sync_options, **options})
        return tokens

    def _padded(self, tokens: torch.Tensor, options: Mapping[str, Any]) -> torch.Tensor:
        """Return tokens padded to the maximum length, so that all batches and ranks agree."""
        config = getattr(self.model, "generation_config", None)
        longest = options.get("max_length") or getattr(config, "max_length", None)
        new_tokens_max = options.get("max_new_tokens") or getattr(config, "max_new_tokens", None)
        if new_tokens_max is not None and not options.get("max_length"):
            longest = new_tokens_max + 1
        padding_tokens = (longest or 0) - tokens.shape[-1]
        if padding_tokens <= 0:
            return tokens
        return torch.nn.functional.pad(tokens, (0, padding_tokens), value=self._pad_token())

    def _pad_token(self) -> int:
        """Return the token that pads sequences.

        Raises:
            ConfigError: Neither the processing class nor the model's config names a token.
        """
        owners = (getattr(self, "processing_class", None), getattr(self.model, "config", None))
        for home in owners:
            for name in ("pad_token_id", "eos_token_id"):
                token = getattr(home, name, None)
                if isinstance(token, int):
                    return token
        raise ConfigError(
            "generated sequences differ in length, and their padding is unknown: set "
            "`pad_token_id` in the model's config, or pass a tokenizer as `processing_class`"
        )


def _read_config(place: str) -> Any:
    """Return the GenerationConfig of a folder or a file.

    Raises:
        ConfigError: There is no such config, or Transformers is not installed.
    """
    from pathlib import Path

    try:
        from transformers import GenerationConfig
    except ImportError as error:
        raise ConfigError(
            "`generation_config` needs Transformers", hint="pip install resilient-train[hf]"
        ) from error
    path = Path(place)
    folder, name = (path, None) if path.is_dir() else (path.parent, path.name)
    try:
        return GenerationConfig.from_pretrained(str(folder), name, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"`generation_config` `{place}` cannot be loaded: {error}") from error
