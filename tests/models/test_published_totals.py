"""Numbers of parameters: those of public run logs and of a published figure; RFM's by its formula."""

from itertools import pairwise

import pytest

from recap_ctr.data.layout import Layout
from recap_ctr.models.catalogue import count_parameters, parse_model
from tests.support.published import AVAZU, CRITEO, KDD12, KKBOX, ML_1M, layout_of_total

# These logs are of FuxiCTR 1, which had no PAD row for plain fields and split KKBox's multi fields differently.
CRITEO_V1, AVAZU_V1, KKBOX_V1 = (
    layout_of_total(910_747 - 39, 39),
    layout_of_total(3_750_999 - 24, 24),
    layout_of_total(92_247, 13),
)

FRAPPE_V1, ML_TAG_V1 = layout_of_total(5_399 - 10, 10), layout_of_total(90_242 - 3, 3)

FRAPPE, FRAPPE_MIN_2, ML_TAG, IPINYOU = (
    layout_of_total(5_399, 10),
    layout_of_total(5_383, 10),
    layout_of_total(90_242, 3),
    layout_of_total(665_765, 16),
)

# The context of Frappe's gates: user (f0) and item (f1).
FRAPPE_CONTEXT = Layout.of_sizes([956, 4_084, *[3] * 7, 359 - 21])


def fcn(exponential: int, linear: int, **settings: object) -> tuple[str, dict[str, object]]:
    return "fcn", {"num_exponential_layers": exponential, "num_linear_layers": linear, **settings}


def mlp(size: int, count: int, **settings: object) -> dict[str, object]:
    return {"units": [size] * count, "batch_norm": False, **settings}


def small(**settings: object) -> dict[str, object]:
    """Return the settings for Frappe and ML-tag: vectors of size 10, an MLP of 400 x 3 with BatchNorm."""
    return {"dim": 10, **mlp(400, 3, batch_norm=True), **settings}


def plain_attention(size: int, num_layers: int, **settings: object) -> dict[str, object]:
    return {"attention_dim": size, "num_layers": num_layers, "layer_norm": False, **settings}


def masknet(blocks: int, block_dim: int, ratio: float, *units: int, norm: bool = False) -> dict[str, object]:
    return {
        "num_blocks": blocks,
        "block_dim": block_dim,
        "ratio": ratio,
        "units": units,
        "embedding_norm": False,
        "block_norm": norm,
    }


def finalmlp(
    units1: tuple[int, ...], units2: tuple[int, ...], heads: int, **more: object
) -> dict[str, object]:
    return {
        "units1": units1,
        "units2": units2,
        "num_heads": heads,
        "batch_norm1": False,
        "batch_norm2": False,
        "feature_selection": False,
        **more,
    }


def qnn(layers: int, products: int, **more: object) -> dict[str, object]:
    return {"num_layers": layers, "num_products": products, "num_heads": 1, **more}


# Totals printed in public run logs.
PUBLISHED_FCN = [
    (*fcn(3, 4), ML_1M, 201_728),
    (*fcn(3, 4, scale_norm=False), CRITEO, 15_944_754),
    (*fcn(4, 5, scale_norm=False), CRITEO, 16_336_626),
    (*fcn(4, 4), KDD12, 74_866_354),
    (*fcn(4, 2, dim=128), KKBOX, 20_074_766),
    (*fcn(5, 5, dim=128), KKBOX, 25_625_878),
    (*fcn(4, 5, num_heads=4), AVAZU, 240_735_242),
    ("ecn", {"num_layers": 4, "num_heads": 3}, AVAZU, 180_346_345),
    ("ecn", {"num_layers": 2}, ML_1M, 169_125),
    ("ecn", {"num_layers": 3, "dim": 128}, KKBOX, 15_909_767),
    *(
        ("ecn", {"num_layers": n, "scale_norm": False}, CRITEO, 14_768_513 + 195_936 * (n - 1))
        for n in range(1, 7)
    ),
    *(("ecn", {"num_layers": n}, KDD12, 74_711_795 + 22_050 * (n - 1)) for n in range(1, 9)),
    ("lcn", {"num_layers": 2}, ML_1M, 169_125),
    ("lr", {}, CRITEO, 910_748),
]

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

ONE_BLOCK = {"units2": (), "gating": False, "loss": "bce", "dim": 10}
BOTH_NORMS = {"batch_norm1": True, "batch_norm2": True, "feature_selection": True, "dim": 10}

