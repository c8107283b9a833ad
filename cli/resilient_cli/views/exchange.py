"""What came from another trainer, or went to one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from resilient_cli.render import Answer

if TYPE_CHECKING:
    from resilient.format.names import CheckpointId


def imported(url: str, source: str, checkpoint: CheckpointId) -> Answer:
    """Return the answer of ``ckpt import``."""
    document = {"repository": url, "from": source, "id": checkpoint.folder}
    said = f"{source} is {checkpoint} of {url} now."
    return Answer("ckpt.import", "import", document, (said,), (checkpoint.folder,))


def exported(url: str, target: str, checkpoint: CheckpointId) -> Answer:
    """Return the answer of ``ckpt export``."""
    document = {"repository": url, "id": checkpoint.folder, "folder": target}
    said = f"{checkpoint} of {url} is in {target}."
    return Answer("ckpt.export", "export", document, (said,), (target,))
