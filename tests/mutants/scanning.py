"""Defects of the scan: harm that is not seen, or is called harmless."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

TESTS = "tests/unit/layouts/test_scanning.py"
SCANNING = "resilient/layouts/security_scan.py"
CALLABLES = "resilient/layouts/pickle_names.py"

MUTANTS = [
    Mutant(
        "a host that is away is a file that is missing",
        "resilient/storage/errors.py",
        "kind_of_foreign(error.__cause__) in _NO_ANSWER:",
        "kind_of_foreign(error.__cause__) in ():",
        "tests/unit/storage/test_fsspec_calls.py -k nobody",
    ),
    Mutant(
        "only the first pickle of a file is looked at",
        SCANNING,
        "    while stream.tell() < len(data):\n",
        "    while stream.tell() < min(1, len(data)):\n",
        TESTS,
    ),
    Mutant(
        "names before the place where a pickle breaks are forgotten",
        "resilient/layouts/pickle_reader.py",
        "        return frozenset(machine.names), str(error)\n",
        "        return frozenset(), str(error)\n",
        TESTS,
    ),
    Mutant(
        "a pickle that breaks is no finding",
        SCANNING,
        "            why = why or broken\n",
        "            why = why or ''\n",
        TESTS,
    ),
    Mutant(
        "a way through attributes is taken for the name before it",
        CALLABLES,
        '    if "." not in attribute and _rebuilds(module, attribute):\n',
        '    if _rebuilds(module, attribute.partition(".")[0]):\n',
        TESTS,
    ),
    Mutant(
        "all builtins rebuild data",
        CALLABLES,
        '        return attribute in _REBUILDS["builtins"]\n',
        "        return True\n",
        TESTS,
    ),
    Mutant(
        "a library's lower names are its classes",
        CALLABLES,
        'and attribute.lstrip("_")[:1].isupper()',
        "and attribute",
        TESTS,
    ),
    Mutant(
        "an index is not asked where it leads",
        SCANNING,
        "    for file in sorted(filter(leads_out, files))",
        "    for file in sorted(filter(str.isspace, files))",
        TESTS,
    ),
    Mutant(
        "members of a zip are called pickles by their names alone",
        SCANNING,
        "        if not is_pickle and not head.startswith(_PICKLE_MAGIC):\n",
        "        if not is_pickle:\n",
        TESTS,
    ),
    Mutant(
        "slices of a distributed checkpoint are left out",
        SCANNING,
        "        yield from _archive(folder, file, size_bytes, start)\n",
        "        continue\n",
        TESTS,
    ),
    Mutant(
        "links out of the folder are no danger",
        SCANNING,
        "    for name in listing.outside:\n",
        "    for name in ():\n",
        TESTS,
    ),
    Mutant(
        "what a zip claims of its size is not added up",
        SCANNING,
        "    unpacked = sum(member.file_size for member in members)\n",
        "    unpacked = size_bytes\n",
        TESTS,
    ),
    Mutant(
        "a stream that does not unpack ends the scan by what zlib raises",
        SCANNING,
        "zlib.error, LZMAError, ",
        "",
        f"{TESTS} -k unpack",
    ),
    Mutant(
        "a member that does not unpack hides those behind it",
        SCANNING,
        "                    broken = broken or str(error)\n",
        "                    broken = broken or str(error)\n                    break\n",
        f"{TESTS} -k hides_no_other",
    ),
    Mutant(
        "a warning alone ends with 0",
        "cli/resilient_cli/commands/scan.py",
        "any(one.risk is not Risk.NOTE for one in found)",
        "any(one.risk is Risk.DANGER for one in found)",
        "tests/cli/test_scan.py",
    ),
]
