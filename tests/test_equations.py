"""The table of docs/equations.md is true, and every equation has a test against brute force: here or where it says.

Shape suffixes: N rows, M estimators, B batch, K trained depths, C and D sides of a weight, R rank, T steps.
"""

import ast
import inspect
import math
import re
from decimal import Decimal, localcontext
from functools import cache
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor, nn

from recap_ctr.axes.trajectory import MovingAverage
from recap_ctr.config import TrainConfig
from recap_ctr.data.shards import PreparedData
from recap_ctr.diagnose import expected_loss, mean_variance, variance_removed
from recap_ctr.evaluation.metrics import logloss, softplus
from recap_ctr.models.catalogue import parse_model
from recap_ctr.models.lr import LR, LRConfig
from recap_ctr.models.recap import Route
from recap_ctr.nn.interface import Inputs, Output
from recap_ctr.nn.lora import AdapterBank
from recap_ctr.nn.losses import LOSSES, bce, distillation
from recap_ctr.nn.mlp import Wide
from recap_ctr.training.feed import Shuffled
from recap_ctr.training.loop import Trainer
from tests.support.small_recap import LAYOUT, recap_config, recap_model, recap_rows

Floats = npt.NDArray[np.float64]
ROOT = Path(__file__).parents[1]
SIGMAS = 4.0  # standard errors that a simulated mean may be off


# The map.


def table() -> dict[int, tuple[str, list[str], list[str]]]:
    """Equation number to what it says, functions and tests, in the order of docs/equations.md."""
    lines = (ROOT / "docs" / "equations.md").read_text(encoding="utf-8").splitlines()
    rows = {}
    for line in lines:
        if re.match(r"\| *\d+ *\|", line):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            assert len(cells) == 4, f"not four cells: {line}"
            number = int(cells[0])
            assert number not in rows, f"Eq. {number} is listed twice"
            rows[number] = cells[1], re.findall(r"`([^`]+)`", cells[2]), re.findall(r"`([^`]+)`", cells[3])
    return rows


@cache
def names_in(path: str) -> frozenset[str]:
    body = ast.parse((ROOT / path).read_text(encoding="utf-8")).body
    names = (node.name for node in body if isinstance(node, ast.FunctionDef))
    return frozenset(name for name in names if name.startswith("test_"))


def test_map_lists_all_equations_in_order() -> None:
    assert list(table()) == list(range(1, 17))
    assert all(says for says, _, _ in table().values())


@pytest.mark.parametrize("number", range(1, 17))
def test_map_names_functions_where_they_are_defined(number: int) -> None:
    _, functions, _ = table()[number]
    assert functions
    for function in functions:
        module, _, name = function.partition(":")
        assert module.startswith("recap_ctr."), function
        member: Any = import_module(module)
        for part in name.split("."):
            member = getattr(member, part)
        assert inspect.isfunction(member), function
        assert (member.__module__, member.__qualname__) == (module, name), function


@pytest.mark.parametrize("number", range(1, 17))
def test_map_names_tests_that_exist(number: int) -> None:
    _, _, tests = table()[number]
    assert tests
    for test in tests:
        path, _, name = test.partition("::")
        assert path.startswith("tests/"), test
        assert name in names_in(path), test


def test_map_names_every_equation_test_of_this_file() -> None:
    cited = {test for _, _, tests in table().values() for test in tests}
    tests_here = {f"tests/test_equations.py::{name}" for name in names_in("tests/test_equations.py")}
    assert tests_here - cited == {name for name in tests_here if "::test_map_" in name}


# Eqs. 1, 14: the loss.


