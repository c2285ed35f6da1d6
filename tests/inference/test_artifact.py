"""An artifact loads only if every bit of it is as it was written."""

import errno
import json
import os
import random
import shutil
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from recap_ctr.axes.predict import predict
from recap_ctr.data.encode import Encoder, FittedField
from recap_ctr.data.profile import PROFILE
from recap_ctr.data.shards import PreparedData
from recap_ctr.errors import InputError
from recap_ctr.evaluation.calibrate import AffineCalibration, Calibration, IsotonicCalibration
from recap_ctr.inference import torch_backend
from recap_ctr.inference.artifact import read_artifact, write_artifact
from recap_ctr.inference.engine import Engine
from recap_ctr.inference.manifest import CARD, MANIFEST, SCHEMA, WEIGHTS, read_artifact_manifest
from recap_ctr.inference.scorer import Scorer
from recap_ctr.inference.torch_backend import PackedModel, load_artifact
from recap_ctr.models.catalogue import MODELS, build, parse_model
from recap_ctr.nn.weights import to_arrays
from recap_ctr.schema import Field, Schema, read_schema
from recap_ctr.training.report import read_report
from tests.conftest import contents
from tests.support.forged_artifact import (
    forge,
    refused,
    refused_with_a_flipped_bit,
    swap_directories,
    write_manifest,
)

FIELD = "vocabulary/0001.parquet"
FILES = [MANIFEST, WEIGHTS, SCHEMA, CARD, PROFILE, *(f"vocabulary/{i:04d}.parquet" for i in (0, 1, 2, 4))]


@pytest.fixture
def copy(packed: Path, tmp_path: Path) -> Path:
    """Return an artifact that a test may damage."""
    return Path(shutil.copytree(packed, tmp_path / "copy"))


def test_a_model_without_routes_has_one_setting(packed: Path) -> None:
    """It is the default, and also the setting of one route."""
    engine = Engine.load(packed)
    assert list(engine.settings) == [engine.setting()] == [engine.setting(1)]
    for routes, depth in ((2, None), (None, 1), (1, 1)):
        with pytest.raises(InputError, match="neither routes nor depths"):
            engine.setting(routes, depth)


def pack(out: Path, artifact: PackedModel, **changes: Any) -> None:
    """Write the artifact again, with some of its parts changed."""
    parts: dict[str, Any] = {
        "name": artifact.name,
        "config": artifact.config,
        "weights": artifact.weights,
        "encoder": artifact.encoder,
        "calibration": artifact.calibration,
        "shift": artifact.shift,
        "profile": artifact.profile,
        **{part: artifact.manifest[part] for part in ("metrics", "dial", "data", "training")},
    }
    write_artifact(out, **(parts | changes))


