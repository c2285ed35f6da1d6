"""The cross layer of FCN, which RECAP repeats with adapters (Eqs. 8-9).

Shapes: B batch, H heads, D width of a head, C = D // 2. A name without suffix is a chunk of the batch.

The maths is written twice. `Cross._plain` is the definition: it serves, exports and evaluates. `_FusedCross`
trains: its element-wise work stays in cache, and beside its inputs it keeps only `c` and the mask.
"""

from collections.abc import Iterator
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from recap_ctr.nn.dropout import keep_mask
from recap_ctr.nn.initial import xavier_normal_
from recap_ctr.nn.norms import ScaleNorm, centre_

# Values of one (rows, H, D) buffer in a chunk, per thread; about five such buffers are in use at a time.
# Fewer values fit the L2 cache better but pay the microseconds of each torch call more often: between 100,000
# and 400,000 a step takes the same time.
_CHUNK_VALUES = 250_000
_LAYER_NORM_EPS = 1e-5


class Cross(nn.Module):
    """One cross layer: h' = anchor * ([c | c * relu(norm(c))] + bias) + h, where c = W h.

    The towers differ only in `anchor`: h_0 gives a linear cross, h itself an exponential one. The gate
    multiplies, it is no 0/1 mask.
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

        A recursion calls one layer many times: `delta` is added to `W h` (the term of a low-rank adapter, which the
        caller computes), `weight` stands in for W, and `scale_norm` is the norm of the present depth.
        """
        weight_CD = self.weight if weight_CD is None else weight_CD
        scale_norm = self.scale_norm if scale_norm is None else scale_norm
        # Drawn here, so that both versions of the maths see the same mask.
        drop = self.training and self.dropout > 0.0
        keep_BHD = keep_mask(tuple(h_BHD.shape), self.dropout, h_BHD.device) if drop else None
        # Compilers fuse for themselves; autocast picks a precision for each operation of the plain version.
        eager = not (torch.compiler.is_compiling() or torch.is_autocast_enabled(h_BHD.device.type))
        if self.training and torch.is_grad_enabled() and eager:
            return self._fused(h_BHD, anchor_BHD, delta_BHC, keep_BHD, weight_CD, scale_norm)
        return self._plain(h_BHD, anchor_BHD, delta_BHC, keep_BHD, weight_CD, scale_norm)

    def _plain(
        self,
        h_BHD: Tensor,
        anchor_BHD: Tensor | None,
        delta_BHC: Tensor | None,
        keep_BHD: Tensor | None,
        weight_CD: Tensor,
        scale_norm: ScaleNorm | None,
    ) -> Tensor:
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
        """All of a layer but its matrix product: norms, gate, anchor and residual."""
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
            scale_norm.track(mean_H, var_H, h_BHD.shape[0] * self.weight.shape[0])
        assert isinstance(out_BHD, Tensor)
        return out_BHD

    def extra_repr(self) -> str:
        return f"width={self.bias.numel()}, num_heads={self.num_heads}, dropout={self.dropout}"


