"""Fig. 4 of the paper as data: the order of normalisation, activation and weights.

A residual unit is `x_{l+1} = f(h(x_l) + F(x_l))`. The six arrangements hold the same
components and differ only in their order, so each is a row of `ARRANGEMENTS`: what
comes before the first weight, between two weights, after the last weight (these three
make F) and after the addition (f). Three more columns say what the arrangement needs in
the network around its units.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, get_args

import keras

from keras_preact import _checks
from keras_preact._objects import Specification, from_table, name_or_config

Component = Literal["norm", "activation", "shift", "scale"]
Order = tuple[Component, ...]

NORM: Order = ("norm",)
ACTIVATION: Order = ("activation",)
NORM_ACTIVATION: Order = ("norm", "activation")


@keras.saving.register_keras_serializable("keras_preact")
@dataclasses.dataclass(frozen=True)
class Arrangement(Specification):
    """The order of the components in a residual unit, and of those at the start and the
    end of the network.

    Every field is a tuple of component names in the order in which they are applied:
    `"norm"`, `"activation"`, `"shift"` (adds a trained scalar) and `"scale"`
    (multiplies by a trained scalar). A single name means a tuple of one.

    Args:
        first: Components before the first weight of F.
        between: Components between two weights of F.
        last: Components after the last weight of F.
        after_addition: Components of f, which is applied to the sum.
        stem: Components between the network's first convolution and the first unit. If
            `first` is not empty, the paper's appendix applies the first activation
            right after that convolution, before the two paths split. It is then listed
            here, and the first unit is built without it (`of_first_unit`).
        head: Components between the last unit and the pooling.
        projection: Components after the 1x1 projection of a unit that changes the shape.

    Example:

    >>> from keras_preact.arrangements import ARRANGEMENTS, Arrangement
    >>> ARRANGEMENTS["full_preactivation"].first
    ('norm', 'activation')
    >>> ARRANGEMENTS["original"].after_addition
    ('activation',)

    Source: Fig. 4, Table 2 and the appendix of arXiv 1603.05027.
    """

    first: Order = ()
    between: Order = NORM_ACTIVATION
    last: Order = ()
    after_addition: Order = ()
    stem: Order = NORM_ACTIVATION
    head: Order = ()
    projection: Order = ()

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            names = getattr(self, field.name)
            components = (names,) if isinstance(names, str) else tuple(names)  # lists from JSON
            for component in components:
                _checks.one_of(component, get_args(Component), field.name)
            object.__setattr__(self, field.name, components)

    def of_first_unit(self) -> "Arrangement":
        """Return this arrangement for a network's first unit: without `first` if the
        stem ends with these components.
        """
        activated = self.stem[-len(self.first) :] == self.first
        return dataclasses.replace(self, first=()) if activated else self

    def get_config(self) -> dict:
        return {field.name: list(getattr(self, field.name)) for field in dataclasses.fields(self)}


#: Name to `Arrangement`. The last row is not in the paper: BN moved before the weights, ReLU left
#: where the original has it.
ARRANGEMENTS: Mapping[str, Arrangement] = MappingProxyType(
    {
        "original": Arrangement(last=NORM, after_addition=ACTIVATION, projection=NORM),
        "bn_after_addition": Arrangement(after_addition=NORM_ACTIVATION),
        "relu_before_addition": Arrangement(last=NORM_ACTIVATION, projection=NORM),
        "relu_only_preactivation": Arrangement(
            first=ACTIVATION, last=NORM, stem=NORM_ACTIVATION, head=ACTIVATION, projection=NORM
        ),
        "full_preactivation": Arrangement(first=NORM_ACTIVATION, head=NORM_ACTIVATION),
        "bn_only_preactivation": Arrangement(
            first=NORM,
            between=("activation", "norm"),
            after_addition=ACTIVATION,
            stem=("activation", "norm"),
            head=NORM,
        ),
    }
)

#: Full pre-activation without components after the stem's convolution: the first unit has its own
#: first activation. The paper's appendix does not do so, but keras.applications, keras-hub and timm
#: do.
RAW_STEM = dataclasses.replace(ARRANGEMENTS["full_preactivation"], stem=())

#: The same without the components before the pooling, so that the classifier reads the raw sum. The
#: paper's appendix has them; pytorch-cifar's PreActResNet18 to 152 do not.
RAW_ENDS = dataclasses.replace(RAW_STEM, head=())

#: Full pre-activation for networks without normalisation: a shift before every weight and
#: activation, a scale at the end of the branch (arXiv 1901.09321, Sec. 3; that paper has the
#: original order). `kp.initializers.Fixup` is its initialiser.
FIXUP = Arrangement(
    first=("shift", "activation", "shift"),
    between=("shift", "activation", "shift"),
    last=("scale",),
    stem=("shift", "activation", "shift"),
    head=("shift", "activation", "shift"),
)

#: Name to `Arrangement` of a transformer's units; only the activation is between their two dense
#: layers. Source: Fig. 1 of arXiv 2002.04745; `post_norm` is the order of arXiv 1706.03762,
#: `peri_norm`, which also normalises F, that of arXiv 2502.02732.
TRANSFORMER_ARRANGEMENTS: Mapping[str, Arrangement] = MappingProxyType(
    {
        "pre_norm": Arrangement(first=NORM, between=ACTIVATION, stem=(), head=NORM),
        "post_norm": Arrangement(between=ACTIVATION, after_addition=NORM, stem=()),
        "peri_norm": Arrangement(
            first=NORM, between=ACTIVATION, last=NORM, stem=(), head=NORM, projection=NORM
        ),
    }
)

_NAMED = {
    **ARRANGEMENTS,
    "full_preactivation_raw_stem": RAW_STEM,
    "full_preactivation_raw_ends": RAW_ENDS,
    **TRANSFORMER_ARRANGEMENTS,
}


def get(arrangement: str | dict | Arrangement) -> Arrangement:
    """Return the arrangement of that name, or `arrangement` itself if it is one
    already.

    Raises:
        ValueError: for an unknown name; the message holds the nearest ones.
    """
    return from_table(arrangement, Arrangement, _NAMED, "arrangement")


def serialize(arrangement: Arrangement) -> str | dict | Arrangement:
    """Return what a config holds for `arrangement`: its name if it is in a table, else
    its fields.
    """
    return name_or_config(arrangement, _NAMED)
