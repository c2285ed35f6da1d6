"""Figures that others published. They are shown beside ours, and never used for anything else."""

from typing import NamedTuple


class Published(NamedTuple):
    """A model's published figures on one data set."""

    logloss: float
    auc: float
    """In points."""


DATASETS = ("avazu-x4", "criteo-x4", "ml-1m", "kdd12", "kkbox-x1")
SAME_SPLIT = ("avazu-x4", "criteo-x4", "kkbox-x1", "frappe-x1", "movielens-latest-x1")
"""Data sets whose published folds are known, and are those of our protocols."""
# Table 1 of the RECAP paper; its rows from DNN to RFM equal Table 4 of the FCN paper, where ECN is from.
_TABLE: dict[str, tuple[tuple[float, float], ...]] = {
    "dnn": ((0.3721, 79.27), (0.4380, 81.40), (0.3100, 90.30), (0.1502, 80.52), (0.4811, 85.01)),
    "pnn": ((0.3712, 79.44), (0.4378, 81.42), (0.3070, 90.42), (0.1504, 80.47), (0.4793, 85.15)),
    "wide-deep": ((0.3720, 79.29), (0.4376, 81.42), (0.3056, 90.45), (0.1504, 80.48), (0.4852, 85.04)),
    "deepfm": ((0.3719, 79.30), (0.4375, 81.43), (0.3073, 90.51), (0.1501, 80.60), (0.4785, 85.31)),
    "dcn": ((0.3719, 79.31), (0.4376, 81.44), (0.3156, 90.38), (0.1501, 80.59), (0.4766, 85.31)),
    "xdeepfm": ((0.3718, 79.33), (0.4376, 81.43), (0.3054, 90.47), (0.1501, 80.62), (0.4772, 85.35)),
    "autoint": ((0.3746, 79.02), (0.4390, 81.32), (0.3112, 90.45), (0.1502, 80.57), (0.4773, 85.34)),
    "afn": ((0.3726, 79.29), (0.4384, 81.38), (0.3048, 90.53), (0.1499, 80.70), (0.4842, 84.89)),
    "dcnv2": ((0.3718, 79.31), (0.4376, 81.45), (0.3098, 90.56), (0.1502, 80.59), (0.4787, 85.31)),
    "edcn": ((0.3716, 79.35), (0.4386, 81.36), (0.3073, 90.48), (0.1501, 80.62), (0.4952, 85.27)),
    "masknet": ((0.3711, 79.43), (0.4387, 81.34), (0.3080, 90.34), (0.1498, 80.79), (0.5003, 84.79)),
    "eulernet": ((0.3723, 79.22), (0.4379, 81.47), (0.3050, 90.44), (0.1498, 80.78), (0.4922, 84.27)),
    "finalmlp": ((0.3718, 79.35), (0.4373, 81.45), (0.3058, 90.52), (0.1497, 80.78), (0.4822, 85.10)),
    "final": ((0.3712, 79.41), (0.4371, 81.49), (0.3035, 90.53), (0.1498, 80.74), (0.4800, 85.14)),
    "rfm": ((0.3723, 79.24), (0.4374, 81.47), (0.3048, 90.51), (0.1506, 80.73), (0.4853, 84.70)),
    "qnn": ((0.3712, 79.47), (0.4358, 81.63), (0.2960, 90.87), (0.1506, 80.82), (0.4730, 85.76)),
    "ecn": ((0.3698, 79.65), (0.4364, 81.55), (0.3013, 90.59), (0.1496, 80.90), (0.4778, 85.40)),
    "fcn": ((0.3702, 79.66), (0.4359, 81.62), (0.3001, 90.74), (0.1494, 80.86), (0.4746, 85.72)),
    "recap": ((0.3702, 79.92), (0.4345, 81.76), (0.2951, 90.88), (0.1494, 81.41), (0.4669, 86.06)),
}


