"""The options that all builders of a `ResidualNetwork` share, for editors and type
checkers. tests/keras_preact/test_configurations.py compares them with the classes.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypedDict

import keras

from keras_preact.arrangements import Arrangement
from keras_preact.downsampling import Downsampling
from keras_preact.shortcuts import Shortcut


class NetworkOptions(TypedDict, total=False):
    """Options of `ResidualNetwork`, of its units, and of their blocks."""

    # of the network
    include_top: bool
    pooling: str | None
    classifier_activation: str | Callable | keras.Layer | None
    mean: float | Sequence[float] | None
    std: float | Sequence[float] | None
    dtype: str | keras.DTypePolicy | None
    name: str | None
    output_stride: int | None
    stacked: bool | None
    execution: str
    remat: bool | int
    unroll: int
    # of every unit
    arrangement: str | Arrangement
    shortcut: str | Shortcut
    gate_bias: float
    shape_shortcut: str
    activate_shape_shortcut: bool
    downsampling: str | Downsampling
    normalization: str | keras.Layer
    activation: str | Callable | keras.Layer
    dropout: float
    dropout_at: str
    dropout_varies: bool
    stochastic_depth: float | None
    use_bias: bool | str
    bias_initializer: Any
    kernel_initializer: Any
    kernel_regularizer: Any
    zero_init_last: bool
    data_format: str | None
    seed: int | None
    # of a block
    groups: int
    base_width: int
    squeeze_excitation: int | None
    stride_on: str
    dilation: int
    dilated_strides: int
    dimensions: int
    standardize_weights: bool
    hidden: int | None


class TransformerOptions(TypedDict, total=False):
    """Options of `TransformerNetwork` and of its units."""

    # of the network
    classifier_activation: str | Callable | keras.Layer | None
    mean: float | Sequence[float] | None
    std: float | Sequence[float] | None
    data_format: str | None
    dtype: str | keras.DTypePolicy | None
    name: str | None
    # of every unit
    arrangement: str | Arrangement
    shortcut: str | Shortcut
    mlp: str | Callable | keras.Layer
    hidden: int | None
    normalization: str | keras.Layer
    dropout: float
    dropout_varies: bool
    stochastic_depth: float | None
    causal: bool
    use_bias: bool
    bias_initializer: Any
    kernel_initializer: Any
    kernel_regularizer: Any
    seed: int | None
