"""Count the modules that one save and one resume of a trainer run through.

    python -m tools.walk [--json] [--functions]

Two trainers run in this process, on a local store in a temporary folder. The first trainer saves
once to fill its caches. The command traces its second save until that is durable, then the resume
of the second trainer. A module counts if one of its functions runs, in any thread. The command
also prints the sizes of the tree and the targets of the layout. It exits with code 1 if a save or
a resume crosses more modules than its limit, or if the tree misses a limit.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from inspect import CO_OPTIMIZED
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.tree_sizes import measure_tree, render_sizes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import FrameType

    from torch import nn

    from resilient.train.run import TrainingRun
    from resilient.train.trainer import Trainer

SAVE_MODULES_MAX = 64
RESUME_MODULES_MAX = 62
_LIBRARY = str(Path(__file__).resolve().parent.parent / "resilient") + os.sep
_TRACED_SAVE = 2
_OTHER_THREADS = ("stop-watch", "stop-talk")
"""Threads that wait for a stop request, beside any operation."""


@dataclass(slots=True)
class Walk:
    """Functions of the library that ran in one operation.

    Attributes:
        name: Operation.
        modules_max: Limit on the number of modules.
        functions: Names of the functions by module; modules and functions in the order of their
            first call.
    """

    name: str
    modules_max: int
    functions: dict[str, dict[str, None]] = field(default_factory=dict)

    @property
    def modules(self) -> list[str]:
        """Modules in the order of their first call."""
        return list(self.functions)

    @property
    def functions_count(self) -> int:
        """Number of functions in all modules."""
        return sum(len(names) for names in self.functions.values())

    @property
    def is_within_limit(self) -> bool:
        """Whether the operation crosses at most ``modules_max`` modules."""
        return len(self.functions) <= self.modules_max

    def to_json(self) -> dict[str, Any]:
        """Return the walk as JSON-able values."""
        return {
            "modules": len(self.functions),
            "modules_max": self.modules_max,
            "functions": self.functions_count,
            "hops": {module: list(names) for module, names in self.functions.items()},
        }

    def add(self, frame: FrameType) -> None:
        """Record the function of a frame if it belongs to the library."""
        code = frame.f_code
        # Bodies of modules and classes run once, at import, and are no functions.
        if not code.co_filename.startswith(_LIBRARY) or not code.co_flags & CO_OPTIMIZED:
            return
        # A comprehension is a part of its function.
        name = code.co_qualname.removesuffix(code.co_name).rstrip(".") or code.co_name
        name = name if code.co_name.startswith("<") else code.co_qualname
        module = str(frame.f_globals["__name__"])
        self.functions.setdefault(module, {})[name.removesuffix(".<locals>")] = None


class Tracer:
    """Profile hook of all threads, which records the calls while a walk is active.

    Threads get the hook when they start: install the tracer before the first thread.
    """

    def __init__(self) -> None:
        self._walk: Walk | None = None

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Hook this thread and all threads that start inside."""
        before = sys.getprofile(), threading.getprofile()
        sys.setprofile(self._hook)
        threading.setprofile(self._hook)
        try:
            yield
        finally:
            sys.setprofile(before[0])
            threading.setprofile(before[1])

    @contextmanager
    def recording(self, walk: Walk) -> Iterator[None]:
        """Record the calls made inside into ``walk``."""
        self._walk = walk
        try:
            yield
        finally:
            self._walk = None

    def _hook(self, frame: FrameType, event: str, _argument: object) -> None:
        walk = self._walk
        if walk is None or event != "call":
            return
        if threading.current_thread().name not in _OTHER_THREADS:
            walk.add(frame)


class _Stopped(Exception):
    """Ends a training after its traced save, as a kill would."""


def trace() -> tuple[Walk, Walk]:
    """Return the walks of one save and of one resume."""
    save, resume = Walk("save", SAVE_MODULES_MAX), Walk("resume", RESUME_MODULES_MAX)
    tracer = Tracer()
    with tempfile.TemporaryDirectory(prefix="walk-") as folder, tracer.installed():
        with suppress(_Stopped):
            _train_until_save(folder, tracer, save)
        _train_from_resume(folder, tracer, resume)
    return save, resume


def _train_until_save(folder: str, tracer: Tracer, walk: Walk) -> None:
    """Train from step 0, record the second save, and stop there."""
    from resilient.train.trainer import Trainer

    class TracedTrainer(Trainer):
        saves = 0

        def _save_step(self, run: TrainingRun) -> None:
            self.saves += 1
            if self.saves < _TRACED_SAVE:
                super()._save_step(run)
                # Else the traced save would wait for this one.
                run.saver.wait()
                return
            with tracer.recording(walk):
                super()._save_step(run)
                run.saver.wait()
            raise _Stopped

    _trainer(TracedTrainer, folder).train()


def _train_from_resume(folder: str, tracer: Tracer, walk: Walk) -> None:
    """Resume the run, record that, and train to the end."""
    from resilient.train import trainer as module
    from resilient.train.trainer import Trainer

    restore = module.restore

    def traced(*given: Any, **named: Any) -> None:
        with tracer.recording(walk):
            restore(*given, **named)

    module.restore = traced
    try:
        _trainer(Trainer, folder).train()
    finally:
        module.restore = restore


def _trainer(kind: type[Trainer], folder: str) -> Trainer:
    """Return a trainer of a tiny model that saves each step in ``folder``."""
    import torch

    from resilient import TrainingArguments

    arguments = TrainingArguments(
        folder,
        max_steps=_TRACED_SAVE + 1,
        save_steps=1,
        per_device_train_batch_size=2,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    rows = [{"x": torch.full((4,), float(n)), "labels": torch.zeros(1)} for n in range(8)]
    return kind(model=_tiny_model(), args=arguments, train_dataset=rows)


def _tiny_model() -> nn.Module:
    import torch
    from torch import nn

    class TinyModel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 1)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor]:
            return (nn.functional.mse_loss(self.linear(x), labels),)

    return TinyModel()


def render_walk(walk: Walk, *, shows_functions: bool) -> str:
    """Return a walk as text: the counts, then one line per module in call order."""
    verdict = "" if walk.is_within_limit else "  TOO MANY"
    modules = f"{len(walk.functions)} modules (at most {walk.modules_max})"
    lines = [f"one {walk.name}: {modules}, {walk.functions_count} functions{verdict}"]
    for number, (module, names) in enumerate(walk.functions.items(), 1):
        lines.append(f"{number:4}  {module}  {len(names)}")
        if shows_functions:
            lines += [f"        {name}" for name in names]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Trace, print, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.walk", description=__doc__)
    parser.add_argument("--json", action="store_true", help="Print one JSON document.")
    parser.add_argument("--functions", action="store_true", help="List the functions as well.")
    options = parser.parse_args(arguments)
    walks, sizes = trace(), measure_tree()
    if options.json:
        document = {walk.name: walk.to_json() for walk in walks} | {"sizes": sizes.to_json()}
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
    else:
        texts = [render_walk(walk, shows_functions=options.functions) for walk in walks]
        rows = [
            (
                f"modules that run in one {walk.name}",
                len(walk.functions),
                f"at most {walk.modules_max}",
                not walk.is_within_limit,
            )
            for walk in walks
        ]
        sys.stdout.write("\n\n".join([*texts, render_sizes(sizes, rows)]) + "\n")
    is_met = all(walk.is_within_limit for walk in walks) and not sizes.missed()
    return 0 if is_met else 1


if __name__ == "__main__":
    raise SystemExit(main())
