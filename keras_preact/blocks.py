"""F's weights as data: the blocks that a residual unit is made of, and the options that
each has.
"""

import dataclasses
from collections.abc import Mapping
from fractions import Fraction
from types import MappingProxyType

from keras_preact import _layers


@dataclasses.dataclass(frozen=True)
class Block:
    """The weights of a residual branch.

    Args:
        kernels: Kernel size of each weight in turn; None is a dense layer,
            `"attention"` self-attention over the tokens.
        expansion: Channels that the unit returns, as a multiple of `filters`.
        hidden: Channels between the weights, as a multiple of `filters`.
        multiple: Of which the channels between the weights are one, rounded up.
        gated: Whether a second weight stands beside each one but the last, and
            multiplies what stands behind that.
        activation: The one that belongs to the block; None for the unit's.
    """

    kernels: tuple[_layers.KernelSize, ...]
    expansion: int = 1
    hidden: Fraction = Fraction(1)
    multiple: int = 1
    gated: bool = False
    activation: str | None = None

    @property
    def is_dense(self) -> bool:
        """Whether it works on features that stand last, without a convolution."""
        return not isinstance(self.kernels[0], int)

    @property
    def attends(self) -> bool:
        return _layers.ATTENTION in self.kernels

    @property
    def inputs(self) -> tuple[str, range]:
        """What it takes, in words, and with how many dimensions."""
        return _INPUTS[_layers.weight_name(self.kernels[0])]


_INPUTS = {
    "conv": ("(batch, height, width, channels)", range(4, 5)),
    "dense": ("(batch, ..., features)", range(2, 100)),
    "attention": ("(batch, tokens, features)", range(3, 4)),
}

#: Name to `Block`. `single` is the 1-layer skip of Table 3. The last three are a transformer's:
#: arXiv 1706.03762, Sec. 3.2 and 3.3; arXiv 2002.05202 with 2/3 of an MLP's width, as there, so
#: that three matrices have the size of its two.
BLOCKS: Mapping[str, Block] = MappingProxyType(
    {
        "basic": Block((3, 3)),
        "bottleneck": Block((1, 3, 1), expansion=4),
        "dense": Block((None, None)),
        "single": Block((3,)),
        "attention": Block((_layers.ATTENTION,)),
        "mlp": Block((None, None), hidden=Fraction(4)),
        "swiglu": Block(
            (None, None), hidden=Fraction(8, 3), multiple=8, gated=True, activation="silu"
        ),
    }
)


def check_options(unit) -> None:
    """Refuse options of a residual unit that its block does not have, or that
    contradict each other.
    """
    if unit.block != "bottleneck" and (unit.groups, unit.base_width) != (1, 64):
        raise ValueError(
            "`groups` and `base_width` shape the 3x3 convolution of a bottleneck: use "
            f"block='bottleneck'. Received: block={unit.block!r}, groups={unit.groups}, "
            f"base_width={unit.base_width}"
        )
    if unit.width < 1:
        raise ValueError(
            "`base_width` leaves the 3x3 convolution no channel: int(filters * base_width / 64) "
            f"must be at least 1. Received: filters={unit.filters}, base_width={unit.base_width}"
        )
    if (
        unit.dropout
        and unit.dropout_at == "between_weights"
        and len(unit.branch_block.kernels) == 1
    ):
        raise ValueError(
            f"block={unit.block!r} has one weight and nothing between weights: use "
            f"dropout_at='before_addition'. Received: dropout={unit.dropout}, "
            f"dropout_at={unit.dropout_at!r}"
        )
    if unit.branch_block.is_dense:
        _refuse_spatial(unit)
    if unit.strides > 1 and unit.dilation > 1:
        raise ValueError(
            "A unit on a dilated grid has its strides as dilation too: give dilated_strides in "
            f"place of strides. Received: strides={unit.strides}, dilation={unit.dilation}"
        )
    if unit.dilated_strides > 1 and unit.downsampling != "strided":
        raise ValueError(
            "Only downsampling='strided' can become dilation: pooled maps have no values in "
            f"between. Received: downsampling={unit.downsampling!r}, "
            f"dilated_strides={unit.dilated_strides}"
        )
    if unit.hidden is not None and (
        len(unit.branch_block.kernels) < 2 or not unit.branch_block.is_dense
    ):
        blocks = " or ".join(
            repr(name) for name, row in BLOCKS.items() if row.is_dense and len(row.kernels) > 1
        )
        raise ValueError(
            f"`hidden` is the width between two dense layers: use it with block={blocks}. "
            f"Received: block={unit.block!r}, hidden={unit.hidden}"
        )
    if not unit.branch_block.attends and (unit.num_heads, unit.causal) != (1, False):
        raise ValueError(
            "`num_heads` and `causal` shape attention: use block='attention'. "
            f"Received: block={unit.block!r}, num_heads={unit.num_heads}, causal={unit.causal}"
        )
    if unit.filters % unit.num_heads:
        raise ValueError(
            "The heads share the features: `filters` must be a multiple of `num_heads`. "
            f"Received: filters={unit.filters}, num_heads={unit.num_heads}"
        )
    if unit.zero_init_last and unit.arrangement.last[-1:] == ("activation",):
        raise ValueError(
            "zero_init_last=True would leave F at 0 for ever: the activation at its end has no "
            f"gradient there. Received: arrangement with last={unit.arrangement.last}"
        )


#: Options that work on height and width, and the values that leave them out.
_SPATIAL = {
    "strides": 1,
    "dilation": 1,
    "dilated_strides": 1,
    "downsampling": "strided",
    "squeeze_excitation": None,
    "standardize_weights": False,
}


def _refuse_spatial(unit) -> None:
    if given := [
        f"{name}={getattr(unit, name)!r}"
        for name, left_out in _SPATIAL.items()
        if getattr(unit, name) != left_out
    ]:
        raise ValueError(
            f"block={unit.block!r} works on vectors and has no {', '.join(_SPATIAL)}. Received: "
            f"{', '.join(given)}"
        )
