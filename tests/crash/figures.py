"""What the crash tests saw, in numbers that can be added up."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

VIOLATIONS_KEPT = 20


@dataclass
class Figures:
    """What was seen.

    Attributes:
        histories: recorded histories.
        operations: their file operations.
        moments: disks that may be left at a moment, added up over all moments.
        on_disk: those that differ on the disk: the crash states of an honest disk.
        visible: those of them that differ in what a store shows.
        lying: different disks that a disk which does not sync may leave.
        objects: runs against an object store with troubles.
        late: manifests that arrived after their files were gone, as docs/guarantees.md says.
        checked: comparisons with what was promised.
        second_lives: second lives that were lived to their end.
        broken: how many violations there were, by invariant.
        violations: the first few, each with what makes it again.
    """

    histories: int = 0
    operations: int = 0
    moments: int = 0
    on_disk: int = 0
    visible: int = 0
    lying: int = 0
    objects: int = 0
    late: int = 0
    checked: int = 0
    second_lives: int = 0
    broken: dict[str, int] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)

    @property
    def states(self) -> int:
        """Different crash states."""
        return self.on_disk + self.lying + self.objects

    @property
    def enumerated(self) -> int:
        """Crash states: a moment and what is left then. Many moments leave equal disks."""
        return self.moments + self.objects

    @property
    def violated(self) -> int:
        """How many violations there were."""
        return sum(self.broken.values())

    def blame(self, found: list[str], case: str) -> None:
        """Count violations, and keep the first few."""
        for one in found:
            self.broken[one[0]] = self.broken.get(one[0], 0) + 1
            if len(self.violations) < VIOLATIONS_KEPT:
                self.violations.append(f"{case}: {one}")

    def add(self, other: Figures) -> None:
        """Add another's."""
        for name, value in asdict(other).items():
            if isinstance(value, int):
                setattr(self, name, getattr(self, name) + value)
        for name, count in other.broken.items():
            self.broken[name] = self.broken.get(name, 0) + count
        self.violations = [*self.violations, *other.violations][:VIOLATIONS_KEPT]
