"""Numbers of parameters from public run logs, for the models after 2020; RFM's by its formula."""

from itertools import pairwise

import pytest

from recap_ctr.data.layout import Layout
from recap_ctr.models.catalogue import count_parameters, parse_model
from tests.support.published import AVAZU, CRITEO, KKBOX, ML_1M, layout_of_total

FRAPPE, FRAPPE_MIN_2, ML_TAG, IPINYOU = (
    layout_of_total(5_399, 10),
    layout_of_total(5_383, 10),
    layout_of_total(90_242, 3),
    layout_of_total(665_765, 16),
)
# FuxiCTR 1 keeps no PAD row for plain fields.
FRAPPE_V1, ML_TAG_V1 = layout_of_total(5_389, 10), layout_of_total(90_239, 3)
# The context of Frappe's gates: user (f0) and item (f1).
FRAPPE_CONTEXT = Layout.of_sizes([956, 4_084, *[3] * 7, 359 - 21])


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


ONE_BLOCK = {"units2": (), "gating": False, "loss": "bce", "dim": 10}
BOTH_NORMS = {"batch_norm1": True, "batch_norm2": True, "feature_selection": True, "dim": 10}

PUBLISHED = [
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


@pytest.mark.parametrize(("name", "settings", "layout", "total"), PUBLISHED)
def test_published_totals(name: str, settings: dict[str, object], layout: Layout, total: int) -> None:
    assert count_parameters(name, parse_model(name, settings), layout) == total


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
