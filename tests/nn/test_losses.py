import torch
from torch.nn import functional as F

from recap_ctr.nn.interface import Output
from recap_ctr.nn.losses import LOSSES, bce


def test_bce_weights_are_copies_of_rows() -> None:
    logits, labels = torch.tensor([0.3, -1.0, 2.0]), torch.tensor([1.0, 0.0, 0.0])

    weighted = bce(logits, labels, torch.tensor([2.0, 1.0, 0.0]))

    torch.testing.assert_close(weighted, bce(logits[[0, 0, 1]], labels[[0, 0, 1]], None))


def towers(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    exponential, linear = (
        torch.randn(16, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(2)
    )
    labels = torch.randint(0, 2, (16,), generator=generator).double()
    return exponential, linear, labels


def test_tri_bce_gradient_has_the_coefficients_of_undetached_weights() -> None:
    for seed in range(20):
        exponential, linear, labels = towers(seed)
        output = Output((exponential + linear) / 2, {"exponential": exponential, "linear": linear})
        grads = torch.autograd.grad(LOSSES["tri-bce"](output, labels, None), [exponential, linear])

        loss = F.binary_cross_entropy_with_logits((exponential + linear) / 2, labels)
        lags = [F.binary_cross_entropy_with_logits(tower, labels) for tower in (exponential, linear)]
        active = [float(lag > loss) for lag in lags]
        # (1 - sum of active tower losses) grad L + active (2 L_tower - L) grad L_tower
        expected = []
        for i, tower in enumerate((exponential, linear)):
            main = torch.autograd.grad(loss, tower, retain_graph=True)[0]
            direct = torch.autograd.grad(lags[i], tower, retain_graph=True)[0]
            keep = 1 - sum(a * lag.detach() for a, lag in zip(active, lags, strict=True))
            expected.append(keep * main + active[i] * (2 * lags[i] - loss).detach() * direct)
        torch.testing.assert_close(list(grads), expected)


def test_detached_tri_bce_differs_only_in_its_gradient() -> None:
    exponential, linear, labels = towers(0)
    output = Output((exponential + linear) / 2, {"exponential": exponential, "linear": linear})
    plain, detached = (
        LOSSES["tri-bce"](output, labels, None),
        LOSSES["tri-bce-detached"](output, labels, None),
    )

    assert plain.item() == detached.item()
    assert not torch.allclose(
        torch.autograd.grad(plain, exponential, retain_graph=True)[0],
        torch.autograd.grad(detached, exponential)[0],
    )


def test_tri_bce_is_the_formula() -> None:
    exponential, linear, labels = towers(1)
    mean = (exponential + linear) / 2
    L, L_d, L_s = (F.binary_cross_entropy_with_logits(z, labels).item() for z in (mean, exponential, linear))
    expected = L + max(0, L_d - L) * L_d + max(0, L_s - L) * L_s
    output = Output(mean, {"exponential": exponential, "linear": linear})

    assert abs(LOSSES["tri-bce"](output, labels, None).item() - expected) < 1e-12


def test_self_distillation_pulls_members_to_the_whole_and_not_the_whole_to_them() -> None:
    exponential, linear, labels = towers(2)
    mean = (exponential + linear) / 2
    soft = torch.sigmoid(mean).detach()
    expected = F.binary_cross_entropy_with_logits(mean, labels)
    expected = expected + sum(F.binary_cross_entropy_with_logits(z, soft) for z in (exponential, linear))
    loss = LOSSES["self-distillation"](
        Output(mean, {"members_KB": torch.stack([exponential, linear])}), labels, None
    )

    torch.testing.assert_close(loss, expected)
    for z in (exponential, linear):
        ours, theirs = (torch.autograd.grad(each, z, retain_graph=True)[0] for each in (loss, expected))
        torch.testing.assert_close(ours, theirs)
    assert LOSSES["self-distillation"](Output(mean, {}), labels, None) == LOSSES["bce"](
        Output(mean, {}), labels, None
    )