class _FusedCross(torch.autograd.Function):
    """`Cross._plain` in training mode, forward and backward, with the element-wise work done chunk by chunk.

    Scratch buffers live for one call, so that nested or concurrent calls can't meet in them. Gradients of
    vectors are summed chunk by chunk in order: the same inputs give the same bits.
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
        x = _Scratch(h_BHD)
        for h, anchor, c, keep, out in _chunks(h_BHD, anchor_BHD, c_BHC, keep_BHD, out_BHD):
            x.fit(h.shape[0])
            if shift_HC is not None and scale_HC is not None:
                c = torch.addcmul(shift_HC, c, scale_HC, out=x.c)
            gate, _, _ = _gate(c, ln_weight_C, ln_bias_C)
            _cross(c, gate, biases, x)
            if anchor is None:
                torch.mul(h, x.wide, out=out)
            else:
                torch.addcmul(h, anchor, x.wide, out=out)
            if keep is not None:
                torch.addcmul(zero, out, x.wide.copy_(keep), value=keep_scale, out=out)

        ctx.save_for_backward(
            h_BHD, anchor_BHD, c_BHC, weight_CD, bias_D, ln_weight_C, ln_bias_C,
            rstd_H, scale_HC, shift_HC, keep_BHD,
        )  # fmt: skip
        ctx.keep_scale = keep_scale
        ctx.has_delta = delta_BHC is not None
        if mean_H is not None:
            ctx.mark_non_differentiable(mean_H, var_H)
        return out_BHD, mean_H, var_H

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out_BHD: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        (
            h_BHD, anchor_BHD, c_BHC, weight_CD, bias_D, ln_weight_C, ln_bias_C,
            rstd_H, scale_HC, shift_HC, keep_BHD,
        ) = ctx.saved_tensors  # fmt: skip
        C, D = weight_CD.shape
        grad_h_BHD = torch.empty_like(h_BHD)
        grad_anchor_BHD = None if anchor_BHD is None else torch.empty_like(h_BHD)
        grad_c_BHC = torch.empty_like(c_BHC)
        # One term per chunk.
        grad_bias: list[Tensor] = []
        grad_ln_weight: list[Tensor] = []
        grad_ln_bias: list[Tensor] = []
        sums: list[Tensor] = []
        dots: list[Tensor] = []

        biases = _bias_halves(bias_D, anchor_BHD)
        zero = h_BHD.new_zeros(())
        x = _Scratch(h_BHD)
        for grad_out, h, anchor, c_raw, keep, grad_h, grad_anchor, grad_c in _chunks(
            grad_out_BHD, h_BHD, anchor_BHD, c_BHC, keep_BHD, grad_h_BHD, grad_anchor_BHD, grad_c_BHC
        ):
            x.fit(h.shape[0])
            c = c_raw if scale_HC is None else torch.addcmul(shift_HC, c_raw, scale_HC, out=x.c)
            gate, ln_mean, ln_rstd = _gate(c, ln_weight_C, ln_bias_C)
            # In the linear cross h has the gradient of the output: it is made in its place.
            grad = x.grad if anchor is None else grad_h
            if keep is not None:
                torch.addcmul(zero, grad_out, x.wide.copy_(keep), value=ctx.keep_scale, out=grad)
            elif anchor is None:
                grad = grad_out
            else:
                grad.copy_(grad_out)
            _cross(c, gate, biases, x)
            torch.mul(grad, x.wide, out=grad_h if anchor is None else grad_anchor)
            torch.mul(grad, h if anchor is None else anchor, out=x.wide)  # gradient of [c | c * gate]
            grad_bias.append(x.wide.sum((0, 1)))
            # Through the gate where it is open, and its LayerNorm; then the direct terms.
            torch.mul(x.second, c, out=grad_c)
            torch.ops.aten.threshold_backward.grad_input(grad_c, gate, 0.0, grad_input=grad_c)
            grad_x = grad_c
            if ln_weight_C is not None:
                grad_x, grad_weight, grad_shift = torch.ops.aten.native_layer_norm_backward(
                    grad_c, c, [C], ln_mean, ln_rstd, ln_weight_C, ln_bias_C, [True, True, True]
                )
                grad_ln_weight.append(grad_weight)
                grad_ln_bias.append(grad_shift)
            torch.add(grad_x, x.first, out=grad_c)
            grad_c.addcmul_(x.second, gate)
            if scale_HC is not None:
                sums.append(_head_sums(grad_c))
                dots.append(_head_sums(torch.mul(grad_c, c_raw, out=x.c)))

        grad_sn_weight_H = grad_sn_bias_H = None
        if scale_HC is not None:
            grad_sn_bias_H = _total(sums)
            grad_sn_weight_H = _total(dots) * rstd_H
            # The statistics depend on c too: grad_c <- scale * (grad_c - mean(grad_c) - c^ mean(grad_c c^)),
            # with c^ the normalised c: affine in c.
            count = h_BHD.shape[0] * C
            offset_HC = scale_HC * _spread(grad_sn_bias_H / -count, c_BHC)
            slope_HC = scale_HC * _spread(grad_sn_weight_H * rstd_H / -count, c_BHC)
            for h, c, grad_c in _chunks(h_BHD, c_BHC, grad_c_BHC):
                x.fit(h.shape[0])
                torch.addcmul(offset_HC, c, slope_HC, out=x.c)
                torch.addcmul(x.c, grad_c, scale_HC, out=grad_c)

        grad_c_NC = grad_c_BHC.view(-1, C)
        grad_h_BHD.view(-1, D).addmm_(grad_c_NC, weight_CD)
        grad_weight_CD = torch.mm(grad_c_NC.T, h_BHD.view(-1, D))
        return (
            grad_h_BHD, grad_anchor_BHD, grad_c_BHC if ctx.has_delta else None, grad_weight_CD,
            _total(grad_bias),
            None if ln_weight_C is None else _total(grad_ln_weight),
            None if ln_weight_C is None else _total(grad_ln_bias),
            grad_sn_weight_H, grad_sn_bias_H, None, None,
        )  # fmt: skip


class _Scratch:
    """Buffers for one chunk. `first` and `second` are the halves of `wide`: they spare a concatenation."""

    wide: Tensor
    first: Tensor
    second: Tensor
    grad: Tensor
    c: Tensor

    def __init__(self, like_BHD: Tensor) -> None:
        _, H, D = like_BHD.shape
        rows = _chunk_rows(like_BHD)
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


def _chunk_rows(x_BHD: Tensor) -> int:
    """Rows of the batch to work on at a time: all of them where there is no core's cache to stay in."""
    if x_BHD.device.type != "cpu":
        return max(1, x_BHD.shape[0])
    rows = _CHUNK_VALUES * torch.get_num_threads() // x_BHD.shape[1:].numel()
    return max(1, min(x_BHD.shape[0], rows))


