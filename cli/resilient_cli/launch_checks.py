"""Checks of ``k8s`` and ``slurm`` before Kubernetes or SLURM starts a training.

The checks refuse options that Kubernetes or SLURM sets, and secrets that other users could read in
the job.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from resilient.errors import ConfigError
from resilient.redaction import redact_userinfo

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

RENDEZVOUS_OPTIONS = (
    *("nnodes", "standalone", "rdzv_backend", "rdzv_endpoint", "rdzv_id"),
    *("node_rank", "master_addr", "master_port", "local_addr"),
)
"""Rendezvous options of ``train``; the rendered job sets them itself."""

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET = re.compile(r"KEY|SECRET|TOKEN|PASSW|CREDENTIAL|STORAGE_OPTIONS", re.IGNORECASE)
_SECRET_OPTION = re.compile(
    r"-+(?:[\w.-]*[-_.])?"
    r"(?:token|secret|password|passwd|credentials?|"
    r"(?:api|access|secret|private|account|wandb|comet|hf|aws|azure|openai)[-_.]?key)",
    re.IGNORECASE,
)
_TOKEN_OF_TEXT = re.compile(r".*(?:pad|eos|bos|unk|mask|sep|cls)[-_.]token", re.IGNORECASE)
_ASSIGNED = re.compile(r"(?:^|[\s;&])([A-Za-z_]\w*)=([^\s;&]+)")
# A signature in a URL grants access: SAS of Azure, presigned URLs of S3 and of GCS.
_SIGNED = re.compile(
    r"[?&](?:sig|signature|x-(?:amz|goog)-[\w-]+|[\w-]*(?:token|secret|passw)[\w-]*)=",
    re.IGNORECASE,
)
_SECRET_IN_JSON = re.compile(
    r"""["'][\w-]*(?:secret|token|passw\w*|(?:api|access|private)[-_]?key)["']\s*:""", re.IGNORECASE
)
_BEARER = re.compile(r"\b(?:Bearer|Basic)\s+[^\s$`\"']")


def is_variable(name: str) -> bool:
    """Return whether a text is a valid name of an environment variable."""
    return _VARIABLE.fullmatch(name) is not None


def is_secret(name: str, value: str) -> bool:
    """Return whether a variable looks like a secret: its name, or a URL or JSON in its value."""
    return bool(_SECRET.search(name) or _SECRET_IN_JSON.search(value)) or has_credentials(value)


def has_credentials(text: str) -> bool:
    """Return whether a URL in ``text`` contains a user, a password or a signature."""
    return redact_userinfo(text) != text or _SIGNED.search(text) is not None


def secret_option(words: Iterable[str]) -> str:
    """Return the first option of a command whose name looks like a secret; empty if none does."""
    for word in words:
        name = word.partition("=")[0]
        if _SECRET_OPTION.fullmatch(name) and not _TOKEN_OF_TEXT.fullmatch(name):
            return name
    return ""


def find_secret_variable(line: str) -> str:
    """Return the first variable that a shell line sets to a secret value; empty if there is none.

    A value that the shell reads when the line runs, as ``$(cat FILE)`` or ``$OTHER``, is no secret.
    For a ``Bearer`` or ``Basic`` header the result is ``Authorization``.
    """
    if _BEARER.search(line):
        return "Authorization"
    for name, value in _ASSIGNED.findall(line):
        if is_secret(name, value) and value.lstrip("'\"")[:1] not in ("$", "`"):
            return str(name)
    return ""


def refuse_system_options(options: Collection[str], reason_by_option: Mapping[str, str]) -> None:
    """Refuse options of ``train`` that Kubernetes or SLURM sets.

    Args:
        options: Names of the options that the user gave.
        reason_by_option: Reason by name of the refused option; the reason names the replacement.

    Raises:
        ConfigError: An option is refused; the message names its replacement.
    """
    for name, reason in reason_by_option.items():
        if name in options:
            raise ConfigError(f"train --{name.replace('_', '-')}: {reason}")
