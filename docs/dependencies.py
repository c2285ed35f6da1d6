"""The packages that this one needs: versions that were tested, their licences, and the lowest that are allowed.

python -m docs.dependencies --write   # requirements.lock and docs/reference/licences.md, from this environment
python -m docs.dependencies --floors  # constraints that hold every direct dependency at its lowest version
"""

import argparse
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
LOCK, LICENCES = ROOT / "requirements.lock", ROOT / "docs" / "reference" / "licences.md"
OURS = "recap-ctr"


def direct_requirements() -> list[Requirement]:
    """Return the requirements of this package and of all its extras, itself left out."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    listed = [
        *project["dependencies"],
        *(line for lines in project["optional-dependencies"].values() for line in lines),
    ]
    requirements = [Requirement(line) for line in dict.fromkeys(listed)]
    return [requirement for requirement in requirements if canonicalize_name(requirement.name) != OURS]


def floors(requirements: Iterable[Requirement]) -> dict[str, str]:
    """Return the lowest version that each requirement allows; of two for one package, the higher.

    >>> floors([Requirement("numpy>=2.0,<3"), Requirement("numpy>=2.1")])
    {'numpy': '2.1'}
    """
    lowest: dict[str, str] = {}
    for requirement in requirements:
        versions = [rule.version for rule in requirement.specifier if rule.operator == ">="]
        if not versions:
            raise SystemExit(f"{requirement} has no lowest version")
        name = canonicalize_name(requirement.name)
        lowest[name] = max([lowest.get(name, "0"), *versions], key=_order)
    return lowest


def _order(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)]


def installed(requirements: Iterable[Requirement]) -> dict[str, Distribution]:
    """Return the packages that the requirements lead to in this environment, by name."""
    packages: dict[str, Distribution] = {}
    waiting = [(requirement, "") for requirement in requirements]
    while waiting:
        requirement, extra = waiting.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        is_new = name not in packages
        try:
            package = packages.setdefault(name, distribution(name))
        except PackageNotFoundError:
            continue
        extras = [*requirement.extras, *([""] if is_new else [])]
        waiting += [(Requirement(line), wanted) for wanted in extras for line in package.requires or ()]
    return dict(sorted(packages.items()))


def licence(package: Distribution) -> str:
    """Return the licence that a package names: its expression, its classifiers, or the first line of its text."""
    metadata = package.metadata.json
    if expression := metadata.get("license_expression"):
        return str(expression)
    classifiers = [line for line in metadata.get("classifier", ()) if line.startswith("License ::")]
    if classifiers:
        return ", ".join(line.rpartition(" :: ")[2] for line in classifiers)
    text = str(metadata.get("license", "")).strip()
    return text.splitlines()[0] if text else "not stated"


def _public_version(package: Distribution) -> str:
    """Return the version without its local part, such as +cpu, which other machines don't have."""
    return package.version.partition("+")[0]


def lock_lines(packages: dict[str, Distribution]) -> Iterator[str]:
    """Yield the lines of the lock file."""
    yield "# Versions that were tested together; written by: python -m docs.dependencies --write"
    yield from (f"{name}=={_public_version(package)}" for name, package in packages.items())


def licence_lines(packages: dict[str, Distribution]) -> Iterator[str]:
    """Yield the lines of the page of licences."""
    yield from ("# Licences", "")
    yield "What this package and all its extras install, written by `python -m docs.dependencies --write`."
    yield from ("", "| package | version | licence |", "|---|---|---|")
    for name, package in packages.items():
        yield f"| {name} | {_public_version(package)} | {licence(package).replace('|', '/')} |"


def main() -> None:
    """Print the floors, or write the lock file and the page of licences."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--write", action="store_true")
    group.add_argument("--floors", action="store_true")
    arguments = parser.parse_args()
    requirements = direct_requirements()
    if arguments.floors:
        sys.stdout.writelines(
            f"{name}=={version}\n" for name, version in sorted(floors(requirements).items())
        )
        return
    packages = installed(requirements)
    for path, lines in ((LOCK, lock_lines(packages)), (LICENCES, licence_lines(packages))):
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
