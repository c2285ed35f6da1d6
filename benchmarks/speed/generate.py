"""Make data of the shapes of Criteo and Avazu: text files, or rows that are already encoded.

    python -m benchmarks.speed.generate criteo --rows 1000000 --out train.tsv
    python -m benchmarks.speed.generate criteo --rows 1000000 --split train.tsv --out csv/
    python -m benchmarks.speed.generate criteo --schema 10 --out criteo.toml
    python -m benchmarks.speed.generate avazu --rows 1000000 --out train.csv
    python -m benchmarks.speed.generate criteo --rows 500000 --encoded --out encoded/

`criteo` is a TSV without header (label, 13 integers, 26 categories of 8 hexadecimal digits), `avazu` a CSV
with header (click, 24 strings). `--split` cuts a `criteo` file into train.csv, valid.csv and test.csv, as the peer
wants them. `--schema` writes the schema for `recap prepare`, with that `min_count`. `--encoded` writes `ids.npy`
(int32, rows x fields), `labels.npy` and `sizes.npy`.

The universe of a field holds as many values as the public protocol keeps (Criteo_x4, Avazu_x4), and depends on
the seed only. Values are drawn from a bounded Zipf law; its exponents, the shares of missing values and the
spread of the integers follow the first 500 public rows of each data set. Labels are independent of the fields:
speed does not depend on them. Row k depends on the seed and on k alone: a short file is a prefix of a long one.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl

CHUNK = 1 << 17  # rows drawn together: bounds memory, and fixes the random stream


class Field(NamedTuple):
    """One column; `size` is the vocabulary of the protocol: PAD, the values, OOV."""

    name: str
    size: int
    exponent: float = 1.1  # of the Zipf law over the values
    missing: float = 0.0
    top: float = 0.0  # extra probability of the most frequent value
    hexadecimal: bool = True
    log_normal: tuple[float, float] | None = None  # median and spread of the raw integer's logarithm


class Shape(NamedTuple):
    """One data set."""

    label: str
    clicks: float
    separator: str
    header: bool
    fields: tuple[Field, ...]


CRITEO = Shape(
    label="label",
    clicks=0.2562,
    separator="\t",
    header=False,
    fields=(
        Field("I1", 44, missing=0.44, log_normal=(0.92, 1.31)),
        Field("I2", 99, log_normal=(1.25, 3.01)),
        Field("I3", 122, missing=0.26, log_normal=(1.87, 1.60)),
        Field("I4", 41, missing=0.23, log_normal=(1.70, 0.96)),
        Field("I5", 220, missing=0.03, log_normal=(7.98, 1.63)),
        Field("I6", 112, missing=0.23, log_normal=(3.68, 1.73)),
        Field("I7", 80, missing=0.04, log_normal=(1.50, 1.63)),
        Field("I8", 69, log_normal=(2.14, 0.99)),
        Field("I9", 92, missing=0.04, log_normal=(3.92, 1.51)),
        Field("I10", 6, missing=0.44, log_normal=(0.41, 0.52)),
        Field("I11", 27, missing=0.04, log_normal=(0.92, 0.81)),
        Field("I12", 37, missing=0.76, log_normal=(0.41, 0.98)),
        Field("I13", 72, missing=0.23, log_normal=(1.87, 1.14)),
        Field("C1", 1446, 2.04),
        Field("C2", 554, 1.21),
        Field("C3", 157339, 1.01, 0.04),
        Field("C4", 117822, 1.07, 0.04),
        Field("C5", 306, 2.66),
        Field("C6", 18, 1.60, 0.13),
        Field("C7", 11882, 0.85),
        Field("C8", 630, 2.34),
        Field("C9", 5, 2.90),
        Field("C10", 39530, 1.08),
        Field("C11", 5131, 0.86),
        Field("C12", 156656, 1.01, 0.04),
        Field("C13", 3176, 0.88),
        Field("C14", 28, 2.00),
        Field("C15", 11043, 0.98),
        Field("C16", 148913, 1.04, 0.04),
        Field("C17", 12, 1.60),
        Field("C18", 4560, 1.09),
        Field("C19", 2003, 1.38, 0.52),
        Field("C20", 5, 0.10, 0.52),
        Field("C21", 154564, 1.03, 0.04),
        Field("C22", 18, 1.60, 0.83),
        Field("C23", 17, 1.80),
        Field("C24", 53031, 1.17, 0.04),
        Field("C25", 82, 2.16, 0.52),
        Field("C26", 40955, 1.02, 0.52),
    ),
)

AVAZU = Shape(
    label="click",
    clicks=0.1698,
    separator=",",
    header=True,
    fields=(
        Field("hour", 26, 0.20, hexadecimal=False),
        Field("C1", 9, 2.50, hexadecimal=False),
        Field("banner_pos", 9, 2.00, hexadecimal=False),
        Field("site_id", 4051, 1.63),
        Field("site_domain", 5461, 1.70),
        Field("site_category", 27, 1.60),
        Field("app_id", 6545, 1.88),
        Field("app_domain", 400, 2.50),
        Field("app_category", 33, 2.50),
        Field("device_id", 820509, 0.60, top=0.83),  # most rows carry one placeholder, the rest hardly repeat
        Field("device_ip", 2903322, 0.84),
        Field("device_model", 7259, 1.17),
        Field("device_type", 7, 2.90, hexadecimal=False),
        Field("device_conn_type", 6, 2.90, hexadecimal=False),
        Field("C14", 2556, 1.30, hexadecimal=False),
        Field("C15", 10, 2.90, hexadecimal=False),
        Field("C16", 11, 2.90, hexadecimal=False),
        Field("C17", 434, 1.50, hexadecimal=False),
        Field("C18", 6, 1.20, hexadecimal=False),
        Field("C19", 70, 1.90, hexadecimal=False),
        Field("C20", 173, 1.83, hexadecimal=False),
        Field("C21", 62, 1.70, hexadecimal=False),
        Field("weekday", 9, 0.20, hexadecimal=False),
        Field("weekend", 4, 0.50, hexadecimal=False),
    ),
)

SHAPES = {"criteo": CRITEO, "avazu": AVAZU}


def draw_ranks(field: Field, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """Ranks 0..size-3 of one chunk: the continuous law x^-exponent on [1, size - 1), rounded down."""
    power = 1.0 - field.exponent
    uniform = rng.random(CHUNK)
    if field.top:
        uniform = np.maximum(0.0, (uniform - field.top) / (1.0 - field.top))
    x: npt.NDArray[np.float64] = ((float(field.size - 1) ** power - 1.0) * uniform + 1.0) ** (1.0 / power)
    return np.minimum(x.astype(np.int64) - 1, field.size - 3)


def draw_integers(field: Field, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """Raw integers of one chunk, log-normal; the largest one lies in the last bucket of (ln x)^2 there is."""
    assert field.log_normal is not None
    median, spread = field.log_normal
    largest = np.exp(np.sqrt(field.size - 2.0))
    x = np.exp(np.minimum(median + spread * rng.standard_normal(CHUNK), 60.0))
    return np.minimum(np.floor(x) - 1.0, largest).clip(-1.0 if field.name == "I2" else 0.0).astype(np.int64)


def universe(field: Field, salt: int) -> pl.Series:
    """All values of one field, the most frequent first; distinct: every step is one-to-one on 32 bits."""
    rank = np.arange(field.size - 2, dtype=np.uint32)
    if not field.hexadecimal:
        return pl.Series(field.name, rank).cast(pl.String)
    x = rank * np.uint32(0x9E3779B1) + np.uint32(salt)
    x ^= x >> np.uint32(15)
    x *= np.uint32(0x85EBCA77)
    x ^= x >> np.uint32(13)
    octets = x.astype(">u4").view(np.uint8)
    digits = np.frombuffer(b"0123456789abcdef", dtype=np.uint8)
    text = digits[np.stack([octets >> 4, octets & 15], axis=1)].reshape(-1, 8)
    return pl.Series(field.name, np.ascontiguousarray(text).view("S8").ravel().astype("U8"))


def write_text(shape: Shape, path: Path, rows: int, seed: int = 0) -> None:
    """Write `rows` rows of raw text."""
    salts = np.random.default_rng(seed).integers(1 << 32, size=len(shape.fields))
    values = [None if f.log_normal else universe(f, int(s)) for f, s in zip(shape.fields, salts, strict=True)]
    with path.open("wb") as file:
        for chunk in range((rows + CHUNK - 1) // CHUNK):
            rng = np.random.default_rng([seed, chunk])
            columns = [pl.Series(shape.label, (rng.random(CHUNK) < shape.clicks).astype(np.int8))]
            for field, vocabulary in zip(shape.fields, values, strict=True):
                if vocabulary is None:
                    column = pl.Series(field.name, draw_integers(field, rng))
                else:
                    column = vocabulary.gather(draw_ranks(field, rng))
                if field.missing:
                    absent = pl.Series(rng.random(CHUNK) < field.missing)
                    column = column.to_frame().select(pl.when(~absent).then(pl.col(field.name))).to_series()
                columns.append(column)
            frame = pl.DataFrame(columns).head(rows - chunk * CHUNK)
            frame.write_csv(file, separator=shape.separator, include_header=shape.header and chunk == 0)


def write_encoded(shape: Shape, directory: Path, rows: int, seed: int = 0) -> None:
    """Write `rows` rows as ids: 1..size-2 by falling frequency, size-1 (OOV) where missing; never PAD, 0."""
    directory.mkdir(parents=True, exist_ok=True)
    ids = np.lib.format.open_memmap(
        directory / "ids.npy", mode="w+", dtype=np.int32, shape=(rows, len(shape.fields))
    )
    labels = np.lib.format.open_memmap(directory / "labels.npy", mode="w+", dtype=np.int8, shape=(rows,))
    for chunk in range((rows + CHUNK - 1) // CHUNK):
        rng = np.random.default_rng([seed, chunk])
        part = slice(chunk * CHUNK, min(rows, (chunk + 1) * CHUNK))
        kept = part.stop - part.start
        labels[part] = (rng.random(CHUNK) < shape.clicks)[:kept]
        for column, field in enumerate(shape.fields):
            ranks = draw_ranks(field, rng)
            if field.missing:
                ranks[rng.random(CHUNK) < field.missing] = field.size - 2
            ids[part, column] = ranks[:kept] + 1
    ids.flush()
    labels.flush()
    np.save(directory / "sizes.npy", np.array([f.size for f in shape.fields], dtype=np.int64))


def write_peer_splits(tsv: Path, directory: Path, rows: int) -> None:
    """Cut a Criteo-layout TSV into train, valid and test CSV files with header, 8:1:1, rows in order."""
    directory.mkdir(parents=True, exist_ok=True)
    header = ",".join([CRITEO.label, *(f.name for f in CRITEO.fields)]).encode() + b"\n"
    bounds = {"train": rows * 8 // 10, "valid": rows * 9 // 10, "test": rows}
    done = 0
    with tsv.open("rb") as source:
        for split, end in bounds.items():
            with (directory / f"{split}.csv").open("wb") as target:
                target.write(header)
                while done < end:
                    lines = [line for _, line in zip(range(min(100_000, end - done)), source, strict=False)]
                    if not lines:
                        raise ValueError(f"{tsv} has {done} rows, not {rows}")
                    target.write(b"".join(lines).replace(b"\t", b","))
                    done += len(lines)


def write_schema(shape: Shape, path: Path, min_count: int) -> None:
    """Write the schema of the text file, for `recap prepare`."""
    lines = [f'label = "{shape.label}"']
    if not shape.header:
        lines.append(f"columns = {json.dumps([shape.label, *(f.name for f in shape.fields)])}")
    for field in shape.fields:
        kind = "numeric" if field.log_normal else "categorical"
        lines += ["", "[[fields]]", f'name = "{field.name}"', f'kind = "{kind}"']
        if field.log_normal:
            lines += ['transform = "log-square"', 'missing = ["0"]']
        lines.append(f"min_count = {min_count}")
    path.write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--encoded", action="store_true", help="write ids, not text, to the directory --out")
    instead.add_argument("--split", type=Path, metavar="TSV", help="cut this file of --rows rows instead")
    instead.add_argument("--schema", type=int, metavar="MIN_COUNT", help="write the schema instead")
    args = parser.parse_args()
    shape = SHAPES[args.shape]
    start = time.perf_counter()
    if args.encoded:
        write_encoded(shape, args.out, args.rows, args.seed)
    elif args.split:
        write_peer_splits(args.split, args.out, args.rows)
    elif args.schema:
        write_schema(shape, args.out, args.schema)
    else:
        write_text(shape, args.out, args.rows, args.seed)
    size = sum(file.stat().st_size for file in (args.out.iterdir() if args.out.is_dir() else [args.out]))
    print(json.dumps({"out": str(args.out), "bytes": size, "seconds": round(time.perf_counter() - start, 2)}))


if __name__ == "__main__":
    main()
