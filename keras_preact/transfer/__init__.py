"""Transfer learning with a trained network: features, changed copies, new classifiers,
frozen layers, learning rates per stage, calibrated probabilities.
"""

from keras_preact.models.copies import changed_copy, reset_classifier
from keras_preact.transfer.calibration import apply_temperature, fit_temperature
from keras_preact.transfer.features import feature_extractor
from keras_preact.transfer.freezing import freeze, freeze_batch_norm, unfreeze
from keras_preact.transfer.rates import rate_factors
