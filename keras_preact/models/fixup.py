"""Options that make a residual network train without normalisation."""

from typing import Any

from keras_preact import arrangements, initializers

#: Options for every builder: `kp.models.resnet_cifar(110, **kp.models.FIXUP)`. Fixup, in the order
#: of full pre-activation. Source: arXiv 1901.09321.
FIXUP: dict[str, Any] = {
    "arrangement": arrangements.FIXUP,
    "normalization": "none",
    "kernel_initializer": initializers.Fixup(),
}
