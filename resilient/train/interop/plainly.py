"""A checkpoint of any tool as tensors by name: for safetensors, ``torch.load`` or torch's DCP."""

from __future__ import annotations

import shutil
import warnings
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resilient.comparison.writing import write_parts
from resilient.errors import ConfigError
from resilient.showing import quoted

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping

    from resilient.comparison.values import Side

TORCH_FILE = "checkpoint.pt"


class Plainly(StrEnum):
    """What to write."""

    SAFETENSORS = "safetensors"
    TORCH = "torch"
    DCP = "dcp"


def export_plainly(
    side: Side,
    folder: str | os.PathLike[str],
    kind: Plainly,
    told: Callable[[int, int], None],
) -> list[str]:
    """Write the weights and the moments of a checkpoint to a new folder, each tensor whole.

    Not what else a resume needs: Transformers' form has that (:mod:`.exporting`).

    Crash: a folder beside it, named ``.<name>.partial``; the checkpoint is only read.

    Args:
        side: the checkpoint; its bytes were proved.
        folder: where to; must not be there yet.
        kind: ``safetensors`` streams; the others hold everything in memory once.
        told: called with bytes read and bytes in all.

    Returns:
        The names of the files.

    Raises:
        ConfigError: the folder is there, or there are no tensors.
        Unreadable: a tensor cannot be read.
        StoreError: it could not be read.
    """
    target = Path(folder)
    if target.exists():
        raise ConfigError(f"`{target}` is there already", hint=f"ls -l {quoted(target)}")
    draft = target.with_name(f".{target.name}.partial")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    files = write_parts(side, draft, told)
    if not files:
        shutil.rmtree(draft)
        raise ConfigError(f"{side.url} holds no weights and no moments")
    if kind is not Plainly.SAFETENSORS:
        _convert(side, draft, files, kind)
    draft.rename(target)
    return sorted(one.name for one in target.iterdir())


def _convert(side: Side, draft: Path, files: Mapping[str, Path], kind: Plainly) -> None:
    """Put what torch writes in the place of the files."""
    # Not before it is called: it takes seconds.
    import torch
    from safetensors.torch import load_file

    state: dict[str, Any] = {part: load_file(path) for part, path in files.items()}
    if side.step is not None:
        state["step"] = side.step
    if kind is Plainly.TORCH:
        torch.save(state, draft / TORCH_FILE)
    else:
        from torch.distributed import checkpoint

        with warnings.catch_warnings():
            # It says that it takes a single process for what it is.
            warnings.simplefilter("ignore", UserWarning)
            checkpoint.save(state, checkpoint_id=str(draft / "dcp"), no_dist=True)
        for one in (draft / "dcp").iterdir():
            one.rename(draft / one.name)
        (draft / "dcp").rmdir()
    for path in files.values():
        path.unlink()
