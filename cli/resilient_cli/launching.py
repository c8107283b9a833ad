"""A training that another system starts: what that system decides, and what everybody would see."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from resilient.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

MEETING = (
    *("nnodes", "standalone", "rdzv_backend", "rdzv_endpoint", "rdzv_id"),
    *("node_rank", "master_addr", "master_port", "local_addr"),
)
"""Options of ``train`` that say where agents meet, which follows from what is rendered."""

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET = re.compile(r"KEY|SECRET|TOKEN|PASSW|CREDENTIAL|STORAGE_OPTIONS", re.IGNORECASE)
_USER_INFO = re.compile(r"://[^/\s@]+@")


def is_variable(name: str) -> bool:
    """Say whether a variable of the environment can be called so."""
    return _VARIABLE.fullmatch(name) is not None


def is_secret(name: str, value: str) -> bool:
    """Say whether a variable sounds like a secret, or a URL in its value names a user."""
    return bool(_SECRET.search(name)) or names_user(value)


def names_user(text: str) -> bool:
    """Say whether a URL in ``text`` has a user or a password in it."""
    return _USER_INFO.search(text) is not None


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
