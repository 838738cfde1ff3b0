"""Rows of a bias as lines of eight: where the Hopper kernels are told to look for them, for any strides."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper", reason="this Triton has no Gluon for Hopper")

from biasflash.backends.hopper.odd_bias import LINE, odd_bias
from biasflash.backends.hopper.operands import batch_of
from biasflash.backends.triton.operands import Layout, Operands
from test_hopper import H200, layouts, problem


@st.composite
def biases(draw: st.DrawFn) -> tuple[tuple[int, int], Tensor]:
    """Two batch axes, and a bias that varies along some axes: a slice of a wider, longer array or all of it."""
    batch = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    M, N = draw(st.integers(9, 40)), draw(st.integers(9, 40))
    outer = [size if draw(st.booleans()) else 1 for size in (*batch, 8)]
    more_rows, more_columns = draw(st.sampled_from((0, 0, 3))), draw(st.sampled_from((0, 0, 1, 8)))
    whole = torch.arange(outer[0] * outer[1] * outer[2] * (M + more_rows) * (N + more_columns))
    return batch, whole.view(*outer, M + more_rows, N + more_columns)[..., :M, :N]


@settings(max_examples=300, deadline=None)
@given(drawn=biases())
def test_every_row_is_found_in_its_line(drawn: tuple[tuple[int, int], Tensor]) -> None:
    """``flat`` row of all planes, its line and place there, as ``odd_rows.copy_odd`` reckons them."""
    batch, bias = drawn
    *outer, M, N = bias.shape
    word = "".join(letter if n > 1 else "1" for letter, n in zip("bbH", outer, strict=True)) + "MN"
    p = problem(batch=batch, M=M, N=N, biases=(word,))
    rows, terms = layouts(p, bias0=Layout(bias.stride(), True))
    ops = Operands(p, H200, rows, terms)
    found = odd_bias(ops)
    if found is None:
        return
    has = found.arguments("forward", 64)
    storage = bias.as_strided((int(bias.max()) + 1,), (1,))
    n0, n1 = batch_of(ops)
    for b0, b1, h in itertools.product(range(n0), range(n1), range(8)):
        at = b0 * n1 + b1
        plane = bias[at // batch[1] % outer[0], at % batch[1] % outer[1], h % outer[2]]
        for row in (0, 1, M - 1):
            flat = b0 * has["odd_b0"] + b1 * has["odd_b1"] + h * has["odd_h"] + row
            line = flat // LINE
            first = line * has["bias_desc"].strides[0] + flat % LINE * has["odd_pitch"]
            assert torch.equal(storage[first : first + N], plane[row])
            if flat < has["odd_whole"]:
                assert line < has["bias_desc"].shape[0]
                assert (line + 1) * LINE * has["odd_pitch"] <= len(storage)


def test_which_layouts_are_read_in_lines() -> None:
    whole = torch.zeros(2, 2, 8, 20, 13)
    apart = torch.zeros(4 * 8 * 261).as_strided((2, 2, 8, 20, 13), (2 * 8 * 261, 8 * 261, 261, 13, 1))
    layouts_of = {True: (whole, whole[..., :12], whole[..., :17, :]), False: (whole.mT, apart)}
    for is_odd, biases_of in layouts_of.items():
        for bias in biases_of:
            p = problem(batch=(2, 2), M=bias.shape[-2], N=bias.shape[-1], biases=("bbHMN",))
            rows, terms = layouts(p, bias0=Layout(bias.stride(), True))
            assert (odd_bias(Operands(p, H200, rows, terms)) is not None) == is_odd, bias.stride()