def double(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def cross_entropy(y: float, z: float) -> float:
    """log(1 + exp z) - y z as written, with digits enough that nothing cancels."""
    with localcontext() as context:
        context.prec = 100
        logit = Decimal(z)
        return float((1 + logit.exp()).ln() - Decimal(y) * logit)


@pytest.mark.parametrize("z", [-80.0, -3.7, -0.2, 0.0, 1e-9, 0.9, 12.5, 80.0])
def test_cross_entropy_is_its_definition(z: float) -> None:
    rounding = 4 * math.ulp(max(1.0, abs(z)))  # torch adds terms of the size of z
    for y in (0.0, 0.3, 1.0):
        loss = bce(double([z]), double([y]), None).item()
        assert loss == pytest.approx(cross_entropy(y, z), rel=0, abs=rounding)
    for label in (0, 1):
        assert logloss([label], [z]) == pytest.approx(cross_entropy(label, z), rel=1e-14, abs=0)


@pytest.mark.parametrize("name", ["bce", "tri-bce"])
def test_distillation_is_the_cross_entropy_against_the_teachers_probability(name: str) -> None:
    rng = np.random.default_rng(0)
    teacher, student = rng.normal(-1.0, 2.0, (2, 50))

    q = torch.sigmoid(torch.from_numpy(teacher))
    loss = distillation(name)(Output(torch.from_numpy(student), {}), q, None).item()

    expected = 0.0
    for taught, learned in zip(teacher.tolist(), student.tolist(), strict=True):
        target, p = 1 / (1 + math.exp(-taught)), 1 / (1 + math.exp(-learned))
        expected -= (target * math.log(p) + (1 - target) * math.log(1 - p)) / 50
    assert loss == pytest.approx(expected, rel=1e-12)


# Eqs. 3 to 5: what averaging does.


EQUICORRELATED = [(0.5, 0.0, 3), (1.5, 0.6, 5), (2.0, -0.15, 6), (0.8, 0.95, 2)]


def gaussians(tau2: float, rho: float, M: int) -> Floats:
    """Draws of M estimators around zero with variance tau2 and correlation rho, which may be negative."""
    covariance_MM = np.full((M, M), tau2 * rho)
    np.fill_diagonal(covariance_MM, tau2)
    noise_NM = np.random.default_rng(1).standard_normal((100_000, M))
    return np.asarray(noise_NM @ np.linalg.cholesky(covariance_MM).T)


def standard_error(draws_N: Floats) -> float:
    return float(draws_N.std(ddof=1) / math.sqrt(len(draws_N)))


@pytest.mark.parametrize(("tau2", "rho", "M"), EQUICORRELATED)
def test_variance_of_the_mean_of_equicorrelated_gaussians(tau2: float, rho: float, M: int) -> None:
    square_N = gaussians(tau2, rho, M).mean(axis=1) ** 2  # the mean is known to be zero

    assert mean_variance(tau2, rho, M) == pytest.approx(
        square_N.mean(), abs=SIGMAS * standard_error(square_N)
    )


@pytest.mark.parametrize(("tau2", "rho", "M"), EQUICORRELATED)
def test_variance_removed_from_equicorrelated_gaussians(tau2: float, rho: float, M: int) -> None:
    logits_NM = gaussians(tau2, rho, M)
    removed_N = (logits_NM**2).mean(axis=1) - logits_NM.mean(axis=1) ** 2

    assert variance_removed(tau2, rho, M) == pytest.approx(
        removed_N.mean(), abs=SIGMAS * standard_error(removed_N)
    )


@pytest.mark.parametrize("M", [1, 4])
def test_loss_of_a_mean_of_estimators_to_second_order(M: int) -> None:
    """Noise is drawn with both signs, so that odd orders cancel from the simulation.

    What is left beyond the second order is at most max|ℓ''''|/24 · E[e⁴] = (1/8)/24 · 3 Var² for a Gaussian e.
    """
    rng = np.random.default_rng(2)
    count, draws, rho = 200, 1_000, 0.4
    mu_N, tau_N = rng.normal(-1.0, 1.5, count), rng.uniform(0.1, 0.4, count)
    labels_N = rng.integers(0, 2, count)
    shared = rng.standard_normal((draws, count))
    separate = rng.standard_normal((M, draws, count))
    noise = tau_N * (math.sqrt(rho) * shared + math.sqrt(1 - rho) * separate.mean(axis=0))
    both = (softplus(mu_N + noise) + softplus(mu_N - noise)) / 2
    losses = (both - labels_N * mu_N).mean(axis=1)

    variance_N = np.array([mean_variance(tau**2, rho, M) for tau in tau_N.tolist()])
    predicted = expected_loss(logloss(labels_N, mu_N), mu_N, variance_N)

    rest = float((variance_N**2).mean()) / 64
    tolerance = SIGMAS * standard_error(losses) + rest
    assert predicted == pytest.approx(losses.mean(), abs=tolerance)
    assert tolerance < 0.05 * (predicted - logloss(labels_N, mu_N))  # tight enough to see the second order


# Eq. 9: adapters.


def test_adapters_are_products_of_low_rank() -> None:
    torch.manual_seed(0)
    num_adapters, C, D, R = 3, 5, 7, 2
    bank = AdapterBank(num_adapters, C, D, R, std=1.0).double()
    h_BHD = torch.randn(4, 1, D, dtype=torch.float64)
    for adapter in range(num_adapters):
        a, b = bank.a_ACR[adapter].tolist(), bank.b_ADR[adapter].tolist()
        expected = [[sum(a[c][r] * b[d][r] for r in range(R)) for d in range(D)] for c in range(C)]
        change = [
            [[sum(expected[c][d] * h[0][d] for d in range(D)) for c in range(C)]] for h in h_BHD.tolist()
        ]

        assert np.linalg.matrix_rank(bank.matrix(adapter).detach().numpy()) == R
        torch.testing.assert_close(bank.matrix(adapter).detach(), double(expected))
        torch.testing.assert_close(bank.delta(h_BHD, adapter).detach(), double(change))


# Eqs. 10, 11: the trajectory.


def shares(beta: float, steps: int) -> Floats:
    """α_t of the weights after step t in the average, and of the start, α_0, by unrolling the recurrence."""
    betas = [min(beta, (1 + step) / (10 + step)) for step in range(1, steps + 1)]
    alphas = [math.prod(betas)]
    alphas += [(1 - betas[t]) * math.prod(betas[t + 1 :]) for t in range(steps)]
    assert sum(alphas) == pytest.approx(1.0)
    return np.array(alphas)


@pytest.mark.parametrize("lazy", [False, True])
def test_moving_average_is_the_weighted_sum_of_all_past_weights(lazy: bool) -> None:
    """At β = 0.8 the first 35 of 60 steps are warm-up; each step touches three of the table's rows, and the bias."""
    torch.manual_seed(0)
    source = Wide(LAYOUT, bias=True).double()
    average = MovingAverage(source, 0.8, lazy=lazy)
    weight, bias = source.embedding.table.weight, source.get_parameter("bias")
    past = [(weight.detach().clone(), bias.detach().clone())]
    for step in range(1, 61):
        touched = torch.randperm(len(weight))[:3]
        average.before_rows_change("embedding.table", touched)
        with torch.no_grad():
            weight[touched] += torch.randn(3, 1, dtype=torch.float64)
            bias.add_(0.1 * step)
        average.after_step(step)
        past.append((weight.detach().clone(), bias.detach().clone()))

    averaged = average.settle()

    for at, name in enumerate(("embedding.table.weight", "bias")):
        parameter = averaged.get_parameter(name)
        expected = sum(alpha * point[at] for alpha, point in zip(shares(0.8, 60), past, strict=True))
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-11, atol=1e-12)


