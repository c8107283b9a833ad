"""Model card: a README.md with the training data, the arguments and the results.

The head of the card is metadata in the format of the Hub
(https://huggingface.co/docs/hub/model-cards). Each value is written as JSON, which is valid YAML
too.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from resilient.errors import ConfigError
from resilient.storage.local import LocalStore
from resilient.train.arguments.choices import text_of
from resilient.train.model.artifacts import base_model, is_adapted

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import nn

    from resilient.train.arguments import TrainingArguments
    from resilient.train.state import TrainerState

GENERATED = "generated_from_trainer"
# Metrics with a page on the Hub, by a part of their name.
METRICS = (
    *("accuracy", "bleu", "f1", "matthews_correlation", "pearsonr", "precision", "recall"),
    *("rouge", "sacrebleu", "spearmanr", "wer"),
)
_UNWRITTEN = ("Model description", "Intended uses & limitations", "Training and evaluation data")
_OPTIONS = (
    *("learning_rate", "per_device_train_batch_size", "per_device_eval_batch_size", "seed"),
    *("gradient_accumulation_steps", "world_size", "optim", "optim_args", "lr_scheduler_type"),
    *("warmup_steps", "max_steps", "num_train_epochs", "label_smoothing_factor", "bf16", "fp16"),
)


@dataclass(frozen=True, slots=True)
class ModelCardInfo:
    """Facts about a model that only the user knows. Fields with plural names take one or several.

    Attributes:
        language: Language of the data.
        license: License of the model.
        tags: Tags for the Hub.
        model_name: Title of the card.
        finetuned_from: Model before this training.
        tasks: Identifiers, such as ``text-classification``.
        dataset_tags: Identifiers of datasets on the Hub.
        dataset: Names of the datasets.
        dataset_args: Configuration of each dataset.
    """

    language: Any = None
    license: str | None = None
    tags: Any = None
    model_name: str | None = None
    finetuned_from: str | None = None
    tasks: Any = None
    dataset_tags: Any = None
    dataset: Any = None
    dataset_args: Any = None


def write_card(
    folder: Path,
    model: nn.Module,
    info: ModelCardInfo,
    args: TrainingArguments,
    state: TrainerState,
) -> None:
    """Write a model's card into a folder, atomically.

    Raises:
        ConfigError: An existing card cannot be read.
        StoreError: The folder cannot be written.
    """
    base = base_model(model)
    base_name = str(getattr(getattr(base, "config", None), "_name_or_path", "") or "")
    library = "transformers" if hasattr(base, "save_pretrained") else None
    info = replace(
        info,
        tags=[*listed(info.tags), *tags_in(folder / "README.md")],
        finetuned_from=info.finetuned_from
        or ("" if Path(base_name).is_dir() else base_name)
        or None,
        model_name=info.model_name or folder.resolve().name,
    )
    text = card_of(info, "peft" if is_adapted(model) else library, args, state.log_history)
    LocalStore(folder).put("README.md", text.encode())


def card_of(
    info: ModelCardInfo,
    library: str | None,
    args: TrainingArguments,
    history: Sequence[Mapping[str, Any]],
) -> str:
    """Return the text of a card.

    Args:
        info: Facts from the user.
        library: Library that loads the model, by the Hub's name; None if the Hub has none.
        args: Arguments of the run.
        history: ``log_history`` of the trainer state.
    """
    judged = _evaluations(history)
    results = {_shown_name(name): metric for name, metric in _metrics(judged[-1])} if judged else {}
    head = _metadata(info, library, results)
    lines = [
        "---",
        *(f"{key}: {json.dumps(value)}" for key, value in head.items() if value),
        "---",
        "",
    ]
    lines += [f"# {info.model_name}", "", _origin(info), ""]
    if results:
        lines += ["It achieves the following results on the evaluation set:", ""]
        lines += [*(f"- {name}: {_number(result)}" for name, result in results.items()), ""]
    for title in _UNWRITTEN:
        lines += [f"## {title}", "", "More information needed", ""]
    lines += ["## Training procedure", "", "### Training hyperparameters", ""]
    values = ((name, getattr(args, name)) for name in _OPTIONS)
    lines += [
        *(
            f"- {name}: {text_of(value) if isinstance(value, str) else value}"
            for name, value in values
            if value is not None and value is not False
        )
    ]
    lines += [""]
    if judged:
        lines += ["### Training results", "", *_table(judged), ""]
    lines += ["### Framework versions", "", f"- PyTorch {torch.__version__}", ""]
    return "\n".join(lines)


def tags_in(card: Path) -> list[str]:
    """Return the tags of a folder's existing card; empty without a card.

    Raises:
        ConfigError: The card cannot be read.
    """
    if not card.exists():
        return []
    try:
        from huggingface_hub import ModelCard
    except ImportError as error:
        raise ConfigError(
            f"`{card}` exists, but huggingface_hub, which reads its tags, is not installed",
            hint=f"pip install huggingface_hub, or mv {card} elsewhere",
        ) from error
    try:
        return [str(tag) for tag in listed(ModelCard.load(card).data.tags)]
    except ValueError as error:
        raise ConfigError(
            f"the head of `{card}` is not the YAML of a model card: {error}",
            hint=f"fix it, or mv {card} elsewhere",
        ) from error


def listed(value: Any) -> list[Any]:
    """Return one value or several as a list."""
    if value is None:
        return []
    return [value] if isinstance(value, str) else list(value)


def _metadata(
    info: ModelCardInfo, library: str | None, results: Mapping[str, Any]
) -> dict[str, Any]:
    card_metrics = {
        metric: name
        for metric in METRICS
        for name in results
        if metric in name.lower().replace(" ", "_")
    }
    return {
        "library_name": library,
        "language": listed(info.language),
        "license": info.license,
        "base_model": info.finetuned_from,
        "tags": list(dict.fromkeys([*listed(info.tags), GENERATED])),
        "datasets": listed(info.dataset_tags),
        "metrics": list(card_metrics),
        "model-index": _index(info, card_metrics, results),
    }


def _index(
    info: ModelCardInfo, card_metrics: Mapping[str, str], results: Mapping[str, Any]
) -> list[Any]:
    """Return results in the Hub's format, which requires a task and a dataset for each result."""
    tags, names = listed(info.dataset_tags), listed(info.dataset)
    arguments = listed(info.dataset_args)
    metrics = [
        {"name": name, "type": metric, "value": results[name]}
        for metric, name in card_metrics.items()
    ]
    entries = []
    for task, (place, tag) in product(listed(info.tasks), enumerate(tags)):
        dataset = {"name": names[place] if place < len(names) else tag, "type": tag}
        if place < len(arguments):
            dataset["args"] = arguments[place]
        described = {"name": task.replace("-", " ").title(), "type": task}
        entries.append({"task": described, "dataset": dataset, "metrics": metrics})
    return [{"name": info.model_name, "results": entries}] if entries and metrics else []


