"""The training rows in the order of each epoch, batch by batch.

`Shuffled` keeps an order of all rows, and gathers a batch from wherever its rows are: for rows that fit in memory.
`Windowed` needs the same memory for any number of rows: it goes through chunks of neighbouring rows in a random order,
and shuffles the rows of 64 chunks, a window, in memory, while a thread reads the next window. An epoch's order is a
function of seed and epoch, so a run can go on in the middle of one (docs/decisions/0031).
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from recap_ctr.config import TrainConfig
from recap_ctr.data.shards import Batch, Shard
from recap_ctr.jobs.machine import memory_bytes
from recap_ctr.nn.group import Group

Floats = npt.NDArray[np.float32]
Positions = npt.NDArray[np.int64]
MAX_BYTES = 16 << 30
"""Training rows that take more bytes, or more than half of the machine's memory, are read in windows."""
WINDOW_ROWS = 1 << 20
WINDOW_CHUNKS = 64
ROUNDS = 4
ORDER = 2**41  # The stream of random numbers of the first epoch's order.


class Targets(Protocol):
    """What a student learns from: one probability for each training row, computed when it is asked for."""

    def __getitem__(self, rows: slice, /) -> Floats:
        """Return the probabilities of neighbouring rows."""
        ...


class Feed(Protocol):
    """The batches of an epoch, as one worker gets them."""

    def take(self, epoch: int, step: int, place: slice) -> tuple[Batch, Floats | None]:
        """Return this worker's rows of a batch and their targets; `place` is where they are in the batch."""
        ...


def feed_of(
    rows: Shard, config: TrainConfig, targets: Targets | None, group: Group, window_rows: int
) -> Feed:
    """Return the feed of a run, in windows of `window_rows` rows; with 0, all rows are shuffled at once."""
    if window_rows == 0:
        return Shuffled(rows, config, targets)
    return Windowed(rows, config, targets, group, window_rows)