class TestRoundTrip:
    def test_the_files(self, packed: Path) -> None:
        assert sorted(contents(packed)) == sorted(FILES)
        manifest = read_artifact_manifest(packed)
        assert sorted(manifest["files"]) == sorted(set(FILES) - {MANIFEST})
        assert (packed / CARD).read_text().startswith("# FCN click model")
        assert load_artifact(packed.parent).manifest == manifest, "a run's directory names its artifact"

    def test_the_profile_is_that_of_the_data(
        self, packed: Path, prepared: PreparedData, tmp_path: Path
    ) -> None:
        artifact = load_artifact(packed)
        assert artifact.usual == prepared.profile
        pack(tmp_path / "older", artifact, profile=None)
        with pytest.raises(
            InputError, match=r"holds no profile of its training rows.*\n.*fit the model again"
        ):
            _ = read_artifact(tmp_path / "older").usual
        other = artifact.usual.model_copy(update={"fields": artifact.usual.fields[1:]})
        pack(tmp_path / "other", artifact, profile=other)
        refused(tmp_path / "other", "other fields")

    def test_metrics_are_those_of_the_report(self, packed: Path) -> None:
        metrics = read_report(packed.parent).metrics
        assert read_artifact(packed).metrics == metrics.without_reliability()

    def test_all_files_have_the_same_permissions(self, packed: Path) -> None:
        assert len({path.stat().st_mode for path in packed.rglob("*") if path.is_file()}) == 1

    def test_nothing_names_the_machine_the_date_or_the_user(self, packed: Path) -> None:
        text = (packed / MANIFEST).read_text() + (packed / CARD).read_text()
        for private in (os.uname().nodename, str(Path.home()), str(packed.parent), time.strftime("%Y-%m-%d")):
            assert private not in text

    @pytest.mark.slow
    def test_scores_are_identical(self, packed: Path, click_log: pl.DataFrame, tmp_path: Path) -> None:
        first = load_artifact(packed)
        pack(tmp_path / "again", first)
        again = load_artifact(tmp_path / "again")
        assert {name: data for name, (data, _) in contents(packed).items()} == {
            name: data for name, (data, _) in contents(tmp_path / "again").items()
        }
        scores = Scorer(Engine.of(first)).score_frame(click_log)
        assert scores.tolist() == Scorer(Engine.of(again)).score_frame(click_log).tolist()
        assert not again.model.training

    @pytest.mark.slow
    @pytest.mark.parametrize("name", MODELS)
    @pytest.mark.parametrize(
        "calibration", [AffineCalibration(0.1 + 0.2, -1 / 3), IsotonicCalibration((-0.1, 1 / 3), (-2.0, 0.7))]
    )
    def test_every_model_and_calibration(
        self, name: str, calibration: Calibration, prepared: PreparedData, packed: Path, tmp_path: Path
    ) -> None:
        torch.manual_seed(0)
        config = parse_model(name, {} if name == "lr" else {"dim": 4})
        model = build(name, config, prepared.layout).eval()
        weights = to_arrays(model.state_dict())
        pack(
            tmp_path / "a",
            load_artifact(packed),
            name=name,
            config=config,
            weights=weights,
            encoder=prepared.encoder,
            calibration=calibration,
            shift=-0.7,
        )
        loaded = load_artifact(tmp_path / "a")
        assert (loaded.config, loaded.calibration, loaded.shift) == (config, calibration, -0.7)
        assert loaded.manifest["parameters"] == sum(weight.numel() for weight in model.parameters())
        cpu = torch.device("cpu")
        assert np.array_equal(predict(loaded.model, prepared.test, cpu), predict(model, prepared.test, cpu))


