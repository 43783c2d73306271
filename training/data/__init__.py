"""Load data sets of images, and prepare the images for a network with tf.data."""

from .image_data import ImageData
from .images import evaluation_batches, sample
from .pipelines import TrainingStream, training_stream
from .readers import Reader
from .sources import SOURCES, load
