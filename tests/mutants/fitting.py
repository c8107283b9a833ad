"""Defects of holding parts of a checkpoint against each other, and of naming what is none."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

FITTING = "tests/unit/layouts/test_states_and_weights.py"

LOST = "tests/unit/layouts/test_lost_files.py"

SAFE = "tests/unit/layouts/test_modules_and_safe_slices.py"

MUTANTS = [
    Mutant(
        "slices of safetensors begin where their file does",
        "resilient/layouts/dcp.py",
        "Region(shape_of(offsets), tensor.shape)",
        "Region(tuple(0 for _ in offsets), tensor.shape)",
        f"{SAFE} -k slices",
    ),
    Mutant(
        "the slices of a rank are not missed",
        "resilient/layouts/dcp.py",
        "    for number in lost:",
        "    for number in ():",
        f"{SAFE} -k gone",
    ),
    Mutant(
        "a module inside a dictionary has no weights",
        "resilient/layouts/single_file.py",
        "for key, value in named.items() if is_module(value)]",
        "for key, value in named.items() if False]",
        f"{SAFE} -k inside",
    ),
    Mutant(
        "a stream is found again in any pass",
        "resilient/layouts/hf_trainer.py",
        "and epoch >= 1:",
        "and epoch >= 9:",
        f"{LOST} -k stream",
    ),
    Mutant(
        "the traces of an engine are not looked for",
        "resilient/layouts/accelerate.py",
        "    if lost := _lost_engine(folder, listing):",
        "    if lost := None:",
        LOST,
    ),
    Mutant(
        "with FSDP any file of weights will do",
        "resilient/layouts/accelerate.py",
        "    if _OF_TRAINER in listing.sizes and",
        "    if False and",
        LOST,
    ),
    Mutant(
        "a best checkpoint may be gone",
        "resilient/layouts/hf_trainer.py",
        '    elif step != whole(state.get("global_step")) and',
        "    elif False and",
        LOST,
    ),
    Mutant(
        "a repair is silent of random states that are lost",
        "resilient/layout_repair/donors.py",
        '            case.refused["."] = _LOST.format(problem.what)',
        "            pass",
        LOST,
    ),
    Mutant(
        "moments of more weights of a shape than there are pass",
        "resilient/layouts/consistency.py",
        "if shapes[value.shape] > counts[value.shape]]:",
        "if not counts[value.shape]]:",
        f"{FITTING} -k first_step",
    ),
    Mutant(
        "both moments of a parameter may have any shape",
        "resilient/layouts/consistency.py",
        "        if other.shape != moment.shape:",
        "        if False:",
        f"{FITTING} -k first_step",
    ),
    Mutant(
        "a state under the name of a weight may have any shape",
        "resilient/layouts/consistency.py",
        "            if shape != value.shape:",
        "            if False:",
        f"{FITTING} -k under_a_name",
    ),
    Mutant(
        "a weight that is lost is called another model",
        "resilient/layouts/consistency.py",
        "            if counts - shapes",
        "            if True",
        f"{FITTING} -k file_has_not",
    ),
    Mutant(
        "a group may lack its rate",
        "resilient/layouts/consistency.py",
        '        wanted = {"lr"} | (',
        "        wanted = set() | (",
        f"{FITTING} -k adam_needs",
    ),
    Mutant(
        "states of some parameters are states of all",
        "resilient/layouts/consistency.py",
        "    if not 0 < len(states) < count or",
        "    if True or",
        f"{FITTING} -k half_of",
    ),
    Mutant(
        "a schedule may be of any number of groups",
        "resilient/layouts/consistency.py",
        "    if begun != count and (",
        "    if False and (",
        f"{FITTING} -k number_of_groups",
    ),
    Mutant(
        "a document in another encoding is taken",
        "resilient/layouts/json_files.py",
        'json.loads(data.decode("utf-8"), object',
        "json.loads(data, object",
        f"{FITTING} -k utf8",
    ),
]
