"""Check of the option ``--resume`` by the agent, before the agent starts a worker.

The agent checks whether training can resume from a folder. The agent uses the same rules as the
workers, but without torch. Only the workers check three cases:

* A reference into the repository, because only the script defines the near tier.
* A start that may continue an earlier start of its scheduler job. The option applies only until a
  checkpoint of the run exists. After that, the folder that the option names may be deleted.
* A folder that does not exist, unless ``--repo`` names a repository without checkpoints. A run that
  began from the folder continues without it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from resilient.checkpoint.catalog import committed
from resilient.checkpoint.resume_policy import AUTO, NEVER
from resilient.diff.verification import require_trainer_folder
from resilient.errors import (
    IntegrityError,
    KeyNotFound,
    NothingToResume,
    StoreError,
    UnknownLayout,
)
from resilient.format.keys import MANIFEST, parse_checkpoint
from resilient.redaction import shell_quote
from resilient.start_guard import TRAINER, checkpoints_at, is_path, lead_to
from resilient.storage.open import local_reference, open_store

if TYPE_CHECKING:
    from resilient.distributed.start_identity import StartIdentity
    from resilient.elastic.options import WorkerOptions
    from resilient.start_guard import FoundCheckpoint

_STATE = "trainer_state.json"
"""File by which a worker recognizes a folder of the Hugging Face Trainer."""
_SLURM = "slurm/"
_STORE_SECONDS = 60.0


def check_resume(options: WorkerOptions, start: StartIdentity) -> None:
    """Refuse a ``--resume`` that every worker would refuse. Reads only.

    The caller checks that this is the only host. With several hosts, only the host of rank 0 needs
    the folder.

    Args:
        options: Options of the workers.
        start: Identity of this start.

    Raises:
        IntegrityError: The folder is damaged.
        IncompatibleCheckpoint: The Trainer does not import the folder, or ``strict_resume`` refuses
            a loss.
        UnknownLayout: No known tool wrote the folder.
        NothingToResume: There is no such folder.
    """
    resume_option = local_reference(options.resume)
    if resume_option in (AUTO, NEVER) or _may_continue(start):
        return
    folder = Path(resume_option)
    is_foreign = (folder / _STATE).is_file() and not (folder / MANIFEST).exists()
    if is_foreign and options.repo and _may_have_checkpoint(options):
        return  # the workers check that the run began from the folder
    is_gone = is_path(resume_option) and not os.path.lexists(folder)
    if is_gone and (not options.repo or _may_have_checkpoint(options)):
        return  # the run may have begun from a folder that was deleted since
    if is_foreign or is_path(resume_option):
        _require_folder(resume_option, strict=options.strict_resume)


def _may_continue(start: StartIdentity) -> bool:
    """Return whether an earlier start of the scheduler job may have saved a checkpoint."""
    is_first_of_slurm = start.job.startswith(_SLURM) and not start.requeues
    return bool(start.job) and not is_first_of_slurm


def _may_have_checkpoint(worker_options: WorkerOptions) -> bool:
    """Return False if the repository has no checkpoint; True if the store fails."""
    options = worker_options.storage_options
    try:
        store = open_store(
            worker_options.repo, within_seconds=_STORE_SECONDS, storage_options=options
        )
        return bool(committed(store))
    except StoreError:
        return True


def _is_inside(found: FoundCheckpoint, folder: Path) -> bool:
    return Path(found.path).resolve() != folder.resolve()


def _require_folder(resume_option: str, *, strict: bool) -> None:
    folder = Path(resume_option)
    if (folder / MANIFEST).is_file() and parse_checkpoint(folder.name) is not None:
        raise NothingToResume(
            f"no checkpoint to resume from at `{resume_option}`: a checkpoint of a repository is "
            "named without its path. Nothing was started",
            hint=f"resilient train --repo {shell_quote(str(folder.parent))} "
            f"--resume {shell_quote(folder.name)} SCRIPT",
        )
    try:
        require_trainer_folder(resume_option, strict=strict)
    except KeyNotFound as error:
        raise NothingToResume(
            f"no checkpoint to resume from at `{resume_option}`: there is no such folder. Nothing "
            "was started",
            hint="name an existing folder or checkpoint; to start at step 0: --resume never",
        ) from error
    except StoreError:
        return  # the workers report it
    except (IntegrityError, UnknownLayout) as error:
        checkpoints = [
            found for found in checkpoints_at(resume_option) if _is_inside(found, folder)
        ]
        if not checkpoints:
            raise
        raise lead_to(error, checkpoints, TRAINER) from None
