"""Write an exported network a second time, in 8 bits for OpenVINO, with NNCF's
post-training quantisation.

`python -m keras_preact.export._int8 VERSION IMAGES.npy` writes it into the version's folder.
"""

import os
import sys
from pathlib import Path

import numpy as np

from keras_preact.export import _children
from keras_preact.export.version import INT8, Version

#: Packages of the extra `int8`.
MODULES = ("nncf", "openvino")

#: Batch size for measuring the ranges of the activations. With 1, 8 and 32 the logits of a trained
#: ResNet-20 for photographs are off by 14.5, 3.8 and 2.8 % (root mean square).
BATCH = 32


def write(version: Path, images: np.ndarray, folder: Path) -> None:
    """Write the network of an exported version in 8 bits, in another process.

    Args:
        version: Folder of the SavedModel.
        images: Some of the training images, float32, channels last, as the network
            takes them.
        folder: Folder for temporary files.

    Raises:
        ExportError: if NNCF cannot quantise it.
    """
    file = folder / "calibration.npy"
    np.save(file, images)
    _children.run(["-m", __name__, str(version), str(file)], "Quantising the network with NNCF")


def main(version: str, file: str) -> None:
    os.environ["NNCF_CI"] = "1"  # otherwise NNCF reports its use over the network
    import nncf
    import openvino as ov

    network, _ = Version(Path(version)).functions()
    images = np.load(file)
    n = -(-len(images) // BATCH)
    batches = [images[i::n] for i in range(n)]  # each has all classes, even if sorted by class
    # The default preset has symmetric ranges for all activations. It is meant for networks in which
    # every activation is the output of a ReLU. A unit's sum is not.
    quantized = nncf.quantize(
        network.openvino_model(),
        nncf.Dataset(batches),
        subset_size=len(batches),
        preset=nncf.QuantizationPreset.MIXED,
    )
    ov.save_model(quantized, Path(version) / INT8)


if __name__ == "__main__":
    main(*sys.argv[1:])
