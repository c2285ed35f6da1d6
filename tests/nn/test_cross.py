# Shapes: B batch, H heads, D width of a head, C = D // 2.

import itertools
import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from recap_ctr.nn import cross as cross_module
from recap_ctr.nn.cross import Cross
from recap_ctr.nn.dropout import keep_mask

Args = tuple[Tensor, Tensor | None, Tensor | None]  # h, anchor, delta
NORMS = [(False, False), (True, False), (False, True), (True, True)]


@pytest.fixture(params=[2, 10_000], ids=["chunks of 2", "one chunk"])
def chunk_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Rows of a chunk: few enough that a small batch has several and a short last one, or all."""
    monkeypatch.setattr(cross_module, "chunk_rows", lambda h_BHD: request.param)
    yield request.param


def randomise(layer: Cross) -> Cross:
    """Every parameter off its initial value: LayerNorm at (1, 0) would hide a forgotten gradient."""
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.5 + 0.2)
    return layer


def inputs(
    shape: tuple[int, int, int], *, anchor: bool, delta: bool, dtype: torch.dtype = torch.float64
) -> Args:
    B, H, D = shape
    h_BHD = torch.randn(shape, dtype=dtype, requires_grad=True)
    anchor_BHD = torch.randn(shape, dtype=dtype, requires_grad=True) if anchor else None
    delta_BHC = torch.randn((B, H, D // 2), dtype=dtype, requires_grad=True) if delta else None
    return h_BHD, anchor_BHD, delta_BHC


def outcome(layer: Cross, args: Args, *, fused: bool) -> dict[str, Tensor]:
    """Output, running statistics and all gradients of one training step, with the mask fixed by a seed."""
    layer.train()
    for buffer in layer.buffers():
        buffer.fill_(0.5)
    torch.manual_seed(11)
    if fused:
        out_BHD = layer(*args)
        assert type(out_BHD.grad_fn).__name__ == "_FusedCrossBackward"
    else:
        keep_BHD = keep_mask(tuple(args[0].shape), layer.dropout, args[0].device) if layer.dropout else None
        out_BHD = layer.plain(*args, keep_BHD, layer.weight, layer.scale_norm)
    torch.manual_seed(12)
    weight_BHD = torch.randn(out_BHD.shape, dtype=torch.float64).to(out_BHD.dtype)
    leaves = [x for x in args if x is not None] + list(layer.parameters())
    grads = torch.autograd.grad((out_BHD * weight_BHD).sum(), leaves)
    names = [
        *(name for name, x in zip(("h", "anchor", "delta"), args, strict=True) if x is not None),
        *(name for name, _ in layer.named_parameters()),
    ]
    return (
        {"out": out_BHD.detach()}
        | {name: buffer.clone() for name, buffer in layer.named_buffers()}
        | {f"grad {name}": grad for name, grad in zip(names, grads, strict=True)}
    )


def named(name: str) -> Callable[[str], str]:
    return lambda message: f"{name}: {message}"


@pytest.mark.slow
@pytest.mark.parametrize(("layer_norm", "scale_norm"), NORMS)
@pytest.mark.parametrize(("num_heads", "batch"), [(1, 11), (3, 9), (2, 1)])
def test_fused_equals_plain(
    chunk_rows: int, layer_norm: bool, scale_norm: bool, num_heads: int, batch: int
) -> None:
    torch.manual_seed(0)
    for dropout, anchor, delta in itertools.product([0.0, 0.3], [False, True], [False, True]):
        layer = Cross(10, num_heads=num_heads, layer_norm=layer_norm, scale_norm=scale_norm, dropout=dropout)
        randomise(layer.double())
        args = inputs((batch, num_heads, 10), anchor=anchor, delta=delta)

        fused, plain = (outcome(layer, args, fused=fused) for fused in (True, False))

        assert fused.keys() == plain.keys()
        for name in fused:
            torch.testing.assert_close(fused[name], plain[name], rtol=1e-10, atol=1e-12, msg=named(name))


@pytest.mark.parametrize(("layer_norm", "scale_norm"), NORMS)
@pytest.mark.parametrize("anchor", [False, True])
def test_fused_equals_plain_in_single_precision(layer_norm: bool, scale_norm: bool, anchor: bool) -> None:
    """At a real width and with the real chunks; compared with plain double precision."""
    torch.manual_seed(0)
    layer = Cross(112, layer_norm=layer_norm, scale_norm=scale_norm, dropout=0.1)
    args = inputs((777, 1, 112), anchor=anchor, delta=True, dtype=torch.float32)

    fused = outcome(layer, args, fused=True)
    doubles = [None if x is None else x.detach().double().requires_grad_() for x in args]
    assert doubles[0] is not None
    plain = outcome(layer.double(), (doubles[0], doubles[1], doubles[2]), fused=False)

    for name in fused:
        scale = plain[name].abs().max().item()
        torch.testing.assert_close(
            fused[name].double(), plain[name], rtol=1e-5, atol=1e-5 * scale, msg=named(name)
        )


@pytest.mark.slow
@pytest.mark.parametrize(("layer_norm", "scale_norm"), [(False, False), (True, True)])
@pytest.mark.parametrize("anchor", [False, True])
def test_gradcheck(monkeypatch: pytest.MonkeyPatch, layer_norm: bool, scale_norm: bool, anchor: bool) -> None:
    monkeypatch.setattr(cross_module, "chunk_rows", lambda h_BHD: 2)  # chunks of two rows and one
    torch.manual_seed(2)
    layer = Cross(4, num_heads=2, layer_norm=layer_norm, scale_norm=scale_norm, dropout=0.3).double()
    randomise(layer)
    args = inputs((3, 2, 4), anchor=anchor, delta=True)

    def run(*leaves: Tensor) -> Tensor:
        torch.manual_seed(3)
        return layer(*args)  # type: ignore[no-any-return]

    leaves = (*(x for x in args if x is not None), *layer.parameters())
    assert torch.autograd.gradcheck(run, leaves)


@pytest.mark.parametrize("anchor", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_formula_against_a_naive_loop(anchor: bool, training: bool) -> None:
    """Section 2.17 of the specification, one number at a time (LayerNorm on, no BatchNorm, no dropout)."""
    torch.manual_seed(1)
    B, H, D, C = 3, 2, 6, 3
    layer = randomise(Cross(D, num_heads=H, scale_norm=False).double()).train(training)
    assert layer.layer_norm is not None
    h_BHD, anchor_BHD, _ = inputs((B, H, D), anchor=anchor, delta=False)
    w, b = layer.weight.tolist(), layer.bias.tolist()
    gamma, beta = layer.layer_norm.weight.tolist(), layer.layer_norm.bias.tolist()
    x_0 = (h_BHD if anchor_BHD is None else anchor_BHD).tolist()

    expected = torch.zeros(B, H, D, dtype=torch.float64)
    for i, k in itertools.product(range(B), range(H)):
        x = h_BHD[i, k].tolist()
        c = [sum(w[j][d] * x[d] for d in range(D)) for j in range(C)]
        mean = sum(c) / C
        std = math.sqrt(sum((v - mean) ** 2 for v in c) / C + 1e-5)
        gate = [max(0.0, (c[j] - mean) / std * gamma[j] + beta[j]) for j in range(C)]
        g = c + [c[j] * gate[j] for j in range(C)]
        for d in range(D):
            expected[i, k, d] = x_0[i][k][d] * (g[d] + b[d]) + x[d]

    torch.testing.assert_close(layer(h_BHD, anchor_BHD), expected)


@pytest.mark.parametrize("num_heads", [1, 3])
def test_scale_norm_inside_is_batch_norm(chunk_rows: int, num_heads: int) -> None:
    """Running statistics of the fused path are those of nn.BatchNorm1d, and eval mode uses them."""
    torch.manual_seed(4)
    layer = randomise(Cross(6, num_heads=num_heads, layer_norm=False).double())
    twin = torch.nn.BatchNorm1d(num_heads).double()
    assert layer.scale_norm is not None
    with torch.no_grad():
        twin.weight.copy_(layer.scale_norm.weight)
        twin.bias.copy_(layer.scale_norm.bias)

    def expected(h_BHD: Tensor) -> Tensor:
        c_BHC = twin(h_BHD @ layer.weight.T)
        return h_BHD * (torch.cat([c_BHC, c_BHC * c_BHC.relu()], -1) + layer.bias) + h_BHD

    for _ in range(3):
        h_BHD = torch.randn(9, num_heads, 6, dtype=torch.float64) + 2.0
        torch.testing.assert_close(layer(h_BHD, None), expected(h_BHD))
        torch.testing.assert_close(layer.scale_norm.running_mean, twin.running_mean)
        torch.testing.assert_close(layer.scale_norm.running_var, twin.running_var)
    layer.eval(), twin.eval()
    torch.testing.assert_close(layer(h_BHD, None), expected(h_BHD))


def test_scale_norm_survives_a_mean_far_from_zero() -> None:
    """E[c^2] - E[c]^2 would lose the variance in single precision; the statistics must not be made so."""
    torch.manual_seed(0)
    layer = Cross(64, dropout=0.0)
    h_BHD = torch.randn(300, 1, 64)
    delta_BHC = torch.full((300, 1, 32), 3000.0)

    layer(h_BHD, None, delta_BHC)

    assert layer.scale_norm is not None
    c_BHC = (h_BHD.double() @ layer.weight.double().T) + delta_BHC
    momentum = layer.scale_norm.momentum
    var = (layer.scale_norm.running_var.item() - (1 - momentum)) / momentum
    assert var == pytest.approx(c_BHC.var().item(), rel=1e-3)


def test_one_value_per_head_cannot_be_normalised() -> None:
    layer = Cross(2)
    with pytest.raises(ValueError, match="larger batch"):
        layer(torch.randn(1, 1, 2), None)


def test_same_seed_same_bits() -> None:
    torch.manual_seed(0)
    layer = Cross(48, num_heads=2, dropout=0.2)
    args = inputs((501, 2, 48), anchor=True, delta=True, dtype=torch.float32)

    first, second = outcome(layer, args, fused=True), outcome(layer, args, fused=True)

    assert all(torch.equal(first[name], second[name]) for name in first)


def test_backward_may_run_twice() -> None:
    torch.manual_seed(0)
    layer = Cross(8, dropout=0.2)
    args = inputs((5, 1, 8), anchor=True, delta=True, dtype=torch.float32)
    leaves = [*(x for x in args if x is not None), *layer.parameters()]
    loss = layer(*args).square().sum()

    first, second = (torch.autograd.grad(loss, leaves, retain_graph=True) for _ in range(2))

    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_autocast_takes_the_plain_path() -> None:
    torch.manual_seed(0)
    layer = Cross(8)
    args = inputs((5, 1, 8), anchor=True, delta=True, dtype=torch.float32)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        out_BHD = layer(*args)
    out_BHD.sum().backward()

    torch.testing.assert_close(out_BHD.float(), layer(*args), rtol=0.1, atol=0.1)


def test_plain_path_without_gradients_keeps_training_semantics() -> None:
    torch.manual_seed(0)
    layer = Cross(8, dropout=0.5).double()
    args = inputs((6, 1, 8), anchor=True, delta=False)
    torch.manual_seed(1)
    trained = layer(*args)
    torch.manual_seed(1)
    with torch.no_grad():
        silent = layer(*args)

    torch.testing.assert_close(silent, trained.detach())


def test_strided_inputs_and_gradients() -> None:
    torch.manual_seed(0)
    layer = Cross(8, num_heads=2).double()
    h_BHD = torch.randn(2, 7, 8, dtype=torch.float64).transpose(0, 1).requires_grad_()
    anchor_BHD = torch.randn(7, 2, 1, dtype=torch.float64).expand(7, 2, 8).requires_grad_()

    fused = torch.autograd.grad(layer(h_BHD, anchor_BHD).sum(), [h_BHD, anchor_BHD])
    plain = torch.autograd.grad(
        layer.plain(h_BHD, anchor_BHD, None, None, layer.weight, layer.scale_norm).sum(), [h_BHD, anchor_BHD]
    )

    torch.testing.assert_close(fused, plain)


@pytest.mark.slow
def test_eval_mode_is_differentiable_and_exports() -> None:
    torch.manual_seed(0)
    layer = Cross(8, dropout=0.5).eval()
    h_BHD = torch.randn(4, 1, 8, requires_grad=True)
    (grad_BHD,) = torch.autograd.grad(layer(h_BHD, h_BHD).sum(), h_BHD)
    assert grad_BHD.isfinite().all()

    exported = torch.export.export(layer, (h_BHD.detach(), h_BHD.detach())).module()

    torch.testing.assert_close(exported(h_BHD, h_BHD), layer(h_BHD, h_BHD))


def test_parameters_and_their_initial_values() -> None:
    torch.manual_seed(0)
    layer = Cross(624, num_heads=2)
    counts = {name: parameter.numel() for name, parameter in layer.named_parameters()}

    assert counts == {
        "weight": 312 * 624,
        "bias": 624,
        "layer_norm.weight": 312,
        "layer_norm.bias": 312,
        "scale_norm.weight": 2,
        "scale_norm.bias": 2,
    }
    assert layer.weight.std().item() == pytest.approx(math.sqrt(2 / (312 + 624)), rel=0.01)
    assert 0.0 <= layer.bias.min().item() < 0.02
    assert 0.98 < layer.bias.max().item() < 1.0


@pytest.mark.parametrize("width", [0, 7])
def test_odd_width_is_refused(width: int) -> None:
    with pytest.raises(ValueError, match="even width"):
        Cross(width)
