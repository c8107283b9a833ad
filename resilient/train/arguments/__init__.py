"""Everything a run can be told.

``arguments``: the class; ``fields``: its fields by group; ``checks``: what is refused;
``support``: what works yet (its docstring says how to switch an argument on); ``old_names``: what
arguments were called once; ``place``: what the launcher adds; ``files``, ``sources``,
``command_line``: where they come from.
"""

from __future__ import annotations

from resilient.train.arguments.arguments import TrainingArguments
from resilient.train.arguments.derived import layer_classes
from resilient.train.arguments.parsing import parse_arguments

__all__ = ["TrainingArguments", "layer_classes", "parse_arguments"]
