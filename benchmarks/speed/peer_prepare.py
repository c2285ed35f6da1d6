"""Time fuxictr 2.3.10's own preprocessing of Criteo-layout CSV files (runs in the peer's environment).

    .peer/bin/python peer_prepare.py --data DIR --out DIR     # DIR holds train.csv, valid.csv, test.csv
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from pathlib import Path

from fuxictr.datasets.criteo import CustomizedFeatureProcessor
from fuxictr.preprocess import build_dataset
from fuxictr.preprocess.build_dataset import init_ray


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--block", type=int, default=0)
    parser.add_argument("--cpus", type=int, default=0)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    import os
    if args.cpus: os.cpu_count = lambda: args.cpus
    integers = [f"I{i}" for i in range(1, 14)]
    categories = [f"C{i}" for i in range(1, 27)]
    params = {
        "dataset_id": "criteo",
        "data_root": str(args.out),
        "data_format": "csv",
        **{f"{split}_data": str(args.data / f"{split}.csv") for split in ("train", "valid", "test")},
        "data_block_size": args.block,
        "min_categr_count": 10,
        "feature_cols": [
            {"name": integers, "active": True, "dtype": "float", "type": "categorical",
             "preprocess": "convert_to_bucket", "fill_na": 0},
            {"name": categories, "active": True, "dtype": "str", "type": "categorical"},
        ],
        "label_col": {"name": "label", "dtype": "float"},
    }
    t0=time.perf_counter()
    init_ray()
    start = time.perf_counter()
    processor = CustomizedFeatureProcessor(**params)
    build_dataset(processor, **params)
    seconds = time.perf_counter() - start
    print(json.dumps({"seconds": round(seconds, 3), "ray":start-t0, "vocabulary": processor.feature_map.total_features}))


if __name__ == "__main__":
    main()
