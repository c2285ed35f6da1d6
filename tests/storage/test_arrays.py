"""Tensor files are read as they were written, or not at all."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from recap_ctr.errors import InputError
from recap_ctr.storage.arrays import Array, NpyFile, check_arrays, load_arrays, save_arrays

ARRAYS: dict[str, Array] = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "n": np.array(7, np.int64)}


@pytest.mark.parametrize("metadata", [None, {"progress": "{}", "torch": "2"}])
def test_a_flipped_bit_of_every_byte_is_noticed(metadata: dict[str, str] | None, tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    save_arrays(path, ARRAYS, metadata, checksum=True)
    check_arrays(path)
    assert all(np.array_equal(array, load_file(path)[name]) for name, array in ARRAYS.items())
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
        with pytest.raises(InputError):
            check_arrays(path)
            load_arrays(path)


def test_files_without_a_checksum_are_read(tmp_path: Path) -> None:
    save_arrays(tmp_path / "a", ARRAYS)
    save_arrays(tmp_path / "b", ARRAYS, {"progress": "{}"})
    save_file(ARRAYS, tmp_path / "c")
    for name in "abc":
        check_arrays(tmp_path / name)
        assert load_arrays(tmp_path / name, ["n"]) == {"n": 7}


@pytest.mark.parametrize("raw", [b"", b"\xff" * 8, b"\x02" + b"\0" * 7 + b"[]", b"\x01" + b"\0" * 7 + b"3"])
def test_what_is_no_such_file(raw: bytes, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(raw)
    with pytest.raises(InputError, match="is damaged"):
        check_arrays(tmp_path / "a")
        load_arrays(tmp_path / "a")


def test_npy_files_are_new_and_hashed(tmp_path: Path) -> None:
    rows = np.arange(12, dtype=np.int32).reshape(4, 3)
    with NpyFile(tmp_path / "deep" / "a.npy", np.int32, rows.shape) as file:
        file.write(rows[:1])
        file.write(rows[1:])
    assert np.array_equal(np.load(tmp_path / "deep" / "a.npy"), rows)
    assert file.entry["bytes"] == (tmp_path / "deep" / "a.npy").stat().st_size
    with pytest.raises(FileExistsError):
        NpyFile(tmp_path / "deep" / "a.npy", np.int32, rows.shape)
