"""Weights of other libraries' pre-activation networks, here and back: equal weights,
equal outputs.
"""

from keras_preact.weights.files import read_state, write_state
from keras_preact.weights.keras_applications import from_keras_applications, to_keras_applications
from keras_preact.weights.keras_hub import from_keras_hub, to_keras_hub
from keras_preact.weights.timm import from_timm, to_timm
from keras_preact.weights.torch_cifar import from_torch_cifar, to_torch_cifar
from keras_preact.weights.transfer import Adapted, Entry, WeightsMismatch, extract, load, named
