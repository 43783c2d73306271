"""Pre-activation ResNet-50s of other packages, as their users build them, and networks
for CIFAR in plain PyTorch. All have new weights: nothing is downloaded.
"""

import importlib

_CLASSES = 1000


def applications_resnet50v2(package: str, image_size: int):
    """The network of `keras.applications`, or of this library's `applications`, which
    takes the same weights and has its strides at the same places.
    """
    return importlib.import_module(package).applications.ResNet50V2(
        weights=None,
        input_shape=(image_size, image_size, 3),
        classes=_CLASSES,
        classifier_activation=None,
    )


def keras_hub_resnet50v2(image_size: int):
    """The backbone in the configuration of the preset resnet_v2_50_imagenet, with
    pooling and classifier.
    """
    import keras
    import keras_hub

    backbone = keras_hub.models.ResNetBackbone(
        input_conv_filters=[64],
        input_conv_kernel_sizes=[7],
        stackwise_num_filters=[64, 128, 256, 512],
        stackwise_num_blocks=[3, 4, 6, 3],
        stackwise_num_strides=[1, 2, 2, 2],
        block_type="bottleneck_block",
        use_pre_activation=True,
        image_shape=(image_size, image_size, 3),
    )
    x = keras.layers.GlobalAveragePooling2D()(backbone.output)
    x = keras.layers.Dense(_CLASSES, dtype="float32")(x)
    return keras.Model(backbone.input, x, name="keras_hub_resnet50v2")


def timm_resnetv2_50(image_size: int):
    """A torch module; it takes images of any size, channels first."""
    import timm

    return timm.create_model("resnetv2_50", pretrained=False, num_classes=_CLASSES)


def torch_resnet_cifar(depth: int, image_size: int):
    """A torch module; it takes images of any size, channels first."""
    from .torch_resnet_cifar import ResNet

    return ResNet(depth)
