"""Which options of a residual unit are valid, and which fit together."""

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import keras

from keras_preact import _checks, blocks, shortcuts
from keras_preact.downsampling import serialize
from keras_preact.layers import chains
from keras_preact.layers.components import UNLESS_NORM


def check(unit: keras.Layer) -> None:
    """Check the options of a `ResidualUnit`, alone and together.

    Raises:
        ValueError: for the first wrong option.
    """
    _checks.positive_int(unit.filters, "filters")
    _checks.positive_int(unit.strides, "strides")
    _checks.one_of(unit.shape_shortcut, ("auto", "projection", "zero_pad"), "shape_shortcut")
    _checks.fraction(unit.dropout, "dropout")
    _checks.one_of(unit.dropout_at, ("between_weights", "before_addition"), "dropout_at")
    for name in ("activate_shape_shortcut", "dropout_varies", "zero_init_last"):
        _checks.flag(getattr(unit, name), name)
    if unit.stochastic_depth is not None:
        _checks.fraction(unit.stochastic_depth, "stochastic_depth")
    _checks.one_of(unit.use_bias, (True, False, UNLESS_NORM), "use_bias")
    _check_branch(unit)
    _check_strides(unit)


def _check_branch(unit: keras.Layer) -> None:
    block = unit.block
    weights = len(block.channels(unit.filters))
    has_dropout = unit.dropout or unit.dropout_varies
    if has_dropout and unit.dropout_at == "between_weights" and weights == 1:
        raise ValueError(
            f"block={block.name!r} has one weight and nothing between weights: use "
            f"dropout_at='before_addition'. Received: dropout={unit.dropout}, "
            f"dropout_at={unit.dropout_at!r}, dropout_varies={unit.dropout_varies!r}"
        )
    if unit.zero_init_last and unit.arrangement.last[-1:] == ("activation",):
        raise ValueError(
            "zero_init_last=True would keep F at 0 for ever: the activation at its end has no "
            f"gradient there. Received: arrangement with last={unit.arrangement.last}"
        )
    # relu is the default
    allowed = (block.activation, "relu")
    if block.activation and unit.activation not in map(keras.activations.get, allowed):
        raise ValueError(
            f"block={block.name!r} has the activation {block.activation!r}: leave `activation` "
            f"out. Received: activation={chains.activation_config(unit.activation)!r}"
        )


def _check_strides(unit: keras.Layer) -> None:
    block, downsampling = unit.block, serialize(unit.downsampling)
    if block.strided is None and (unit.strides, downsampling) != (1, "strided"):
        raise ValueError(
            f"block={block.name!r} works on features and has no strides and no downsampling: "
            f"leave both out. Received: strides={unit.strides}, downsampling={downsampling!r}"
        )
    if not isinstance(block, blocks.Convolutional):
        return
    if block.dimensions == 1 and "blur" in unit.downsampling.get_config().values():
        raise ValueError(
            "A blur needs a map of 2 pixels or more in both directions: choose another "
            f"downsampling for sequences. Received: downsampling={downsampling!r} with a block of "
            "dimensions=1"
        )
    if unit.strides > 1 and block.dilation > 1:
        raise ValueError(
            "A unit with dilation must have its strides as dilation too: give dilated_strides "
            f"instead of strides. Received: strides={unit.strides}, dilation={block.dilation}"
        )
    if block.dilated_strides > 1 and downsampling not in ("strided", "average"):
        raise ValueError(
            "Only downsampling='strided' and 'average' can become dilation; a blur and a maximum "
            f"cannot. Received: downsampling={downsampling!r}, "
            f"dilated_strides={block.dilated_strides}"
        )


def check_names(given: Iterable[str], known: Collection[str]) -> None:
    """Refuse options of a network's units that are not among the `known` ones.

    Raises:
        ValueError: the message names the nearest options, or the block that has this
            option.
    """
    for name in given:
        if name in known:
            continue
        suggestions = [
            f"kp.blocks.{block.__name__}({name}=...)"
            for block in blocks.BLOCKS.values()
            if name in blocks.options_of(block)
        ]
        if suggestions:
            raise ValueError(
                f"A residual unit has no option {name!r}. It is an option of a block: "
                f"block={' or '.join(suggestions)}."
            )
        raise ValueError(_checks.unknown_option(name, known))


def nested(block: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a unit from the options of a network.

    A network also takes the options of a block and the bias of a gate by name. They are
    moved into the block and the shortcut.
    """
    options = dict(options)
    block = blocks.get(block)
    block_options = {name: options.pop(name) for name in blocks.options_of(block) & options.keys()}
    gate_bias = options.pop("gate_bias", None)
    if gate_bias is not None:
        options["shortcut"] = shortcuts.get(options.get("shortcut", "identity"), gate_bias)
    return {**options, "block": dataclasses.replace(block, **block_options)}
