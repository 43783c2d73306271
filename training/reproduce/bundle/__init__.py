"""What a machine without network needs to train trials, and the state of unfinished
runs, in pieces that travel one by one.

A bundle is a folder: `run_bundle.py`, `bundle-manifest.json` with the hashes of all
pieces, `code-and-wheels-0.zip` and so on, and the archives of the data sets
(`training.reproduce.images`). The pieces may arrive in one folder over several visits;
`python FOLDER/run_bundle.py ARGUMENTS...` runs `training.reproduce ARGUMENTS...` there,
with Python, JAX, NumPy and Pillow.

The state of a run is a tar file cut into `state-0000.part` and so on, and `state.json`
with their hashes.
"""

from .build import bundle
from .state import pack_state, unpack_state
