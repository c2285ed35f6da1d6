"""What a release needs: its workflows, floors of all dependencies, a lock file and a list of licences."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from docs.dependencies import LICENCES, LOCK, direct_requirements, floors, installed

ROOT = Path(__file__).parents[1]


def workflow(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / name).read_text())
    return loaded


def test_every_direct_dependency_has_a_floor() -> None:
    lowest = floors(direct_requirements())
    assert {"numpy", "polars", "torch", "starlette", "pytest"} <= set(lowest)
    assert lowest["scikit-learn"] == "1.8"  # The higher of two.
    with pytest.raises(SystemExit, match="has no lowest version"):
        floors([Requirement("numpy")])


@pytest.mark.parametrize("path", [LOCK, LICENCES], ids=lambda path: path.name)
def test_lists_name_every_direct_dependency(path: Path) -> None:
    named = set(re.findall(r"^\|? ?([a-z0-9][a-z0-9.-]*)(?:==| \|)", path.read_text(), re.MULTILINE))
    present = installed(direct_requirements())
    missing = {canonicalize_name(requirement.name) for requirement in direct_requirements()} & set(
        present
    ) - named
    assert not missing, "run python -m docs.dependencies --write"


def test_locked_versions_are_allowed() -> None:
    locked = dict(line.split("==") for line in LOCK.read_text().splitlines() if not line.startswith("#"))
    for requirement in direct_requirements():
        version = locked.get(canonicalize_name(requirement.name))
        assert version is None or requirement.specifier.contains(version, prereleases=True), requirement


def test_the_version_comes_from_tags_and_has_a_fallback() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert config["project"]["dynamic"] == ["version"]
    assert config["tool"]["hatch"]["version"]["source"] == "vcs"
    assert config["tool"]["hatch"]["version"]["fallback-version"]


def test_only_the_publishing_job_gets_an_identity() -> None:
    release = workflow("release.yml")
    assert release["permissions"] == {"contents": "read"}
    publish = release["jobs"]["publish"]
    assert publish["needs"] == "wheel" and publish["permissions"] == {"id-token": "write"}
    assert not any("checkout" in step.get("uses", "") for step in publish["steps"])
    for name in ("ci.yml", "wheel.yml"):
        assert workflow(name)["permissions"] == {"contents": "read"}
    assert "secrets." not in "".join(path.read_text() for path in (ROOT / ".github").rglob("*.yml"))


def test_all_pythons_are_tried() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    tried = workflow("ci.yml")["jobs"]["pythons"]["strategy"]["matrix"]["python"]
    assert tried == ["3.11", "3.12", "3.13", "3.14"]
    assert config["requires-python"] == f">={tried[0]}"


def test_the_wheel_scores_on_all_systems() -> None:
    job = workflow("wheel.yml")["jobs"]["systems"]
    matrix = job["strategy"]["matrix"]
    assert matrix == {"system": ["macos-latest", "windows-latest"], "python": ["3.11", "3.14"]}
    assert job["needs"] == "model" and "recap predict" in job["steps"][-1]["run"]
