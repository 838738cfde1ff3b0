"""Descriptors of Hopper's products: followed through a listing, and all inside a program's shared memory."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch

pytest.importorskip("triton", reason="only Triton compiles kernels")

from biasflash.backends.triton import geometry
from biasflash.backends.triton.backward_plan import BackwardPlan
from biasflash.backends.triton.forward_plan import forward_recipe
from biasflash.backends.triton.operands import Device, Layout
from biasflash.problem import Problem, Term
from biasflash.testing.descriptors import NOTHING, Descriptor, descriptors
from biasflash.testing.offline import compile_launch, meta_tensors

H200 = Device(shared_memory=232448, multiprocessors=132, gpu="NVIDIA H200")

LISTING = """
        /*00f0*/                   S2UR UR5, SR_CgaCtaId ;                             /* 0x0 */
        /*0100*/                   UMOV UR6, 0x400 ;                                   /* 0x0 */
        /*0110*/                   ULEA UR6, UR5, UR6, 0x18 ;                          /* 0x0 */
        /*0120*/                   UIADD3 UR14, UR6, 0x3000, URZ ;                     /* 0x0 */
        /*0130*/                   USHF.R.U32.HI UR30, URZ, 0x4, UR14 ;                /* 0x0 */
        /*0140*/                   USGXT.U32 UR30, UR30, 0xe ;                         /* 0x0 */
        /*0150*/                   UMOV UR31, 0xc0000010 ;                             /* 0x0 */
        /*0160*/                   UIADD3 UR10, UP1, UR6, 0x20, URZ ;                  /* 0x0 */
        /*0170*/                   UIADD3.X UR11, UR6, -0x3ffffff0, URZ, UP1, !UPT ;   /* 0x0 */
        /*0180*/                   UIADD3.64 UR42, UR30, 0x20, URZ ;                   /* 0x0 */
        /*0190*/                   ULDC.64 UR46, c[0x0][0x210] ;                       /* 0x0 */
        /*01a0*/                   HGMMA.64x16x16.F32.BF16 R24, R92, gdesc[UR28].tnspB, R24 ;   /* 0x0 */
        /*01b0*/                   HGMMA.64x16x16.F32.BF16 R24, R92, gdesc[UR8].tnspB, R24 ;    /* 0x0 */
        /*01c0*/                   HGMMA.64x16x16.F32.BF16 R24, R92, gdesc[UR40].tnspB, R24 ;   /* 0x0 */
        /*01d0*/                   HGMMA.64x16x16.F32.BF16 R24, R92, gdesc[UR44].tnspB, R24 ;   /* 0x0 */
        /*01e0*/                   UIADD3.64 UR50, UR60, 0x2, URZ ;                    /* 0x0 */
        /*01f0*/                   HGMMA.64x16x16.F32.BF16 R24, R92, gdesc[UR48].tnspB, R24 ;   /* 0x0 */
"""


def test_descriptors_are_followed() -> None:
    """The second product's descriptor is an address that was never shifted, as ptxas made it once."""
    right, wrong, next_row, unknown, empty = descriptors(LISTING)
    assert right == Descriptor("01a0", 0x340, 0xC0000010)
    assert wrong == Descriptor("01b0", 0x420, 0xC0000410)
    assert next_row == Descriptor("01c0", 0x360, 0xC0000010)
    assert unknown.low is None
    assert empty == Descriptor("01f0", NOTHING, NOTHING), "made of a register that nothing was written to"
    assert [d.is_inside(0x4000) for d in (right, wrong, next_row, unknown, empty)] == [True, False, True, True, False]
    assert not right.is_inside(0x2000)


STRIDED = ["".join(names) for count in (1, 3) for names in combinations("qkv", count)]


@pytest.mark.parametrize("strided", STRIDED)
def test_float32_products_read_their_own_memory(strided: str) -> None:
    """float32 kernels fill the registers; elements read one by one need the most."""
    B, M, H, D = 2, 37, 3, 16
    problem = Problem(
        batch=(B,),
        M=M,
        N=M,
        Hq=H,
        Hkv=H,
        D=D,
        Dv=D,
        dtype=torch.float32,
        device=torch.device("cuda"),
        terms=(Term(kind="dense", shape=(1, H, M, M), dtype=torch.float32, trainable=True),),
        causal_shift=None,
        scale=0.25,
        trainable=(True, True, True),
    )
    flat = Layout(tuple(geometry.plain_strides((B, M, H, D))), True)
    rows = dict.fromkeys(("q", "k", "v", "out", "dout", "dq", "dk", "dv"), flat)
    rows |= {name: Layout((D * M * H, 1, M * D, M), True) for name in strided}
    bias = Layout(tuple(geometry.plain_strides((1, H, M, M))), True)
    forward = forward_recipe(problem, H200, {name: rows[name] for name in ("q", "k", "v", "out")}, [bias])
    backward = BackwardPlan(problem, H200, rows, [bias], {0: bias}, has_dlse=False).recipe()
    followed = 0
    for recipe in (forward, backward):
        tensors = meta_tensors(problem, recipe)
        for launch in recipe.launches:
            compiled = compile_launch(launch, tensors, 90)
            found = descriptors(compiled.sass)
            followed += sum(d.low is not None for d in found)
            assert all(d.is_inside(compiled.shared) for d in found), compiled.name
    assert followed > 20