def linearisation_error(source: nn.Module, inputs: Inputs, spread: float) -> Tensor:
    """|z(θ̄) - Σ α_t z(θ_t)| per row, over checkpoints whose distance from the start grows with `spread`."""
    steps, beta = 12, 0.5
    generator = torch.Generator().manual_seed(3)
    start = [parameter.detach().clone() for parameter in source.parameters()]
    average = MovingAverage(source, beta, lazy=False)
    with torch.no_grad():
        logits = [source(inputs).logit_B]
        for step in range(1, steps + 1):
            for parameter, origin in zip(source.parameters(), start, strict=True):
                direction = torch.randn(origin.shape, dtype=origin.dtype, generator=generator)
                parameter.copy_(origin + spread * direction)
            average.after_step(step)
            logits.append(source(inputs).logit_B)
        mean_B = torch.from_numpy(shares(beta, steps)) @ torch.stack(logits)
        error_B: Tensor = (average.settle()(inputs).logit_B - mean_B).abs()
        for parameter, origin in zip(source.parameters(), start, strict=True):
            parameter.copy_(origin)
    return error_B


def test_averaged_weights_of_a_linear_model_give_the_averaged_logit() -> None:
    linear = LR(LRConfig(), LAYOUT).double().eval()

    assert linearisation_error(linear, recap_rows(), spread=10.0).max() < 1e-12


