"""Transfer learning: features, new classifiers, frozen parts and learning rates by layer for a trained network."""

from keras_preact.transfer.classifiers import reset_classifier
from keras_preact.transfer.features import feature_extractor
from keras_preact.transfer.freezing import freeze, freeze_batch_norm, unfreeze
from keras_preact.transfer.rates import LayerwiseRates, layerwise_rates
