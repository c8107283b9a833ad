"""Distances are those that torch computes of the same tensors."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from resilient.diff.compare import DifferenceMeter
from resilient.diff.tensor_stats import gap, is_known, ranks, values

NAMES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool, "C64": torch.complex64, "C128": torch.complex128,
}  # fmt: skip
FLOATS = ["F64", "F32", "F16", "BF16"]


def raw(tensor):
    flat = tensor.contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().reshape(len(flat), -1)


def measured(one, other, before, after, block=5):
    meter = DifferenceMeter(before, after)
    left, right = raw(one), raw(other)
    for start in range(0, len(left), block):
        meter.add(left[start : start + block], right[start : start + block])
    return meter.result()


def pair(dtype):
    generator = torch.Generator().manual_seed(7)
    one = torch.randn(40, generator=generator, dtype=torch.float64) * 20
    other = one + torch.randn(40, generator=generator, dtype=torch.float64)
    other[:9] = one[:9]
    if dtype in (torch.bool, torch.uint8):
        one, other = one.abs(), other.abs()
    if dtype is torch.bool:
        one, other = one > 9, other > 9
    if dtype.is_complex:
        return torch.complex(one, other).to(dtype), torch.complex(other, one + 1).to(dtype)
    return one.to(dtype), other.to(dtype)


@pytest.mark.parametrize("name", [one for one in NAMES if one != "F8_E8M0"])
def test_every_dtype_is_measured_as_torch_measures_it(name):
    one, other = pair(NAMES[name])
    found = measured(one, other, name, name)
    wide = torch.complex128 if one.is_complex() else torch.float64
    left, right = one.to(wide), other.to(wide)
    if one.is_complex():
        left, right = torch.view_as_real(left).reshape(-1), torch.view_as_real(right).reshape(-1)
    assert found.elements == 40
    assert found.changed == int((raw(one) != raw(other)).any(axis=1).sum())
    assert found.max_abs == float((left - right).abs().max())
    assert found.relative == pytest.approx(float((left - right).norm() / left.norm()), rel=1e-12)
    wanted = torch.nn.functional.cosine_similarity(left, right, dim=0)
    assert found.cosine == pytest.approx(float(wanted), rel=1e-12)
    assert found.norms == pytest.approx((float(left.norm()), float(right.norm())), rel=1e-12)


@pytest.mark.parametrize("name", list(NAMES))
def test_every_bit_pattern_of_a_narrow_float_is_what_torch_says(name):
    assert is_known(name)
    if not name.startswith("F8"):
        return
    patterns = torch.arange(256, dtype=torch.uint8)
    wanted = patterns.view(NAMES[name]).to(torch.float64).numpy()
    assert np.array_equal(values(patterns.numpy()[:, None], name), wanted, equal_nan=True)


@pytest.mark.parametrize("name", FLOATS)
def test_ulps_count_the_numbers_between(name):
    steps = 5
    dtype = NAMES[name]
    for start in (1.0, -1.0, 0.0, 3.14159, -65000.0):
        one = torch.tensor([start], dtype=dtype)
        other = one.clone()
        for _ in range(steps):
            other = torch.nextafter(other, torch.tensor([math.inf], dtype=dtype))
        assert measured(one, other, name, name).max_ulp == steps
        assert measured(other, one, name, name).max_ulp == steps


def test_zeros_of_both_signs_differ_in_bits_and_are_no_number_apart():
    one, other = torch.zeros(3), -torch.zeros(3)
    found = measured(one, other, "F32", "F32")
    assert (found.changed, found.max_abs, found.max_ulp, found.relative) == (3, 0.0, 0, 0.0)
    assert found.cosine is None


def test_numbers_that_are_none_are_counted_and_left_out():
    one = torch.tensor([1.0, math.nan, math.inf, 2.0, math.nan, 5.0])
    other = torch.tensor([1.0, math.nan, math.inf, 4.0, 1.0, -math.inf])
    found = measured(one, other, "F32", "F32", 2)
    assert (found.nans, found.infinite) == ((2, 1), (1, 2))
    assert found.changed == 3
    assert found.max_abs == 2.0
    assert found.norms == (math.sqrt(5), math.sqrt(17))
    assert found.relative == 2 / math.sqrt(5)


def test_what_is_no_number_on_both_sides_has_the_same_bits_or_differs():
    one = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert measured(one, one.clone(), "F32", "F32").changed == 0
    assert measured(one, one.flip(0), "F32", "F32").changed == 2


def test_two_dtypes_are_compared_by_value():
    one = torch.tensor([1.0, 2.0, 1.0 + 2**-20, math.nan])
    other = one.bfloat16()
    found = measured(one, other, "F32", "BF16")
    assert (found.changed, found.max_abs, found.max_ulp) == (1, 2**-20, None)


def test_whole_numbers_beyond_the_precision_of_floats_are_told_apart():
    one = torch.tensor([2**62, -(2**63), 7])
    other = torch.tensor([2**62 + 1, 2**63 - 1, 7])
    found = measured(one[:1], other[:1], "I64", "I64")
    assert (found.changed, found.max_abs, found.max_ulp) == (1, 1.0, None)
    assert gap(one.numpy(), other.numpy()) == 2**64 - 1


def test_what_was_zero_has_no_relative_change():
    found = measured(torch.zeros(4), torch.ones(4), "F32", "F32")
    assert (found.relative, found.cosine, found.max_abs) == (None, None, 1.0)
    same = measured(torch.zeros(4), torch.zeros(4), "F32", "F32")
    assert (same.relative, same.changed) == (0.0, 0)


def test_numbers_too_large_to_square_do_not_warn():
    one = torch.tensor([1e200, 1.0], dtype=torch.float64)
    found = measured(one, one * 2, "F64", "F64")
    assert found.norms == (math.inf, math.inf)
    assert (found.relative, found.cosine, found.max_abs) == (None, None, 1e200)


def test_nothing_is_the_same_as_nothing():
    found = DifferenceMeter("F32", "F32").result()
    assert (found.elements, found.changed, found.relative, found.max_ulp) == (0, 0, 0.0, 0)


def test_places_of_floats_are_in_their_order():
    line = torch.tensor([-math.inf, -2.0, -1e-45, -0.0, 0.0, 1e-45, 2.0, math.inf])
    found = ranks(raw(line), "F32").tolist()
    assert found == sorted(found)
    assert found[3] == found[4]
    assert found[5] - found[2] == 2