def _chunks(first: Tensor, *others: Tensor | None) -> Iterator[tuple[Any, ...]]:
    """Views of the same rows of all tensors, chunk by chunk; None stays None."""
    rows = _chunk_rows(first)
    views = (repeat(None) if x is None else torch.split(x, rows) for x in others)
    return zip(torch.split(first, rows), *views, strict=False)


def _spread(x_H: Tensor, like_BHC: Tensor) -> Tensor:
    """One value per head, repeated for its features: torch's loops are fast on rows, not on single values."""
    return x_H[:, None].expand(like_BHC.shape[1:]).contiguous()


def _bias_halves(bias_D: Tensor, anchor_BHD: Tensor | None) -> tuple[Tensor, Tensor]:
    # The residual of the exponential cross goes into its bias: h * (x + b) + h = h * (x + b + 1).
    first_C, second_C = (bias_D if anchor_BHD is not None else bias_D + 1.0).chunk(2)
    return first_C, second_C


def _gate(
    c: Tensor, weight_C: Tensor | None, bias_C: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """relu(LayerNorm(c)), and the statistics of the LayerNorm."""
    if weight_C is None:
        return torch.relu(c), None, None
    gate, mean, rstd = torch.native_layer_norm(c, [c.shape[-1]], weight_C, bias_C, _LAYER_NORM_EPS)
    return gate.relu_(), mean, rstd


def _cross(c: Tensor, gate: Tensor, biases: tuple[Tensor, Tensor], x: _Scratch) -> None:
    """x.wide <- [c | c * gate] + bias."""
    torch.add(c, biases[0], out=x.first)
    torch.addcmul(biases[1], c, gate, out=x.second)


def _head_sums(x: Tensor) -> Tensor:
    return x.sum(-1).sum(0)


def _total(terms: list[Tensor]) -> Tensor:
    return torch.stack(terms).sum(0)
