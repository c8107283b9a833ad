"""Files of accelerate's hooks: save hooks write the files, and load hooks read them."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate.utils import DistributedType

from resilient.errors import IntegrityError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


class HookFiles:
    """Files of hooks as a Stateful; loading the state calls the load hooks.

    Args:
        accelerator: Accelerator with which the hooks are registered.
    """

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        self._files: dict[str, torch.Tensor] = {}
        self._group: dist.ProcessGroup | None = None

    def exists(self) -> bool:
        """Return true if a hook is registered."""
        return bool(self.hooks())

    def hooks(self) -> list[Any]:
        """Return the save hooks and the load hooks."""
        return [*self._save_hooks(), *self._load_hooks()]

    def collect(self) -> None:
        """Call the save hooks and keep the files that they write in memory.

        Collective: every rank. All ranks keep the files of every rank, as in one shared folder. If
        several ranks write a file of one name, the result has the file of the lowest rank.
        """
        accelerator, weights = self._accelerator, []
        if accelerator.distributed_type != DistributedType.FSDP:
            weights = [accelerator.get_state_dict(model, unwrap=False) for model in self._models()]
        with tempfile.TemporaryDirectory(prefix="resilient-hooks-") as folder:
            for hook in self._save_hooks():
                hook(self._models(), weights, folder)
            self._files = self._shared(_read(Path(folder)))

    def state_dict(self) -> dict[str, Any]:
        """Return names and contents of the files."""
        return {"names": list(self._files), "contents": list(self._files.values())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Call the load hooks with a folder of the files.

        Raises:
            IntegrityError: A name leads out of the folder.
        """
        with tempfile.TemporaryDirectory(prefix="resilient-hooks-") as folder:
            for name, content in zip(state["names"], state["contents"], strict=True):
                path = Path(folder) / _inside(name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content.cpu().numpy().tobytes())
            for hook in self._load_hooks():
                hook(self._models(), folder)

    def _shared(self, files: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the files of all ranks. Collective."""
        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
            return files
        if self._group is None:
            # A process group of NCCL would gather the files in GPU memory.
            self._group = dist.new_group(backend="gloo")
        of_ranks: list[dict[str, torch.Tensor]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(of_ranks, files, group=self._group)
        merged = {
            name: value
            for files_of_rank in reversed(of_ranks)
            for name, value in files_of_rank.items()
        }
        return dict(sorted(merged.items()))

    def _models(self) -> list[Any]:
        """Return a list that hooks may change."""
        return list(self._accelerator._models)  # noqa: SLF001 - no public way

    def _save_hooks(self) -> Iterable[Any]:
        return list(self._accelerator._save_model_state_pre_hook.values())  # noqa: SLF001 - no public way

    def _load_hooks(self) -> Iterable[Any]:
        return list(self._accelerator._load_model_state_pre_hook.values())  # noqa: SLF001 - no public way


def _read(folder: Path) -> dict[str, torch.Tensor]:
    """Return the content of each file below a folder, by its path with slashes."""
    files = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            content = np.frombuffer(path.read_bytes(), np.uint8).copy()
            files[path.relative_to(folder).as_posix()] = torch.from_numpy(content)
    return dict(sorted(files.items()))


def _inside(name: str) -> PurePosixPath:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise IntegrityError(
            f"cannot write the files of hooks: `{name}` leads out of their folder; "
            "no hook was called",
            hint="resume an older checkpoint: resilient ckpt ls",
        )
    return path
