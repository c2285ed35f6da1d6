"""The torch model of an artifact, built from its weights."""

import os
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from threading import Lock

import numpy as np
import torch
from torch import nn

from recap_ctr.axes.routes import FoldedRoutes, Routed
from recap_ctr.config import Frozen, parse
from recap_ctr.data.encode import Floats, Ints
from recap_ctr.errors import InputError
from recap_ctr.inference.artifact import WEIGHTS, Artifact, Setting, misfit, read_artifact
from recap_ctr.jobs.machine import num_cores
from recap_ctr.models.catalogue import build, count_parameters, parse_model
from recap_ctr.models.recap import Recap, Route
from recap_ctr.nn.interface import Inputs
from recap_ctr.nn.weights import load_tensors, to_arrays
from recap_ctr.plugins import is_dotted
from recap_ctr.storage.arrays import Array

TRUSTED = "RECAP_MODELS"  # environment variable: models from outside that artifacts may name, comma-separated


@dataclass(frozen=True, eq=False)
class PackedModel(Artifact):
    """An artifact with its model in memory; its directory may be gone."""

    config: Frozen
    model: nn.Module
    """Gives one logit a row: the mean over the artifact's routes, where it has several."""

    @property
    def backbone(self) -> nn.Module:
        """The model whatever its routes."""
        return self.model.model if isinstance(self.model, Routed) else self.model

    @property
    def routes(self) -> tuple[Route, ...]:
        return self.model.routes if isinstance(self.model, Routed) else ()

    @property
    def weights(self) -> dict[str, Array]:
        """As they are stored."""
        return to_arrays(self.backbone.state_dict())

    def dialled(self, routes: int | None = None, depth: int | None = None) -> "PackedModel":
        """The same model on fewer of its routes, or at another trained depth; the calibration stays."""
        if routes is None and depth is None:
            return self
        if not isinstance(self.model, Routed):
            raise InputError(f"{self.name} has neither routes nor depths to choose from")
        stored = self.model.routes
        if routes is not None and not 1 <= routes <= len(stored):
            raise InputError(f"{routes} routes, where the artifact has {len(stored)}")
        return replace(self, model=Routed(self.model.model, stored[:routes], depth).eval())

    def ready(self, setting: Setting) -> nn.Module:
        """The model at a setting of the dial, its weights final: single routes are folded."""
        if setting == Setting(1, None) and not isinstance(self.model, Routed):
            return self.model
        model = self.dialled(setting.routes, setting.depth).model
        assert isinstance(model, Routed)
        return FoldedRoutes(model).eval()


class Eager:
    """Any setting of a model, by torch: single routes are folded into the weights once, when first asked for."""

    def __init__(self, model: PackedModel) -> None:
        self.settings, self.threads = model.dial, torch.get_num_threads()
        self._model, self._ready = model, dict[Setting, nn.Module]()
        self._lock = Lock()
        self._module(self.settings[0])

    def logits(self, setting: Setting, ids_BW: Ints, values_BN: Floats) -> tuple[Array, Array]:
        """Raw logits, the correction for sampled negatives included, and the routes' disagreement."""
        with torch.inference_mode():
            found = self._module(setting)(Inputs(torch.from_numpy(ids_BW), torch.from_numpy(values_BN)))
            logit_B = found.logit_B.numpy().astype(np.float64) + self._model.shift
            if setting.routes == 1:
                return logit_B, np.zeros_like(logit_B)
            return logit_B, found.aux["logits_KB"].std(dim=0, correction=0).numpy()

    def _module(self, setting: Setting) -> nn.Module:
        with self._lock:
            if setting not in self._ready:
                self._ready[setting] = self._model.ready(setting)
            return self._ready[setting]


def use_threads(threads: int | None) -> None:
    """For all of torch in this process."""
    torch.set_num_threads(threads or num_cores())


def load_artifact(path: Path) -> PackedModel:
    """Read an artifact, and build its model after checking that weights, settings and routes fit each other."""
    return with_model(read_artifact(path))


def with_model(artifact: Artifact) -> PackedModel:
    """The model of an artifact that was read."""
    path, name, manifest = artifact.path, artifact.name, artifact.manifest
    _check_trusted(path, name)
    layout = artifact.encoder.layout
    try:
        config = parse_model(name, manifest["model"]["config"])
        # A false size must cost neither time nor memory: no setting counts more than there are weights, and the
        # weights are counted before they are allocated.
        room = manifest["files"][WEIGHTS]["bytes"] // 4
        sizes = [value for value in dict(config).values() if isinstance(value, int)]
        if max(sizes, default=0) > room or count_parameters(name, config, layout) > room:
            raise ValueError("the model has more weights than the file")
        model = build(name, config, layout)
        model.load_state_dict(load_tensors(path / WEIGHTS)[0])
        routes = tuple(parse(Route, route, "route") for route in manifest.get("routes", []))
        if routes and not isinstance(model, Recap):
            raise ValueError(f"{name} has no routes")
        routed = Routed(model, routes) if routes and isinstance(model, Recap) else model
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError, InputError) as error:
        raise InputError(f"{misfit(path)}: {error}") from None
    for key, tensor in model.state_dict().items():
        if not tensor.isfinite().all():
            raise InputError(f"{path / WEIGHTS}: {key} holds NaN or infinity", fix="train the model anew")
    artifact.check_unchanged()
    own = {field.name: getattr(artifact, field.name) for field in fields(Artifact)}
    return PackedModel(**own, config=config, model=routed.eval())


def _check_trusted(path: Path, name: str) -> None:
    """A manifest is data, and may come from anywhere: what it names is not imported for that (docs/decisions/0010)."""
    if not is_dotted(name) or name.partition(":")[0] in sys.modules:
        return
    if name not in [entry.strip() for entry in os.environ.get(TRUSTED, "").split(",")]:
        raise InputError(
            f"{path}: its model, {name}, is code from outside this package, which an artifact alone can't have run",
            fix=f"if you trust that code, set {TRUSTED}={name}, or import its module first",
        )
