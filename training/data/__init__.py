"""Image data sets as tf.data, and what happens to the images on their way to the
network.
"""

from .image_data import ImageData
from .images import evaluation_batches
from .pipelines import TrainingStream, training_stream
from .readers import Reader
from .sources import SOURCES, load
