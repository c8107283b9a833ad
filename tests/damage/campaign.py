"""The damage campaign: compares four ways to use each damaged checkpoint of each layout.

The ways are our Trainer, ``resilient train --resume``, ``ckpt inspect|verify`` and ``ckpt
repair``. All four must agree. ``make campaign`` runs every case and writes two tables.
``build/damage-campaign.md`` has a row for each case. ``docs/damage-campaign.md`` has the counts
and the losses.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

import torch

HERE = Path(__file__).resolve().parent

from tests.damage.contradictions import GENERAL, kinds_of  # noqa: E402 - the folder is on the path only now
from tests.damage.doors import (  # noqa: E402
    KINDS,
    LATER,
    LOSES,
    REFUSES,
    RESUMES,
    Answer,
    by_launcher,
    by_trainer,
    disagreements,
)
from tests.damage.import_kinds import KINDS_OF_IMPORTS  # noqa: E402
from tests.damage.kinds import Inapplicable  # noqa: E402
from tests.damage.matrix import Bench, said_of  # noqa: E402
from tests.damage.page import BEYOND  # noqa: E402
from tests.damage.repairs import STAYS, quiet, repaired  # noqa: E402
from tests.damage.samples import load_trainer  # noqa: E402
from tests.damage.sharded import ALL, SHARDS  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.damage.kinds import Kind
    from tests.damage.samples import Loaded, Sample

TABLE = HERE.parents[1] / "build" / "damage-campaign.md"
SUMMARY = HERE.parents[1] / "docs" / "damage-campaign.md"
CASES_MIN = 500
LATER_STEPS = 13
LAUNCH_EVERY = 25
"""Default of ``--launch-every``: every 25th case also runs as a process."""


@dataclass(frozen=True)
class Case:
    """One damage of one layout, and the four results.

    Attributes:
        sample: the layout.
        kind: the damage.
        verdict: Result of ``ckpt verify``.
        answers: Results of the Trainer and, if it ran, of ``resilient train``.
        repair: Result of ``ckpt repair``.
        faults: Disagreements of these results.
    """

    sample: str
    kind: str
    verdict: str
    answers: tuple[Answer, ...]
    repair: str
    faults: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.sample}, {self.kind}"


class Campaign:
    """Runs cases on copies of undamaged checkpoints, made once."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self.bench = Bench()
        self._whole: dict[str, Loaded | None] = {}
        self._older: dict[str, Loaded] = {}

    def close(self) -> None:
        self.bench.close()

    def whole(self, sample: Sample) -> Loaded | None:
        """Return the state that our Trainer loads from the undamaged checkpoint, if any."""
        if sample.name not in self._whole:
            answer = by_trainer(sample, self.bench.copy_whole(sample))
            assert answer.word != REFUSES or sample.name not in KINDS, answer.why
            self._whole[sample.name] = answer.found
        return self._whole[sample.name]

    def older(self, sample: Sample) -> Loaded | None:
        """Return the state of the older checkpoint in our Trainer; None for other layouts."""
        if not sample.is_ours:
            return None
        if sample.name not in self._older:
            path = self.bench.copy_whole(sample)
            shutil.rmtree(path)
            answer = by_trainer(sample, path)
            assert answer.found is not None, answer.why
            self._older[sample.name] = answer.found
        return self._older[sample.name]

    def step_of(self, sample: Sample, path: Path) -> Sample:
        """Return the sample for the step of the damaged checkpoint."""
        folder, made = self.bench.make(sample)
        whole = folder / path.name
        if sample.is_ours or path.name == made.name or not whole.is_dir():
            return sample
        later = replace(sample, name=LATER, load=partial(load_trainer, steps=LATER_STEPS))
        self.bench.made[LATER] = (folder, whole)
        return later

    def case(self, sample: Sample, kind: Kind, *, is_launched: bool) -> Case | None:
        """Damage a copy and collect all results; None if the layout cannot have the damage."""
        scene = self.bench.copy(sample)
        try:
            with quiet():
                path = kind.spoil(scene) or scene.path
        except Inapplicable:
            return None
        sample, name = self.step_of(sample, path), sample.name
        verdict = said_of(sample, path).answer
        answers = [by_trainer(sample, path)]
        if is_launched and not sample.is_ours:
            answers.append(by_launcher(sample, path))
        whole = self.whole(sample)
        faults = disagreements(verdict, answers, whole, self.older(sample))
        original = self.bench.make(sample)[1]
        repair, how = repaired(sample, path, original, self.bench.load_whole(sample))
        if (name, kind.name) in BEYOND:
            # Here a Trainer may reject the checkpoint when it loads the tensors.
            allowed = ("other numbers", "the verdict calls whole")
            faults = [one for one in faults if not any(text in one for text in allowed)]
        if "WRONG" in repair:
            faults.append(f"repair {repair}: {how}")
        return Case(name, kind.name, verdict, tuple(answers), repair, tuple(faults))


def kinds_for(sample: Sample) -> list[Kind]:
    """Return the kinds of damage of a layout, from the damage matrix and from imports."""
    general = GENERAL if sample.name == SHARDS else []
    found = [*kinds_of(sample), *general, *KINDS_OF_IMPORTS]
    return list({one.name: one for one in reversed(found)}.values())[::-1]


