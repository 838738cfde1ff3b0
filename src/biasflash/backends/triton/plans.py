"""The passes of a call whose tensors are all contiguous: for ``explain``, offline compiles and tests."""

from __future__ import annotations

from collections.abc import Callable

from biasflash.backends.triton import geometry
from biasflash.backends.triton.backward_plan import backward_recipe
from biasflash.backends.triton.forward_plan import forward_recipe
from biasflash.backends.triton.operands import Device, Layout, gradient_strides
from biasflash.backends.triton.recipe import Recipe
from biasflash.problem import Problem


def contiguous_recipes(
    problem: Problem,
    device: Device,
    forward: Callable[..., Recipe] = forward_recipe,
    backward: Callable[..., Recipe] = backward_recipe,
) -> dict[str, Recipe]:
    """The passes of a call whose tensors are all contiguous: ``forward``, and ``backward`` if anything is trained.

    ``forward`` and ``backward`` make the recipes, as the functions of this backend do.
    """
    p = problem

    def flat(*shape: int) -> Layout:
        return Layout(tuple(geometry.plain_strides(shape)), True)

    rows = {
        "q": flat(*p.batch, p.M, p.Hq, p.D),
        "k": flat(*p.batch, p.N, p.Hkv, p.D),
        "v": flat(*p.batch, p.N, p.Hkv, p.Dv),
        "out": flat(*p.batch, p.M, p.Hq, p.Dv),
    }
    terms = [flat(*t.shape) for t in p.terms]
    recipes = {"forward": forward(p, device, rows, terms)}
    rows["dout"] = rows["out"]
    rows |= {f"d{name}": rows[name] for name, want in zip("qkv", p.trainable, strict=True) if want}
    grads = {i: Layout(gradient_strides(p, t), True) for i, t in enumerate(p.terms) if t.trainable}
    if (any(p.trainable) or grads) and not p.is_empty:
        recipes["backward"] = backward(p, device, rows, terms, grads, False)
    return recipes
