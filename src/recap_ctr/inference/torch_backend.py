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
from recap_ctr.inference.artifact import Artifact, check_num_routes, read_artifact
from recap_ctr.inference.manifest import WEIGHTS, mismatch
from recap_ctr.inference.setting import Setting
from recap_ctr.jobs.machine import memory_bytes, num_cores
from recap_ctr.models.catalogue import build, count_parameters, parse_model
from recap_ctr.models.recap import Recap, Route
from recap_ctr.nn.interface import Inputs
from recap_ctr.nn.weights import load_tensors, to_arrays
from recap_ctr.plugins import is_dotted
from recap_ctr.storage.arrays import Array

# This environment variable lists the models outside this package that artifacts may name, separated by commas.
TRUSTED = "RECAP_MODELS"


@dataclass(frozen=True, eq=False)
class PackedModel(Artifact):
    """An artifact with its model in memory; its directory is no longer needed."""

    config: Frozen
    model: nn.Module
    """Gives one logit per row: the mean over the artifact's routes, where it has several."""

    @property
    def backbone(self) -> nn.Module:
        """Return the model without its routes."""
        return self.model.model if isinstance(self.model, Routed) else self.model

    @property
    def routes(self) -> tuple[Route, ...]:
        """Return the routes that are averaged; none for a model without routes."""
        return self.model.routes if isinstance(self.model, Routed) else ()

    @property
    def weights(self) -> dict[str, Array]:
        """Return the weights under their names in the file of weights."""
        return to_arrays(self.backbone.state_dict())

    def with_setting(self, routes: int | None = None, depth: int | None = None) -> "PackedModel":
        """Return the same model on its first `routes` routes, at a trained `depth`; its `calibration` stays.

        The calibration of that setting is `calibration_of(setting)`.
        """
        if routes is None and depth is None:
            return self
        if not isinstance(self.model, Routed):
            raise InputError(f"{self.name} has neither routes nor depths to choose from")
        check_num_routes(routes, len(self.routes))
        return replace(self, model=Routed(self.model.model, self.routes[:routes], depth).eval())

    def folded(self, setting: Setting) -> nn.Module:
        """Return the model at a setting of the dial, with the adapters of single routes folded into the weights."""
        if setting == Setting(1, None) and not isinstance(self.model, Routed):
            return self.model
        model = self.with_setting(setting.routes, setting.depth).model
        assert isinstance(model, Routed)
        return FoldedRoutes(model).eval()


class TorchBackend:
    """Runs any setting of a model by torch. Weights are folded once per setting, at its first use."""

    def __init__(self, model: PackedModel) -> None:
        self.settings, self.threads = model.dial, torch.get_num_threads()
        self._model, self._folded = model, dict[Setting, nn.Module]()
        self._lock = Lock()
        self._module(self.settings[0])

    def logits(self, setting: Setting, ids_BW: Ints, values_BN: Floats) -> tuple[Array, Array]:
        """Return the raw logits, corrected for sampled negatives, and their standard deviation over routes."""
        with torch.inference_mode():
            output = self._module(setting)(Inputs(torch.from_numpy(ids_BW), torch.from_numpy(values_BN)))
            logit_B = output.logit_B.numpy().astype(np.float64) + self._model.shift
            if setting.routes == 1:
                return logit_B, np.zeros_like(logit_B)
            return logit_B, output.aux["logits_KB"].std(dim=0, correction=0).numpy()

    def _module(self, setting: Setting) -> nn.Module:
        with self._lock:
            if setting not in self._folded:
                self._folded[setting] = self._model.folded(setting)
            return self._folded[setting]


def set_threads(threads: int | None) -> None:
    """Set the number of threads for all of torch in this process, by default as many as there are cores."""
    torch.set_num_threads(threads or num_cores())


def load_artifact(path: Path) -> PackedModel:
    """Read an artifact and build its model, after checking that weights, config and routes fit each other."""
    return load_model(read_artifact(path))


def load_model(artifact: Artifact) -> PackedModel:
    """Build the model of an artifact that was read, from the weights on disk."""
    _refuse_untrusted(artifact.path, artifact.name)
    _refuse_too_large(artifact)
    try:
        config = parse_model(artifact.name, artifact.manifest["model"]["config"])
        _refuse_false_sizes(artifact, config)
        model = build(artifact.name, config, artifact.encoder.layout)
        model.load_state_dict(load_tensors(artifact.path / WEIGHTS)[0])
        routes = tuple(parse(Route, route, "route") for route in artifact.manifest.get("routes", []))
        if routes and not isinstance(model, Recap):
            raise ValueError(f"{artifact.name} has no routes")
        routed = Routed(model, routes) if routes and isinstance(model, Recap) else model
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError, InputError) as error:
        raise InputError(f"{mismatch(artifact.path)}: {error}") from None
    for key, tensor in model.state_dict().items():
        if not tensor.isfinite().all():
            raise InputError(
                f"{artifact.path / WEIGHTS}: {key} holds NaN or infinity", fix="train the model again"
            )
    artifact.check_unchanged()
    inherited = {field.name: getattr(artifact, field.name) for field in fields(Artifact)}
    return PackedModel(**inherited, config=config, model=routed.eval())


def _refuse_too_large(artifact: Artifact) -> None:
    """Refuse weights that this machine can't hold; several workers may have trained them, and loading needs them
    twice."""
    needed, available = 2 * artifact.manifest["files"][WEIGHTS]["bytes"], memory_bytes()
    if available is not None and needed > available:
        raise InputError(
            f"{artifact.path}: loading its weights takes {needed / 2**30:.1f} GiB of memory, and this machine has"
            f" {available / 2**30:.1f}",
            fix="use a machine with more memory, or train with a smaller dim, or a larger min_count in the schema",
        )


def _refuse_false_sizes(artifact: Artifact, config: Frozen) -> None:
    """Refuse a config with more weights than the file holds, before it costs time or memory to build the model."""
    available = artifact.manifest["files"][WEIGHTS]["bytes"] // 4
    largest = max((value for value in dict(config).values() if isinstance(value, int)), default=0)
    if largest > available or count_parameters(artifact.name, config, artifact.encoder.layout) > available:
        raise ValueError("the model has more weights than the file")


def _refuse_untrusted(path: Path, name: str) -> None:
    """Refuse to import code only because an artifact names it; a manifest may come from anywhere
    (docs/decisions/0010)."""
    if not is_dotted(name) or name.partition(":")[0] in sys.modules:
        return
    if name not in [entry.strip() for entry in os.environ.get(TRUSTED, "").split(",")]:
        raise InputError(
            f"{path}: its model, {name}, is code from outside this package, and an artifact alone may not run it",
            fix=f"if you trust that code, set {TRUSTED}={name}, or import its module first",
        )
