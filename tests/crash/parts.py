"""A long sweep in parts: each with seeds of its own, done once, added up in a file.

Who is stopped goes on from there. Figures of different code never come into one file.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.crash.figures import Figures

ROOT = Path(__file__).resolve().parent.parent.parent
SOURCES = ("resilient/*/*.py", "tests/crash/*.py")


def code() -> str:
    """Return what stands for the code whose figures these are."""
    paths = sorted(path for pattern in SOURCES for path in ROOT.glob(pattern))
    content = b"".join(path.name.encode() + path.read_bytes() for path in paths)
    return hashlib.sha256(content).hexdigest()[:16]


@dataclass
class Report:
    """What was done so far, and what it showed.

    Attributes:
        seed: draws all of it.
        path: where it is kept; None: nowhere.
        figures: of all parts that were done.
        done: their names.
        kills: what was seen of real processes, added up.
        seconds: of processor time.
    """

    seed: int
    path: Path | None = None
    figures: Figures = field(default_factory=Figures)
    done: list[str] = field(default_factory=list)
    kills: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    def add(self, name: str, figures: Figures, seconds: float) -> None:
        """Add a part of the sweep."""
        self.figures.add(figures)
        self._ended(name, seconds)

    def add_kills(self, name: str, seen: dict[str, Any]) -> None:
        """Add a part of the kills."""
        for key, value in seen.items():
            if key != "seed":
                self.kills[key] = self.kills[key] + value if key in self.kills else value
        self._ended(name, 0.0)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able value."""
        figures = asdict(self.figures)
        return {
            "seed": self.seed,
            "code": code(),
            "enumerated": self.figures.enumerated,
            "different": self.figures.states,
            "seconds": round(self.seconds, 1),
            **figures,
            "kills": self.kills,
            "done": self.done,
        }

    def _ended(self, name: str, seconds: float) -> None:
        self.done.append(name)
        self.seconds += seconds
        if self.path:
            new = self.path.with_suffix(".new")
            new.write_text(json.dumps(self.to_json(), indent=1) + "\n")
            new.replace(self.path)


def resumed(path: Path | None, seed: int) -> Report:
    """Return the report that is kept at ``path``, or a new one.

    Raises:
        SystemExit: what is kept there is of another seed or of other code.
    """
    if path is None or not path.exists():
        return Report(seed, path)
    kept = json.loads(path.read_text())
    if (kept["seed"], kept["code"]) != (seed, code()):
        raise SystemExit(f"{path} is of another seed or other code: give another file")
    figures = Figures(**{name: kept[name] for name in asdict(Figures())})
    return Report(seed, path, figures, kept["done"], kept["kills"], kept["seconds"])
