"""Tables of vectors: the distinct rows of a batch."""

import torch

from recap_ctr.nn.table import distinct_padded


def test_distinct_rows_of_a_known_size() -> None:
    ids = torch.randint(0, 9, (50,), generator=torch.Generator().manual_seed(1))
    rows, places, is_real = distinct_padded(ids)
    assert rows[is_real].tolist() == sorted(set(ids.tolist()))
    assert torch.equal(rows[places], ids)
    assert set(rows[~is_real].tolist()) == {int(ids.min())}
    assert [len(each) for each in distinct_padded(ids[:0])] == [0, 0, 0]
