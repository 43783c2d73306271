"""Builders of functional models, one file per family, and the registry of named models."""

from keras_preact.models.base import UnitNetwork
from keras_preact.models.cifar import fast_resnet, resnet_1d, resnet_cifar, wide_resnet
from keras_preact.models.copies import changed_copy, reset_classifier, stack, unstack
from keras_preact.models.deep_norm import DEEP_NORM
from keras_preact.models.dense import dense_resnet
from keras_preact.models.fixup import FIXUP
from keras_preact.models.imagenet import resnet_imagenet
from keras_preact.models.input_range import expected_input
from keras_preact.models.network import ResidualNetwork, option_names
from keras_preact.models.registry import MODELS, ModelEntry
from keras_preact.models.segments import Stage
from keras_preact.models.tokens import TransformerNetwork, transformer
from keras_preact.models.vanilla import vanilla_cnn
