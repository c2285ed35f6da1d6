# Shapes: B batch, D width.

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recap_ctr.nn.dropout import Dropout, keep_mask

CPU = torch.device("cpu")


@pytest.mark.parametrize("p", [0.0, 0.001, 0.1, 0.2, 0.5, 0.9])
def test_keep_frequency_is_one_minus_p(p: float) -> None:
    torch.manual_seed(1)
    n = 2_000_000

    kept = keep_mask((n,), p, CPU).sum().item() / n

    assert kept == pytest.approx(1 - p, abs=4 * (p * (1 - p) / n) ** 0.5 + 2**-17)


def test_masks_of_successive_calls_and_neighbouring_seeds_are_unrelated() -> None:
    torch.manual_seed(3)
    first, second = keep_mask((200_000,), 0.5, CPU), keep_mask((200_000,), 0.5, CPU)
    torch.manual_seed(4)
    third = keep_mask((200_000,), 0.5, CPU)

    signs = np.stack([m.numpy() * 2.0 - 1.0 for m in (first, second, third)])
    corr = signs @ signs.T / signs.shape[1]

    assert np.abs(corr - np.eye(3)).max() < 0.012  # five standard errors


def test_elements_of_one_random_word_are_unrelated() -> None:
    torch.manual_seed(5)
    words = keep_mask((100_000, 4), 0.5, CPU).numpy() * 2.0 - 1.0

    assert np.abs(words.T @ words / len(words) - np.eye(4)).max() < 0.016


@pytest.mark.slow
@given(st.lists(st.integers(0, 5), max_size=3), st.floats(0, 0.999), st.integers(0, 2**40))
def test_mask_depends_on_torch_seed_alone(shape: list[int], p: float, seed: int) -> None:
    torch.manual_seed(seed)
    first = keep_mask(tuple(shape), p, CPU)
    np.random.seed(seed % 1000)  # noqa: NPY002 - the global generator of numpy must not matter
    torch.manual_seed(seed)
    second = keep_mask(tuple(shape), p, CPU)

    assert first.dtype is torch.bool
    assert first.shape == torch.Size(shape)
    assert torch.equal(first, second)


def test_nothing_is_dropped_at_zero() -> None:
    assert bool(keep_mask((1000, 7), 0.0, CPU).all())


@pytest.mark.parametrize("p", [-0.1, 1.0, float("nan")])
def test_probability_out_of_range_is_refused(p: float) -> None:
    with pytest.raises(ValueError, match="dropout p is"):
        keep_mask((2,), p, CPU)
    with pytest.raises(ValueError, match="dropout p is"):
        Dropout(p)


def test_dropout_scales_what_it_keeps_and_passes_the_same_gradient() -> None:
    x_BD = torch.randn(64, 33, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(7)
    keep_BD = keep_mask((64, 33), 0.3, CPU)
    torch.manual_seed(7)
    out_BD = Dropout(0.3)(x_BD)
    (grad_BD,) = torch.autograd.grad(out_BD.sum(), x_BD)

    torch.testing.assert_close(out_BD, x_BD * keep_BD / 0.7)
    torch.testing.assert_close(grad_BD, keep_BD / torch.tensor(0.7, dtype=torch.float64))


def test_dropout_is_the_identity_in_eval_mode_and_at_zero() -> None:
    x_BD = torch.randn(5, 3)
    state = torch.get_rng_state()

    assert Dropout(0.5).eval()(x_BD) is x_BD
    assert Dropout(0.0)(x_BD) is x_BD
    assert torch.equal(torch.get_rng_state(), state)
