"""The code of parity: the field's laws, every loss of small groups, bytes that stay fixed."""

from __future__ import annotations

from itertools import combinations
from random import Random

import pytest

from resilient.errors import ConfigError
from resilient.format.parity import (
    GROUP_FILES_MAX,
    PARITY_MAX,
    add,
    check_groups,
    check_parity,
    coefficient,
    grouped,
    invert,
    multiply,
    parity_bytes,
    protect,
    solve,
)
from resilient.format.safetensors_file import StagedFile


def by_hand(one: int, other: int) -> int:
    """Multiply as the definition says: polynomials over two elements, modulo 0x11D."""
    product = 0
    for bit in range(8):
        product ^= (one << bit) if other >> bit & 1 else 0
    for bit in range(14, 7, -1):
        product ^= (0x11D << (bit - 8)) if product >> bit & 1 else 0
    return product


def test_products_are_those_of_the_definition():
    wrong = [
        (one, other)
        for one in range(256)
        for other in range(0, 256, 7)
        if multiply(one, other) != by_hand(one, other)
    ]
    assert wrong == []
    assert all(multiply(value, invert(value)) == 1 for value in range(1, 256))


def test_the_coefficients_are_those_that_the_format_names():
    """They are in docs/format.md: other ones could not read what is stored."""
    assert all(
        by_hand(coefficient(row, column), (255 - row) ^ column) == 255 ^ column
        for row in range(PARITY_MAX)
        for column in range(0, GROUP_FILES_MAX, 9)
    )
    assert {coefficient(0, column) for column in range(GROUP_FILES_MAX)} == {1}
    assert [coefficient(1, column) for column in range(4)] == [0x7F, 0xFC, 0x7E, 0xFE]
    assert [coefficient(2, column) for column in range(4)] == [0xE2, 0xFF, 0xE6, 0xFD]


def files_of(random, sizes):
    return [StagedFile(f"f{at}.json", random.randbytes(size)) for at, size in enumerate(sizes)]


def computed_back(files, parity, lost, rows):
    """Return the lost files, from the others and some rows, as the vault does chunk by chunk."""
    longest = max(len(file.data) for file in files)
    sums = []
    for row in rows:
        total = bytearray(parity[row].data)
        there = [(at, file) for at, file in enumerate(files) if at not in lost]
        add(total, [(coefficient(row, at), file.data) for at, file in there])
        sums.append(total)
    found = []
    for at, factors in zip(lost, solve(lost, rows), strict=True):
        content = bytearray(longest)
        add(content, list(zip(factors, sums, strict=True)))
        found.append(bytes(content[: len(files[at].data)]))
    return found


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_every_loss_of_as_many_files_as_there_is_parity_is_computed_back(count):
    random = Random(count)
    files = files_of(random, [300, 0, 1, 299, 77])
    parity = list(protect(files, grouped([file.name for file in files], 0, count)))
    assert [len(one.data) for one in parity] == [300] * count
    tried = 0
    for losses in range(1, count + 1):
        for lost in combinations(range(len(files)), losses):
            for rows in combinations(range(count), losses):
                expected = [bytes(files[at].data) for at in lost]
                assert computed_back(files, parity, lost, rows) == expected
                tried += 1
    assert tried > count


def test_the_largest_groups_can_be_solved_for_the_most_losses():
    random = Random(7)
    for _ in range(60):
        size = random.randint(1, PARITY_MAX)
        lost = random.sample(range(GROUP_FILES_MAX), size)
        rows = random.sample(range(PARITY_MAX), size)
        inverse = solve(lost, rows)
        for at, factors in enumerate(inverse):
            product = [0] * size
            for factor, row in zip(factors, rows, strict=True):
                for other, column in enumerate(lost):
                    product[other] ^= multiply(factor, coefficient(row, column))
            assert product == [int(other == at) for other in range(size)]


def test_the_first_row_is_plain_exclusive_or():
    one, other = files_of(Random(1), [5, 3])
    (parity,) = protect([one, other], grouped([one.name, other.name], 3, 1))
    assert parity.name == "parity-0-0.r00003.parity"
    expected = bytes(a ^ b for a, b in zip(one.data, other.data + b"\0\0", strict=True))
    assert bytes(parity.data) == expected


def test_pieces_larger_than_a_cache_block_are_summed_whole():
    files = files_of(Random(2), [700_000, 600_001])
    parity = list(protect(files, grouped([file.name for file in files], 0, 2)))
    assert computed_back(files, parity, (0,), (1,)) == [files[0].data]
    assert computed_back(files, parity, (1,), (0,)) == [files[1].data]


def test_many_files_are_several_groups():
    names = [f"f{at}.json" for at in range(GROUP_FILES_MAX + 1)]
    groups = grouped(names, 0, 2)
    assert [len(group.files) for group in groups] == [GROUP_FILES_MAX, 1]
    assert groups[1].parity == ("parity-1-0.r00000.parity", "parity-1-1.r00000.parity")
    sizes = [10] * GROUP_FILES_MAX + [3]
    assert parity_bytes(sizes, 2) == 2 * (10 + 3)
    files = [StagedFile(name, b"x" * size) for name, size in zip(names, sizes, strict=True)]
    assert sum(len(one.data) for one in protect(files, groups)) == parity_bytes(sizes, 2)
    assert grouped(names, 0, 0) == []
    assert parity_bytes(sizes, 0) == 0


@pytest.mark.parametrize("count", [-1, PARITY_MAX + 1, 1.0, True, "1", None])
def test_a_number_that_the_code_does_not_know_is_refused(count):
    with pytest.raises(ConfigError, match="is not accepted: use a whole number from 0 to 16"):
        check_parity(count)


def broken(**changes):
    (group,) = grouped(["a.json", "b.json"], 0, 1)
    changed = {"code": group.code, "files": group.files, "parity": group.parity, **changes}
    return [type(group)(**changed)]


SIZES = {"a.json": 3, "b.json": 5, "parity-0-0.r00000.parity": 5}


@pytest.mark.parametrize(
    ("groups", "sizes"),
    [
        (broken(code="rs257"), SIZES),
        (broken(files=("a.json", "a.json")), SIZES),
        (broken(files=("a.json", "parity-0-0.r00000.parity")), SIZES),
        (broken(files=()), SIZES),
        (broken(parity=()), SIZES),
        (broken(parity=()), {"a.json": 3, "b.json": 5}),
        ([], SIZES),
        (broken() * 2, SIZES),
        (broken(), {**SIZES, "parity-0-0.r00000.parity": 4}),
        (broken(), {"a.json": 3, "parity-0-0.r00000.parity": 5}),
    ],
)
def test_groups_that_contradict_the_files_are_refused(groups, sizes):
    check_groups(broken(), SIZES)
    with pytest.raises((ValueError, KeyError)):
        check_groups(groups, sizes)
