"""The names that other libraries and papers give to networks and weights, and what to call
here instead.
"""

import re
from collections.abc import Mapping
from types import MappingProxyType

#: Pattern of a network's name, in small letters without `-`, `_`, `.` and spaces, to what to call.
#: `{0}` is the pattern's first group.
NETWORKS: Mapping[str, str] = MappingProxyType(
    {
        r"resnet(50|101|152)v2.*": "kp.applications.ResNet{0}V2() is keras.applications' network "
        "with its weights; on the command line, --model.weights ResNet{0}V2:imagenet.",
        r"resnetv2(18|34|50|101|152).*": "kp.weights.from_timm(FILE) reads timm's weights, and "
        "kp.weights.from_keras_hub(MODEL) keras-hub's; on the command line, --model.weights FILE. "
        "For new weights, use 'imagenet_resnet{0}_preact'.",
        r"preactresnet(18|34|50|101|152)": "kp.weights.from_torch_cifar(FILE) reads "
        "pytorch-cifar's weights; on the command line, --model.weights FILE. For new weights, use "
        "kp.models.resnet_imagenet({0}, stem='3x3', classes=10, input_shape=(32, 32, 3)).",
        r"preresnet(\d+).*": "kp.weights.from_pytorchcv(FILE) reads pytorchcv's weights; on the "
        "command line, --model.weights FILE.",
        r"(?:wrn|wideresnet)(\d\d)(\d+)": "Use kp.models.wide_resnet({0}, {1}).",
        r"resnet(18|34|50|101|152|200)d": "Use kp.models.resnet_imagenet({0}, stem='deep', "
        "downsampling='average').",
        r"(?:preact)?resnet(20|32|44|56|110|164|1001|1202)(?:v[12])?": "Use "
        "'cifar_resnet{0}_preact', or 'cifar_resnet{0}_original' for the original order.",
        r"resnet(18|34|50|101|152|200)(?:v1)?": "Use 'imagenet_resnet{0}_preact', or "
        "'imagenet_resnet{0}_original' for the original order.",
    }
)

#: Pattern of `weights`, in small letters, to what to call.
WEIGHTS: Mapping[str, str] = MappingProxyType(
    {
        r"imagenet.*|true|default|pretrained": "For weights of ImageNet, use "
        "kp.applications.ResNet50V2(weights='imagenet'), or kp.weights.from_timm(FILE) for a file "
        "of timm's.",
        r".*\.(safetensors|pth|pt|bin|npz|h5)": "Files of other libraries are read by "
        "kp.weights.from_timm, from_keras_applications, from_pytorchcv and from_torch_cifar, and "
        "by `keras-preact convert`.",
    }
)


def advice(table: Mapping[str, str], name: object) -> str:
    """Return what to call in place of a name, or `""` if the table has no row for it.

    Example:

    >>> from keras_preact.models.other_names import NETWORKS, advice
    >>> advice(NETWORKS, "WRN-28-10")
    'Use kp.models.wide_resnet(28, 10).'
    """
    text = str(name).lower()
    if table is NETWORKS:
        text = re.sub(r"[-_. ]", "", text)
    matches = ((re.fullmatch(pattern, text), words) for pattern, words in table.items())
    return next((words.format(*match.groups()) for match, words in matches if match), "")
