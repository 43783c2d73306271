"""Convert weights from and to keras.applications, keras-hub, timm, pytorchcv and the
authors' released networks.
"""

from collections.abc import Mapping
from types import MappingProxyType

from keras_preact.models.named_weights import Entry, WeightsMismatch, extract, load, named
from keras_preact.weights import keras_applications, keras_hub, pytorchcv, timm, torch_cifar
from keras_preact.weights.files import read_state, write_state
from keras_preact.weights.keras_applications import from_keras_applications, to_keras_applications
from keras_preact.weights.keras_hub import from_keras_hub, to_keras_hub
from keras_preact.weights.pytorchcv import from_pytorchcv, to_pytorchcv
from keras_preact.weights.timm import from_timm, to_timm
from keras_preact.weights.torch_cifar import from_torch_cifar, to_torch_cifar

#: Format to what `from_FORMAT` assumes about a source that names and shapes of weights do not show.
ASSUMPTIONS: Mapping[str, str] = MappingProxyType(
    {
        "keras_applications": keras_applications.FAMILY.assumes,
        "keras_hub": keras_hub.FAMILY.assumes,
        "pytorchcv": pytorchcv.CIFAR.assumes,
        "timm": timm.BATCH.assumes,
        "torch_cifar": torch_cifar.CONTAINERS.assumes,
    }
)
