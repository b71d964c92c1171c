"""MXFP4 against ml_dtypes, and the properties of the quantiser."""
from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pack_mxfp4 import pack_mxfp4

from k3plan.compiler.ops.mxfp4 import BLOCK, E2M1, unpack_mxfp4


def reference_values() -> np.ndarray:
    """fp32 [256 scales, 16 codes] by ml_dtypes; overflow to infinity included."""
    codes = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    scales = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        return scales[:, None] * codes[None, :]


def blocks(exponents: st.SearchStrategy[int]) -> st.SearchStrategy[torch.Tensor]:
    """fp32 [1, 32] with a common exponent drawn from ``exponents``, so that all of the fp32 range is met."""
    elements = st.lists(st.floats(-8, 8, width=32), min_size=BLOCK, max_size=BLOCK)
    scaled = st.builds(lambda e, x: np.ldexp(np.array(x, np.float32), e), exponents, elements)
    return scaled.map(lambda a: torch.from_numpy(a.astype(np.float32))[None])


def test_every_code_times_every_scale_is_bit_exact() -> None:
    row = torch.arange(16, dtype=torch.uint8)
    packed = torch.cat((row[0::2] | row[1::2] << 4, row[1::2] | row[0::2] << 4))  # each code in each nibble
    scale = torch.arange(256, dtype=torch.uint8)[:, None]
    got = unpack_mxfp4(packed.expand(256, 16), scale)
    swapped = np.arange(16).reshape(8, 2)[:, ::-1].reshape(16)
    table = reference_values()
    want = np.concatenate((table, table[:, swapped]), axis=1)
    nan = np.isnan(want)
    assert np.array_equal(np.isnan(got.numpy()), nan)
    assert np.array_equal(got.numpy().view(np.int32)[~nan], want.view(np.int32)[~nan])


def test_leading_dims_and_column_order() -> None:
    packed = torch.zeros(2, 3, 32, dtype=torch.uint8)
    packed[1, 2, 17] = 0x2F  # column 34: code 15 (-6), column 35: code 2 (1); second block of the row
    scale = torch.full((2, 3, 2), 127, dtype=torch.uint8)
    scale[1, 2, 1] = 130
    got = unpack_mxfp4(packed, scale)
    assert got.shape == (2, 3, 64)
    assert got[1, 2, 34] == -48
    assert got[1, 2, 35] == 8
    assert torch.count_nonzero(got) == 2


@pytest.mark.parametrize(
    ("value", "want"),
    [(0.25, 0.0), (0.75, 1.0), (1.25, 1.0), (1.75, 2.0), (2.5, 2.0), (3.5, 4.0), (5.0, 4.0), (7.9, 6.0)],
)
def test_ties_go_to_the_even_code_and_large_values_saturate(value: float, want: float) -> None:
    x = torch.zeros(1, BLOCK)
    x[0, 0], x[0, 1], x[0, 2] = 4.0, value, -value  # 4.0 keeps the scale at 1
    packed, scale = pack_mxfp4(x)
    assert scale.item() == 127
    assert unpack_mxfp4(packed, scale)[0, 1:3].tolist() == [want, -want]


def test_rounding_equals_ml_dtypes() -> None:
    x = torch.linspace(-6, 6, 32 * 4096).view(-1, BLOCK).clone()
    x[:, 0] = 6.0
    want = x.numpy().astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    packed, scale = pack_mxfp4(x)
    got = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
    assert torch.all(scale == 127)
    assert np.array_equal(got.numpy(), want)


@settings(max_examples=150, deadline=None)
@given(blocks(st.integers(-152, 124)))
def test_packing_is_idempotent_and_nearest(x: torch.Tensor) -> None:
    packed, scale = pack_mxfp4(x)
    first = unpack_mxfp4(packed, scale)
    again = unpack_mxfp4(*pack_mxfp4(first))
    assert torch.equal(first.view(torch.int32), again.view(torch.int32)), "signs of zeros included"
    grid = torch.tensor([*E2M1, *(-v for v in E2M1)], dtype=torch.float64) * 2.0 ** (int(scale) - 127)
    best = (x.double().unsqueeze(-1) - grid).abs().amin(-1)
    assert torch.equal((x.double() - first.double()).abs(), best)
    assert torch.equal(torch.signbit(x), torch.signbit(first))


def test_extremes() -> None:
    x = torch.zeros(5, BLOCK)
    x[1, 3] = -0.0
    x[2, 0] = torch.inf
    x[3, 0] = torch.nan
    x[4, :2] = torch.tensor([torch.finfo(torch.float32).max, 2.0**-149])
    packed, scale = pack_mxfp4(x)
    assert scale[:, 0].tolist() == [0, 0, 255, 255, 252]
    got = unpack_mxfp4(packed, scale)
    assert torch.signbit(got[1]).nonzero().tolist() == [[3]]
    assert got[2:4].isnan().all()
    assert got[4, 0] == 6 * 2.0**125
    assert not torch.count_nonzero(got[:2])


def test_shapes_are_checked() -> None:
    with pytest.raises(ValueError, match=r"\(2, 16\) packed bytes do not match \(2, 2\) scales"):
        unpack_mxfp4(torch.zeros(2, 16, dtype=torch.uint8), torch.zeros(2, 2, dtype=torch.uint8))
    with pytest.raises(ValueError, match="not a multiple of 32"):
        pack_mxfp4(torch.zeros(2, 48))
