"""Attention and its gradients as two cuDNN graphs. Importing this needs ``nvidia-cudnn-frontend``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import cudnn
import torch
from torch import Tensor

from biasflash.cli.providers import Refused, merge_terms

if TYPE_CHECKING:
    from biasflash.testing.case import Call

#: Stands for "hidden" in a boolean mask, which the graphs take only as an additive plane: exp(-30000) is 0 in float32.
HIDDEN = -3e4

_TYPES = {
    torch.bfloat16: cudnn.data_type.BFLOAT16,
    torch.float16: cudnn.data_type.HALF,
    torch.float32: cudnn.data_type.FLOAT,
}


class _Graph:
    """A cuDNN graph and its named tensors."""

    def __init__(self, handle: Any, dtype: torch.dtype) -> None:
        self.handle = handle
        self.graph = cudnn.pygraph(
            io_data_type=_TYPES[dtype],
            intermediate_data_type=cudnn.data_type.FLOAT,
            compute_data_type=cudnn.data_type.FLOAT,
            handle=handle,
        )
        self.slots: dict[str, Any] = {}
        self.workspace = torch.empty(0)

    def input(self, name: str, like: Tensor | None) -> Any:
        """Declares an input with the shape, strides and dtype of ``like``; None stays None."""
        if like is None:
            return None
        slot = self.graph.tensor(dim=list(like.shape), stride=list(like.stride()), data_type=_TYPES[like.dtype])
        self.slots[name] = slot
        return slot

    def output(self, name: str, slot: Any, like: Tensor) -> None:
        slot.set_output(True).set_dim(list(like.shape)).set_stride(list(like.stride()))
        slot.set_data_type(_TYPES[like.dtype])
        self.slots[name] = slot

    def build(self, device: torch.device) -> None:
        self.graph.validate()
        self.graph.build_operation_graph()
        self.graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        self.graph.check_support()
        self.graph.build_plans()
        size = max(1, self.graph.get_workspace_size())
        self.workspace = torch.empty(size, device=device, dtype=torch.uint8)

    def run(self, **tensors: Tensor) -> None:
        cudnn.set_stream(handle=self.handle, stream=torch.cuda.current_stream().cuda_stream)
        bound = {self.slots[name]: tensor for name, tensor in tensors.items() if name in self.slots}
        self.graph.execute(bound, self.workspace, handle=self.handle)


class Graphs:
    """The two graphs of one call; everything in cuDNN's ``(B, H, L, D)`` order, as views."""

    def __init__(self, call: Call, scale: float) -> None:
        if call.q.dtype not in _TYPES:
            raise Refused(f"has no type for {call.q.dtype}")
        self.call, self.scale, self.causal = call, scale, bool(call.causal)
        self.handle = cudnn.create_handle()
        q, k, v = self.views = [t.transpose(1, 2) for t in (call.q, call.k, call.v)]
        plane = self._plane()
        self.out_shape = (q.shape[0], q.shape[2], q.shape[1], v.shape[-1])
        try:
            self.forward_graph = self._forward_graph(q, k, v, plane)
            self.wants_plane = plane is not None and plane.requires_grad
            needed = torch.is_grad_enabled() and q.requires_grad
            self.backward_graph = self._backward_graph(q, k, v, plane) if needed else None
        except Exception as error:  # the package raises classes of its own, RuntimeError and ValueError
            raise Refused(str(error).strip().splitlines()[0]) from None

    def _plane(self) -> Tensor | None:
        """All biases and masks as one additive plane of four axes."""
        dtype, masks = self.call.q.dtype, self.call.mask
        if masks and not self.call.bias:
            keep = merge_terms([], masks, dtype)
            assert keep is not None
            plane: Tensor | None = torch.zeros(keep.shape, device=keep.device, dtype=dtype).masked_fill_(~keep, HIDDEN)
        else:
            plane = merge_terms(self.call.bias, masks, dtype)
        return None if plane is None else plane[(None,) * (4 - plane.dim())]

    def _results(self, q: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.empty(self.out_shape, device=q.device, dtype=q.dtype).transpose(1, 2)
        return out, torch.empty((*q.shape[:3], 1), device=q.device, dtype=torch.float32)

    def _forward_graph(self, q: Tensor, k: Tensor, v: Tensor, plane: Tensor | None) -> _Graph:
        out, lse = self._results(q)
        g = _Graph(self.handle, q.dtype)
        found = g.graph.sdpa(
            name="attention",
            q=g.input("q", q),
            k=g.input("k", k),
            v=g.input("v", v),
            bias=g.input("plane", plane),
            is_inference=False,
            attn_scale=self.scale,
            use_causal_mask=self.causal,
        )
        g.output("out", found[0], out)
        g.output("lse", found[1], lse)
        g.build(q.device)
        return g

    def _backward_graph(self, q: Tensor, k: Tensor, v: Tensor, plane: Tensor | None) -> _Graph:
        out, lse = self._results(q)
        g = _Graph(self.handle, q.dtype)
        found = g.graph.sdpa_backward(
            name="gradients",
            q=g.input("q", q),
            k=g.input("k", k),
            v=g.input("v", v),
            o=g.input("out", out),
            dO=g.input("dout", out),
            stats=g.input("lse", lse),
            attn_scale=self.scale,
            bias=g.input("plane", plane),
            dBias=g.input("dplane", plane if self.wants_plane else None),
            use_causal_mask=self.causal,
        )
        for name, slot, like in zip(("dq", "dk", "dv"), found, (q, k, v), strict=True):
            g.output(name, slot, like)
        if self.wants_plane:
            g.slots["dplane"].set_output(True)
        g.build(q.device)
        return g

    def forward(self, q: Tensor, k: Tensor, v: Tensor, plane: Tensor | None) -> tuple[Tensor, Tensor]:
        out, lse = self._results(q)
        extra = {} if plane is None else {"plane": plane}
        self.forward_graph.run(q=q, k=k, v=v, out=out, lse=lse, **extra)
        return out, lse

    def backward(self, saved: Sequence[Any], dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, plane, out, lse = saved
        assert self.backward_graph is not None
        dq, dk, dv = (torch.empty_like(t) for t in (q, k, v))
        dplane = torch.zeros_like(plane) if plane is not None and self.wants_plane else None
        extra = {name: t for name, t in (("plane", plane), ("dplane", dplane)) if t is not None}
        self.backward_graph.run(q=q, k=k, v=v, out=out, dout=dout, lse=lse, dq=dq, dk=dk, dv=dv, **extra)
        return dq, dk, dv, dplane

    def attend(self) -> Tensor:
        out = _Attention.apply(self, *self.views, self._plane())  # type: ignore[no-untyped-call]
        assert isinstance(out, Tensor)
        return out.transpose(1, 2)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graphs: Graphs, q: Tensor, k: Tensor, v: Tensor, plane: Tensor | None) -> Tensor:
        out, lse = graphs.forward(q, k, v, plane)
        ctx.save_for_backward(q, k, v, plane, out, lse)
        ctx.graphs = graphs
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.graphs.backward(ctx.saved_tensors, grads[0])
