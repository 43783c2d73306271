"""Pre-activation ResNet-50s of other packages, as their users build them, and networks
for CIFAR in plain PyTorch. All have new weights: nothing is downloaded.
"""

from ..cli import UserError

_CLASSES = 1000


def keras_applications_resnet50v2(image_size: int):
    import keras

    return keras.applications.ResNet50V2(
        weights=None,
        input_shape=(image_size, image_size, 3),
        classes=_CLASSES,
        classifier_activation=None,
    )


def kp_applications_resnet50v2(image_size: int):
    """This library's network that takes the weights of `keras.applications`; the strides
    are where those have them.
    """
    import keras_preact as kp

    return kp.applications.ResNet50V2(
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

    try:
        import keras_hub
    except ImportError as error:
        raise UserError(
            "keras_hub_resnet50v2: keras-hub is installed, but something it imports is not "
            f"({error}): pip install -c constraints/tested.txt -e '.[benchmark]'"
        ) from error

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
    try:
        import timm
    except (ImportError, RuntimeError) as error:  # of torchvision, beside another build of torch
        raise UserError(
            f"timm_resnetv2_50: timm is installed, but cannot be imported ({error}): "
            "pip install -c constraints/tested.txt -e '.[benchmark]'"
        ) from error

    return timm.create_model("resnetv2_50", pretrained=False, num_classes=_CLASSES)


def torch_resnet_cifar(depth: int, image_size: int):
    """A torch module; it takes images of any size, channels first."""
    from .torch_resnet_cifar import ResNet

    return ResNet(depth)
