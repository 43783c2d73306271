"""Functional builders, one file a family, and the registry of named models."""

from keras_preact.models.cifar import resnet_cifar, wide_resnet
from keras_preact.models.dense import dense_resnet
from keras_preact.models.imagenet import resnet_imagenet
from keras_preact.models.network import ResidualNetwork, Stage
from keras_preact.models.registry import MODELS, ModelEntry
