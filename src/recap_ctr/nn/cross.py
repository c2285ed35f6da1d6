"""The cross layer of FCN, which RECAP repeats with adapters (Eqs. 8-9).

Shapes: B batch, H heads, D width of a head, C = D // 2. A name without a suffix is a chunk of the batch.

The maths is written twice. `Cross.plain` is the definition, used to evaluate, export and serve. `_FusedCross` is
used to train: its element-wise work stays in cache, and apart from its inputs it keeps only `c` and the mask.
"""

from collections.abc import Iterator
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from recap_ctr.nn.dropout import keep_mask
from recap_ctr.nn.group import current_group
from recap_ctr.nn.initial import xavier_normal_
from recap_ctr.nn.norms import ScaleNorm, centre_

# Numbers in one (rows, H, D) buffer of a chunk, per thread; about five such buffers are in use at a time.
# A smaller chunk fits the L2 cache better but pays the overhead of each torch call more often. Between 100,000
# and 400,000 numbers, a step takes the same time.
_CHUNK_VALUES = 250_000
_LAYER_NORM_EPS = 1e-5


class Cross(nn.Module):
    """One cross layer: h' = anchor * ([c | c * relu(norm(c))] + bias) + h, where c = W h.

    The towers differ only in `anchor`: h_0 gives a linear cross, h itself an exponential one. The gate
    is a factor, not a 0/1 mask.
    """

    def __init__(
        self,
        width: int,
        *,
        num_heads: int = 1,
        layer_norm: bool = True,
        scale_norm: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if width < 2 or width % 2:
            raise ValueError(f"width is {width}; a cross layer needs an even width, as half of it is gated")
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"dropout is {dropout}; it must be at least 0 and below 1")
        self.num_heads = num_heads
        self.dropout = dropout
        self.weight = nn.Parameter(torch.empty(width // 2, width))
        self.bias = nn.Parameter(torch.empty(width))
        self.layer_norm = nn.LayerNorm(width // 2, eps=_LAYER_NORM_EPS) if layer_norm else None
        self.scale_norm = ScaleNorm(num_heads) if scale_norm else None
        xavier_normal_(self.weight)
        nn.init.uniform_(self.bias)

    def forward(
        self,
        h_BHD: Tensor,
        anchor_BHD: Tensor | None,
        delta_BHC: Tensor | None = None,
        *,
        weight_CD: Tensor | None = None,
        scale_norm: ScaleNorm | None = None,
    ) -> Tensor:
        """Cross `h` with `anchor` (None: with itself, which is cheaper than passing `h` twice).

        A recursion calls one layer many times and changes its parts: `delta`, the term of a low-rank adapter, is
        added to `W h`; `weight` replaces W; `scale_norm` is the norm of the current depth.
        """
        weight_CD = self.weight if weight_CD is None else weight_CD
        scale_norm = self.scale_norm if scale_norm is None else scale_norm
        # The mask is drawn here, so that both versions of the maths use the same one.
        drop = self.training and self.dropout > 0.0
        keep_BHD = keep_mask(tuple(h_BHD.shape), self.dropout, h_BHD.device) if drop else None
        # A compiler fuses the plain version itself, and autocast has to choose a precision for each operation.
        eager = not (torch.compiler.is_compiling() or torch.is_autocast_enabled(h_BHD.device.type))
        if self.training and torch.is_grad_enabled() and eager:
            return self._fused(h_BHD, anchor_BHD, delta_BHC, keep_BHD, weight_CD, scale_norm)
        return self.plain(h_BHD, anchor_BHD, delta_BHC, keep_BHD, weight_CD, scale_norm)

    def plain(
        self,
        h_BHD: Tensor,
        anchor_BHD: Tensor | None,
        delta_BHC: Tensor | None,
        keep_BHD: Tensor | None,
        weight_CD: Tensor,
        scale_norm: ScaleNorm | None,
    ) -> Tensor:
        """Compute the layer by its definition, with the dropout mask `keep`."""
        c_BHC = F.linear(h_BHD, weight_CD)
        if delta_BHC is not None:
            c_BHC = c_BHC + delta_BHC
        out_BHD = self.combine(c_BHC, h_BHD, anchor_BHD, scale_norm)
        if keep_BHD is not None:
            out_BHD = out_BHD * keep_BHD * (1.0 / (1.0 - self.dropout))
        return out_BHD

    def combine(
        self, c_BHC: Tensor, h_BHD: Tensor, anchor_BHD: Tensor | None, scale_norm: ScaleNorm | None
    ) -> Tensor:
        """Return the layer's output for a given `c` = W h: apply norms, gate, anchor and residual."""
        if scale_norm is not None:
            c_BHC = scale_norm(c_BHC)
        gate_BHC = F.relu(c_BHC if self.layer_norm is None else self.layer_norm(c_BHC))
        cross_BHD = torch.cat([c_BHC, c_BHC * gate_BHC], dim=-1)
        if anchor_BHD is None:
            return h_BHD * (cross_BHD + (self.bias + 1.0))
        return anchor_BHD * (cross_BHD + self.bias) + h_BHD

    def _fused(
        self,
        h_BHD: Tensor,
        anchor_BHD: Tensor | None,
        delta_BHC: Tensor | None,
        keep_BHD: Tensor | None,
        weight_CD: Tensor,
        scale_norm: ScaleNorm | None,
    ) -> Tensor:
        layer_norm = self.layer_norm
        out_BHD, mean_H, var_H = _FusedCross.apply(  # type: ignore[no-untyped-call]
            h_BHD,
            anchor_BHD,
            delta_BHC,
            weight_CD,
            self.bias,
            None if layer_norm is None else layer_norm.weight,
            None if layer_norm is None else layer_norm.bias,
            None if scale_norm is None else scale_norm.weight,
            None if scale_norm is None else scale_norm.bias,
            keep_BHD,
            1.0 / (1.0 - self.dropout),
        )
        if scale_norm is not None:
            rows = current_group().rows_of_all(h_BHD.shape[0])
            scale_norm.track(mean_H, var_H, rows * self.weight.shape[0])
        assert isinstance(out_BHD, Tensor)
        return out_BHD

    def extra_repr(self) -> str:
        """Return the arguments to show in `repr`."""
        return f"width={self.bias.numel()}, num_heads={self.num_heads}, dropout={self.dropout}"


class _Saved(NamedTuple):
    """The tensors that the forward pass keeps for the backward pass; `ln`: LayerNorm, `sn`: ScaleNorm."""

    h_BHD: Tensor
    anchor_BHD: Tensor | None
    c_BHC: Tensor
    weight_CD: Tensor
    bias_D: Tensor
    ln_weight_C: Tensor | None
    ln_bias_C: Tensor | None
    sn_rstd_H: Tensor | None
    sn_scale_HC: Tensor | None
    sn_shift_HC: Tensor | None
    keep_BHD: Tensor | None


class _FusedCross(torch.autograd.Function):
    """`Cross.plain` in training mode, forward and backward, with the element-wise work done chunk by chunk.

    Scratch buffers live for one call, so that nested or concurrent calls can't share them. Gradients of
    vectors are summed chunk by chunk in order, so the same inputs give the same bits.
    """

    @staticmethod
    def forward(
        ctx: Any,
        h_BHD: Tensor,
        anchor_BHD: Tensor | None,
        delta_BHC: Tensor | None,
        weight_CD: Tensor,
        bias_D: Tensor,
        ln_weight_C: Tensor | None,
        ln_bias_C: Tensor | None,
        sn_weight_H: Tensor | None,
        sn_bias_H: Tensor | None,
        keep_BHD: Tensor | None,
        keep_scale: float,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        h_BHD = h_BHD.contiguous()
        B, H, D = h_BHD.shape
        c_BHC = torch.mm(h_BHD.view(-1, D), weight_CD.T).view(B, H, D // 2)
        if delta_BHC is not None:
            c_BHC += delta_BHC
        mean_H = var_H = rstd_H = scale_HC = shift_HC = None
        if sn_weight_H is not None and sn_bias_H is not None:
            mean_H, var_H = centre_(c_BHC)
            rstd_H = (var_H + ScaleNorm.eps).rsqrt_()
            scale_HC, shift_HC = _spread(rstd_H * sn_weight_H, c_BHC), _spread(sn_bias_H, c_BHC)
        if keep_BHD is not None:
            # torch converts bytes to floats several times faster than booleans.
            keep_BHD = keep_BHD.view(torch.uint8)

        out_BHD = torch.empty_like(h_BHD)
        biases = _bias_halves(bias_D, anchor_BHD)
        zero = h_BHD.new_zeros(())
        scratch = _Scratch(h_BHD)
        for h, anchor, c, keep, out in _chunks(h_BHD, anchor_BHD, c_BHC, keep_BHD, out_BHD):
            scratch.fit(h.shape[0])
            if shift_HC is not None and scale_HC is not None:
                c = torch.addcmul(shift_HC, c, scale_HC, out=scratch.c)
            gate, _, _ = _gate(c, ln_weight_C, ln_bias_C)
            _cross(c, gate, biases, scratch)
            if anchor is None:
                torch.mul(h, scratch.wide, out=out)
            else:
                torch.addcmul(h, anchor, scratch.wide, out=out)
            if keep is not None:
                torch.addcmul(zero, out, scratch.wide.copy_(keep), value=keep_scale, out=out)

        norms = ln_weight_C, ln_bias_C, rstd_H, scale_HC, shift_HC
        ctx.save_for_backward(*_Saved(h_BHD, anchor_BHD, c_BHC, weight_CD, bias_D, *norms, keep_BHD))
        ctx.keep_scale = keep_scale
        ctx.has_delta = delta_BHC is not None
        if mean_H is not None:
            ctx.mark_non_differentiable(mean_H, var_H)
        return out_BHD, mean_H, var_H

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out_BHD: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        saved = _Saved(*ctx.saved_tensors)
        grads, scratch = _Gradients(saved), _Scratch(saved.h_BHD)
        _backward_by_chunk(saved, grads, grad_out_BHD, ctx.keep_scale, scratch)
        grad_sn_weight_H = grad_sn_bias_H = None
        if saved.sn_scale_HC is not None:
            grad_sn_weight_H, grad_sn_bias_H = _backward_of_scale_norm(saved, grads, scratch)

        C, D = saved.weight_CD.shape
        grad_c_NC = grads.c_BHC.view(-1, C)
        grads.h_BHD.view(-1, D).addmm_(grad_c_NC, saved.weight_CD)
        grad_weight_CD = torch.mm(grad_c_NC.T, saved.h_BHD.view(-1, D))
        return (
            grads.h_BHD,
            grads.anchor_BHD,
            grads.c_BHC if ctx.has_delta else None,
            grad_weight_CD,
            _total(grads.bias),
            None if saved.ln_weight_C is None else _total(grads.ln_weight),
            None if saved.ln_weight_C is None else _total(grads.ln_bias),
            grad_sn_weight_H,
            grad_sn_bias_H,
            None,
            None,
        )


class _Gradients:
    """The gradients that one backward pass fills in; those of vectors are lists with one term per chunk."""

    def __init__(self, saved: _Saved) -> None:
        self.h_BHD = torch.empty_like(saved.h_BHD)
        self.anchor_BHD = None if saved.anchor_BHD is None else torch.empty_like(saved.h_BHD)
        self.c_BHC = torch.empty_like(saved.c_BHC)
        self.bias: list[Tensor] = []
        self.ln_weight: list[Tensor] = []
        self.ln_bias: list[Tensor] = []
        self.c_sums: list[Tensor] = []
        self.c_dots: list[Tensor] = []


def _backward_by_chunk(
    saved: _Saved, grads: _Gradients, grad_out_BHD: Tensor, keep_scale: float, scratch: "_Scratch"
) -> None:
    """Carry the gradient from the output to `h`, `anchor` and the normalised `c`."""
    biases = _bias_halves(saved.bias_D, saved.anchor_BHD)
    zero = saved.h_BHD.new_zeros(())
    batch = grad_out_BHD, saved.h_BHD, saved.anchor_BHD, saved.c_BHC, saved.keep_BHD
    for grad_out, h, anchor, c_raw, keep, grad_h, grad_anchor, grad_c in _chunks(
        *batch, grads.h_BHD, grads.anchor_BHD, grads.c_BHC
    ):
        scratch.fit(h.shape[0])
        c = c_raw
        if saved.sn_shift_HC is not None and saved.sn_scale_HC is not None:
            c = torch.addcmul(saved.sn_shift_HC, c_raw, saved.sn_scale_HC, out=scratch.c)
        gate, ln_mean, ln_rstd = _gate(c, saved.ln_weight_C, saved.ln_bias_C)
        # In a linear cross, the gradient of h is that of the output, so it is written to its place at once.
        grad = scratch.grad if anchor is None else grad_h
        if keep is not None:
            torch.addcmul(zero, grad_out, scratch.wide.copy_(keep), value=keep_scale, out=grad)
        elif anchor is None:
            grad = grad_out
        else:
            grad.copy_(grad_out)
        _cross(c, gate, biases, scratch)
        torch.mul(grad, scratch.wide, out=grad_h if anchor is None else grad_anchor)
        # From here on `wide` holds the gradient of [c | c * gate].
        torch.mul(grad, h if anchor is None else anchor, out=scratch.wide)
        grads.bias.append(scratch.wide.sum((0, 1)))
        # First the gradient through the gate, where it is open, and its LayerNorm; then the direct terms.
        torch.mul(scratch.second, c, out=grad_c)
        torch.ops.aten.threshold_backward.grad_input(grad_c, gate, 0.0, grad_input=grad_c)
        grad_through_gate = grad_c
        if saved.ln_weight_C is not None:
            grad_through_gate, grad_weight, grad_shift = torch.ops.aten.native_layer_norm_backward(
                grad_c,
                c,
                [c.shape[-1]],
                ln_mean,
                ln_rstd,
                saved.ln_weight_C,
                saved.ln_bias_C,
                [True, True, True],
            )
            grads.ln_weight.append(grad_weight)
            grads.ln_bias.append(grad_shift)
        torch.add(grad_through_gate, scratch.first, out=grad_c)
        grad_c.addcmul_(scratch.second, gate)
        if saved.sn_scale_HC is not None:
            grads.c_sums.append(_head_sums(grad_c))
            grads.c_dots.append(_head_sums(torch.mul(grad_c, c_raw, out=scratch.c)))


def _backward_of_scale_norm(saved: _Saved, grads: _Gradients, scratch: "_Scratch") -> tuple[Tensor, Tensor]:
    """Carry the gradient from the normalised `c` to `c`; return the gradients of the norm's weight and bias."""
    assert saved.sn_scale_HC is not None
    assert saved.sn_rstd_H is not None
    grad_bias_H = _total(grads.c_sums)
    grad_weight_H = _total(grads.c_dots) * saved.sn_rstd_H
    # The statistics depend on c too: grad_c <- scale * (grad_c - mean(grad_c) - c^ mean(grad_c c^)),
    # with c^ the normalised c. This is affine in c.
    group = current_group()
    count = group.rows_of_all(saved.h_BHD.shape[0]) * saved.c_BHC.shape[-1]
    sum_H, dot_H = group.sum_(torch.stack([grad_bias_H, grad_weight_H]))
    offset_HC = saved.sn_scale_HC * _spread(sum_H / -count, saved.c_BHC)
    slope_HC = saved.sn_scale_HC * _spread(dot_H * saved.sn_rstd_H / -count, saved.c_BHC)
    for h, c, grad_c in _chunks(saved.h_BHD, saved.c_BHC, grads.c_BHC):
        scratch.fit(h.shape[0])
        torch.addcmul(offset_HC, c, slope_HC, out=scratch.c)
        torch.addcmul(scratch.c, grad_c, saved.sn_scale_HC, out=grad_c)
    return grad_weight_H, grad_bias_H


class _Scratch:
    """Buffers for one chunk. `first` and `second` are the halves of `wide`, which saves a concatenation."""

    wide: Tensor
    first: Tensor
    second: Tensor
    grad: Tensor
    c: Tensor

    def __init__(self, like_BHD: Tensor) -> None:
        _, H, D = like_BHD.shape
        rows = chunk_rows(like_BHD)
        self._wide = like_BHD.new_empty(rows, H, D)
        self._grad = like_BHD.new_empty(rows, H, D)
        self._c = like_BHD.new_empty(rows, H, D // 2)
        self._rows = -1

    def fit(self, rows: int) -> None:
        """Make the buffers `rows` long; only the last chunk is shorter than the others."""
        if rows != self._rows:
            self._rows = rows
            self.wide, self.grad, self.c = self._wide[:rows], self._grad[:rows], self._c[:rows]
            self.first, self.second = self.wide.chunk(2, dim=-1)


def chunk_rows(x_BHD: Tensor) -> int:
    """Return how many rows of the batch to work on at a time: all of them, unless on a CPU."""
    if x_BHD.device.type != "cpu":
        return max(1, x_BHD.shape[0])
    rows = _CHUNK_VALUES * torch.get_num_threads() // x_BHD.shape[1:].numel()
    return max(1, min(x_BHD.shape[0], rows))


def _chunks(first: Tensor, *others: Tensor | None) -> Iterator[tuple[Any, ...]]:
    """Yield views of the same rows of all tensors, chunk by chunk; None stays None."""
    rows = chunk_rows(first)
    views = (repeat(None) if x is None else torch.split(x, rows) for x in others)
    return zip(torch.split(first, rows), *views, strict=False)


def _spread(x_H: Tensor, like_BHC: Tensor) -> Tensor:
    """Repeat one value per head for all its features: torch's loops are fast on rows, not on single values."""
    return x_H[:, None].expand(like_BHC.shape[1:]).contiguous()


def _bias_halves(bias_D: Tensor, anchor_BHD: Tensor | None) -> tuple[Tensor, Tensor]:
    # The bias of an exponential cross includes its residual: h * (x + b) + h = h * (x + b + 1).
    first_C, second_C = (bias_D if anchor_BHD is not None else bias_D + 1.0).chunk(2)
    return first_C, second_C


def _gate(
    c: Tensor, weight_C: Tensor | None, bias_C: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return relu(LayerNorm(c)) and the statistics of the LayerNorm."""
    if weight_C is None:
        return torch.relu(c), None, None
    gate, mean, rstd = torch.native_layer_norm(c, [c.shape[-1]], weight_C, bias_C, _LAYER_NORM_EPS)
    return gate.relu_(), mean, rstd


def _cross(c: Tensor, gate: Tensor, biases: tuple[Tensor, Tensor], scratch: _Scratch) -> None:
    """Write [c | c * gate] + bias to `scratch.wide`."""
    torch.add(c, biases[0], out=scratch.first)
    torch.addcmul(biases[1], c, gate, out=scratch.second)


def _head_sums(x: Tensor) -> Tensor:
    return x.sum(-1).sum(0)


def _total(terms: list[Tensor]) -> Tensor:
    return torch.stack(terms).sum(0)