class TestDamage:
    """Accidents: flipped bits, wrong lengths, missing and swapped files."""

    @pytest.mark.slow
    def test_every_byte_of_the_manifest(self, copy: Path) -> None:
        whole = (copy / MANIFEST).read_bytes()
        rng = random.Random(0)
        for at in range(len(whole)):
            refused_with_a_flipped_bit(copy, MANIFEST, whole, at, rng.randrange(8))
        load_artifact(copy)

    @pytest.mark.slow
    def test_a_few_hundred_bits_of_all_other_files(self, copy: Path) -> None:
        rng = random.Random(1)
        for name in FILES[1:]:
            whole = (copy / name).read_bytes()
            for _ in range(50):
                refused_with_a_flipped_bit(copy, name, whole, rng.randrange(len(whole)), rng.randrange(8))
        load_artifact(copy)

    @pytest.mark.parametrize("name", FILES)
    def test_truncated_extended_emptied_or_missing(self, copy: Path, name: str) -> None:
        whole = (copy / name).read_bytes()
        for length in {0, 1, len(whole) // 2, len(whole) - 1}:
            (copy / name).write_bytes(whole[:length])
            refused(copy)
        for more in (b"\0", b"\n", whole):
            (copy / name).write_bytes(whole + more)
            refused(copy)
        (copy / name).unlink()
        refused(copy, "missing|holds no artifact")
        (copy / name).mkdir()
        refused(copy, "missing|holds no artifact")

    def test_swapped(self, copy: Path) -> None:
        for first, second in combinations(FILES, 2):
            (copy / first).rename(copy / "aside")
            (copy / second).rename(copy / first)
            (copy / "aside").rename(copy / second)
            refused(copy)
            (copy / first).rename(copy / "aside")
            (copy / second).rename(copy / first)
            (copy / "aside").rename(copy / second)
        load_artifact(copy)

    @pytest.mark.parametrize("name", FILES)
    def test_a_link_is_refused(self, copy: Path, packed: Path, name: str) -> None:
        (copy / name).unlink()
        (copy / name).symlink_to(packed / name)
        refused(copy, "missing|holds no artifact")

    def test_a_linked_folder_of_vocabularies(self, copy: Path, packed: Path) -> None:
        shutil.rmtree(copy / "vocabulary")
        (copy / "vocabulary").symlink_to(packed / "vocabulary")
        refused(copy, "missing")

    @pytest.mark.parametrize("name", FILES)
    def test_a_pipe_is_refused(self, copy: Path, name: str) -> None:
        (copy / name).unlink()
        os.mkfifo(copy / name)
        refused(copy, "missing|holds no artifact")  # It must not wait for the pipe.

    def test_an_artifact_that_is_replaced_between_two_reads(
        self, copy: Path, packed: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        other = Path(shutil.copytree(packed, copy.with_name("other")))
        forge(other, lambda manifest: manifest.update(shift=1.0))

        def swap_and_read(path: Path) -> Schema:
            swap_directories(other, copy)
            return read_schema(path)

        monkeypatch.setattr("recap_ctr.inference.artifact.read_schema", swap_and_read)
        refused(copy, "was replaced while it was read")

    def test_a_link_to_the_directory_is_followed(self, packed: Path, tmp_path: Path) -> None:
        (tmp_path / "current").symlink_to(packed)
        load_artifact(tmp_path / "current")

    def test_other_files_are_ignored(self, copy: Path) -> None:
        (copy / "vocabulary" / "0003.parquet").write_bytes(b"junk")
        (copy / ".model.safetensors.partial").write_bytes(b"junk")
        load_artifact(copy)

    @pytest.mark.parametrize("version", [2, 0, "1", None])
    def test_another_format(self, copy: Path, version: object) -> None:
        forge(copy, lambda manifest: manifest.update(format=version))
        refused(copy, f"format {version!r}; this version reads 1\n  fix: upgrade")

    def test_no_artifact(self, tmp_path: Path, prepared: PreparedData) -> None:
        refused(tmp_path, "holds no artifact")
        refused(tmp_path / "nowhere", "holds no artifact")
        refused(prepared.path, "holds no artifact")


def nested(depth: int) -> bytes:
    return b'{"kind": "artifact", "format": 1, "x": ' + b"[" * depth + b"]" * depth + b"}"


class TestHostileManifest:
    """Malice: an attacker who can compute checksums."""

    @pytest.mark.parametrize(
        "raw",
        [
            b"",
            b"null",
            b"[]",
            b'"artifact"',
            b"{",
            b"\xff\xfe{\0}\0",
            b'\xef\xbb\xbf{"kind": "artifact"}',
            b'{"kind": "artifact", "format": 1}',
            b'{"kind": "artifact", "format": 1, "checksum": 1}',
            b'{"kind": "artifact", "format": 1, "x": NaN}',
            b'{"kind": "artifact", "format": 1, "x": 1e999}',
            b'{"kind": "artifact", "format": 1, "x": "\\ud800"}',
            b'{"kind": "artifact", "format": 1, "x": ' + b"9" * 5_000 + b"}",
            b'{"kind": ["artifact"], "format": {}}',
            *(nested(depth) for depth in (100, 490, 900, 980, 1_100, 100_000)),
        ],
    )
    def test_raw_bytes(self, copy: Path, raw: bytes) -> None:
        (copy / MANIFEST).write_bytes(raw)
        refused(copy)

    def test_duplicate_keys(self, copy: Path) -> None:
        text = (copy / MANIFEST).read_text()
        doubled = text.replace('"kind": "artifact",', '"kind": "artifact",\n  "kind": "artifact",')
        assert doubled != text
        (copy / MANIFEST).write_text(doubled)
        refused(copy, "damaged")

    def test_a_huge_manifest(self, copy: Path) -> None:
        with (copy / MANIFEST).open("r+b") as file:
            file.truncate(1 << 40)  # A sparse file: a terabyte that takes no disk space.
        refused(copy, "damaged")

    @pytest.mark.parametrize(
        "key",
        [
            *("kind", "model", "parameters", "fields", "calibration", "shift"),
            *("metrics", "data", "training", "files"),
        ],
    )
    def test_a_part_is_missing(self, copy: Path, key: str) -> None:
        forge(copy, lambda manifest: manifest.pop(key))
        refused(copy)

    @pytest.mark.slow
    def test_wrong_types_anywhere(self, copy: Path, click_log: pl.DataFrame) -> None:
        """Replace each value in turn: the artifact is refused or scores, and no other exception is raised."""
        whole = json.loads((copy / MANIFEST).read_bytes())
        del whole["checksum"]
        wrong_values: list[Any] = [None, True, 10**400, "x", [{}]]
        loaded = 0
        for path in list(paths(whole)):
            for value in wrong_values:
                write_manifest(copy, replaced(whole, path, value))
                try:
                    scorer = Scorer.load(copy)
                except InputError:
                    continue
                loaded += 1
                assert path[0] not in ("kind", "format", "files"), path
                if path[0] not in ("data", "metrics", "training", "parameters"):
                    assert np.isfinite(scorer.score_frame(click_log.head(2))).all()
        assert loaded > 0

    @pytest.mark.parametrize(
        "name",
        [
            "../copy/model.safetensors",
            "/etc/passwd",
            "vocabulary/../schema.toml",
            "vocabulary/0009.parquet",
            "",
            ".",
            "a\0b",
            "schema.toml/",
        ],
    )
    def test_a_path_that_leads_elsewhere(self, copy: Path, name: str) -> None:
        forge(copy, lambda manifest: manifest["files"].update({name: manifest["files"][SCHEMA]}))
        refused(copy, "damaged")

    @pytest.mark.parametrize("name", [WEIGHTS, SCHEMA, FIELD])
    def test_a_file_without_a_checksum(self, copy: Path, name: str) -> None:
        forge(copy, lambda manifest: manifest["files"].pop(name))
        refused(copy, "damaged|not in the manifest")

    @pytest.mark.parametrize(
        "model",
        [
            {"name": "nonsense", "config": {}},
            {"name": "lr", "config": {}},
            {"name": "fcn", "config": {"dim": 8}},
            {"name": "fcn", "config": {"dims": 4}},
            {"name": "os:system", "config": {}},
        ],
    )
    def test_another_model_or_config(self, copy: Path, model: dict[str, Any]) -> None:
        forge(copy, lambda manifest: manifest.update(model=model))
        refused(copy)

    def test_sizes_beyond_the_file_of_weights(self, copy: Path) -> None:
        """A model of 2^40 weights, or of as many layers, is refused before it is built."""
        for sizes in ({"dim": 2**20}, {"dim": 1_000}, {"num_linear_layers": 2**40}):
            forge(copy, lambda manifest, sizes=sizes: manifest["model"]["config"].update(sizes))  # type: ignore[misc]
            refused(copy, "more weights than the file")

    def test_weights_beyond_memory(self, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch_backend, "memory_bytes", lambda: 10_000)
        refused(copy, "loading its weights takes .* GiB of memory, and this machine has 0.0")

    def test_buckets_beyond_memory(self, copy: Path) -> None:
        text = (copy / SCHEMA).read_text()
        (copy / SCHEMA).write_text(text.replace('name = "site"', 'name = "site", hash_buckets = 2000000000'))
        forge(copy, lambda manifest: manifest["fields"][0].update(size=2_000_000_002))
        refused(copy, "more weights than the file|of other fields")


class TestBombs:
    """Small files that would take gigabytes; the time and memory to refuse them is that of a small file."""

    def refused_quickly(self, copy: Path, message: str) -> None:
        tracemalloc.start()
        started = time.process_time()
        refused(copy, message)
        assert time.process_time() - started < 3
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
        tracemalloc.stop()

    def test_a_manifest_of_countless_values(self, copy: Path) -> None:
        text = b'{"kind": "artifact", "format": 1, "x": [' + b"[]," * 5_000_000 + b"[]]}"
        (copy / MANIFEST).write_bytes(text)
        self.refused_quickly(copy, "damaged")

    def test_a_schema_of_countless_values(self, copy: Path) -> None:
        (copy / SCHEMA).write_bytes(b"x = [" + b"[]," * 1_200_000 + b"[]]")
        forge(copy)
        self.refused_quickly(copy, "more than 1,000,000 values")

    def test_a_schema_with_a_key_of_countless_parts(self, copy: Path) -> None:
        text = (copy / SCHEMA).read_bytes()
        (copy / SCHEMA).write_bytes(text + b"\n[" + b"a." * 100_000 + b"a]\n")
        forge(copy)
        self.refused_quickly(copy, "dots")

    def test_a_profile_of_countless_values(self, copy: Path) -> None:
        (copy / PROFILE).write_bytes(b'{"a": [' + b"[]," * 1_200_000 + b"[]]}")
        forge(copy)
        self.refused_quickly(copy, "more than 1,000,000 values")

    def test_weights_of_countless_tensors(self, copy: Path) -> None:
        raw = (copy / WEIGHTS).read_bytes()
        size = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + size])
        header |= {f"t{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(80_000)}
        text = json.dumps(header).encode()
        (copy / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + size :])
        forge(copy)
        self.refused_quickly(copy, "larger than 4 MiB")

    @pytest.mark.parametrize("length", [65_537, 300_000_000])
    def test_rows_of_countless_ids(self, copy: Path, length: int) -> None:
        text = (copy / SCHEMA).read_text()
        assert "max_len = 3" in text
        (copy / SCHEMA).write_text(text.replace("max_len = 3", f"max_len = {length}"))
        forge(copy)
        self.refused_quickly(copy, "max_len")

    def test_a_vocabulary_of_countless_values(self, copy: Path) -> None:
        rows = 2_000_000
        constant = {"value": pl.Series(["a"]).new_from_index(0, rows), "count": np.ones(rows, np.int64)}
        pl.DataFrame(constant).write_parquet(copy / FIELD, statistics=False)
        forge(copy, lambda manifest: manifest["fields"][1].update(size=rows + 2))
        self.refused_quickly(copy, "does not hold 2,000,000 values")

    @pytest.mark.slow
    def test_a_vocabulary_of_huge_values(self, copy: Path) -> None:
        values = pl.Series([f"{number:02d}" * 4_000_000 for number in range(12)])
        pl.DataFrame({"value": values, "count": range(12)}).write_parquet(copy / FIELD, statistics=False)
        forge(copy, lambda manifest: manifest["fields"][1].update(size=14))
        self.refused_quickly(copy, "unpacks to")

    def test_a_value_twice(self, copy: Path) -> None:
        pl.DataFrame({"value": ["a", "b", "a"], "count": [3, 2, 1]}).write_parquet(
            copy / FIELD, statistics=False
        )
        forge(copy, lambda manifest: manifest["fields"][1].update(size=5))
        refused(copy, "holds a value twice")

    @pytest.mark.parametrize(
        ("values", "edges", "message"),
        [
            (["0"], (1.0,), "not the numbers of its edges"),
            (["0"], (1.0, 2.0), "not the numbers of its edges"),
            (["1", "0"], (1.0, 2.0), "not the numbers of its edges"),
            (["0", "1"], (2.0, 1.0), "out of order"),
        ],
    )
    def test_edges_that_the_encoder_could_not_have_written(
        self, packed: Path, tmp_path: Path, values: list[str], edges: tuple[float, ...], message: str
    ) -> None:
        artifact = load_artifact(packed)
        fields = list(artifact.encoder.fields)
        field = Field(name="price", kind="numeric", transform="linear")
        fields[3] = FittedField(field, pl.Series(values), np.ones(len(values), np.int64), edges=edges)
        schema = artifact.encoder.schema
        schema = schema.model_copy(update={"fields": (*schema.fields[:3], field, *schema.fields[4:])})
        pack(tmp_path / "forged", artifact, encoder=Encoder(schema, fields), profile=None)
        refused(tmp_path / "forged", message)


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of keys to every value inside `value`."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in items:
        yield from paths(child, (*path, key))


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """Return a copy of `value` with `new` at `path`."""
    if not path:
        return new
    changed = value.copy()
    changed[path[0]] = replaced(value[path[0]], path[1:], new)
    return changed


