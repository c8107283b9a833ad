"""What the user may ask of metrics."""

from __future__ import annotations

from dataclasses import dataclass

from resilient.errors import ConfigError

_PORT_MAX = 65535


@dataclass(frozen=True, slots=True)
class MetricsWishes:
    """Where figures go.

    Attributes:
        port: to serve them at; 0 lets the system choose, None serves none.
        host: address to serve them at.
        file: for node_exporter's textfile collector; empty for none.
        every_seconds: between two writes of it.
    """

    port: int | None = None
    host: str = "127.0.0.1"
    file: str = ""
    every_seconds: float = 15.0

    @property
    def is_on(self) -> bool:
        """Whether anybody wants figures."""
        return self.port is not None or bool(self.file)


def parse_port(text: str) -> int | None:
    """Return the port that a user asks for: None for ``0`` (off), 0 for ``auto``.

    Raises:
        ConfigError: it is neither a port nor ``auto``.
    """
    word = text.strip().lower()
    if word == "auto":
        return 0
    if not (word.isascii() and word.isdecimal()) or int(word) > _PORT_MAX:
        raise ConfigError(
            f"--metrics-port {text!r} is neither a port nor auto",
            hint="0 serves none, auto takes a free one and prints it",
        )
    return int(word) or None
