"""Arguments of a training run: ``TrainingArguments``, its fields, parsing and validation."""

from __future__ import annotations

from resilient.train.arguments.arguments import TrainingArguments
from resilient.train.arguments.derived import layer_classes
from resilient.train.arguments.parsing import parse_arguments

__all__ = ["TrainingArguments", "layer_classes", "parse_arguments"]
