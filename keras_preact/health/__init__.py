"""Training health: gradients, updates, activations and the gap to the validation data,
watched inside `model.fit`.
"""

from keras_preact.health.callback import TrainingHealth
from keras_preact.health.ranges import HEALTHY_RANGES, Range
from keras_preact.health.records import HealthRecord
