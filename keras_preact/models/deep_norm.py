"""Options that make a transformer with post-norm train at any depth."""

from typing import Any

from keras_preact import initializers, shortcuts

#: Options of `kp.models.transformer`: `kp.models.transformer(100, **kp.models.DEEP_NORM)`. Each
#: unit is `LN(L^(1/4) x + F(x))`, and its branch starts with smaller weights. Source: Fig. 2 of
#: arXiv 2203.00555.
DEEP_NORM: dict[str, Any] = {
    "arrangement": "post_norm",
    "shortcut": shortcuts.DeepNormScaling(),
    "kernel_initializer": initializers.DeepNorm(),
}
