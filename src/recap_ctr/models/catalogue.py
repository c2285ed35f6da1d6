"""All models by name. A model is one file here and one line in `MODELS`; CONTRIBUTING.md has the other steps.

A model outside this package is named by its dotted name, such as my_ctr.nets:Pairs (docs/extending.md).
"""

from typing import TYPE_CHECKING, Any, cast

from recap_ctr.config import Frozen, parse
from recap_ctr.data.layout import Layout
from recap_ctr.errors import InputError, did_you_mean
from recap_ctr.plugins import is_dotted, load, resolve

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
PARTS = {
    "rates": "recap_ctr.models.rates:Rates",
    "boosted": "recap_ctr.models.boosted:Boosted",
    "blend": "recap_ctr.models.blend:Blend",
}
"""Models that a fit makes beside others: what they know of the training rows is counted, not learnt by steps."""


def model_class(name: str) -> type["nn.Module"]:
    """Return the class of a model, by its name in `MODELS` or by its dotted name."""
    if is_dotted(name):
        return _outside_class(name)
    if name not in MODELS and name not in PARTS:
        raise InputError(
            f"no model {name!r}{did_you_mean(name, MODELS)}",
            fix=f"choose {', '.join(MODELS)}, or package.module:Name",
        )
    return cast("type[nn.Module]", resolve({**MODELS, **PARTS}[name]))


def model_name(model: type["nn.Module"]) -> str:
    """Return the name by which `model_class` finds a class.

    >>> from recap_ctr.models.fcn import ECN
    >>> model_name(ECN)
    'ecn'
    """
    dotted = f"{model.__module__}:{model.__qualname__}"
    return next((name for name, path in {**MODELS, **PARTS}.items() if path == dotted), dotted)


def _outside_class(name: str) -> type["nn.Module"]:
    """Return the class of a model outside this package; refuse it unless it meets the rules for our own."""
    from torch import nn

    model = load(name, "model")
    if not (isinstance(model, type) and issubclass(model, nn.Module)):
        raise InputError(f"model {name!r} is not a torch.nn.Module")
    config = _config_annotation(model)
    if not issubclass(config, Frozen):
        raise InputError(
            f"model {name!r}: the parameter `config` of its __init__ is not annotated as a recap_ctr.config.Frozen",
            fix="write class Settings(Frozen), and def __init__(self, config: Settings, layout: Layout)",
        )
    if "loss" not in config.model_fields:
        raise InputError(
            f"model {name!r}: {config.__name__} has no setting `loss`", fix='add loss: str = "bce"'
        )
    return model


def _config_annotation(model: type["nn.Module"]) -> type:
    """Return the class that annotates the constructor's `config`; `object` if there is none."""
    annotation = model.__init__.__annotations__.get("config", object)
    if isinstance(annotation, str):  # from __future__ import annotations
        annotation = model.__init__.__globals__.get(annotation, object)
    return annotation if isinstance(annotation, type) else object


def short_name(name: str) -> str:
    """Return a model's name for files and tables; for one outside this package, its class in lower case.

    If that is already a name in `MODELS`, the module is part of the short name too.

    >>> short_name("wide-deep"), short_name("my_ctr.nets:Pairs"), short_name("my_ctr.nets:FCN")
    ('wide-deep', 'pairs', 'my_ctr.nets.fcn')
    """
    if not is_dotted(name):
        return name
    short = name.rpartition(":")[2].lower()
    return name.replace(":", ".").lower() if short in MODELS else short


def purpose(name: str) -> str:
    """Return what a model is good for: the first line of its docstring."""
    return (model_class(name).__doc__ or "").strip().partition("\n")[0]


def paper(name: str) -> str:
    """Return the publication that a model comes from."""
    return str(getattr(model_class(name), "paper", ""))


def catalogue() -> list[dict[str, Any]]:
    """Return a record of each entry of `MODELS`, with its default number of parameters on MovieLens-1M."""
    # Sizes include PAD and OOV, as in the published split.
    vocabularies = {
        "UserID": 6_042,
        "Gender": 4,
        "Age": 9,
        "Occupation": 23,
        "MovieID": 3_643,
        "Release": 10,
        "Genres": 20,
    }
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
    """Return the config of a model from plain values; refuse unknown names and wrong values."""
    config = parse(config_class(name), settings, f"model {name}")
    if is_dotted(name):  # the configs of our own models allow only losses that exist
        from recap_ctr.nn.losses import LOSSES

        if (loss := dict(config)["loss"]) not in LOSSES:
            raise InputError(f"model {name}: no loss {loss!r}", fix=f"choose {', '.join(LOSSES)}")
    return config


def config_class(name: str) -> type[Frozen]:
    """Return the class of a model's config."""
    return cast("type[Frozen]", _config_annotation(model_class(name)))


def build(name: str, config: Frozen, layout: Layout) -> "nn.Module":
    """Return a new model; its initial weights follow torch's global seed."""
    return model_class(name)(config, layout)


def count_parameters(name: str, config: Frozen, layout: Layout) -> int:
    """Return the number of trainable parameters, PAD rows included, without allocating them.

    An entry of a table of rates counts as one, since it takes as many bytes; and so does each number of a tree.
    """
    import torch

    from recap_ctr.nn.group import alone
    from recap_ctr.nn.rates import RateTable
    from recap_ctr.nn.trees import Forest

    with alone(), torch.device("meta"):
        model = build(name, config, layout)
    modules = list(model.modules())
    rates = sum(module.weight.numel() for module in modules if isinstance(module, RateTable))
    forests = [module.state_dict() for module in modules if isinstance(module, Forest)]
    trees: int = sum(tensor.numel() for forest in forests for tensor in forest.values())
    return rates + trees + sum(parameter.numel() for parameter in model.parameters())
