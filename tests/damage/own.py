"""Our own layout in the matrix: with parity and without, told by `verify`, mended by `repair`."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from resilient.checkpoint.repair import apply_repair, plan_repair
from resilient.errors import NothingToResume, ResilientError
from resilient.format.keys import parse_checkpoint
from resilient.storage.open import open_store

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS, NEXT = 4, 6


def maker(parity: int) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        _trainer(folder / "run", STEPS, save_steps=2, save_parity=parity).train()
        return folder / "run" / f"checkpoint-{STEPS}-g1"

    return make


def resume(path: Path) -> tuple[dict, int]:
    """Train on from the newest checkpoint that our own trainer takes."""
    with tempfile.TemporaryDirectory() as folder:
        run = shutil.copytree(path.parent, Path(folder) / "run", symlinks=True)
        trainer = _trainer(run, NEXT)
        trainer.train()
        weights = {name: one.clone() for name, one in trainer.model.state_dict().items()}
        return weights, trainer.state.global_step


def _trainer(folder: Path, steps: int, **options):
    from tests.unit.train.models import make_trainer

    return make_trainer(folder, max_steps=steps, **options)


def verify(path: Path) -> tuple[str, tuple[str, ...], tuple[tuple[str, str, str], ...]]:
    """Return what `ckpt verify` answers of one checkpoint, and where it sees what."""
    from resilient_cli.app import main

    sink, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(sink), contextlib.redirect_stderr(errors):
        status = main(["ckpt", "verify", path.name, str(path.parent), "--level", "deep", "--json"])
    lines = sink.getvalue().splitlines()
    document = json.loads(lines[0]) if lines else {}
    found = [
        (one.get("file") or one.get("key") or ".", one["problem"], one["fix"])
        for one in (*_findings(document), *document.get("records", ()))
    ]
    if status == 0 and not found:
        return "yes", (), ()
    if not document:
        error = json.loads(errors.getvalue().splitlines()[-1])
        return "unknown", (error["message"],), ((".", error["message"], error["hint"]),)
    is_taken = document.get("resume") == path.name
    return ("yes" if is_taken else "no"), (), tuple(found)


def _findings(document: dict) -> list[dict]:
    return [it for one in document.get("checkpoints", ()) for it in one.get("findings", ())]


def mend(path: Path, others: tuple[str, ...]) -> tuple[bool, str]:
    """Repair a checkpoint as `ckpt repair --apply` does; return whether all is whole, and how."""
    store = open_store(str(path.parent))
    places = [open_store(str(Path(one).parent)) for one in others]
    checkpoint = parse_checkpoint(path.name)
    try:
        plan = plan_repair(store, checkpoint, places, undelete=True)
        apply_repair(store, plan, places)
    except NothingToResume as error:
        return False, error.message
    except ResilientError as error:
        return False, error.message
    told = [f"{one.file}: from {one.source}" for one in plan.fixes]
    told += [f"lost: {one.file}" for one in plan.losses]
    return bool(plan.fixes) and not plan.losses, "; ".join(told)
