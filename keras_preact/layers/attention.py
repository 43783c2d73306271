"""Multi-head self-attention as the weight layer of a residual branch."""

import keras
from keras import ops

from keras_preact import initializers


class SelfAttention(keras.Layer):
    """Multi-head self-attention: `softmax(Q K^T / sqrt(size)) V` in each head, then a
    dense layer over all heads.

    It does not use Keras' `MultiHeadAttention`, which has three problems here. Query,
    key and value get the same initial values if the initialiser has a seed. An
    initialiser that depends on depth cannot know which weight is the last of the
    branch. PyTorch has no forward derivative of it.

    Args:
        filters: Number of output features, `num_heads` times the size of a head.
        num_heads: Number of heads.
        causal: Whether a token attends only to itself and the tokens before it.
        use_bias, kernel_initializer, kernel_regularizer, bias_initializer: Arguments of
            the four dense layers; each layer draws its own values. The layers of query,
            key and value are the first weight of the branch, the layer after the heads
            is the last.
        output_initializer: Initialiser of the kernel after the heads, instead of
            `kernel_initializer`.

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
        kernel_regularizer=None,
        output_initializer=None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.filters = filters
        self.num_heads = num_heads
        self.causal = causal

        def projection(name: str, index: int, initializer=None) -> keras.layers.Dense:
            if initializer is None:
                own = initializers.spawn(kernel_initializer, name)
                initializer = initializers.of_branch(own, index, 2, name in ("query", "key"))
            return keras.layers.Dense(
                filters,
                use_bias=use_bias,
                kernel_initializer=initializer,
                kernel_regularizer=kernel_regularizer,
                bias_initializer=initializers.spawn(bias_initializer, name),
                name=name,
                dtype=self.dtype_policy,
            )

        self.heads_in = [projection(name, 1) for name in ("query", "key", "value")]
        self.heads_out = projection("output", 2, output_initializer)

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
        scores = ops.cast(scores, self.variable_dtype)  # full precision for sums over many tokens
        if self.causal:
            positions = ops.arange(tokens)
            scores = ops.where(positions[:, None] >= positions, scores, float("-inf"))
        attention = ops.cast(ops.softmax(scores), value.dtype)
        return self.heads_out(
            ops.reshape(
                ops.einsum("bhqk,bkhs->bqhs", attention, value), (batch, tokens, self.filters)
            )
        )

    def compute_output_shape(self, input_shape):
        return (*input_shape[:-1], self.filters)
