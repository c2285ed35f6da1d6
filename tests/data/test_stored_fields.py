"""Fitted fields on disk: the same as those that were fitted, and read only when somebody asks for their values."""

from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest

from recap_ctr.data.encode import Encoder
from recap_ctr.data.prepare import Preparation, write_prepared_data
from recap_ctr.data.shards import PreparedData
from recap_ctr.data.source import FrameSource
from recap_ctr.errors import InputError
from recap_ctr.inference.artifact import read_artifact
from recap_ctr.training.config import RunConfig
from recap_ctr.training.run import run
from tests.support.preparing import EVERY_KIND, contents, every_kind


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    """Rows with a field of every kind."""
    preparation = Preparation(EVERY_KIND, {"all": FrameSource(every_kind(400))})
    return write_prepared_data(preparation, tmp_path_factory.mktemp("every") / "data", quiet=True)[0]


def test_the_layout_is_that_of_the_fields(data: PreparedData) -> None:
    assert data.stored_fields.layout == data.encoder.layout
    widths = {(place.width, place.pooling, place.value_column) for place in data.layout.fields}
    assert len(widths) > 3, "fields of several kinds"


def test_a_copy_is_what_the_encoder_writes(data: PreparedData, tmp_path: Path) -> None:
    assert data.stored_fields.save(tmp_path / "copy") == data.encoder.save(tmp_path / "written")
    assert contents(tmp_path / "copy") == contents(tmp_path / "written")


def test_one_field_is_read_by_its_name(data: PreparedData) -> None:
    for fitted in data.encoder.fields:
        stored = data.stored_fields.field(fitted.field.name)
        assert stored.values.equals(fitted.values)
        learnt = [(each.mean, each.scale, each.edges, each.num_added) for each in (stored, fitted)]
        assert learnt[0] == learnt[1]
    with pytest.raises(InputError, match="no field 'sites'"):
        data.stored_fields.field("sites")


def test_a_run_reads_only_the_values_that_it_shows(
    run_config: RunConfig, prepared: PreparedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A vocabulary may take more memory than a worker's rows of the table."""
    read: list[str] = []
    real = pl.read_parquet

    def noted(path: Path, *, glob: bool) -> pl.DataFrame:
        read.append(path.name)
        return real(path, glob=glob)

    monkeypatch.setattr(pl, "read_parquet", noted)
    monkeypatch.setattr(Encoder, "load", lambda *_: pytest.fail("all vocabularies were read"))
    config = replace(run_config, slices=("site",), train_baseline=False)
    run(config, PreparedData(prepared.path), tmp_path / "run", quiet=True)
    monkeypatch.undo()
    names = [field.name for field in prepared.schema.fields]
    assert read == [f"{names.index('site'):04d}.parquet"]
    artifact = read_artifact(tmp_path / "run" / "artifact")
    assert artifact.encoder.layout == prepared.layout