# Test figures of runs whose logs their authors or BARS made public, by the settings of benchmarks/DATA/MODEL.toml.
_LOGS: dict[str, dict[str, tuple[float, float]]] = {
    "criteo-x4": {
        "dnn": (0.438015, 81.4042),
        "pnn": (0.437840, 81.4212),
        "wide-deep": (0.437693, 81.4232),
        "deepfm": (0.437584, 81.4332),
        "dcn": (0.437612, 81.4437),
        "xdeepfm": (0.437602, 81.4331),
        "autoint": (0.439023, 81.3240),
        "afn": (0.438404, 81.3804),
        "dcnv2": (0.437631, 81.4514),
        "masknet": (0.438748, 81.3420),
        "finalmlp": (0.437353, 81.4584),
        "final": (0.437116, 81.4966),
        "eulernet": (0.437982, 81.4690),
        "qnn": (0.435862, 81.6305),
        "ecn": (0.436456, 81.5572),
        "fcn": (0.435816, 81.6216),
    },
    "avazu-x4": {
        "dnn": (0.372169, 79.2761),
        "pnn": (0.371151, 79.4385),
        "wide-deep": (0.371969, 79.2869),
        "deepfm": (0.371901, 79.2990),
        "dcn": (0.371936, 79.3061),
        "xdeepfm": (0.371780, 79.3283),
        "autoint": (0.374625, 79.0215),
        "afn": (0.372589, 79.2929),
        "dcnv2": (0.371865, 79.3146),
        "masknet": (0.371189, 79.4382),
        "finalmlp": (0.371862, 79.3537),
        "final": (0.371254, 79.4116),
        "ecn": (0.369807, 79.6564),
        "fcn": (0.369527, 79.7029),
    },
    "kkbox-x1": {
        "dnn": (0.481129, 85.0076),
        "pnn": (0.479323, 85.1470),
        "wide-deep": (0.485182, 85.0420),
        "deepfm": (0.478468, 85.3109),
        "dcn": (0.476555, 85.3114),
        "xdeepfm": (0.477164, 85.3498),
        "autoint": (0.477251, 85.3443),
        "afn": (0.484192, 84.8879),
        "qnn": (0.472954, 85.7612),
        "ecn": (0.477803, 85.4016),
        "fcn": (0.476532, 85.5714),
    },
    "ml-1m": {"ecn": (0.301351, 90.5906), "fcn": (0.301453, 90.7562), "qnn": (0.296032, 90.8781)},
    "kdd12": {"ecn": (0.149659, 80.9071), "fcn": (0.149430, 80.9823)},
    "frappe-x1": {
        "pnn": (0.154003, 98.4122),
        "wide-deep": (0.148974, 98.4124),
        "deepfm": (0.148174, 98.4243),
        "dcn": (0.152660, 98.3907),
        "xdeepfm": (0.146604, 98.4507),
        "autoint": (0.149007, 98.4812),
        "afn": (0.213933, 98.2563),
        "dcnv2": (0.149149, 98.4478),
        "edcn": (0.154740, 98.5012),
        "masknet": (0.169580, 98.3683),
        "finalmlp": (0.148415, 98.6072),
        "final": (0.131070, 98.5744),
        "eulernet": (0.131309, 98.4775),
        "qnn": (0.131329, 98.6210),
    },
    "movielens-latest-x1": {
        "pnn": (0.209455, 96.9885),
        "wide-deep": (0.216132, 96.8789),
        "deepfm": (0.213002, 96.8515),
        "dcn": (0.215987, 96.8719),
        "xdeepfm": (0.240939, 96.9674),
        "autoint": (0.214772, 96.9188),
        "afn": (0.303013, 96.4208),
        "dcnv2": (0.214736, 96.9098),
        "edcn": (0.212202, 96.7133),
        "masknet": (0.236404, 96.7201),
        "finalmlp": (0.196645, 97.1968),
        "final": (0.194088, 97.2538),
        "eulernet": (0.198821, 97.0296),
    },
}


def published(dataset: str, model: str) -> Published | None:
    """Return the published figures of a model on a data set; None if there are none.

    >>> published("ml-1m", "fcn")
    Published(logloss=0.3001, auc=90.74)
    >>> published("my-clicks", "fcn") is None
    True
    """
    if dataset not in DATASETS or model not in _TABLE:
        return None
    return Published(*_TABLE[model][DATASETS.index(dataset)])


def logged(dataset: str, model: str) -> Published | None:
    """Return what the public log of such a run says; None if there is no log.

    >>> logged("ml-1m", "qnn")
    Published(logloss=0.296032, auc=90.8781)
    >>> logged("ml-1m", "dnn") is None
    True
    """
    figures = _LOGS.get(dataset, {}).get(model)
    return None if figures is None else Published(*figures)


PAPER_ORDER = ("lr", "fm", *(name for name in _TABLE if name != "recap"), "recap")
"""Models in the order of the paper's table."""
TITLES = {
    "lr": "LR",
    "fm": "FM",
    "dnn": "DNN",
    "pnn": "PNN",
    "wide-deep": "Wide & Deep",
    "deepfm": "DeepFM",
    "dcn": "DCN",
    "xdeepfm": "xDeepFM",
    "autoint": "AutoInt+",
    "afn": "AFN+",
    "dcnv2": "DCNv2",
    "edcn": "EDCN",
    "masknet": "MaskNet",
    "eulernet": "EulerNet",
    "finalmlp": "FinalMLP",
    "final": "FINAL",
    "rfm": "RFM",
    "qnn": "QNN",
    "ecn": "ECN",
    "lcn": "LCN",
    "fcn": "FCN",
    "recap": "RECAP",
}


def title_of(model: str) -> str:
    """Return a model's name as papers write it."""
    return TITLES.get(model, model)
