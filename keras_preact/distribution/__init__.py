"""Training on several devices and by several processes, with `model.fit` on each
backend.
"""

from keras_preact.distribution.base import Distribution, Statistics, with_statistics
from keras_preact.distribution.table import KINDS, start