class TestHostileFiles:
    """Files whose checksums are right and whose content is wrong."""

    @pytest.mark.slow
    @pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
    def test_weights_that_are_not_finite(self, copy: Path, value: float) -> None:
        for name, tensor in load_file(copy / WEIGHTS).items():
            tensors = load_file(copy / WEIGHTS)
            if not tensor.is_floating_point():
                continue
            tensors[name].view(-1)[-1] = value
            save_file(tensors, copy / "other")
            whole = (copy / WEIGHTS).read_bytes()
            (copy / "other").rename(copy / WEIGHTS)
            forge(copy)
            refused(copy, f"{name} holds NaN or infinity")
            (copy / WEIGHTS).write_bytes(whole)

    @pytest.mark.parametrize(
        "change",
        [
            lambda tensors: tensors.popitem(),
            lambda tensors: tensors.update(extra=torch.zeros(1)),
            lambda tensors: tensors.update({name: value[..., None] for name, value in tensors.items()}),
            lambda tensors: tensors.clear(),
            lambda tensors: tensors.update({name: torch.zeros(0) for name in tensors}),
        ],
        ids=["one less", "one more", "shapes", "none", "empty"],
    )
    def test_other_tensors(self, copy: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
        tensors = load_file(copy / WEIGHTS)
        change(tensors)
        save_file(tensors, copy / WEIGHTS)
        forge(copy)
        refused(copy, "don't fit together")

    @pytest.mark.parametrize(
        "raw",
        [
            b"",
            b"\x80\x04\x95.",
            b"\xff" * 16,
            (2**62).to_bytes(8, "little") + b"{}",
            (2).to_bytes(8, "little") + b"{}",
            (len(b'{"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,4]}}')).to_bytes(
                8, "little"
            )
            + b'{"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,4]}}'
            + b"\0" * 4,
        ],
        ids=["empty", "pickle", "noise", "long header", "no tensors", "overflow"],
    )
    def test_weights_that_are_not_safetensors(self, copy: Path, raw: bytes) -> None:
        (copy / WEIGHTS).write_bytes(raw)
        forge(copy)
        refused(copy)

    @pytest.mark.parametrize(
        "frame",
        [
            pl.DataFrame({"value": [1, 2], "count": [1, 2]}),
            pl.DataFrame({"value": ["a", None], "count": [1, 2]}),
            pl.DataFrame({"count": [1, 2]}),
            pl.DataFrame({"value": ["a"]}),
            pl.DataFrame({"value": ["a", "b"], "count": ["x", "y"]}),
            pl.DataFrame(),
        ],
    )
    def test_other_vocabularies(self, copy: Path, frame: pl.DataFrame) -> None:
        frame.write_parquet(copy / FIELD)
        forge(copy, lambda manifest: manifest["fields"][1].update(size=frame.height + 2))
        refused(copy)

    @pytest.mark.slow
    @settings(deadline=None, max_examples=60, derandomize=True)
    @given(
        flips=st.lists(
            st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255)), min_size=1, max_size=4
        )
    )
    def test_mutated_parquet(
        self, flips: list[tuple[float, int]], packed: Path, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        copy = Path(shutil.copytree(packed, tmp_path_factory.mktemp("mutated") / "copy"))
        raw = bytearray((copy / FIELD).read_bytes())
        for share, mask in flips:
            raw[int(share * len(raw))] ^= mask
        (copy / FIELD).write_bytes(raw)
        forge(copy)
        with suppress(InputError):
            load_artifact(copy)

    @pytest.mark.parametrize(
        "text", ["", "label = 3", "x = [", 'label = "click"\nfields = []', "\xff", 'format = 2\nlabel = "a"']
    )
    def test_other_schemas(self, copy: Path, text: str) -> None:
        (copy / SCHEMA).write_bytes(text.encode("latin-1"))
        forge(copy)
        refused(copy)


class TestWriting:
    @pytest.mark.slow
    @pytest.mark.parametrize("call", ["fsync", "replace"])
    def test_a_full_disk_keeps_the_old_artifact(
        self, call: str, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Whichever call fails, it raises, the old artifact is still whole, and no other file remains."""
        artifact = load_artifact(packed)
        pack(tmp_path / "a", artifact)
        before = contents(tmp_path)
        owner: Any = os if call == "fsync" else Path
        real, calls_left = getattr(owner, call), 0

        def failing(*arguments: Any) -> Any:
            nonlocal calls_left
            calls_left -= 1
            if calls_left == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*arguments)

        monkeypatch.setattr(owner, call, failing)
        for failing_at in range(1, 100):
            calls_left = failing_at
            try:
                pack(tmp_path / "a", artifact, shift=1.0)
            except OSError as error:
                assert error.errno == errno.ENOSPC
            else:
                break
            if load_artifact(tmp_path / "a").shift == artifact.shift:
                assert contents(tmp_path) == before
            assert [path.name for path in tmp_path.iterdir()] == ["a"]
        assert failing_at > 3
        assert load_artifact(tmp_path / "a").shift == 1.0

    def test_a_new_artifact_replaces_the_old_one(self, packed: Path, tmp_path: Path) -> None:
        artifact = load_artifact(packed)
        pack(tmp_path / "a", artifact)
        pack(tmp_path / "a", artifact, shift=-1.0)
        assert load_artifact(tmp_path / "a").shift == -1.0
        assert [path.name for path in tmp_path.iterdir()] == ["a"]
