"""Lists the packages: keras_preact, and training/, which installs as
keras_preact_training. The rest is in pyproject.toml.
"""

from setuptools import find_packages, setup

SCRIPTS = ["training", *(f"training.{name}" for name in find_packages("training"))]

setup(
    packages=[
        *find_packages(include=["keras_preact", "keras_preact.*"]),
        *(name.replace("training", "keras_preact_training", 1) for name in SCRIPTS),
    ],
    # A package called training would be a bad neighbour in site-packages.
    package_dir={"keras_preact_training": "training"},
)
