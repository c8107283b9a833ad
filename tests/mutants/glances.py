"""Defects of knowing a stateful's state at a glance."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

GLANCES = "resilient/state/glances.py"
SAME = "tests/unit/state/test_glances.py"
LATER = "tests/unit/state/test_glances_later.py"
AGAIN = "tests/unit/state/test_known_again.py"
COPIED = "tests/unit/train/test_copied.py"
SPELLED = "tests/unit/state/test_spelling.py"

MUTANTS = [
    Mutant(
        "the dicts of a module are not looked for",
        GLANCES,
        "_are([*map(vars, self._modules)], owns)",
        "True",
        SAME,
    ),
    Mutant(
        "the class of a module is not looked at",
        GLANCES,
        "            and _are([*map(type, self._modules)], self._kinds)\n",
        "",
        SAME,
    ),
    Mutant(
        "what a class was given since is passed over",
        GLANCES,
        "            and all(map(has_torchs_ways, frozenset(self._kinds)))\n",
        "",
        SAME,
    ),
    Mutant(
        "a hook that came since is passed over",
        GLANCES,
        "            and not any(_of_each(owns, *_WAYS))\n",
        "",
        SAME,
    ),
    Mutant(
        "a method that a module was given is passed over",
        GLANCES,
        "            and not any(any(map(contains, owns, repeat(name))) for name in ASKED)\n",
        "",
        SAME,
    ),
    Mutant(
        "buffers that are stored from now on are passed over",
        GLANCES,
        "            and [*map(itemgetter(_PASSING), owns)] == self._passing\n",
        "",
        SAME,
    ),
    Mutant(
        "the names of what is held are not compared",
        GLANCES,
        "            and [*chain.from_iterable(dicts)] == self._keys\n",
        "",
        SAME,
    ),
    Mutant(
        "where one dict ends and the next begins is not compared",
        GLANCES,
        "            [*map(len, dicts)] == self._lengths\n            and ",
        "            ",
        SAME,
    ),
    Mutant(
        "tensors of the same name are taken for the known ones",
        GLANCES,
        "            and _are(_values(dicts), self._values)\n",
        "",
        SAME,
    ),
    Mutant(
        "states of an optimizer in another order are taken for the known ones",
        GLANCES,
        "            and _are([*state], self._parameters)\n",
        "",
        SAME,
    ),
    Mutant(
        "another dict of an optimizer's state is not seen",
        GLANCES,
        "            and _are([*state.values()], self._dicts)\n",
        "",
        SAME,
    ),
    Mutant(
        "a group that came since is passed over",
        GLANCES,
        "            and named.names is self._names\n",
        "",
        SAME,
    ),
    Mutant(
        "objects are looked at that training no longer has",
        "resilient/state/recall.py",
        "        known.live = walk.seen\n",
        '        known.live = getattr(known, "live", walk.seen)\n',
        LATER,
    ),
    Mutant(
        "a module that keeps what it holds in a way of its own is looked into",
        GLANCES,
        "if not _DICTS.issuperset(type(own[name]) for name in _HELD):",
        "if False:",
        "tests/unit/state/test_odd_modules.py",
    ),
    Mutant(
        "what is asked each time is among what is kept",
        "resilient/state/recall.py",
        "if rest is not None and flatten(part, rest)[1]:",
        "if False:",
        LATER,
    ),
    Mutant(
        "a parameter that a forward pass may clamp is copied beside it",
        "resilient/state/steady.py",
        " and (source.nbytes >= _LATER_BYTES_MIN or address in small)",
        "",
        AGAIN,
    ),
    Mutant(
        "what torch has drawn is forgotten",
        GLANCES,
        '        self._cpu.copy_(now["cpu"])\n',
        "",
        SAME,
    ),
    Mutant(
        "what the other generators have drawn is forgotten",
        GLANCES,
        '_NUMBERS = ("python", "numpy")',
        '_NUMBERS = ("python",)',
        SAME,
    ),
    Mutant(
        "tensors behind a longer header are looked for where they were",
        "resilient/state/drafts.py",
        "        if not moved_bytes:\n",
        "        if True:\n",
        AGAIN,
    ),
    Mutant(
        "what was changed inside of an argument is not told",
        "resilient/train/copied.py",
        "repr(_copy(values[at])) == text for at, text in self._inside",
        "True for _ in self._inside",
        COPIED,
    ),
    Mutant(
        "an argument that was changed is not told",
        "resilient/train/copied.py",
        "all(map(is_, values, self._values)) and ",
        "",
        COPIED,
    ),
    Mutant(
        "what lies elsewhere now is taken for what lay there",
        "resilient/state/recall.py",
        " and known.is_still_there()",
        "",
        SAME,
    ),
    Mutant(
        "what is told of one stateful is told of another",
        "resilient/state/recall.py",
        "if look is None or look.stateful is not stateful:",
        "if look is None:",
        SAME,
    ),
    Mutant(
        "a tensor in a group is left out",
        "resilient/state/recall.py",
        "return None if more else (",
        "return (",
        SAME,
    ),
    Mutant(
        "the generators are asked a second time for what is compared",
        GLANCES,
        "return RandomGlance(stateful, said, cpu[0]) if",
        "return RandomGlance(stateful, stateful.state_dict(), cpu[0]) if",
        LATER,
    ),
    Mutant(
        "a float is spelled as the int that it equals",
        "resilient/state/spelling.py",
        "    if one is other or kind is not type(other):\n        return one is other\n",
        "    if one is other:\n        return True\n",
        SPELLED,
    ),
    Mutant(
        "a flag in a list of numbers is one",
        "resilient/state/spelling.py",
        "if _INTS.issuperset(map(type, one)) and _INTS.issuperset(map(type, other)):",
        "if _INTS.issuperset(map(type, one)):",
        SPELLED,
    ),
    Mutant(
        "the order of keys is not compared",
        "resilient/state/spelling.py",
        "[*one] == [*other] and all",
        "set(one) == set(other) and all",
        SPELLED,
    ),
]