PUBLISHED_SINCE_2020 = [
    ("edcn", {"dim": 10, "temperature": 5.0, "dropout": 0.3}, FRAPPE_V1, 86_351),
    ("edcn", {"dim": 10, "num_layers": 2, "regulation": False, "dropout": 0.1}, ML_TAG_V1, 904_701),
    ("masknet", masknet(2, 500, 0.1, *[1000] * 5), CRITEO, 20_358_077),
    ("masknet", masknet(6, 500, 0.8, *[2000] * 3), AVAZU, 76_594_787),
    ("masknet", masknet(3, 50, 2, 400, 400, 400, norm=True) | {"dim": 10}, FRAPPE_V1, 571_691),
    (
        "masknet",
        {"form": "serial", "units": (400, 400, 400), "ratio": 4, "embedding_norm": False, "dim": 10},
        ML_TAG_V1,
        2_624_541,
    ),
    ("finalmlp", finalmlp((1000,) * 5, (500,), 50), CRITEO, 19_524_954),
    ("finalmlp", finalmlp((2000,) * 3, (500,), 20, batch_norm1=True), AVAZU, 69_046_986),
    ("finalmlp", finalmlp((400,), (800,), 10, selection_units=(800,), **BOTH_NORMS), ML_TAG, 1_040_902),
    (
        "finalmlp",
        finalmlp((400,), (100,), 5, selection_units=(400,), context1=("f0",), context2=("f1",), **BOTH_NORMS),
        FRAPPE_CONTEXT,
        253_392,
    ),
    ("final", {"units1": (1000,) * 3, "units2": (512,)}, CRITEO, 18_153_050),
    ("final", {"units1": (2000,) * 3, "units2": (500,), "dropout1": 0, "dropout2": 0.1}, AVAZU, 69_766_586),
    ("final", {"dim": 10}, FRAPPE, 338_502),
    ("final", {"units2": (500,), "dim": 10}, ML_TAG, 1_106_234),
    ("final", {"units1": (400, 400), **ONE_BLOCK}, FRAPPE, 256_791),
    ("final", {"units1": (400,), **ONE_BLOCK}, ML_TAG, 916_021),
    ("eulernet", {"neurons": (39, 39)}, CRITEO, 15_358_282),
    ("qnn", qnn(4, 5, batch_norm=False), CRITEO, 22_372_577),
    ("qnn", qnn(4, 6, batch_norm=False), CRITEO, 23_932_577),
    ("qnn", qnn(4, 4, batch_norm=False), CRITEO, 20_812_577),
    ("qnn", qnn(3, 2, batch_norm=False), CRITEO, 16_912_577),
    ("qnn", {}, ML_1M, 207_649),
    ("qnn", qnn(3, 3, dim=128, num_heads=2), KKBOX, 36_711_425),
    ("qnn", qnn(2, 5, dim=128), KKBOX, 39_485_313),
    ("qnn", qnn(2, 13), FRAPPE_MIN_2, 764_369),
    ("qnn", qnn(4, 2), IPINYOU, 11_182_929),
]


@pytest.mark.parametrize(
    ("name", "settings", "layout", "total"), [*PUBLISHED_FCN, *PUBLISHED_MLP, *PUBLISHED_SINCE_2020]
)
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


@pytest.mark.parametrize(
    ("dim", "neurons", "layout", "total"),
    [
        (16, (39, 39), CRITEO, 15_358_906),
        (10, (52,), FRAPPE, 108_889),
        (10, (52,), ML_TAG, 920_520),
    ],
)
def test_eulernet_authors_logs_count_unused_batch_norms(
    dim: int, neurons: tuple[int, ...], layout: Layout, total: int
) -> None:
    ours = count_parameters("eulernet", parse_model("eulernet", {"dim": dim, "neurons": neurons}), layout)
    # Per layer two BatchNorms over the neurons before it and two over those after it, a gain and a shift each.
    unused = sum(2 * (2 * before + 2 * after) for before, after in pairwise((layout.num_fields, *neurons)))

    assert ours + unused == total


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("units", [(), (48,), (128, 64)])
@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("residual", [True, False])
def test_rfm_by_formula(layers: int, units: tuple[int, ...], heads: int, residual: bool) -> None:
    F, d, h, g = 7, 16, 32, 8
    settings = {"num_layers": layers, "units": units, "num_heads": heads, "width": h, "group": g}
    expected = 9_751 * d
    for c in [d] + [h] * (layers - 1):
        expected += 3 * F * c * h + c * h + 2 * h + h // heads
    expected += 4 * h + (d + 1) * h
    for before, after in pairwise((F * h, *units)):
        expected += (before + 1) * after + 4 * g
    expected += (units or (F * h,))[-1] + 1

    config = parse_model("rfm", {**settings, "residual": residual})
    assert count_parameters("rfm", config, ML_1M) == expected
