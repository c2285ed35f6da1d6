"""Layouts with the vocabulary sizes of the public data sets, for published numbers of parameters."""

from recap_ctr.data.layout import Layout


def layout_of_total(total: int, num_fields: int) -> Layout:
    """Return a layout with this sum of vocabulary sizes; numbers of parameters depend on nothing else."""
    return Layout.of_sizes([3] * (num_fields - 1) + [total - 3 * (num_fields - 1)])


ML_1M = layout_of_total(9_751, 7)
CRITEO = layout_of_total(910_747, 39)
AVAZU = layout_of_total(3_750_999, 24)
KDD12 = layout_of_total(4_668_096, 13)
KKBOX = layout_of_total(91_756, 13)
