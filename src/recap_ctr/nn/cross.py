"""The cross layer of FCN, which RECAP repeats with adapters (Eqs. 8-9).

Shapes: B batch, H heads, D width of a head, C = D // 2. A name without suffix is a chunk of the batch.

The maths is written twice. `Cross._plain` is the definition: it serves, exports and evaluates. `_FusedCross`
trains: its element-wise work stays in the cache of one core, and it keeps only `c` and the mask for backward.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from recap_ctr.nn.dropout import keep_mask
from recap_ctr.nn.norms import ScaleNorm

# Bytes of one (rows, D) buffer: a handful of them should stay in the L2 cache of a core.
_CHUNK_BYTES = 160_000


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
        self.layer_norm = nn.LayerNorm(width // 2) if layer_norm else None
        self.scale_norm = ScaleNorm(num_heads) if scale_norm else None
        nn.init.xavier_normal_(self.weight)
        nn.init.uniform_(self.bias)

    def forward(self, h_BHD: Tensor, anchor_BHD: Tensor | None, delta_BHC: Tensor | None = None) -> Tensor:
        """Cross `h` with `anchor` (None: with itself, which is cheaper than passing `h` twice).

        `delta` is added to `W h`: the term of a low-rank adapter, which the caller computes.
        """
        # Drawn here, so that both versions of the maths see the same mask.
        drop = self.training and self.dropout > 0.0
        keep_BHD = keep_mask(tuple(h_BHD.shape), self.dropout, h_BHD.device) if drop else None
        if self.training and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return self._fused(h_BHD, anchor_BHD, delta_BHC, keep_BHD)
        return self._plain(h_BHD, anchor_BHD, delta_BHC, keep_BHD)

    def _plain(
        self, h_BHD: Tensor, anchor_BHD: Tensor | None, delta_BHC: Tensor | None, keep_BHD: Tensor | None
    ) -> Tensor:
        c_BHC = F.linear(h_BHD, self.weight)
        if delta_BHC is not None:
            c_BHC = c_BHC + delta_BHC
        if self.scale_norm is not None:
            c_BHC = self.scale_norm(c_BHC)
        gate_BHC = F.relu(c_BHC if self.layer_norm is None else self.layer_norm(c_BHC))
        cross_BHD = torch.cat([c_BHC, c_BHC * gate_BHC], dim=-1)
        if anchor_BHD is None:
            out_BHD = h_BHD * (cross_BHD + (self.bias + 1.0))
        else:
            out_BHD = anchor_BHD * (cross_BHD + self.bias) + h_BHD
        if keep_BHD is not None:
            out_BHD = out_BHD * keep_BHD * (1.0 / (1.0 - self.dropout))
        return out_BHD

    def _fused(
        self, h_BHD: Tensor, anchor_BHD: Tensor | None, delta_BHC: Tensor | None, keep_BHD: Tensor | None
    ) -> Tensor:
        layer_norm, scale_norm = self.layer_norm, self.scale_norm
        out_BHD, mean_H, var_H = _FusedCross.apply(  # type: ignore[no-untyped-call]
            h_BHD,
            anchor_BHD,
            delta_BHC,
            self.weight,
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


_LAYER_NORM_EPS = 1e-5


def _chunk_rows(h_BHD: Tensor) -> int:
    """Rows of the batch to work on at a time: all of them where there is no core's cache to stay in."""
    if h_BHD.device.type != "cpu":
        return max(1, h_BHD.shape[0])
    return max(1, _CHUNK_BYTES // (h_BHD[0].numel() * h_BHD.element_size()))


def _split(x: Tensor | None, rows: int, num_chunks: int) -> Sequence[Any]:
    return [None] * num_chunks if x is None else torch.split(x, rows)


class _FusedCross(torch.autograd.Function):
    """`Cross._plain` in training mode, forward and backward, in chunks of the batch.

    Chunks share scratch buffers that live for one call, so that nested or concurrent calls can't meet.
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
        C = D // 2
        rows = _chunk_rows(h_BHD)
        n = len(torch.split(h_BHD, rows))

        c_BHC = torch.mm(h_BHD.view(-1, D), weight_CD.T).view(B, H, C)
        if delta_BHC is not None:
            c_BHC += delta_BHC
        mean_H = var_H = rstd_H = scale_H1 = shift_H1 = None
        if sn_weight_H is not None and sn_bias_H is not None:
            mean_H, var_H = _head_moments(c_BHC, rows)
            rstd_H = (var_H + ScaleNorm.eps).rsqrt_()
            scale_H1, shift_H1 = _scale_and_shift(mean_H, rstd_H, sn_weight_H, sn_bias_H)

        # The residual of the exponential cross goes into the bias: h * (x + b) + h = h * (x + b + 1).
        shifted_D = bias_D + 1.0 if anchor_BHD is None else bias_D
        out_BHD = torch.empty_like(h_BHD)
        scratch = _Scratch(h_BHD[:rows])
        for h, anchor, c, keep, out in zip(
            torch.split(h_BHD, rows),
            _split(anchor_BHD, rows, n),
            torch.split(c_BHC, rows),
            _split(keep_BHD, rows, n),
            torch.split(out_BHD, rows),
            strict=True,
        ):
            x = scratch.resize(h.shape[0])
            if scale_H1 is not None and shift_H1 is not None:
                c = torch.addcmul(shift_H1, c, scale_H1, out=x.c)
            gate, _, _ = _gate(c, ln_weight_C, ln_bias_C, x.gate)
            _cross(c, gate, shifted_D, x.wide)
            if anchor is None:
                torch.mul(h, x.wide, out=out)
            else:
                torch.addcmul(h, anchor, x.wide, out=out)
            if keep is not None:
                out.mul_(_float_mask(keep, keep_scale, x.wide))

        ctx.save_for_backward(
            h_BHD, anchor_BHD, c_BHC, weight_CD, bias_D, ln_weight_C, ln_bias_C,
            sn_weight_H, sn_bias_H, mean_H, rstd_H, keep_BHD,
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
            sn_weight_H, sn_bias_H, mean_H, rstd_H, keep_BHD,
        ) = ctx.saved_tensors  # fmt: skip
        B, _, D = h_BHD.shape
        C = D // 2
        rows = _chunk_rows(h_BHD)
        n = len(torch.split(h_BHD, rows))
        scale_H1 = shift_H1 = None
        if sn_weight_H is not None:
            scale_H1, shift_H1 = _scale_and_shift(mean_H, rstd_H, sn_weight_H, sn_bias_H)

        shifted_D = bias_D + 1.0 if anchor_BHD is None else bias_D
        grad_h_BHD = torch.empty_like(h_BHD)
        grad_anchor_BHD = None if anchor_BHD is None else torch.empty_like(anchor_BHD)
        grad_c_BHC = torch.empty_like(c_BHC)
        grad_bias_D = torch.zeros_like(bias_D)
        grad_ln_weight_C = None if ln_weight_C is None else torch.zeros_like(ln_weight_C)
        grad_ln_bias_C = None if ln_bias_C is None else torch.zeros_like(ln_bias_C)
        sums_H = dots_H = None
        if sn_weight_H is not None:
            sums_H = torch.zeros_like(sn_weight_H)
            dots_H = torch.zeros_like(sn_weight_H)

        scratch = _Scratch(h_BHD[:rows])
        for grad_out, h, anchor, raw_c, keep, grad_h, grad_anchor, grad_c in zip(
            torch.split(grad_out_BHD, rows),
            torch.split(h_BHD, rows),
            _split(anchor_BHD, rows, n),
            torch.split(c_BHC, rows),
            _split(keep_BHD, rows, n),
            torch.split(grad_h_BHD, rows),
            _split(grad_anchor_BHD, rows, n),
            torch.split(grad_c_BHC, rows),
            strict=True,
        ):
            x = scratch.resize(h.shape[0])
            c = raw_c
            if scale_H1 is not None and shift_H1 is not None:
                c = torch.addcmul(shift_H1, raw_c, scale_H1, out=x.c)
            gate, ln_mean, ln_rstd = _gate(c, ln_weight_C, ln_bias_C, x.gate)
            if keep is not None:
                grad_out = torch.mul(grad_out, _float_mask(keep, ctx.keep_scale, x.wide), out=x.grad)
            _cross(c, gate, shifted_D, x.wide)
            if anchor is None:
                torch.mul(grad_out, x.wide, out=grad_h)
                grad_cross = torch.mul(grad_out, h, out=x.wide)
            else:
                grad_h.copy_(grad_out)
                torch.mul(grad_out, x.wide, out=grad_anchor)
                grad_cross = torch.mul(grad_out, anchor, out=x.wide)
            grad_bias_D += grad_cross.sum((0, 1))
            grad_first, grad_second = grad_cross[..., :C], grad_cross[..., C:]
            # Through the gate: grad_second * c where the gate is open, then back through its LayerNorm.
            torch.mul(grad_second, c, out=grad_c)
            torch.ops.aten.threshold_backward.grad_input(grad_c, gate, 0.0, grad_input=grad_c)
            if ln_weight_C is not None:
                grad_x, grad_weight, grad_bias = torch.ops.aten.native_layer_norm_backward(
                    grad_c, c, [C], ln_mean, ln_rstd, ln_weight_C, ln_bias_C, [True, True, True]
                )
                grad_ln_weight_C += grad_weight
                grad_ln_bias_C += grad_bias
            else:
                grad_x = grad_c
            torch.add(grad_x, grad_first, out=grad_c)
            grad_c.addcmul_(grad_second, gate)
            if sums_H is not None and dots_H is not None and scale_H1 is not None:
                sums_H += grad_c.sum(-1).sum(0)
                dots_H += torch.mul(grad_c, raw_c - mean_H[:, None], out=x.c).sum(-1).sum(0)

        if sums_H is not None and dots_H is not None and scale_H1 is not None:
            dots_H *= rstd_H  # from c - mean to the normalised c
            # grad_c <- scale * (grad_c - sums / n - c_hat * dots / n), which is affine in the raw c.
            count = B * C
            slope_H1 = -scale_H1 * (rstd_H * dots_H / count)[:, None]
            offset_H1 = -scale_H1 * (sums_H / count)[:, None] - slope_H1 * mean_H[:, None]
            for grad_c, raw_c in zip(torch.split(grad_c_BHC, rows), torch.split(c_BHC, rows), strict=True):
                grad_c.mul_(scale_H1).addcmul_(raw_c, slope_H1).add_(offset_H1)

        grad_c_NC = grad_c_BHC.view(-1, C)
        grad_h_BHD.view(-1, D).addmm_(grad_c_NC, weight_CD)
        grad_weight_CD = torch.mm(grad_c_NC.T, h_BHD.view(-1, D))
        return (
            grad_h_BHD, grad_anchor_BHD, grad_c_BHC if ctx.has_delta else None, grad_weight_CD, grad_bias_D,
            grad_ln_weight_C, grad_ln_bias_C, dots_H, sums_H, None, None,
        )  # fmt: skip


class _Scratch:
    """Buffers of one chunk, and shorter views of them for the last one."""

    def __init__(self, like: Tensor) -> None:
        self._wide = torch.empty_like(like)
        self._grad = torch.empty_like(like)
        self._c = like.new_empty((*like.shape[:-1], like.shape[-1] // 2))
        self._gate = torch.empty_like(self._c)

    def resize(self, rows: int) -> "_Scratch":
        self.wide, self.grad = self._wide[:rows], self._grad[:rows]
        self.c, self.gate = self._c[:rows], self._gate[:rows]
        return self


def _head_moments(c_BHC: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of each head over the batch and its features, in two passes."""
    count = c_BHC.shape[0] * c_BHC.shape[2]
    if count < 2:
        raise ValueError("Expected more than 1 value per head when training")
    mean_H = c_BHC.sum(-1).sum(0) / count
    sum_H = torch.zeros_like(mean_H)
    for c in torch.split(c_BHC, rows):
        sum_H += (c - mean_H[:, None]).square_().sum(-1).sum(0)
    return mean_H, sum_H / count


def _scale_and_shift(
    mean_H: Tensor, rstd_H: Tensor, weight_H: Tensor, bias_H: Tensor
) -> tuple[Tensor, Tensor]:
    scale_H = rstd_H * weight_H
    return scale_H[:, None], (bias_H - mean_H * scale_H)[:, None]


def _gate(
    c: Tensor, weight_C: Tensor | None, bias_C: Tensor | None, out: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """relu(LayerNorm(c)), and the statistics of the LayerNorm."""
    if weight_C is None:
        return torch.clamp_min(c, 0.0, out=out), None, None
    gate, mean, rstd = torch.native_layer_norm(c, [c.shape[-1]], weight_C, bias_C, _LAYER_NORM_EPS)
    return gate.relu_(), mean, rstd


def _cross(c: Tensor, gate: Tensor, bias_D: Tensor, out: Tensor) -> None:
    """[c | c * gate] + bias, without the copy that a concatenation makes."""
    C = c.shape[-1]
    torch.add(c, bias_D[:C], out=out[..., :C])
    torch.addcmul(bias_D[C:], c, gate, out=out[..., C:])


def _float_mask(keep: Tensor, scale: float, out: Tensor) -> Tensor:
    # torch multiplies by booleans, and converts them, several times slower than bytes.
    return out.copy_(keep.view(torch.uint8)).mul_(scale)
