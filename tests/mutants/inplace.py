"""Defects of reading into live memory before everything is proved."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

BERTHS = "tests/unit/state_dict/test_berths.py"
GANG = "tests/gang/test_loading_in_place.py"
ROOM = "tests/unit/storage/test_room_for_reads.py"

MUTANTS = [
    Mutant(
        "a part that an older checkpoint may lack is read in place",
        "resilient/state_dict/load.py",
        "    if part.optional or part.document or",
        "    if part.document or",
        BERTHS,
    ),
    Mutant(
        "whatever has state is read in place",
        "resilient/state_dict/load.py",
        "        return None\n    return dict(stateful.state_dict(keep_vars=True))",
        "        return dict(stateful.state_dict())\n"
        "    return dict(stateful.state_dict(keep_vars=True))",
        BERTHS,
    ),
    Mutant(
        "parts that share memory are read in place",
        "resilient/state_dict/load.py",
        "            found |= {part, whose}\n",
        "            pass\n",
        BERTHS,
    ),
    Mutant(
        "what is stored otherwise is read in place",
        "resilient/state_dict/load.py",
        "        if stored[name]\n        == {",
        "        if stored[name].keys()\n        >= {",
        BERTHS,
    ),
    Mutant(
        "tensors with gaps are read into",
        "resilient/state_dict/load.py",
        "return memory if memory.is_contiguous() else None",
        "return memory",
        BERTHS,
    ),
    Mutant(
        "regions that overlap in a file have places",
        "resilient/state_dict/load.py",
        "if any(first[1] > second[0] for",
        "if any(False for",
        BERTHS,
    ),
    Mutant(
        "what was mended is taken for what was read in place",
        "resilient/state_dict/load.py",
        "            if words.ctypes.data != data.data_ptr():\n",
        "            if False:\n",
        f"{BERTHS} {GANG}",
    ),
    Mutant(
        "one part is read in place when it is loaded alone",
        "resilient/checkpoint_engine.py",
        "context.read_request({stored}, landing.boxes)",
        (
            "context.read_request({stored}, landing.boxes, LoadPlan({name: part}, "
            "in_place=True).places)"
        ),
        GANG,
    ),
    Mutant(
        "a life that did not begin saves",
        "resilient/checkpoint_engine.py",
        "        generation, began_seconds = self._begun(), ",
        (
            "        generation, began_seconds = self._life or "
            "start_generation(self._desk, ResumeChoice(None, ()), 'x'), "
        ),
        GANG,
    ),
    Mutant(
        "a rank that has all in place goes on alone",
        "resilient/checkpoint/resume_selection.py",
        "                if not problems[folder]:\n",
        "                if proved is not None:\n",
        GANG,
    ),
    Mutant(
        "an older checkpoint is proved and not loaded",
        "resilient/checkpoint_engine.py",
        "        absent = self._load(choice, parts, landing, check)\n",
        "        absent = () if choice.skipped else self._load(choice, parts, landing, check)\n",
        GANG,
    ),
    Mutant(
        "everything is read into memory of its own",
        "resilient/checkpoint/restore/read.py",
        "**read_ranges(store, manifest, large, places)}",
        "**read_ranges(store, manifest, large)}",
        BERTHS,
    ),
    Mutant(
        "bytes go to the wrong piece of memory",
        "resilient/storage/transfer.py",
        "piece[max(begin - first, 0) : stop - first]",
        "piece[max(begin - first, 0) : stop]",
        ROOM,
    ),
]
