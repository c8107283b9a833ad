"""What came from another trainer, or went to one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from resilient.showing import quoted
from resilient_cli.render import Answer, human_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from resilient.format.names import CheckpointId
    from resilient.vault.mirror import Shipment


def copied(source: str, target: str, shipment: Shipment, *, dry_run: bool) -> Answer:
    """Return the answer of ``ckpt cp``."""
    checkpoint = shipment.manifest.checkpoint
    document = {
        "repository": source,
        "id": checkpoint.folder,
        "to": target,
        "done": not dry_run,
        "was_there": shipment.is_there and not shipment.missing,
        "files": len(shipment.missing),
        "size_bytes": shipment.size_bytes,
        "ledger": shipment.ledger_problem or None,
    }
    verb = "would be put" if dry_run else "put"
    size = human_size(shipment.size_bytes)
    said = [f"{checkpoint} of {source} -> {target}: {len(shipment.missing)} files, {size} {verb}"]
    if document["was_there"]:
        said = [f"{checkpoint} is whole at {target} already."]
    if shipment.ledger_problem:
        said.append(f"its ledger is not copied whole: {shipment.ledger_problem}")
    if not dry_run:
        said.append(f"resilient ckpt verify {checkpoint} {quoted(target)}")
    return Answer("ckpt.cp", "copy", document, tuple(said), (checkpoint.folder,))


def imported(url: str, source: str, checkpoint: CheckpointId, lost: Sequence[str] = ()) -> Answer:
    """Return the answer of ``ckpt import``.

    Args:
        url: The repository.
        source: The folder.
        checkpoint: Its name in the repository.
        lost: What of it is lost, in words.
    """
    document = {"repository": url, "from": source, "id": checkpoint.folder}
    said = f"{source} is {checkpoint} of {url} now."
    if lost:
        document["lost"] = "; ".join(lost)
        said = f"{said} Lost: {document['lost']}."
    return Answer("ckpt.import", "import", document, (said,), (checkpoint.folder,))


def exported(url: str, target: str, name: str) -> Answer:
    """Return the answer of ``ckpt export``."""
    document = {"repository": url, "id": name, "folder": target}
    said = f"{name} of {url} is in {target}."
    return Answer("ckpt.export", "export", document, (said,), (target,))
