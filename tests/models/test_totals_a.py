"""Numbers of parameters from public run logs, for models of MLPs, cross layers, CIN, attention and logarithms."""

import pytest

from recap_ctr.data.layout import Layout
from recap_ctr.models.catalogue import count_parameters, parse_model
from tests.support.published import CRITEO, layout_of_total

# These logs are of FuxiCTR 1, which had no PAD row for plain fields and split KKBox's multi fields differently.
CRITEO_V1, AVAZU_V1, KKBOX_V1 = (
    layout_of_total(910_747 - 39, 39),
    layout_of_total(3_750_999 - 24, 24),
    layout_of_total(92_247, 13),
)
FRAPPE_V1, ML_TAG_V1 = layout_of_total(5_399 - 10, 10), layout_of_total(90_242 - 3, 3)


def mlp(size: int, count: int, **settings: object) -> dict[str, object]:
    return {"units": [size] * count, "batch_norm": False, **settings}


def small(**settings: object) -> dict[str, object]:
    """Return the settings for Frappe and ML-tag: vectors of size 10, an MLP of 400 x 3 with BatchNorm."""
    return {"dim": 10, **mlp(400, 3, batch_norm=True), **settings}


def plain_attention(size: int, num_layers: int, **settings: object) -> dict[str, object]:
    return {"attention_dim": size, "num_layers": num_layers, "layer_norm": False, **settings}


# Totals from public run logs, adjusted for parameters that only the logged version or only ours has.
PUBLISHED_MLP = [
    ("dnn", mlp(1000, 4, dim=128), KKBOX_V1, 16_476_617),
    # The logged model named DNN has two MLPs on the same vectors.
    ("dnn", small(), FRAPPE_V1, 781_892 - 364_001),
    ("dnn", small(), ML_TAG_V1, 1_574_392 - 336_001),
    ("pnn", mlp(2000, 2, dim=128), KKBOX_V1, 19_297_617),
    ("pnn", mlp(1000, 3), AVAZU_V1, 62_679_601),
    ("pnn", small(batch_norm=False), FRAPPE_V1, 433_491),
    ("pnn", small(batch_norm=False), ML_TAG_V1, 1_237_191),
    ("wide-deep", mlp(2000, 4), AVAZU_V1, 76_544_576),
    ("wide-deep", mlp(1000, 3, dim=128), KKBOX_V1, 15_567_864),
    ("wide-deep", small(), FRAPPE_V1, 423_280),
    # One more than logged: DeepFM's linear part had no bias in version 1.
    ("deepfm", mlp(2000, 4), AVAZU_V1, 76_544_576 + 1),
    ("deepfm", small(), FRAPPE_V1, 423_280 + 1),
    ("fm", {}, CRITEO, 910_747 * 17 + 1),  # by its formula; no log
    ("dcn", mlp(5000, 2, dim=128, num_layers=4), KKBOX_V1, 45_157_593),
    ("dcn", small(num_layers=3), FRAPPE_V1, 418_591),
    ("dcn", small(num_layers=4), ML_TAG_V1, 1_238_661),
    ("xdeepfm", mlp(5000, 2, dim=128, cin_sizes=[16, 16]), KKBOX_V1, 45_240_961),
    ("xdeepfm", small(cin_sizes=[64]), FRAPPE_V1, 429_809),
    ("xdeepfm", small(cin_sizes=[64] * 3, batch_norm=False), ML_TAG_V1, 1_351_767),
    # Version 1 allocated a residual matrix of 128 x 256 though residuals were off.
    (
        "autoint",
        mlp(5000, 2, dim=128, **plain_attention(256, 4, residual=False, wide=True)),
        KKBOX_V1,
        45_959_089 - 128 * 256,
    ),
    ("autoint", small(**plain_attention(128, 5, num_heads=4, layer_norm=True)), FRAPPE_V1, 622_180),
    ("autoint", {"dim": 10, "units": [], **plain_attention(128, 6)}, FRAPPE_V1, 306_051),
    ("afn", {"units": [], "num_neurons": 1200, "log_units": [1000] * 4}, CRITEO_V1, 36_833_607),
    ("afn", {"units": [1000] * 5, "num_neurons": 1200, "log_units": [1000] * 4}, CRITEO_V1, 56_044_939),
    ("afn", {"units": [], "num_neurons": 1200, "log_units": [1000] * 2}, AVAZU_V1, 80_253_849),
    ("afn", {"units": [1000] * 2, "num_neurons": 1200, "log_units": [1000] * 2}, AVAZU_V1, 141_660_453),
    ("afn", {"dim": 128, "units": [], "num_neurons": 500, "log_units": [1000] * 3}, KKBOX_V1, 77_825_143),
    (
        "afn",
        {"dim": 128, "units": [1000] * 3, "num_neurons": 1500, "log_units": [1000] * 3},
        KKBOX_V1,
        221_321_763,
    ),
    ("afn", small(num_neurons=1000, log_units=[400], batch_norm=False), FRAPPE_V1, 4_482_205),
    ("dcnv2", mlp(1000, 5, num_layers=3, batch_norm=True), CRITEO, 20_382_577),
    ("dcnv2", mlp(2000, 4, num_layers=4), AVAZU_V1, 73_385_345),
    ("dcnv2", small(num_layers=4), FRAPPE_V1, 458_391),
    ("dcnv2", small(num_layers=5), ML_TAG_V1, 1_243_071),
]


@pytest.mark.parametrize(("name", "settings", "layout", "total"), PUBLISHED_MLP)
def test_published_totals(name: str, settings: dict[str, object], layout: Layout, total: int) -> None:
    assert count_parameters(name, parse_model(name, settings), layout) == total


# Numbers per value in the tables, and millions of other parameters on Criteo, read from a figure of FCN's paper;
# these settings have no log.
FIGURE = [
    ("dnn", mlp(1000, 5), 16, 4.63),
    ("pnn", mlp(1000, 2), 16, 2.37),
    ("wide-deep", mlp(1000, 5), 17, 4.63),
    ("deepfm", mlp(1000, 5), 17, 4.63),
    ("dcn", mlp(1000, 5, num_layers=4), 16, 4.64),
    ("xdeepfm", mlp(1000, 5, cin_sizes=[64] * 3), 17, 5.04),
    ("autoint", mlp(1000, 5, **plain_attention(64, 5, num_heads=1, wide=True)), 17, 4.68),
    ("afn", {"units": [1000] * 5, "num_neurons": 1200, "log_units": [1000] * 4}, 32, 26.9),
    ("dcnv2", mlp(1000, 5, num_layers=3, batch_norm=True), 16, 5.81),
]


@pytest.mark.parametrize(("name", "settings", "table_dim", "millions"), FIGURE)
def test_sizes_of_the_figure(name: str, settings: dict[str, object], table_dim: int, millions: float) -> None:
    total = count_parameters(name, parse_model(name, settings), CRITEO)
    assert (total - 910_747 * table_dim) / 1e6 == pytest.approx(
        millions, abs=0.01
    )  # some are cut, some rounded
