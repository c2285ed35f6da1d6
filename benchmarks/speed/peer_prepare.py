"""Time fuxictr 2.3.10's own preprocessing of Criteo-layout CSV files (runs in the peer's environment).

    .peer/bin/python -m benchmarks.speed.peer_prepare --data DIR --out DIR

DIR of --data holds train.csv, valid.csv and test.csv. What is timed is what fuxictr's run_expid.py does before it
trains: its Criteo feature processor with the settings of Criteo_x4 (threshold 10), then `build_dataset`.

What its source leaves to choose, and what is chosen here, on two cores:
- Reading and counting: polars, lazily, by fuxictr itself, on all cores. There is nothing to set.
- Encoding: Ray Data, one dictionary look-up in Python per value, by half as many tasks at a time as there are
  cores. There is no option for their number. Made to believe in twice the cores, it is not faster on two.
- Output: Parquet, always. `data_block_size` 0 (the default) sorts the rows again and writes one file through
  pandas, which costs seconds per split; blocks skip that and take about a fifth less. They must not
  be larger than the smallest split, and the encoder takes 100,000 rows at a time anyway: that is the size here.
- Ray is started before the clock, though fuxictr starts it inside.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import time
from pathlib import Path
from typing import Any

import ray  # type: ignore[import-not-found,unused-ignore]
from fuxictr.datasets.criteo import CustomizedFeatureProcessor
from fuxictr.preprocess import build_dataset
from fuxictr.preprocess.build_dataset import init_ray

from benchmarks.speed.steps import cpu_seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--block", type=int, default=100_000, help="rows of one Parquet file; 0: one file")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")  # as run_expid.py does
    categorical = {"active": True, "type": "categorical"}
    integers: dict[str, Any] = {
        **categorical,
        "name": [f"I{i}" for i in range(1, 14)],
        "dtype": "float",
        "preprocess": "convert_to_bucket",
        "fill_na": 0,
    }
    params = {
        "dataset_id": "criteo",
        "data_root": str(args.out),
        "data_format": "csv",
        "train_data": str(args.data / "train.csv"),
        "valid_data": str(args.data / "valid.csv"),
        "test_data": str(args.data / "test.csv"),
        "data_block_size": args.block,
        "min_categr_count": 10,
        "feature_cols": [
            integers,
            {**categorical, "name": [f"C{i}" for i in range(1, 27)], "dtype": "str"},
        ],
        "label_col": {"name": "label", "dtype": "float"},
    }
    init_ray()
    cpu, start = cpu_seconds(os.getpid()), time.perf_counter()
    processor = CustomizedFeatureProcessor(**params)
    build_dataset(processor, **params)
    result = {
        "seconds": round(time.perf_counter() - start, 3),
        "cpu_seconds": round(
            cpu_seconds(os.getpid()) - cpu, 2
        ),  # while Ray's processes live: none waits for them
        "vocabulary": processor.feature_map.total_features,
    }
    ray.shutdown()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