@pytest.mark.slow
def test_averaged_weights_miss_the_averaged_logit_by_the_square_of_the_spread() -> None:
    model = recap_model(recap_config()).double()

    errors = [
        linearisation_error(model, recap_rows(), spread).mean().item() for spread in (1e-3, 5e-4, 2.5e-4)
    ]

    ratios = [larger / smaller for larger, smaller in pairwise(errors)]
    assert ratios == pytest.approx([4.0, 4.0], rel=0.03)
    assert abs(ratios[1] - 4) < abs(ratios[0] - 4)


# Eqs. 13, 16: the training loss.


def mean_loss(targets_B: Any, logits_B: Tensor) -> float:
    pairs = zip(targets_B.tolist(), logits_B.tolist(), strict=True)
    return sum(cross_entropy(y, z) for y, z in pairs) / len(logits_B)


@pytest.mark.parametrize(("name", "alphas"), [("lr", (1.0,)), ("recap", (0.1, 0.9))])
def test_the_loss_of_a_step_by_loops(prepared: PreparedData, name: str, alphas: tuple[float, ...]) -> None:
    """Supervised and distillation loss of one step, model of the logits that the step itself saw."""
    targets_N = np.random.default_rng(0).random(len(prepared.train), np.float32)
    settings = TrainConfig(batch_size=64, kd_weight=0.7)
    trainer = Trainer(name, parse_model(name, {}), settings, prepared, torch.device("cpu"), targets_N)
    with torch.no_grad():  # logits away from zero
        for parameter in trainer.model.parameters():
            parameter.add_(0.1)
    seen: list[Output] = []
    trainer.model.register_forward_hook(lambda _model, _inputs, output: seen.append(output))
    assert isinstance(trainer.feed, Shuffled)
    at = trainer.feed.order(0)[:64]

    trainer.step()

    (output,) = seen
    labels_B = prepared.train.batch(at).labels_B
    logits_KB = output.aux.get("logits_KB", output.logit_B[None])
    supervised = sum(a * mean_loss(labels_B, z_B) for a, z_B in zip(alphas, logits_KB, strict=True))
    distilled = sum(a * mean_loss(targets_N[at], z_B) for a, z_B in zip(alphas, logits_KB, strict=True))
    assert logits_KB.std() > 0
    assert trainer.progress.loss_sum == pytest.approx(supervised + 0.7 * distilled, rel=1e-5)


def test_trained_depths_are_those_that_are_evaluated() -> None:
    """One training pass gives the weighted losses of as many passes, each read at its own depth."""
    alphas = {1: 0.2, 2: 0.3, 4: 0.5}
    settings = recap_config(
        train_depths=tuple(alphas),
        depth_weights=tuple(alphas.values()),
        scale_norm=False,
        exponential_dropout=0,
        linear_dropout=0,
    )
    model = recap_model(settings).double()
    labels_B = double([0, 1, 1, 0, 1, 0])
    route = Route(exponential=(4, 1, 6, 3), linear=(0, 5, 2, 7))

    with torch.no_grad():
        depths = {depth: model.eval()(recap_rows(), route, depth).logit_B for depth in alphas}
    loss = LOSSES["depth-bce"](model.train()(recap_rows(), route), labels_B, None)

    expected = sum(alpha * mean_loss(labels_B, depths[depth]) for depth, alpha in alphas.items())
    assert len({round(mean_loss(labels_B, z_B), 6) for z_B in depths.values()}) == 3
    assert loss.item() == pytest.approx(expected, rel=1e-6)  # α_d are kept in single precision
