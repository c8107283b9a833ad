"""Everything a run can be told.

``arguments``: the class; ``fields``: its fields by group; ``checks``: what is refused;
``support``: what works yet (its docstring says how to switch an argument on); ``old_names``: what
arguments were called once; ``place``: what the launcher adds; ``files``, ``sources``,
``command_line``: where they come from.
"""

from __future__ import annotations

from resilient.train.arguments.arguments import TrainingArguments
from resilient.train.arguments.command_line import parse_arguments
from resilient.train.arguments.distribution import layer_classes

__all__ = ["TrainingArguments", "layer_classes", "parse_arguments"]
