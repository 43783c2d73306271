"""Settings of every test: fixed seeds, full float32 precision, and one backend for tests
that do not depend on the backend.
"""

import atexit
import collections
import contextlib
import fcntl
import gc
import os
import random
import shutil
import tempfile
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# On shared cores, torch is several times slower with more threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# TensorFlow's default depends on the CPU. Without it, convolutions have their channels last.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
# Runs would keep their compiled steps in the user's cache folder.
os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="keras-preact-compiled-")
# The tests build the same small networks again and again. Two workers cannot share the folder,
# because JAX may read what the other one has half written.
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

# Imports, collection and traces of graphs make millions of objects that stay. With Python's
# threshold of 700, the garbage collector takes a fifth of the time of an import.
gc.set_threshold(50_000, 20, 100)

# TensorFlow shows its LLVM to what is loaded later. The triton of torch for GPUs would take it
# for its own and end the process: https://github.com/tensorflow/tensorflow/issues/124205
with contextlib.suppress(ImportError):
    import triton  # noqa: F401

import hypothesis
import keras
import pytest

from keras_preact.backend.tf_data import untuned

BACKEND = keras.backend.backend()

atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)

# Every run has the same examples and no time limit for them: a rare fault or a busy machine must
# not fail a change that has not caused it.
hypothesis.settings.register_profile(
    "fixed",
    derandomize=True,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("fixed")

if BACKEND == "jax":
    import jax

    # Compiling takes nearly all of the time; code that runs for milliseconds need not be fast.
    # XLA reads the flags at the first array.
    flags = ["--xla_backend_optimization_level=0"]
    if jax.__version_info__ < (0, 11):  # newer versions stop at a flag that they do not know
        flags.append("--xla_cpu_use_fusion_emitters=false")
        flags.append("--xla_cpu_parallel_codegen_split_count=1")
    os.environ.setdefault("XLA_FLAGS", " ".join(flags))
    jax.config.update("jax_default_matmul_precision", "highest")
elif BACKEND == "torch":
    import torch


@pytest.fixture(autouse=True, scope="session")
def untuned_pipelines():
    """Switch autotuning off in the pipelines that Keras makes from arrays. With autotuning,
    the destructor of an iterator can wait for a minute, in whichever test runs then.
    """
    if BACKEND != "tensorflow":  # Keras makes no pipeline from arrays
        yield
        return
    import tensorflow as tf

    with pytest.MonkeyPatch.context() as patch:
        plain = tf.data.Dataset.__iter__
        patch.setattr(tf.data.Dataset, "__iter__", lambda self: plain(untuned(self)))
        yield


@pytest.fixture(autouse=True, scope="module")
def seed_of_the_backend():
    """Seed everything once per file: on TensorFlow, this drops every compiled kernel."""
    keras.utils.set_random_seed(0)


@pytest.fixture(autouse=True)
def seed_of_the_weights():
    """Seed the generator of Keras' default seeds, so that tests do not depend on their
    order.
    """
    random.seed(0)
    if BACKEND == "torch":
        torch.manual_seed(0)


@pytest.fixture(scope="session")
def once_per_run(tmp_path_factory):
    """Return a function that makes a folder once for all tests and workers of a run.

    `once_per_run(name, make)` calls `make(folder)` the first time. It returns the folder;
    tests must not change it.
    """
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent  # the folder that all workers share

    def folder(name, make):
        target = root / name
        with (root / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.exists():
                part = Path(tempfile.mkdtemp(dir=root))
                make(part)
                part.rename(target)
        return target

    return folder


#: Files that take a worker about half a minute or more, the longest first. Started last, they
#: would keep one worker busy while the other waits.
LONGEST = (
    "test_notebook.py",
    "test_tutorial.py",
    "test_features_by_precision.py",
    "test_devices.py",
    "test_train.py",
    "test_reproduce_cli.py",
    "test_attacks.py",
    "test_export.py",
    "test_kinds_of_classifiers.py",
    "test_stacks.py",
    "test_docstrings.py",
    "test_converters.py",
    "test_first_batch.py",
    "test_audit.py",
    "test_very_deep.py",
    "test_users_objects.py",
)


def pytest_ignore_collect(collection_path):
    """On JAX and torch, do not import the files that have no test with the marker `backend`."""
    if BACKEND == "tensorflow" or not collection_path.match("test_*.py"):
        return None
    return "mark.backend" not in collection_path.read_text() or None


def pytest_collection_modifyitems(config, items):
    """On JAX and torch, run only the tests with the marker `backend`. Begin with the files of
    `LONGEST`, then those of many tests.
    """
    if BACKEND != "tensorflow":
        others = [item for item in items if not item.get_closest_marker("backend")]
        items[:] = [item for item in items if item.get_closest_marker("backend")]
        config.hook.pytest_deselected(items=others)
    sizes = collections.Counter(item.path for item in items)

    def place(item):
        name = item.path.name
        return LONGEST.index(name) if name in LONGEST else len(LONGEST), -sizes[item.path]

    items.sort(key=place)


def pytest_collection_finish():
    """Keep the collector of garbage away from what the imports made."""
    gc.collect()
    gc.freeze()
