"""A directory in which tables are made, one after the other."""

from dataclasses import dataclass
from pathlib import Path

from recap_ctr.recipe.stages import Recipe


@dataclass(frozen=True)
class Workshop:
    """Where tables are made: the recipe with its runs, and the directory of their reports."""

    recipe: Recipe
    reports: Path

    def trained(self) -> dict[Path, int]:
        """Return all runs, and when their weights were last written."""
        return {
            path.parent: path.stat().st_mtime_ns for path in self.recipe.out.rglob("seed-*/best.safetensors")
        }
