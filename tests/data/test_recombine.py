"""Recombined rows: what belongs together stays together, and every value comes as often as before."""

import numpy as np
import pytest

from recap_ctr.data.layout import FieldLayout, Layout
from recap_ctr.data.recombine import link_strengths, recombined, sides_of
from recap_ctr.data.shards import Shard

# user, gender, film, two genres, the hour, a number, a number between two edges.
LAYOUT = Layout(
    (
        FieldLayout("user", 0, 102, 0, 1, None, None),
        FieldLayout("gender", 102, 4, 1, 1, None, None),
        FieldLayout("film", 106, 52, 2, 1, None, None),
        FieldLayout("genres", 158, 10, 3, 2, "mean", None),
        FieldLayout("hour", 168, 26, 5, 1, None, None),
        FieldLayout("price", 194, 3, 6, 1, None, 0),
        FieldLayout("stay", 197, 12, 7, 1, None, 1, is_linear=True),
    )
)
SIDES = (("user", "gender"), ("film", "genres"), ("hour",), ("price",), ("stay",))


def log(rows: int = 4_000, *, hour_of_user: bool = False, rare: float = 0.0, seed: int = 0) -> Shard:
    """Draw users with a gender, nine out of ten of them the same one, and films with two genres of eight, in sessions.

    Of the users and films, the share `rare` has no id of its own. A session of ten rows has one hour.
    """
    rng = np.random.default_rng(seed)
    user, film = rng.integers(0, 100, rows), rng.integers(0, 50, rows)
    gender = (rng.random(100) < 0.1).astype(int)[user]
    genres = rng.integers(0, 8, (50, 2))[film]
    hour = user % 24 if hour_of_user else np.repeat(rng.integers(0, 24, rows // 10), 10)
    user[rng.random(rows) < rare], film[rng.random(rows) < rare] = 100, 50
    columns = [user + 1, gender + 103, film + 107, *(genres.T + 159), hour + 169, np.full(rows, 195)]
    price, stay = rng.normal(size=rows), rng.uniform(0, 9, rows)
    return Shard(
        ids=np.stack([*columns, stay.astype(int) + 198], axis=1).astype(np.int32),
        values=np.stack([price, stay % 1], axis=1).astype(np.float32),
        labels=np.ones(rows, np.uint8),
        rows=np.arange(rows),
        weights=None,
        groups=None,
        times=None,
    )


class TestSides:
    def test_what_a_value_decides_goes_with_it(self) -> None:
        assert sides_of(log(), LAYOUT) == SIDES

    def test_values_without_an_id_of_their_own_decide_nothing_and_hide_nothing(self) -> None:
        assert sides_of(log(rare=0.7), LAYOUT) == SIDES

    def test_a_session_is_no_link(self) -> None:
        """Rows of one session stand next to each other and have the same hour; films of a session don't decide it."""
        rows = log()
        rows.ids[:, 2] = np.repeat(np.random.default_rng(1).integers(107, 157, len(rows) // 5), 5)
        assert link_strengths(rows, LAYOUT)[2, 4] < 0.3

    def test_strengths_are_those_of_the_definition(self) -> None:
        rows = log()
        strengths = link_strengths(rows, LAYOUT)
        shares = np.bincount(rows.ids[:, 1])[103:105] / len(rows)
        assert strengths[0, 1] == pytest.approx(1.0)
        assert (shares**2).sum() > 0.7, "most pairs of rows have the same gender, whoever the users are"
        assert abs(strengths[2, 1]) < 0.1 and abs(strengths[4, 0]) < 0.05
        assert strengths[1, 0] < 0.1, "a gender does not decide who the user is"

    def test_links_join_across_fields(self) -> None:
        """An hour that follows the user is on the user's side."""
        assert sides_of(log(hour_of_user=True), LAYOUT)[0] == ("user", "gender", "hour")

    def test_a_value_that_never_comes_twice_decides_nothing(self) -> None:
        assert sides_of(log(60), LAYOUT)[-2:] == (("price",), ("stay",))

    def test_a_number_between_two_edges_decides_what_goes_with_it(self) -> None:
        """A film's length says which film it is; the id of the edge below alone does not."""
        rows = log()
        length = rows.ids[:, 2] - 106
        rows.ids[:, 7], rows.values[:, 1] = 198 + length // 10, (length % 10) / 10
        assert ("film", "genres", "stay") in sides_of(rows, LAYOUT)
        strengths = link_strengths(rows, LAYOUT)
        assert strengths[6, 2] == pytest.approx(1.0) and strengths[2, 6] == pytest.approx(1.0)


class TestRows:
    def test_sides_stay_whole_and_change_partners(self) -> None:
        rows = log()
        made = recombined(rows, LAYOUT, SIDES, 2, seed=1)
        assert len(made) == 2 * len(rows)
        for columns in ([0, 1], [2, 3, 4]):
            known = {tuple(part) for part in rows.ids[:, columns]}
            assert {tuple(part) for part in made.ids[:, columns]} == known
        pairs = [{tuple(part) for part in shard.ids[:, [0, 2]]} for shard in (rows, made)]
        assert len(pairs[1] - pairs[0]) > 500

    def test_every_value_comes_as_often_as_before(self) -> None:
        rows = log()
        made = recombined(rows, LAYOUT, SIDES, 3, seed=1)
        for copy in np.split(np.arange(len(made)), 3):
            np.testing.assert_array_equal(
                np.sort(made.ids[copy], axis=0), np.sort(np.asarray(rows.ids), axis=0)
            )
            np.testing.assert_array_equal(np.sort(made.values[copy], axis=0), np.sort(rows.values, axis=0))

    def test_a_number_stays_with_the_edge_below_it(self) -> None:
        rows = log()
        made = recombined(rows, LAYOUT, SIDES, 2, seed=1)
        known, stays = (
            np.unique(np.stack([shard.ids[:, 7], shard.values[:, 1]], axis=1), axis=0)
            for shard in (rows, made)
        )
        np.testing.assert_array_equal(known, stays)
        assert (made.ids[: len(rows), 7] != rows.ids[:, 7]).mean() > 0.5, "they come from other rows"

    def test_they_depend_on_the_seed_alone(self) -> None:
        rows = log(500)
        first, again, other = (recombined(rows, LAYOUT, SIDES, 2, seed).ids for seed in (1, 1, 2))
        np.testing.assert_array_equal(first, again)
        assert (first != other).any()
        assert (first[:500] != first[500:]).any(), "copies differ"

    def test_a_weight_goes_with_the_first_side(self) -> None:
        rows = log(500)
        object.__setattr__(rows, "weights", rows.ids[:, 0].astype(np.float32))
        made = recombined(rows, LAYOUT, SIDES, 2, seed=1)
        np.testing.assert_array_equal(made.weights, made.ids[:, 0])
        assert not made.labels.any(), "no label comes along"
