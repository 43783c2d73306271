"""Multi-head self-attention as the weight layer of a residual branch."""

import keras
from keras import ops

from keras_preact import initializers


class SelfAttention(keras.Layer):
    """In each head `softmax(Q K^T / sqrt(size)) V`, then a dense layer over all heads.

    Keras' `MultiHeadAttention` initialises query, key and value alike if its initialiser
    has a seed, does not tell an initialiser for depth which weight is the last of the
    branch, and has no forward derivative on PyTorch.

    Args:
        filters: Features out, `num_heads` times the size of a head.
        num_heads: Number of heads.
        causal: Whether a token sees only itself and the tokens before it.
        use_bias, kernel_initializer, bias_initializer: Arguments of the four dense
            layers; each draws its own values. The one after the heads is the last
            weight of its branch, the three before them are the first.

    Input: `(batch, tokens, features)`, output: `(batch, tokens, filters)`.

    Source: Sec. 3.2 of arXiv 1706.03762.
    """

    def __init__(
        self,
        filters,
        num_heads,
        *,
        causal,
        use_bias,
        kernel_initializer,
        bias_initializer,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.filters = filters
        self.num_heads = num_heads
        self.causal = causal

        def projection(name: str, index: int) -> keras.layers.Dense:
            return keras.layers.Dense(
                filters,
                use_bias=use_bias,
                kernel_initializer=initializers.of_branch(
                    initializers.spawn(kernel_initializer, name), index, 2
                ),
                bias_initializer=initializers.spawn(bias_initializer, name),
                name=name,
                dtype=self.dtype_policy,
            )

        self.heads_in = [projection(name, 1) for name in ("query", "key", "value")]
        self.heads_out = projection("output", 2)

    def build(self, input_shape):
        for layer in self.heads_in:
            layer.build(input_shape)
        self.heads_out.build(self.compute_output_shape(input_shape))

    def call(self, x):
        batch, tokens = ops.shape(x)[:2]
        size = self.filters // self.num_heads
        query, key, value = (
            ops.reshape(layer(x), (batch, tokens, self.num_heads, size)) for layer in self.heads_in
        )
        scores = ops.einsum("bqhs,bkhs->bhqk", query * size**-0.5, key)
        scores = ops.cast(scores, self.variable_dtype)  # a sum over many tokens: in full precision
        if self.causal:
            place = ops.arange(tokens)
            scores = ops.where(place[:, None] >= place, scores, float("-inf"))
        shares = ops.cast(ops.softmax(scores), value.dtype)
        return self.heads_out(
            ops.reshape(ops.einsum("bhqk,bkhs->bqhs", shares, value), (batch, tokens, self.filters))
        )

    def compute_output_shape(self, input_shape):
        return (*input_shape[:-1], self.filters)
