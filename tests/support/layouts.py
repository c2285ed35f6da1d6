"""Small files in the exact raw layouts of the public data sets, and plain readings of what must become of them."""

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from recap_ctr.data.shards import PreparedData, Shard

OOV = "<oov>"


def write(path: Path, lines: Iterable[Sequence[object]], separator: str) -> None:
    path.write_text("".join(separator.join(map(str, line)) + "\n" for line in lines))


def zipf(rng: np.random.Generator, rows: int, values: int) -> list[int]:
    """Few frequent values and many rare ones, so that thresholds matter."""
    drawn: list[int] = (rng.zipf(1.4, rows) % values).tolist()
    return drawn


def criteo(directory: Path, rows: int = 400, seed: int = 0) -> list[list[str]]:
    rng = np.random.default_rng(seed)
    columns: list[list[str]] = [[str(int(click)) for click in rng.random(rows) < 0.3]]
    for i in range(13):
        counts = np.floor(rng.lognormal(1.5, 1.5, rows)).astype(int) - 2 * (i == 1)
        columns.append(
            ["" if gone else str(n) for n, gone in zip(counts, rng.random(rows) < 0.2, strict=True)]
        )
    for i in range(26):
        names = [f"{(value + 1) * 2654435761 % 2**32:08x}" for value in zipf(rng, rows, 30 + i)]
        columns.append(["" if gone else n for n, gone in zip(names, rng.random(rows) < 0.1, strict=True)])
    lines = [list(line) for line in zip(*columns, strict=True)]
    write(directory / "train.txt", lines, "\t")
    return lines


AVAZU = [
    "id",
    "click",
    "hour",
    "C1",
    "banner_pos",
    "site_id",
    "site_domain",
    "site_category",
    "app_id",
    "app_domain",
    "app_category",
    "device_id",
    "device_ip",
    "device_model",
    "device_type",
    "device_conn_type",
    "C14",
    "C15",
    "C16",
    "C17",
    "C18",
    "C19",
    "C20",
    "C21",
]


def avazu(directory: Path, rows: int = 300, seed: int = 0) -> list[list[str]]:
    rng = np.random.default_rng(seed)
    lines = []
    for i in range(rows):
        hour = f"1410{rng.integers(21, 31)}{rng.integers(0, 24):02d}"
        rest = [f"{value:x}" for value in rng.zipf(1.4, 21) % 40]
        lines.append([str(10**19 + i), str(int(rng.random() < 0.3)), hour, *rest])
    write(directory / "train", [AVAZU, *lines], ",")
    return lines


def kdd12(
    directory: Path, rows: int = 400, seed: int = 0
) -> tuple[list[list[int]], dict[int, tuple[int, int]]]:
    rng = np.random.default_rng(seed)
    profiles = {
        int(user): (int(rng.integers(0, 3)), int(rng.integers(0, 7))) for user in rng.permutation(40) + 1
    }
    del profiles[7]
    lines = []
    for _ in range(rows):
        depth = int(rng.integers(1, 4))
        ids = [2**63 + int(rng.integers(0, 9)), *(int(n) for n in rng.zipf(1.4, 6) % 30)]
        impressions = int(rng.integers(1, 200))
        user = int(rng.integers(0, 41))  # 0 is nobody, 7 has no profile
        url, ad, advertiser, *texts = ids
        clicks = int(rng.integers(0, 3) * rng.integers(0, 2))
        lines.append(
            [clicks, impressions, url, ad, advertiser, depth, int(rng.integers(1, depth + 1)), *texts, user]
        )
    write(directory / "training.txt", lines, "\t")
    write(directory / "userid_profile.txt", [(user, *profile) for user, profile in profiles.items()], "\t")
    return lines, profiles


def libsvm(
    directory: Path, num_fields: int, sizes: Sequence[int] = (80, 20, 20)
) -> dict[str, list[list[str]]]:
    rng = np.random.default_rng(0)
    written = {}
    for split, rows in zip(("train", "valid", "test"), sizes, strict=True):
        indices = rng.zipf(1.5, (rows, num_fields)) % 12 + 20 * np.arange(num_fields)
        lines = [[str(i % 3 % 2), *map(str, line)] for i, line in enumerate(indices)]
        write(directory / f"{split}.libsvm", [[y, *(f"{n}:1" for n in line)] for y, *line in lines], " ")
        written[split] = lines
    return written


def deal(labels: Sequence[int], count: int = 10, seed: int = 2018) -> list[int]:
    """The fold of each row, dealt by hand."""
    folds = [-1] * len(labels)
    for label in (0, 1):
        members = [row for row, other in enumerate(labels) if other == label]
        np.random.RandomState(seed).shuffle(members)
        start = 0
        for fold in range(count):
            end = start + len(members) // count + (fold < len(members) % count)
            for row in members[start:end]:
                folds[row] = fold
            start = end
    return folds


def splits(labels: Sequence[int]) -> list[list[int]]:
    """Rows of train, valid and test."""
    folds = deal(labels)
    return [[row for row, fold in enumerate(folds) if min(fold, 2) == which] for which in (2, 1, 0)]


def decoded(data: PreparedData, shard: Shard) -> dict[str, list[object]]:
    """What each row's ids stand for: a value or OOV, and a list of them in a multi field."""
    columns: dict[str, list[object]] = {}
    for fitted, at in zip(data.encoder.fields, data.layout.fields, strict=True):
        names = ["<pad>", *fitted.values, OOV]
        cells = [[names[i] for i in row] for row in shard.ids[:, at.start : at.start + at.width] - at.offset]
        multi = fitted.field.kind == "multi"
        columns[at.name] = [[n for n in row if n != "<pad>"] if multi else row[0] for row in cells]
    return columns


def kept(values: Sequence[str | None], train: Sequence[int], min_count: int) -> list[str]:
    """Each row's value, or OOV for what is missing or too rare among the training rows."""
    counts = Counter(values[row] for row in train)
    return [OOV if value is None or counts[value] < min_count else value for value in values]