def _origin(info: ModelCardInfo) -> str:
    names = [
        f"the {dataset} dataset" for dataset in listed(info.dataset) or listed(info.dataset_tags)
    ]
    data = " and ".join(names) or "an unknown dataset"
    if not info.finetuned_from:
        return f"This model was trained from scratch on {data}."
    link = f"[{info.finetuned_from}](https://huggingface.co/{info.finetuned_from})"
    return f"This model is a fine-tuned version of {link} on {data}."


def _evaluations(history: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return each step's evaluation metrics, with the preceding training loss as ``loss``."""
    evaluations: dict[Any, dict[str, Any]] = {}
    loss: Any = "No log"
    for entry in history:
        loss = entry.get("loss", loss)
        if any(name.startswith("eval_") for name in entry):
            evaluations[entry["step"]] = {
                **evaluations.get(entry["step"], {}),
                **entry,
                "loss": loss,
            }
    return list(evaluations.values())


def _table(judged: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    names = dict.fromkeys(name for entry in judged for name, _ in _metrics(entry))
    yield "| " + " | ".join(["Training Loss", "Epoch", "Step", *map(_shown_name, names)]) + " |"
    yield "|" + " --- |" * (3 + len(names))
    for entry in judged:
        cells = (entry.get(name, "") for name in ("loss", "epoch", "step", *names))
        yield "| " + " | ".join(map(_number, cells)) + " |"


def _metrics(entry: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    return ((name, value) for name, value in entry.items() if name.startswith("eval_"))


def _shown_name(name: str) -> str:
    return " ".join(part.capitalize() for part in name.removeprefix("eval_").split("_"))


def _number(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)
