"""A training that another system starts: what that system decides, and what everybody would see."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from resilient.errors import ConfigError
from resilient.redaction import redact_userinfo

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

MEETING = (
    *("nnodes", "standalone", "rdzv_backend", "rdzv_endpoint", "rdzv_id"),
    *("node_rank", "master_addr", "master_port", "local_addr"),
)
"""Options of ``train`` that say where agents meet, which follows from what is rendered."""

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
# A signature in a URL opens what it is of: SAS of Azure, presigned URLs of S3 and of GCS.
_SIGNED = re.compile(
    r"[?&](?:sig|signature|x-(?:amz|goog)-[\w-]+|[\w-]*(?:token|secret|passw)[\w-]*)=",
    re.IGNORECASE,
)
_SECRET_IN_JSON = re.compile(
    r"""["'][\w-]*(?:secret|token|passw\w*|(?:api|access|private)[-_]?key)["']\s*:""", re.IGNORECASE
)
_BEARER = re.compile(r"\b(?:Bearer|Basic)\s+[^\s$`\"']")


def is_variable(name: str) -> bool:
    """Say whether a variable of the environment can be called so."""
    return _VARIABLE.fullmatch(name) is not None


def is_secret(name: str, value: str) -> bool:
    """Say whether a variable sounds like a secret, or its value has one: in a URL, in JSON."""
    return bool(_SECRET.search(name) or _SECRET_IN_JSON.search(value)) or has_credentials(value)


def has_credentials(text: str) -> bool:
    """Say whether a URL in ``text`` has a user, a password or a signature in it."""
    return redact_userinfo(text) != text or _SIGNED.search(text) is not None


def secret_option(words: Iterable[str]) -> str:
    """Return the first option of a command that sounds like a secret with a value; else nothing."""
    for word in words:
        name = word.partition("=")[0]
        if _SECRET_OPTION.fullmatch(name) and not _TOKEN_OF_TEXT.fullmatch(name):
            return name
    return ""


def secret_assigned(line: str) -> str:
    """Return the first variable that a line of shell sets to a secret itself; else nothing.

    What is read from elsewhere when the line runs, as ``$(cat FILE)`` or ``$OTHER``, is none.
    """
    if _BEARER.search(line):
        return "Authorization"
    for name, value in _ASSIGNED.findall(line):
        if is_secret(name, value) and value.lstrip("'\"")[:1] not in ("$", "`"):
            return str(name)
    return ""


def refuse_given(given: Collection[str], decided: Mapping[str, str]) -> None:
    """Refuse options of ``train`` that whoever starts it decides.

    Args:
        given: names of options.
        decided: what to do instead, by name.

    Raises:
        ConfigError: with the option, and what to do instead.
    """
    for name, instead in decided.items():
        if name in given:
            raise ConfigError(f"train --{name.replace('_', '-')}: {instead}")
