"""All models by name. A model is one file here, one line in `MODELS`, and one TOML of settings per benchmark."""

from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

from recap_ctr.config import Frozen, parse
from recap_ctr.data.encode import Layout
from recap_ctr.errors import InputError

if TYPE_CHECKING:
    from torch import nn

MODELS = {
    "fcn": "recap_ctr.models.fcn:FCN",
    "ecn": "recap_ctr.models.fcn:ECN",
    "lcn": "recap_ctr.models.fcn:LCN",
    "recap": "recap_ctr.models.recap:Recap",
    "edcn": "recap_ctr.models.edcn:EDCN",
    "masknet": "recap_ctr.models.masknet:MaskNet",
    "eulernet": "recap_ctr.models.eulernet:EulerNet",
    "finalmlp": "recap_ctr.models.finalmlp:FinalMLP",
    "final": "recap_ctr.models.final:FINAL",
    "rfm": "recap_ctr.models.rfm:RFM",
    "qnn": "recap_ctr.models.qnn:QNN",
    "lr": "recap_ctr.models.lr:LR",
    "dnn": "recap_ctr.models.dnn:DNN",
    "pnn": "recap_ctr.models.pnn:PNN",
    "fm": "recap_ctr.models.fm:FM",
    "wide-deep": "recap_ctr.models.wide_deep:WideDeep",
    "deepfm": "recap_ctr.models.deepfm:DeepFM",
    "dcn": "recap_ctr.models.dcn:DCN",
    "xdeepfm": "recap_ctr.models.xdeepfm:XDeepFM",
    "dcnv2": "recap_ctr.models.dcnv2:DCNv2",
    "autoint": "recap_ctr.models.autoint:AutoInt",
    "afn": "recap_ctr.models.afn:AFN",
}


def model_class(name: str) -> type["nn.Module"]:
    if name not in MODELS:
        raise InputError(f"no model {name!r}", fix=f"known are {', '.join(MODELS)}")
    module, _, attribute = MODELS[name].partition(":")
    return cast("type[nn.Module]", getattr(import_module(module), attribute))


def purpose(name: str) -> str:
    """What a model is good for, in one line."""
    return (model_class(name).__doc__ or "").strip().partition("\n")[0]


def paper(name: str) -> str:
    """Where a model comes from."""
    return str(getattr(model_class(name), "paper", ""))


def parse_model(name: str, settings: dict[str, Any]) -> Frozen:
    """The model's config from plain values; every name is checked."""
    kind: type[Frozen] = model_class(name).__init__.__annotations__["config"]
    return parse(kind, settings, f"model {name}")


def build(name: str, config: Frozen, layout: Layout) -> "nn.Module":
    """A freshly initialised model; initial weights follow torch's global seed."""
    return model_class(name)(config, layout)


def count_parameters(name: str, config: Frozen, layout: Layout) -> int:
    """Trainable scalars, PAD rows included, without allocating them."""
    import torch

    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build(name, config, layout).parameters())
