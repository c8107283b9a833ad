"""The damage matrix: ``python -m tests.damage`` writes ``docs/damage-matrix.md``.

Fails if a damage at which a layout's own tool stops is not answered with "no", or if one is not
seen that is not in :data:`page.BEYOND`, with the reason.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent

from tests.damage.contradictions import kinds_of  # noqa: E402 - the folder is on the path only now
from tests.damage.matrix import Bench, Cell  # noqa: E402
from tests.damage.page import PAGE, rendered, wrong  # noqa: E402
from tests.damage.sharded import ALL  # noqa: E402


def main() -> int:
    began = time.monotonic()
    bench = Bench()
    for sample in ALL:
        bench.load_whole(sample)
    cells: list[Cell] = []
    for sample in ALL:
        found = (bench.cell(sample, kind, is_loaded=True) for kind in kinds_of(sample))
        cells += [one for one in found if one is not None]
        sys.stderr.write(f"{sample.name}: {len(cells)} cells, {time.monotonic() - began:.0f} s\n")
    PAGE.write_text(rendered(cells, bench.reports))
    bench.close()
    faults = wrong(cells)
    for one in faults:
        sys.stderr.write(f"WRONG {one}\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
