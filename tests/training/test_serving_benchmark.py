"""The benchmark of serving, with a tiny network, and its client against servers that are known."""

import asyncio
import json
import math
import re
import socket
import threading
import time

import keras
import numpy as np
import pytest

from training.benchmark import serving
from training.benchmark.serving import __main__ as command
from training.benchmark.serving import client, parts, results, servers
from training.benchmark.serving.options import Options
from training.cli import UserError

pytestmark = pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="nothing of it depends on the backend")

MODEL = "digits_resnet8_preact"


@pytest.mark.parametrize("share", [0.01, 0.25, 0.5, 0.75, 0.99, 1.0])
@pytest.mark.parametrize("n", [1, 2, 3, 99, 100, 101, 1000])
def test_percentile_is_the_nearest_rank(n, share):
    values = np.random.default_rng(n).permutation(n) * 0.5
    found = client.percentile(list(values), share)
    assert np.mean(values <= found) >= share
    assert np.mean(values < found) < share
    assert found == np.percentile(values, 100 * share, method="inverted_cdf")
