"""Tests of `resilient`, one package.

Programs that tests start are scripts of this package or import from it. Importing it therefore
adds the folder that holds it to ``PYTHONPATH``.
"""

import os
from pathlib import Path

ROOT = str(Path(__file__).resolve().parent.parent)

_paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
if ROOT not in _paths:
    os.environ["PYTHONPATH"] = os.pathsep.join([ROOT, *_paths])
