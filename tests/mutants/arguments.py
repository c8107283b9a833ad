"""Defects of what a run is told: refused, read, and compared at a resume."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_HOME = "resilient/train/arguments"
_TESTS = "tests/unit/train/arguments"
COPIED = "tests/unit/train/test_copied.py"

MUTANTS = [
    Mutant(
        "what is not there yet is taken and ignored",
        f"{_HOME}/validation.py",
        "        if value not in nothing:\n",
        "        if value is nothing:\n",
        f"{_TESTS}/test_argument_values.py",
    ),
    Mutant(
        "a name that is not there yet is taken",
        f"{_HOME}/validation.py",
        "    if value in missing:\n",
        "    if value is missing:\n",
        f"{_TESTS}/test_argument_values.py",
    ),
    Mutant(
        "PowerSGD keeps an overflow for ever",
        f"{_HOME}/derived.py",
        "    if args.fp16 and compression_of(args).remembers:\n",
        "    if args.fp16 is compression_of(args):\n",
        "tests/unit/strategies/test_compression.py",
    ),
    Mutant(
        "an old name is dropped in silence",
        f"{_HOME}/deprecated.py",
        "        for now, meant in written.items():\n"
        "            taken[now] = _joined(name, now, meant, taken)\n",
        "",
        f"{_TESTS}/test_old_names.py",
    ),
    Mutant(
        "the file wins over the command line",
        f"{_HOME}/parsing.py",
        "    values |= told\n",
        "    values = {**told, **values}\n",
        f"{_TESTS}/test_command_line.py",
    ),
    Mutant(
        "the last of two equal keys wins",
        f"{_HOME}/parsing.py",
        "        if key in made:\n",
        "        if key is made:\n",
        f"{_TESTS}/test_argument_files.py",
    ),
    Mutant(
        "a resume takes whatever differs",
        f"{_HOME}/resume_rules.py",
        "    if not fixed and not refused:\n        return\n",
        "    return\n",
        f"{_TESTS}/test_changes.py",
    ),
    Mutant(
        "how samples are fetched never changes what is trained",
        f"{_HOME}/resume_rules.py",
        "    if name == _WORKERS and bool(old) != bool(new):\n",
        "    if False:\n",
        f"{_TESTS}/test_changes.py",
    ),
    Mutant(
        "whatever is allowed allows all",
        f"{_HOME}/resume_rules.py",
        "name not in names and ALL not in names",
        "not names",
        f"{_TESTS}/test_changes.py",
    ),
    Mutant(
        "differences are told after the refusal, and so never",
        "resilient/train/saver.py",
        "    if changes:\n        emit(ArgumentsChanged(changes))\n",
        "",
        f"{_TESTS}/test_changes.py",
    ),
    Mutant(
        "the arguments are looked at after everything is loaded",
        "resilient/state_dict/load.py",
        "    if check.examine is not None:\n"
        "        check.examine(manifest.config)\n"
        "    absent = absent_parts(manifest, parts, rank)\n"
        "    fresh = load(manifest, files, parts, rank, landing, check)\n",
        "    absent = absent_parts(manifest, parts, rank)\n"
        "    fresh = load(manifest, files, parts, rank, landing, check)\n"
        "    if check.examine is not None:\n"
        "        check.examine(manifest.config)\n",
        "tests/unit/test_checkpointer.py",
    ),
    Mutant(
        "a row of the page of parity is lost",
        "docs/parity.md",
        "| A52 | `optim` |",
        "| A99 | `optim` |",
        "tests/unit/test_parity_page.py",
    ),
    Mutant(
        "a row names a test that is gone",
        "tests/unit/train/test_saving.py",
        "def test_other_strategies(",
        "def other_strategies(",
        "tests/unit/test_parity_page.py",
    ),
    Mutant(
        "a ratio of all steps becomes one step",
        f"{_HOME}/deprecated.py",
        "math.nextafter(1.0, 0.0) if ratio == 1 else ratio",
        "ratio",
        f"{_TESTS}/test_old_names.py",
    ),
    Mutant(
        "a number without an end is taken",
        f"{_HOME}/validation.py",
        "    _check_finite(args)\n",
        "",
        f"{_TESTS}/test_argument_values.py",
    ),
    Mutant(
        "names are advised that are refused",
        f"{_HOME}/validation.py",
        "for item in known if item not in refusing)",
        "for item in known)",
        f"{_TESTS}/test_argument_values.py",
    ),
    Mutant(
        "what is about FSDP is taken and ignored without it",
        f"{_HOME}/derived.py",
        '    "fsdp_min_num_params": ("fsdp", (0,)),\n',
        "",
        f"{_TESTS}/test_argument_values.py",
    ),
    Mutant(
        "a Space that nothing makes is asked for",
        f"{_HOME}/validation.py",
        '    "trackio_static_space_id": (\n        (None, False),',
        '    "trackio_space_id": (\n        (None, False),',
        f"{_TESTS}/test_argument_values.py",
    ),
    Mutant(
        "batches are copied ahead whatever was asked",
        "resilient/train/trainer_hooks.py",
        "            return inputs\n        return to_device(inputs, self.session.device, "
        "ahead=copies_ahead(self.args))",
        "            return inputs\n        return to_device(inputs, self.session.device, "
        "ahead=True)",
        "tests/unit/train/test_batch.py",
    ),
    Mutant(
        "what was changed inside of an argument is not told",
        "resilient/train/fast_asdict.py",
        "repr(self._convert(values[at])) == text for at, text in self._inside",
        "True for _ in self._inside",
        COPIED,
    ),
    Mutant(
        "an argument that was changed is not told",
        "resilient/train/fast_asdict.py",
        "all(map(is_, values, self._values)) and ",
        "",
        COPIED,
    ),
    Mutant(
        "a list of the arguments is kept as it is now, not as it was",
        "resilient/train/fast_asdict.py",
        """    if kind is list and _PLAIN.issuperset(map(type, value)):
        return value.copy()""",
        """    if kind is list:
        return value""",
        COPIED,
    ),
    Mutant(
        "a dict of the arguments is kept as it is now, not as it was",
        "resilient/train/fast_asdict.py",
        """    if kind is dict and _PLAIN.issuperset(map(type, chain(value, value.values()))):
        return value.copy()""",
        """    if kind is dict:
        return value""",
        COPIED,
    ),
]
