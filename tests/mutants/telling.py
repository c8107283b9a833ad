"""Defects of what helps against damage, of what is no file, and of an answer nobody can take."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

LAYERS = "tests/unit/layouts/test_layers.py"
OPTIMIZERS = "tests/unit/layouts/test_optimizers_of_tools.py"
NO_FILES = "tests/unit/layouts/test_no_files.py"
SPEAKING = "tests/unit/layouts/test_speaking.py"
DOCUMENTS = "tests/unit/layout_repair/test_documents.py"
REMEDIES = "tests/unit/layouts/test_remedies.py"
STREAMS = "cli/resilient_cli/output.py"
FULL = "tests/cli/test_full_output.py"
FOLDER = "resilient/storage/folder.py"
GROUPS = "        problems += check_optimizer(archive.name, state, archive, is_begun=is_begun)\n"

MUTANTS = [
    Mutant(
        "two layers of different kinds are one with a wrong name",
        "resilient/layouts/consistency.py",
        "or (is_pair and not _is_bit_apart(wanted, found)):",
        "or False:",
        f"{LAYERS} -k different_kinds",
    ),
    Mutant(
        "a weight of another shape is one with a wrong name",
        "resilient/layouts/consistency.py",
        "        if layer_tensor.shape != shapes[wanted] or",
        "        if False or",
        f"{LAYERS} -k another_shape",
    ),
    Mutant(
        "the groups of an optimizer in a file of torch are not looked at",
        "resilient/layouts/single_file.py",
        GROUPS,
        "        problems += []\n",
        f"{OPTIMIZERS} -k a_file",
    ),
    Mutant(
        "the groups of an optimizer of Lightning are not looked at",
        "resilient/layouts/lightning.py",
        (
            "            problems += check_optimizer(archive.name, optimizer_state, "
            "archive, is_begun=is_begun)\n"
        ),
        "            problems += []\n",
        f"{OPTIMIZERS} -k of_lightning",
    ),
    Mutant(
        "an optimizer that has made no step is one that lost its state",
        "resilient/layouts/consistency.py",
        "    if is_begun and _is_emptied(value, archive):",
        "    if _is_emptied(value, archive):",
        f"{OPTIMIZERS} -k before_the_first",
    ),
    Mutant(
        "what is no file is missing",
        FOLDER,
        "        if name not in self.outside:\n",
        "        if True:\n",
        f"{NO_FILES} -k pipe",
    ),
    Mutant(
        "a file that nobody looked at is missing",
        FOLDER,
        "        if leads_out(name):\n",
        "        if False:\n",
        f"{NO_FILES} -k not_called_missing",
    ),
    Mutant(
        "marks of direction in a name are fine",
        "resilient/layouts/security_scan.py",
        '_TALKING = ("Cc", "Cf",',
        '_TALKING = ("Cc",',
        SPEAKING,
    ),
    Mutant(
        "names of tensors are not looked at for what they say to a terminal",
        "resilient/layouts/security_scan.py",
        "        found += _talking(folder, listing, name)\n",
        "",
        SPEAKING,
    ),
    Mutant(
        "a configuration that is as wrong is taken from another step",
        "resilient/layout_repair/index_repair.py",
        "            if any(problem.place == name for problem in problems):\n",
        "            if False:\n",
        f"{DOCUMENTS} -k as_wrong",
    ),
    Mutant(
        "a weight under another name is whole",
        "resilient/layout_repair/plan.py",
        " or problem.loses == RENAMED\n",
        "\n",
        f"{DOCUMENTS} -k another_name",
    ),
    Mutant(
        "of what was saved so the whole step beside it is not named",
        "resilient/layouts/resumability.py",
        ("    if problem.cure is Remedy.EARLIER and sibling:\n"),
        "    if False:\n",
        REMEDIES,
    ),
    Mutant(
        "a message reaches the terminal as somebody wrote it",
        STREAMS,
        "escape_control_chars(one) for nth",
        "one for nth",
        "tests/cli/test_escapes.py -k terminal_obeys",
    ),
    Mutant(
        "a line of a message looks like a hint",
        "cli/resilient_cli/output.py",
        '.replace("\\n", "\\n    ")',
        "",
        "tests/cli/test_escapes.py -k hint",
    ),
    Mutant(
        "what is left of an answer fails again at the end",
        STREAMS,
        "        ignore_broken_pipe()  # what is left in the buffer would fail again at the end\n",
        "",
        f"{FULL} -k full_disk",
    ),
    Mutant(
        "a full stdout is a bug of ours",
        STREAMS,
        "        raise kind_of(error)(\n",
        "        raise RuntimeError(\n",
        f"{FULL} -k full_disk",
    ),
    Mutant(
        "a word of a command is not quoted",
        "resilient/redaction.py",
        "    return text if _WORD.fullmatch(text) else shlex.quote(text)",
        "    return text",
        "tests/cli/test_hinted_commands.py -k odd_place",
    ),
    Mutant(
        "a hint names an option that is not there",
        "cli/resilient_cli/commands/unlock.py",
        " --yes --force loses",
        " --yes --by-force loses",
        "tests/cli/test_hinted_commands.py -k sources",
    ),
    Mutant(
        "a hint may be no command",
        "resilient/checkpoint/refs.py",
        'hint="resilient help refs"',
        'hint="write it otherwise"',
        "tests/cli/test_hints.py -k source",
    ),
]