def cases(
    campaign: Campaign,
    samples: Sequence[Sample],
    every: int = 1,
    at: int = 0,
    launch_every: int = LAUNCH_EVERY,
    only: str = "",
) -> Iterator[Case]:
    """Yield every ``every``-th case, from number ``at`` on; of the kinds with ``only`` in the name.

    Every ``launch_every``-th case is also launched as a process; 0 launches none.
    """
    number = 0
    for sample in ALL:
        for kind in kinds_for(sample):
            number += 1
            is_chosen = re.search(only, kind.name) and sample in samples
            if not is_chosen or number % every != at % every:
                continue
            is_launched = launch_every > 0 and number % launch_every == 0
            case = campaign.case(sample, kind, is_launched=is_launched)
            if case is not None:
                yield case


def cases_of_layout(
    name: str, every: int, at: int, launch_every: int, only: str = ""
) -> list[Case]:
    """Return the cases of one layout without tensors; runs in a separate process."""
    # The launched Trainer has one thread too, so sums have the same order.
    torch.set_num_threads(1)
    samples = [one for one in ALL if one.name == name]
    campaign = Campaign(samples)
    try:
        return [
            replace(case, answers=tuple(replace(one, found=None) for one in case.answers))
            for case in cases(campaign, samples, every, at, launch_every, only)
        ]
    finally:
        campaign.close()


def rendered(found: Sequence[Case]) -> str:
    """Return the table of all cases."""
    answers = sum(len(one.answers) + 2 for one in found)
    bad = sum(bool(one.faults) for one in found)
    counted = f"{len(found)} cases; {answers} answers of four doors; {bad} disagreements."
    lines = [
        "# The damage campaign",
        "",
        counted,
        "",
        "| layout | damage | verify | Trainer | `resilient train` | repair | disagreement |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in found:
        said = [f"{each.word} ({each.code})" for each in one.answers]
        said += [""] * (2 - len(said))
        why = "; ".join(one.faults).replace("|", "/").replace("\n", " ")[:300]
        lines.append(
            f"| {one.sample} | {one.kind} | {one.verdict} | {' | '.join(said)} | {one.repair} "
            f"| {why} |"
        )
    return "\n".join(lines) + "\n"


_HEAD = """# Damage campaign

This page compares four ways to use a damaged checkpoint: our Trainer, `resilient train --resume`,
`ckpt verify` and `ckpt repair`. All of them must agree. A resumed run must either have the numbers
of the undamaged checkpoint or name the loss. `make campaign` writes this page.
"""


def summarized(found: Sequence[Case]) -> str:
    """Return the page: counts by layout, and the losses that a resume names."""
    bad = sum(bool(one.faults) for one in found)
    launched = sum(len(one.answers) > 1 for one in found)
    lines = [
        _HEAD,
        (
            f"The campaign has {len(found)} cases. In {launched} cases `resilient train` also ran "
            f"in a process of its own. The ways disagree in {bad} cases."
        ),
        "",
        "| layout | cases | resumed | resumed with a named loss | refused | repaired |",
        "|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(one.sample for one in found):
        mine = [one for one in found if one.sample == name]
        words = Counter(one.answers[0].word for one in mine)
        repaired = sum(one.repair != STAYS for one in mine)
        told = [len(mine), words[RESUMES], words[LOSES], words[REFUSES], repaired]
        lines.append(f"| {name} | {' | '.join(map(str, told))} |")
    losses = Counter(one.answers[0].why for one in found if one.answers[0].word == LOSES)
    lines += ["", "## Losses that a resume names", "", "| loss | cases |", "|---|---|"]
    lines += [f"| {name} | {count} |" for name, count in sorted(losses.items())]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run the cases; only a run of all cases writes the page."""
    parser = argparse.ArgumentParser(prog="python -m tests.damage.campaign", description=__doc__)
    parser.add_argument("--every", type=int, default=1, help="run one case of so many")
    parser.add_argument("--at", type=int, default=0, help="number of the first case")
    parser.add_argument("--layout", choices=[one.name for one in ALL], help="run one layout")
    parser.add_argument("--kind", default="", help="run the kinds that a pattern finds")
    parser.add_argument("--launch-every", type=int, default=LAUNCH_EVERY, help="0 launches none")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="layouts at once")
    options = parser.parse_args()
    began = time.monotonic()
    names = [one.name for one in ALL if options.layout in (None, one.name)]
    names.sort(key=lambda name: -len(kinds_for(next(one for one in ALL if one.name == name))))
    work = partial(
        cases_of_layout,
        every=options.every,
        at=options.at,
        launch_every=options.launch_every,
        only=options.kind,
    )
    by_layout = {}
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        for name, found_there in zip(names, pool.map(work, names), strict=True):
            by_layout[name] = found_there
            for one in found_there:
                for fault in one.faults:
                    sys.stderr.write(f"{one.name}: {fault}\n")
    found = [case for one in ALL for case in by_layout.get(one.name, ())]
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text(rendered(found))
    is_all = options.every == 1 and options.layout is None and not options.kind
    if is_all:
        SUMMARY.write_text(summarized(found))
    bad = sum(bool(one.faults) for one in found)
    took = time.monotonic() - began
    sys.stderr.write(f"{len(found)} cases, {bad} disagreements, {took:.0f} s: {TABLE}\n")
    return 1 if bad or (is_all and len(found) < CASES_MIN) else 0


if __name__ == "__main__":
    sys.exit(main())
