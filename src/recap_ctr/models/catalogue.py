"""All models by name. A model is one file here, one line in `MODELS`, and one TOML of settings per benchmark.

One that lives elsewhere goes by its dotted name, such as my_ctr.nets:Pairs (docs/extending.md).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

from recap_ctr.config import Frozen, parse
from recap_ctr.data.layout import Layout
from recap_ctr.errors import InputError
from recap_ctr.plugins import is_dotted, load

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
    if is_dotted(name):
        return _outside(name)
    if name not in MODELS:
        raise InputError(f"no model {name!r}", fix=f"known are {', '.join(MODELS)}, or package.module:Name")
    module, _, attribute = MODELS[name].partition(":")
    return cast("type[nn.Module]", getattr(import_module(module), attribute))


def _outside(name: str) -> type["nn.Module"]:
    """A model of somebody else's, held to what ours are."""
    from torch import nn

    found = load(name, "model")
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise InputError(f"model {name!r} is no torch.nn.Module")
    kind = _config_kind(found)
    if not issubclass(kind, Frozen):
        raise InputError(
            f"model {name!r}: its __init__ doesn't say that `config` is a record, a recap_ctr.config.Frozen",
            fix="write class Settings(Frozen), and def __init__(self, config: Settings, layout: Layout)",
        )
    if "loss" not in kind.model_fields:
        raise InputError(
            f"model {name!r}: {kind.__name__} has no setting `loss`", fix='add loss: str = "bce"'
        )
    return found


def _config_kind(model: type["nn.Module"]) -> type:
    """What a constructor takes as `config`; under `from __future__ import annotations` that is a text."""
    kind = model.__init__.__annotations__.get("config", object)
    kind = model.__init__.__globals__.get(kind, object) if isinstance(kind, str) else kind
    return kind if isinstance(kind, type) else object


def short_name(name: str) -> str:
    """A model's name for files and tables: of one from outside its class, unless that is a name of ours.

    >>> short_name("wide-deep"), short_name("my_ctr.nets:Pairs"), short_name("my_ctr.nets:FCN")
    ('wide-deep', 'pairs', 'my_ctr.nets.fcn')
    """
    if not is_dotted(name):
        return name
    short = name.rpartition(":")[2].lower()
    return name.replace(":", ".").lower() if short in MODELS else short


def purpose(name: str) -> str:
    """What a model is good for, in one line."""
    return (model_class(name).__doc__ or "").strip().partition("\n")[0]


def paper(name: str) -> str:
    """Where a model comes from."""
    return str(getattr(model_class(name), "paper", ""))


def catalogue() -> list[dict[str, Any]]:
    """All of `MODELS`, with the number of parameters that each has on MovieLens-1M by default."""
    # PAD and OOV included, as in the published split.
    vocabularies = {
        "UserID": 6_042, "Gender": 4, "Age": 9, "Occupation": 23, "MovieID": 3_643, "Release": 10, "Genres": 20,
    }  # fmt: skip
    layout = Layout.of_sizes(list(vocabularies.values()))
    return [
        {
            "name": name,
            "parameters": count_parameters(name, parse_model(name, {}), layout),
            "purpose": purpose(name),
            "paper": paper(name),
        }
        for name in MODELS
    ]


def parse_model(name: str, settings: dict[str, Any]) -> Frozen:
    """The model's config from plain values; every name is checked."""
    config = parse(config_class(name), settings, f"model {name}")
    if is_dotted(name):  # our own allow no other losses than there are
        from recap_ctr.nn.losses import LOSSES

        if (loss := dict(config)["loss"]) not in LOSSES:
            raise InputError(f"model {name}: no loss {loss!r}", fix=f"known are {', '.join(LOSSES)}")
    return config


def config_class(name: str) -> type[Frozen]:
    """The record of a model's settings."""
    return cast("type[Frozen]", _config_kind(model_class(name)))


def build(name: str, config: Frozen, layout: Layout) -> "nn.Module":
    """A freshly initialised model; initial weights follow torch's global seed."""
    return model_class(name)(config, layout)


def count_parameters(name: str, config: Frozen, layout: Layout) -> int:
    """Trainable scalars, PAD rows included, without allocating them."""
    import torch

    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build(name, config, layout).parameters())