def choose_window(rows: Shard, config: TrainConfig, group: Group) -> int:
    """Return how many rows a window has on this machine; in a group, the first worker's machine decides."""
    limit = min(MAX_BYTES, (memory_bytes() or 2 * MAX_BYTES) // 2)
    return window_of(group.decide(shuffled_bytes(rows) > limit), config)


def window_of(is_too_large: bool, config: TrainConfig) -> int:
    """Return how many rows a window has: as set, or by whether all rows are too large to shuffle; 0 shuffles all."""
    if config.window_rows is not None:
        return config.window_rows
    return WINDOW_ROWS if is_too_large else 0


def shuffled_bytes(rows: Shard) -> int:
    """Return the bytes that a batch of shuffled rows may come from: all columns that training reads, and an order."""
    columns = (rows.ids, rows.values, rows.labels, rows.weights)
    return sum(column.nbytes for column in columns if column is not None) + 8 * len(rows)


def derive_seed(seed: int, stream: int) -> int:
    """Return the seed of one stream of random numbers of a run."""
    return int(np.random.SeedSequence([seed, stream]).generate_state(1, np.uint64)[0] >> 1)


class Shuffled:
    """All rows in a random order, which is kept in memory."""

    def __init__(self, rows: Shard, config: TrainConfig, targets: Targets | None) -> None:
        self._rows, self._config = rows, config
        self._targets = None if targets is None else targets[:]
        self._order: tuple[int, Positions] | None = None

    @property
    def num_bytes(self) -> int:
        """Return what all rows take in memory: labels as floats, targets, and the orders of two epochs."""
        return shuffled_bytes(self._rows) + (3 + 4 + 8) * len(self._rows)

    def blocks(self) -> Iterator[tuple[Batch, Floats | None]]:
        """Yield all rows as they stand on disk, with their targets, so many at a time that copies of them are small."""
        for start in range(0, len(self._rows), WINDOW_ROWS):
            rows = slice(start, min(start + WINDOW_ROWS, len(self._rows)))
            yield self._rows.read(rows), None if self._targets is None else self._targets[rows]

    def order(self, epoch: int) -> Positions:
        """Return the order of the training rows in an epoch, counted from 0."""
        if self._order is None or self._order[0] != epoch:
            generator = np.random.default_rng(derive_seed(self._config.seed, ORDER + epoch))
            self._order = epoch, generator.permutation(len(self._rows))
        return self._order[1]

    def places(self, step: int, place: slice) -> slice:
        """Return where a worker's rows of a batch are in the order of an epoch."""
        size = self._config.batch_size
        return slice(step * size + place.start, step * size + place.stop)

    def take(self, epoch: int, step: int, place: slice) -> tuple[Batch, Floats | None]:
        """Gather this worker's rows of a batch."""
        rows = self.order(epoch)[self.places(step, place)]
        return self._rows.batch(rows), None if self._targets is None else self._targets[rows]


@dataclass(frozen=True, eq=False)
class Window:
    """This worker's rows of a window, in the order of training."""

    batch: Batch
    targets: Floats | None

    def part(self, start: int, stop: int) -> "Window":
        """Return a copy of some of the rows, so that a batch in use does not keep a third window in memory."""
        targets = None if self.targets is None else self.targets[start:stop].copy()
        return Window(self.batch.part(slice(start, stop)), targets)


class Windowed:
    """Rows shuffled within windows of random chunks; memory holds two windows, whatever the number of rows.

    Each epoch counts its chunks from another row, so that each epoch cuts the chunks in other places and has other rows
    left over, which come last. A worker reads all rows of a window and keeps its share.
    """

    def __init__(
        self, rows: Shard, config: TrainConfig, targets: Targets | None, group: Group, window_rows: int
    ) -> None:
        self._rows, self._config, self._targets, self._group = rows, config, targets, group
        self._chunk = -(-window_rows // WINDOW_CHUNKS)
        self._chunks = len(rows) // self._chunk
        self._windows = max(-(-self._chunks // WINDOW_CHUNKS), 1)
        self._reader = ThreadPoolExecutor(1, "recap-reader")
        self._ahead: tuple[tuple[int, int], Future[Window]] | None = None
        self._current: Window | None = None
        self._key, self._at = (-1, -1), 0
        """The epoch and number of the current window, and how many of its rows were taken."""
        self._next = (-1, -1)
        """The epoch and step that go on where the last call ended."""

    def take(self, epoch: int, step: int, place: slice) -> tuple[Batch, Floats | None]:
        """Return the next rows; after a jump, such as in a run that is resumed, wait for their window first."""
        if (epoch, step) != self._next:
            self._seek(epoch, step)
        missing, parts = place.stop - place.start, []
        while missing:
            if self._current is None or self._at == len(self._current.batch.labels_B):
                self._enter(self._after(self._key))
                continue
            stop = min(self._at + missing, len(self._current.batch.labels_B))
            parts.append(self._current.part(self._at, stop))
            missing -= stop - self._at
            self._at = stop
        steps = -(-len(self._rows) // self._config.batch_size)
        self._next = (epoch, step + 1) if step + 1 < steps else (epoch + 1, 0)
        return _joined(parts)

    def _seek(self, epoch: int, step: int) -> None:
        """Go to the first row of a batch."""
        first = step * self._config.batch_size
        window = min(first // self._window_rows, self._windows - 1)
        self._enter((epoch, window))
        start = window * self._window_rows
        self._at = int(self._is_mine(start, first - start).sum())

    @property
    def _window_rows(self) -> int:
        """Return the number of rows of every window but the last."""
        return WINDOW_CHUNKS * self._chunk

    def _after(self, key: tuple[int, int]) -> tuple[int, int]:
        epoch, window = key
        return (epoch, window + 1) if window + 1 < self._windows else (epoch + 1, 0)

    def _enter(self, key: tuple[int, int]) -> None:
        """Make a window the current one, and let the thread read the one after it."""
        self._current = None  # So that never more than two are in memory.
        if self._ahead is None or self._ahead[0] != key:
            self._ahead = key, self._reader.submit(self._load, *key)
        self._current, self._key, self._at = self._ahead[1].result(), key, 0
        following = self._after(key)
        is_wanted = following[0] < self._config.max_epochs
        self._ahead = (following, self._reader.submit(self._load, *following)) if is_wanted else None

    def _is_mine(self, start: int, count: int) -> npt.NDArray[np.bool_]:
        """Return which of `count` places of an epoch, from `start` on, are in this worker's shares of batches."""
        size, rank, workers = self._config.batch_size, self._group.rank, self._group.size
        if workers == 1:
            return np.ones(count, np.bool_)
        batch, place = np.divmod(np.arange(start, start + count), size)
        rows = np.minimum(size, len(self._rows) - batch * size)
        mine: npt.NDArray[np.bool_] = (place >= rows * rank // workers) & (
            place < rows * (rank + 1) // workers
        )
        return mine

    def _load(self, epoch: int, window: int) -> Window:
        """Read a window, chunk by chunk, and put this worker's rows into their order."""
        pieces = self._pieces(epoch, window)
        count = sum(piece.stop - piece.start for piece in pieces)
        seed = derive_seed(derive_seed(self._config.seed, ORDER + epoch), window)
        place_of_row = np.random.default_rng(seed).permutation(count)
        mine = self._is_mine(window * self._window_rows, count)
        place_among_mine = np.cumsum(mine) - 1
        loaded: Window | None = None
        done = 0
        for piece in pieces:
            places = place_of_row[done : done + piece.stop - piece.start]
            kept = mine[places]
            rows = self._rows.read(piece)
            targets = None if self._targets is None else self._targets[piece]
            if loaded is None:
                loaded = _empty_like(rows, targets, int(mine.sum()))
            _put(loaded, place_among_mine[places[kept]], rows, targets, kept)
            done += len(places)
        assert loaded is not None, "a window has rows"
        return loaded

    def _pieces(self, epoch: int, window: int) -> list[slice]:
        """Return where the rows of a window are in the shard; a chunk that crosses the shard's end is two pieces."""
        seed, total = derive_seed(self._config.seed, ORDER + epoch), len(self._rows)
        first = int(np.random.default_rng(seed).integers(total))
        numbers = np.arange(
            window * WINDOW_CHUNKS, min((window + 1) * WINDOW_CHUNKS, self._chunks), dtype=np.uint64
        )
        starts = (permuted(numbers, self._chunks, seed) * self._chunk).tolist() if len(numbers) else []
        spans = [(start, start + self._chunk) for start in starts]
        if window == self._windows - 1 and self._chunks * self._chunk < total:
            spans.append((self._chunks * self._chunk, total))
        pieces = []
        for start, stop in ((start + first, stop + first) for start, stop in spans):
            if start < total:
                pieces.append(slice(start, min(stop, total)))
            if stop > total:
                pieces.append(slice(max(start - total, 0), stop - total))
        return pieces


def permuted(numbers: npt.NDArray[np.uint64], count: int, seed: int) -> Positions:
    """Return the images of some numbers below `count` under a random permutation of them all, which is never stored.

    It is a Feistel network over the next power of four; whatever falls outside goes through it again.

    >>> sorted(permuted(np.arange(10, dtype=np.uint64), 10, seed=1).tolist())
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """
    half = np.uint64(max(-(-(count - 1).bit_length() // 2), 1))
    mask = (np.uint64(1) << half) - np.uint64(1)
    keys = np.random.SeedSequence([seed, count]).generate_state(ROUNDS, np.uint64)

    def network(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        left, right = values >> half, values & mask
        for key in keys:
            left, right = right, left ^ (_mixed(right + key) & mask)
        return (left << half) | right

    images = network(numbers)
    while (outside := images >= count).any():
        images[outside] = network(images[outside])
    return images.astype(np.int64)


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return numbers whose every bit depends on all bits of `values` (the last step of splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _empty_like(rows: Batch, targets: Floats | None, count: int) -> Window:
    def empty(column: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return np.empty((count, *column.shape[1:]), column.dtype)

    weights = None if rows.weights_B is None else empty(rows.weights_B)
    batch = Batch(empty(rows.ids_BW), empty(rows.values_BN), empty(rows.labels_B), weights)
    return Window(batch, None if targets is None else empty(targets))


def _put(
    window: Window, places: Positions, rows: Batch, targets: Floats | None, kept: npt.NDArray[np.bool_]
) -> None:
    """Write the kept ones of some rows to their places."""
    window.batch.ids_BW[places] = rows.ids_BW[kept]
    window.batch.values_BN[places] = rows.values_BN[kept]
    window.batch.labels_B[places] = rows.labels_B[kept]
    if window.batch.weights_B is not None and rows.weights_B is not None:
        window.batch.weights_B[places] = rows.weights_B[kept]
    if window.targets is not None and targets is not None:
        window.targets[places] = targets[kept]


def _joined(parts: list[Window]) -> tuple[Batch, Floats | None]:
    """Return the rows of one part or several, one after the other."""
    if len(parts) == 1:
        return parts[0].batch, parts[0].targets
    batches = [part.batch for part in parts]
    weights = [batch.weights_B for batch in batches if batch.weights_B is not None]
    targets = [part.targets for part in parts if part.targets is not None]
    batch = Batch(
        np.concatenate([batch.ids_BW for batch in batches]),
        np.concatenate([batch.values_BN for batch in batches]),
        np.concatenate([batch.labels_B for batch in batches]),
        np.concatenate(weights) if weights else None,
    )
    return batch, np.concatenate(targets) if targets else None
