"""Published results of the papers' residual networks of 20 to 1001 layers: the error of
each, and how to build it here.

Tables 1, 2, 3 and 5 of arXiv 1603.05027; the rows of its Table 4 that are about this
paper's networks and not in Table 3; and the rows of 20 to 110 layers of Table 6 of
arXiv 1512.03385. Rows about other authors' networks are not included. All were checked
against full-text copies. Numbers that only summaries on the web give are left out, so
`bn_only_preactivation` has no row.

Errors are test errors in percent. A row that the paper prints as "fail", an error over
20 %, has `error=None`.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from keras_preact import _checks
from keras_preact._read_only import ReadOnly

PAPER = "arXiv 1603.05027"
FIRST_PAPER = "arXiv 1512.03385"
MEDIAN = "median of 5"


@dataclasses.dataclass(frozen=True)
class Result:
    """A row of a published table, and the arguments that build its network.

    Args:
        table: `"1"` to `"5"` of arXiv 1603.05027, or `"6 of 1512.03385"`.
        row: The row's label within the table.
        dataset: `"cifar10"`, `"cifar100"` or `"imagenet"`.
        network: Name, such as `"ResNet-110"`.
        builder: Name of a function of `kp.models`.
        arguments: Arguments of that function, as JSON can store them.
        error: Top-1 test error in percent; None for "fail", an error over 20 %.
        top5: Top-5 test error in percent.
        mean, std: Mean and standard deviation over the runs, in percent.
        statistic: Meaning of `error`, such as `"median of 5"` runs.
        remark: Further text of the row, and what is unconfirmed.
        source: Paper and table.

    Example:

    >>> import keras_preact as kp
    >>> [row] = kp.published.results(table="2", network="ResNet-110")[-1:]
    >>> row.error, row.builder, dict(row.arguments)
    (6.37, 'resnet_cifar', {'depth': 110, 'arrangement': 'full_preactivation'})
    """

    table: str
    row: str
    dataset: str
    network: str
    builder: str
    arguments: Mapping[str, Any] = dataclasses.field(hash=False)
    error: float | None
    top5: float | None = None
    mean: float | None = None
    std: float | None = None
    statistic: str = MEDIAN
    remark: str = ""
    source: str = PAPER

    def __post_init__(self) -> None:
        object.__setattr__(self, "arguments", ReadOnly(self.arguments))


def _scaling(shortcut: float, residual: float) -> dict:
    """Return `kp.shortcuts.ConstantScaling(shortcut, residual)` as a config, which
    builders take too.
    """
    return {
        "module": "keras_preact.shortcuts",
        "class_name": "ConstantScaling",
        "registered_name": "keras_preact>ConstantScaling",
        "config": {"shortcut": shortcut, "residual": residual},
    }


def _gate(shortcut: str, bias: float) -> dict:
    return {"shortcut": shortcut, "gate_bias": bias}


# Label with the factors on the shortcut and on F, and the gate bias for a gate; arguments for the
# shortcut; error; remark.
_EXCLUSIVE = "exclusive gating (1-g(x), g(x)), b_g = "
_SHORTCUT_ONLY = "shortcut-only gating (1-g(x), 1), b_g = "
_RANGE = "b_g from 0 to -5 in one row; the arguments hold 0"
_SHORTCUTS: tuple[tuple[str, dict, float | None, str], ...] = (
    ("identity (1, 1)", {}, 6.61, ""),
    ("constant scaling (0, 1)", {"shortcut": "none"}, None, "plain net"),
    ("constant scaling (0.5, 1)", {"shortcut": _scaling(0.5, 1.0)}, None, ""),
    ("constant scaling (0.5, 0.5)", {"shortcut": _scaling(0.5, 0.5)}, 12.35, ""),
    (f"{_EXCLUSIVE}0 to -5", _gate("exclusive_gating", 0.0), None, _RANGE),
    (f"{_EXCLUSIVE}-6", _gate("exclusive_gating", -6.0), 8.70, ""),
    (f"{_EXCLUSIVE}-7", _gate("exclusive_gating", -7.0), 9.81, ""),
    (f"{_SHORTCUT_ONLY}0", _gate("shortcut_only_gating", 0.0), 12.86, ""),
    (f"{_SHORTCUT_ONLY}-6", _gate("shortcut_only_gating", -6.0), 6.91, ""),
    ("1x1 convolution (1x1 conv, 1)", {"shortcut": "conv1x1"}, 12.22, "option C"),
    ("dropout (dropout 0.5, 1)", {"shortcut": "dropout"}, None, ""),
)

# Arrangement, error of ResNet-110, error of ResNet-164.
_ARRANGEMENTS = (
    ("original", 6.61, 5.93),
    ("bn_after_addition", 8.17, 6.50),
    ("relu_before_addition", 7.84, 6.14),
    ("relu_only_preactivation", 6.71, 5.91),
    ("full_preactivation", 6.37, 5.46),
)

_SINGLE = (
    "unconfirmed: the paper does not describe this net's layout; 36 units of one convolution a "
    "stage (3n+2) are assumed"
)
# Data set, network, arguments, error of the original, error of full pre-activation, then fields of
# the latter's row.
_GAINS: tuple[tuple[str, str, dict, float, float, dict], ...] = (
    ("cifar10", "ResNet-110, 1-layer skip", {"depth": 110, "block": "single"}, 9.90, 8.91, {}),
    ("cifar10", "ResNet-110", {"depth": 110}, 6.61, 6.37, {}),
    ("cifar10", "ResNet-164", {"depth": 164}, 5.93, 5.46, {}),
    ("cifar10", "ResNet-1001", {"depth": 1001}, 7.61, 4.92, {"mean": 4.89, "std": 0.14}),
    ("cifar100", "ResNet-164", {"depth": 164, "classes": 100}, 25.16, 24.33, {}),
    (
        "cifar100",
        "ResNet-1001",
        {"depth": 1001, "classes": 100},
        27.82,
        22.71,
        {"mean": 22.68, "std": 0.22},
    ),
)

_SCALE_AND_ASPECT = "trained with scale and aspect-ratio augmentation"
# Depth, arrangement, size in the test, top-1 error, top-5 error, remark.
_IMAGENET = (
    (152, "original", 224, 23.0, 6.7, ""),
    (152, "original", 320, 21.3, 5.5, ""),
    (152, "full_preactivation", 320, 21.1, 5.5, ""),
    (200, "original", 320, 21.8, 6.0, ""),
    (200, "full_preactivation", 320, 20.7, 5.3, ""),
    (200, "full_preactivation", 320, 20.1, 4.8, _SCALE_AND_ASPECT),
)

# Depth, error, further fields.
_FIRST_PAPER: tuple[tuple[int, float, dict], ...] = (
    (20, 8.75, {}),
    (32, 7.51, {}),
    (44, 7.17, {}),
    (56, 6.97, {}),
    (110, 6.43, {"statistic": "best of 5", "mean": 6.61, "std": 0.16}),
)


def _rows() -> Iterator[Result]:
    def cifar(
        table: str, row: str, network: str, arguments: dict, error: float | None, **fields
    ) -> Result:
        fields = {"dataset": "cifar10", "source": f"{PAPER}, Table {table}"} | fields
        return Result(
            table=table,
            row=row,
            network=network,
            builder="resnet_cifar",
            arguments=arguments,
            error=error,
            **fields,
        )

    for label, shortcut, error, remark in _SHORTCUTS:
        arguments = {"depth": 110, "arrangement": "original", **shortcut}
        yield cifar("1", label, "ResNet-110", arguments, error, remark=remark)

    for arrangement, *errors in _ARRANGEMENTS:
        for depth, error in zip((110, 164), errors, strict=True):
            yield cifar(
                "2",
                arrangement,
                f"ResNet-{depth}",
                {"depth": depth, "arrangement": arrangement},
                error,
            )

    for dataset, network, arguments, original, preactivation, fields in _GAINS:
        both = {"dataset": dataset, "remark": _SINGLE if "block" in arguments else ""}
        yield cifar(
            "3", "original", network, arguments | {"arrangement": "original"}, original, **both
        )
        if "mean" in fields:
            both["source"] = f"{PAPER}, Tables 3 and 4"
        arguments = arguments | {"arrangement": "full_preactivation"}
        yield cifar("3", "full_preactivation", network, arguments, preactivation, **both, **fields)

    yield cifar(
        "4",
        "full_preactivation, batch 64",
        "ResNet-1001",
        {"depth": 1001, "arrangement": "full_preactivation"},
        4.62,
        mean=4.69,
        std=0.20,
        remark="batch 64, 200 epochs, drops at epochs 81 and 122, Nesterov",
    )

    for depth, arrangement, size, error, top5, remark in _IMAGENET:
        yield Result(
            table="5",
            row=f"{arrangement}, tested at {size}",
            dataset="imagenet",
            network=f"ResNet-{depth}",
            builder="resnet_imagenet",
            arguments={"depth": depth, "arrangement": arrangement},
            error=error,
            top5=top5,
            statistic="single crop",
            remark="; ".join(filter(None, ["trained at 224", remark])),
            source=f"{PAPER}, Table 5",
        )

    for depth, error, fields in _FIRST_PAPER:
        fields = {"statistic": "not stated", "source": f"{FIRST_PAPER}, Table 6"} | fields
        arguments = {"depth": depth, "arrangement": "original"}
        yield cifar("6 of 1512.03385", "original", f"ResNet-{depth}", arguments, error, **fields)


#: Every row, table by table.
RESULTS: tuple[Result, ...] = tuple(_rows())


class ParameterCount(NamedTuple):
    """Numbers of trainable parameters: in all layers, and in the convolutions and the
    classifier only.
    """

    trainable: int
    conv_and_classifier: int


#: Network to its exact counts with 10 classes, for basic blocks with option A in any arrangement
#: and for bottlenecks with full pre-activation.
PARAMETER_COUNTS: Mapping[str, ParameterCount] = MappingProxyType(
    {
        "ResNet-20": ParameterCount(269_722, 268_346),
        "ResNet-32": ParameterCount(464_154, 461_882),
        "ResNet-44": ParameterCount(658_586, 655_418),
        "ResNet-56": ParameterCount(853_018, 848_954),
        "ResNet-110": ParameterCount(1_727_962, 1_719_866),
        "ResNet-1202": ParameterCount(19_421_274, 19_331_642),
        "ResNet-164": ParameterCount(1_703_258, 1_679_034),
        "ResNet-1001": ParameterCount(10_327_706, 10_178_490),
    }
)


def results(
    table: str | None = None, network: str | None = None, dataset: str | None = None
) -> tuple[Result, ...]:
    """Return the published rows with these values, in the order of the tables.

    Args:
        table, network, dataset: See `Result`; None for any.

    Raises:
        ValueError: for a value that no row has; the message names the nearest ones.

    Example:

    >>> import keras_preact as kp
    >>> for row in kp.published.results(table="3", network="ResNet-1001", dataset="cifar10"):
    ...     print(row.row, row.error)
    original 7.61
    full_preactivation 4.92
    """
    wanted = {"table": table, "network": network, "dataset": dataset}
    wanted = {field: value for field, value in wanted.items() if value is not None}
    for field, value in wanted.items():
        _checks.lookup({getattr(row, field): None for row in RESULTS}, value, field)
    return tuple(
        row
        for row in RESULTS
        if all(getattr(row, field) == value for field, value in wanted.items())
    )


def to_markdown(rows: str | Iterable[Result]) -> str:
    """Return published rows as a Markdown table.

    Args:
        rows: Rows, such as `results` returns, or the name of a table for all of its
            rows.

    Raises:
        ValueError: for an unknown name of a table.

    Example:

    >>> import keras_preact as kp
    >>> print(kp.published.to_markdown(kp.published.results(table="5", network="ResNet-200")[:1]))
    | table | data | network | row | error % | remark |
    |---|---|---|---|---|---|
    | 5 | imagenet | ResNet-200 | original, tested at 320 | 21.8 / 6.0 | trained at 224 |
    """
    lines = ["| table | data | network | row | error % | remark |", "|---|---|---|---|---|---|"]
    for result in results(table=rows) if isinstance(rows, str) else rows:
        cells = (
            result.table,
            result.dataset,
            result.network,
            result.row,
            _format_error(result),
            result.remark,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _format_error(result: Result) -> str:
    if result.error is None:
        return "fail (> 20)"
    if result.top5 is not None:
        return f"{result.error:.1f} / {result.top5:.1f}"
    return f"{result.error:.2f}" + (
        f" ({result.mean:.2f} +- {result.std:.2f})" if result.mean is not None else ""
    )
