"""TransformerUnit: a layer of a transformer, made of two residual units."""

import keras

from keras_preact import _checks, blocks, initializers, shortcuts
from keras_preact._inside import HoldsLayers
from keras_preact._objects import in_config
from keras_preact.arrangements import Arrangement
from keras_preact.layers import chains
from keras_preact.units import ResidualUnit


@keras.saving.register_keras_serializable("keras_preact")
class TransformerUnit(HoldsLayers, chains.SameShape):
    """A layer of a transformer, made of two `ResidualUnit`s: `x + Attention(LN(x))`,
    then `x + MLP(LN(x))`.

    Args:
        width: Features of a token.
        num_heads: Number of attention heads; divides `width`.
        arrangement: `"pre_norm"` (as above: nothing is on the path from x to the output),
            `"post_norm"` (`LN(x + F(x))`, as in the first transformers), `"peri_norm"`
            (`x + LN(F(LN(x)))`, arXiv 2502.02732), or an `Arrangement`.
        shortcut: h of both units, see `ResidualUnit`.
        mlp: `"swiglu"` (arXiv 2002.05202), or the activation of an MLP of two dense
            layers.
        hidden: Width inside the MLP. None: `4 * width`; with `"swiglu"` it is
            `8/3 * width`, rounded up to a multiple of 8.
        normalization: `"layer"`, `"rms"`, or any other of `ResidualUnit`.
        dropout: Rate of the dropout at the end of both branches.
        dropout_varies: Whether this rate can change in training, see `ResidualUnit`.
        stochastic_depth: Rate at which each branch is dropped, see `ResidualUnit`;
            attention and MLP are dropped independently.
        causal: Whether a token sees only itself and the tokens before it.
        use_bias: Whether the dense layers have a bias.
        bias_initializer, kernel_initializer, kernel_regularizer, seed: See
            `ResidualUnit`; attention and MLP have seeds of their own. Without
            `kernel_initializer` the kernels start with Glorot's normal, as in arXiv
            2002.04745.
        **kwargs: `name`, `dtype`, `trainable`.

    Attributes:
        attention, mlp: The units.
        units: Both, in order.

    Input and output: `(batch, tokens, width)`.

    Raises:
        ValueError: as `ResidualUnit`, and for an input of another width.

    Example:

    >>> import numpy as np
    >>> import keras_preact as kp
    >>> unit = kp.TransformerUnit(16, num_heads=4, mlp="swiglu", normalization="rms")
    >>> tuple(unit(np.zeros((2, 9, 16), "float32")).shape), unit.mlp.block.channels(16)
    ((2, 9, 16), (48, 16))

    Source: Fig. 1 of arXiv 2002.04745; Sec. 3 of arXiv 1706.03762.
    """

    def __init__(
        self,
        width: int,
        *,
        num_heads: int,
        arrangement: str | Arrangement = "pre_norm",
        shortcut: str | shortcuts.Shortcut = "identity",
        mlp="gelu",
        hidden: int | None = None,
        normalization: str | keras.Layer = "layer",
        dropout: float = 0.0,
        dropout_varies: bool = False,
        stochastic_depth: float | None = None,
        causal: bool = False,
        use_bias: bool = True,
        bias_initializer="zeros",
        kernel_initializer=None,
        kernel_regularizer=None,
        seed: int | None = None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        kernel = "glorot_normal" if kernel_initializer is None else kernel_initializer
        self.h = shortcuts.get(shortcut)
        self.seed = _checks.plain(seed)
        self.kernel_initializer = initializers.seeded(keras.initializers.get(kernel), seed)
        self.bias_initializer = initializers.seeded(keras.initializers.get(bias_initializer), seed)

        def unit(name: str, **options) -> ResidualUnit:
            return ResidualUnit(
                width,
                arrangement=arrangement,
                shortcut=self.h.at(name),
                normalization=normalization,
                dropout=dropout,
                dropout_at="before_addition",
                dropout_varies=dropout_varies,
                stochastic_depth=stochastic_depth,
                use_bias=use_bias,
                bias_initializer=initializers.spawn(self.bias_initializer, name),
                kernel_initializer=initializers.spawn(self.kernel_initializer, name),
                kernel_regularizer=kernel_regularizer,
                seed=None if seed is None else initializers.derive_seed(seed, name),
                name=name,
                dtype=self.dtype_policy,
                trainable=self.trainable,
                **options,
            )

        self.attention = unit(
            "attention", block=blocks.Attention(num_heads=num_heads, causal=causal)
        )
        self.mlp = (
            unit("mlp", block=blocks.SwiGLU(hidden=hidden))
            if mlp == "swiglu"
            else unit("mlp", block=blocks.MLP(hidden=hidden), activation=mlp)
        )

    @property
    def units(self) -> list[ResidualUnit]:
        return [self.attention, self.mlp]

    def build(self, input_shape):
        width = self.attention.filters * self.h.streams
        if input_shape[-1] != width:
            raise ValueError(
                "A token must have as many features as the unit's width, times its streams if it "
                f"has several: {width}. Received: an input of shape "
                f"{tuple(input_shape)}"
            )
        for unit in self.units:
            unit.build(input_shape)
        self.freeze_inside_again()

    def call(self, x, training=None):
        return self.mlp(self.attention(x, training=training), training=training)

    def get_config(self):
        attention, mlp = self.attention, self.mlp
        gated = isinstance(mlp.block, blocks.SwiGLU)
        config = attention.get_config()
        shared = (
            *("arrangement", "normalization", "dropout", "dropout_varies", "stochastic_depth"),
            *("use_bias", "kernel_regularizer"),
        )
        return super().get_config() | {
            "width": attention.filters,
            "num_heads": attention.block.num_heads,
            "causal": attention.block.causal,
            "mlp": "swiglu" if gated else chains.activation_config(mlp.activation),
            "hidden": mlp.block.hidden,
            **{key: config[key] for key in shared},
            "shortcut": in_config(self.h),
            "bias_initializer": in_config(self.bias_initializer),
            "kernel_initializer": in_config(self.kernel_initializer),
            "seed": self.seed,
        }
