"""The paper's optimiser, SGD with momentum and coupled weight decay; Muon for
convolutions; AdamW and Lion that do not decay every weight. Each has a learning rate by
layer, for fine-tuning and for networks of another depth.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import keras
from keras import ops

from keras_preact import _checks
from keras_preact.backend import keras_private
from keras_preact.shortcuts import DepthScaling, Shortcut


def _words(words: str | Iterable[str]) -> list[str]:
    """Return words as a list. A text is one word; Keras would take its letters for words."""
    return [words] if isinstance(words, str) else list(words)


class _Optimizer(keras.optimizers.Optimizer):
    """A mixin for Keras' optimisers. Schedules and moving averages count updates, not
    the parts of an accumulated gradient, and there is no average before the first
    update. The words in `exclude_from_decay` exclude weights from the decay. A factor in
    `rate_factors` is one on the learning rate of some layers: on the step, and on the
    decay that Keras multiplies by the rate. A word or a name that fits no weight is an
    error.
    """

    def __init__(
        self,
        *args,
        exclude_from_decay: str | Sequence[str] = (),
        rate_factors: Mapping[str, float] | None = None,
        **kwargs,
    ):
        for name, factor in (rate_factors or {}).items():
            _checks.not_negative(factor, f"rate_factors[{name!r}]")
        # Keras refuses numbers of NumPy
        super().__init__(*_checks.plain(args), **_checks.plain(kwargs))
        self.exclude_from_decay = _words(exclude_from_decay)
        self.rate_factors = _checks.plain(dict(rate_factors or {}))
        self._excluded_names: list[str] = []

    def exclude_from_weight_decay(self, var_list=None, var_names=None):
        self._excluded_names = _words(var_names or ())
        super().exclude_from_weight_decay(var_list, self._excluded_names)

    def build(self, variables):
        self._check_used(
            "exclude_from_decay", self.exclude_from_decay, variables, lambda word, v: word in v.path
        )
        self._check_used(
            "var_names", self._excluded_names, variables, lambda word, v: re.search(word, v.name)
        )
        self._check_used(
            "rate_factors", self.rate_factors, variables, lambda name, v: _place(name, v.path) > 0
        )
        super().build(variables)
        # By index: on TensorFlow, `update_step` gets backend variables, which have no path.
        self._decayed = [self._is_decayed(variable) for variable in variables]
        self._factors = [self._factor(variable.path) for variable in variables]

    def add_variable_from_reference(self, reference_variable, *args, **kwargs):
        variable = super().add_variable_from_reference(reference_variable, *args, **kwargs)
        if keras.backend.backend() == "torch":
            import torch

            # The layout of a kernel in memory may not follow the order of its axes. With another
            # one, an update of all weights at once is slow.
            value = variable.value
            like = torch.empty_like(reference_variable.value, dtype=value.dtype)
            value.data = like.copy_(value)
        return variable

    def _check_used(
        self, argument: str, words: Iterable[str], variables: Sequence, fits: Callable
    ) -> None:
        """Raise a ValueError for a word that fits none of the variables."""
        unused = [word for word in words if not any(fits(word, v) for v in variables)]
        if unused and variables:
            paths = [variable.path for variable in variables]
            more = f" and {len(paths) - 6} more" if len(paths) > 6 else ""
            raise ValueError(
                f"`{argument}` of {type(self).__name__} must fit weights that are trained. "
                f"Received: {', '.join(map(repr, unused))} for {', '.join(paths[:6])}{more}. "
                "Correct these words, or leave them out if their weights are frozen"
            )

    def _is_decayed(self, variable) -> bool:
        return self._use_weight_decay(variable) and not any(
            word in variable.path for word in self.exclude_from_decay
        )

    def _factor(self, path: str) -> float:
        places = {name: (_place(name, path), len(name)) for name in self.rate_factors}
        fitting = [name for name, (depth, _) in places.items() if depth]
        return self.rate_factors[max(fitting, key=places.__getitem__)] if fitting else 1.0

    def _decay(self, index: int) -> float | None:
        """Return Keras' decay of a weight, which is multiplied by the learning rate."""
        return self.weight_decay if self._decayed[index] else None

    def _apply_weight_decay(self, variables):
        decayed = [variable for variable in variables if self._is_decayed(variable)]
        if self.rate_factors:  # Keras has one rate; `update_step` decays weights of other rates
            decayed = [v for v in decayed if self._factors[self._get_variable_index(v)] == 1]
        if decayed:
            super()._apply_weight_decay(decayed)

    def update_step(self, gradient, variable, learning_rate):
        if self.rate_factors:
            index = self._get_variable_index(variable)
            factor = self._factors[index]
            if factor != 1:  # a factor of 1 would add a multiplication per weight
                learning_rate = learning_rate * factor
                if decay := self._decay(index):
                    share = ops.cast(learning_rate * decay, variable.dtype)
                    self.assign_sub(variable, ops.multiply(variable, share))
        super().update_step(gradient, variable, learning_rate)

    def _backend_update_step(self, grads, trainable_variables, learning_rate):
        # On torch, Keras updates all weights at once for its own optimisers, but not for classes
        # derived from them. A class derived from these may update single weights in its own way.
        is_unchanged = type(self).update_step.__module__ == __name__
        if keras.backend.backend() == "torch" and is_unchanged:
            import torch

            with torch.no_grad():
                self._update_on_torch(grads, trainable_variables, learning_rate)
        else:
            super()._backend_update_step(grads, trainable_variables, learning_rate)

    def _update_on_torch(self, gradients, variables, learning_rate) -> None:
        """Update all weights in place: those with one factor on their rate at once."""
        import torch

        indices = [self._get_variable_index(variable) for variable in variables]
        for factor in dict.fromkeys(self._factors[index] for index in indices):
            of_factor = [n for n, index in enumerate(indices) if self._factors[index] == factor]
            rate = learning_rate * factor
            weights = {indices[n]: variables[n].value for n in of_factor}
            decays = {index: self._decay(index) for index in weights} if factor != 1 else {}
            for decay in filter(None, dict.fromkeys(decays.values())):
                decayed = [weights[index] for index in weights if decays[index] == decay]
                torch._foreach_mul_(decayed, 1 - rate * decay)
            cast = [gradients[n].to(variables[n].value.dtype) for n in of_factor]
            self._update_at_once(weights, cast, rate)

    def _update_at_once(self, weights: Mapping[int, Any], gradients: list, rate) -> None:
        """Update weights, tensors of torch by their index, with one rate, in place."""
        raise NotImplementedError

    def get_config(self):
        return super().get_config() | {
            "exclude_from_decay": list(self.exclude_from_decay),
            "rate_factors": dict(self.rate_factors),
        }

    def _get_current_learning_rate(self):
        if isinstance(self._learning_rate, keras.optimizers.schedules.LearningRateSchedule):
            # Keras would count the parts of accumulated gradients.
            return self._learning_rate(self.iterations)
        return super()._get_current_learning_rate()

    def _update_model_variables_moving_average(self, trainable_variables):
        if not self.use_ema:
            return
        # Keras counts every part of an accumulated gradient as an update.
        parts = self.gradient_accumulation_steps or 1
        updated = ops.equal(ops.mod(ops.add(self._iterations, 1), parts), 0)
        new_share = ops.where(ops.equal(self.iterations, 0), 1.0, 1.0 - self.ema_momentum)
        new_share = ops.where(updated, new_share, 0.0)
        averages = self._model_variables_moving_average
        for variable, average in zip(trainable_variables, averages, strict=True):
            if average is not None:  # None: the variable is overwritten by its gradient
                dtype = keras.backend.result_type(average.dtype, "float32")
                old, new = ops.cast(average, dtype), ops.cast(variable, dtype)
                self.assign(average, old + ops.cast(new_share, dtype) * (new - old))

    def finalize_variable_values(self, var_list):
        if self.use_ema and not int(ops.convert_to_numpy(self.iterations)):
            return  # Keras would assign the zeros that the averages start with
        super().finalize_variable_values(var_list)
        if self.use_ema and keras.backend.backend() == "jax":
            # A weight and its average are now one array, which the next step would donate twice.
            for average in self._model_variables_moving_average:
                if average is not None:
                    average.assign(ops.copy(average))


def _place(name: str, path: str) -> int:
    """Return how deep in the path of a weight the innermost layer is whose name begins with
    `name`, or `name` and a `_`; 0 if there is none. `outer/inner` names layers directly
    inside others. The first layers of a path may be models.
    """
    names, layers = name.split("/"), path.split("/")[:-1]
    for end in range(len(layers), len(names) - 1, -1):
        pairs = zip(names, layers[end - len(names) : end], strict=True)
        if all(f"{layer}_".startswith(f"{each}_") for each, layer in pairs):
            return end
    return 0


@keras.saving.register_keras_serializable("keras_preact")
class CoupledSGD(_Optimizer, keras.optimizers.SGD):
    """SGD with coupled weight decay, which is part of the gradient and passes through
    the momentum.

        g = gradient + weight_decay * w
        v = momentum * v - learning_rate * g
        w = w + v                      (Nesterov: w + momentum * v - learning_rate * g)

    The paper, the released code and Torch's SGD decay like this.
    `keras.optimizers.SGD(weight_decay=...)` shrinks the weights outside the momentum:
    with momentum 0.9, about ten times less. `keras.regularizers.L2(c)` adds the
    gradient `2 c w`, twice as much, and changes the loss.

    With `gradient_accumulation_steps`, schedules and the moving average of `use_ema`
    count updates; Keras' SGD counts the parts of an update. Before the first update
    there is no average: `finalize_variable_values` then leaves the weights unchanged,
    and Keras' SGD sets them to zero.

    Args:
        learning_rate: A number or a schedule.
        momentum: Share of the last update that is kept.
        nesterov: Whether to use Nesterov momentum, as in the 4.62 % recipe.
        coupled_weight_decay: Factor on w, 1e-4 in the paper.
        exclude_from_decay: Words; a weight with one of them in its path is not decayed.
            The released code decays all weights; `("norm",)` excludes the weights of
            normalisations.
        rate_factors: Name of a layer, or the part of the name before a `_`, to the
            factor on the learning rate of its weights: `{"stem": 0.1, "stage1": 0.5}`.
            Layers inside other layers and models count too, and `"stage1/branch"` names
            the branches of stage 1. If several names fit, the one of the innermost layer
            counts, and of these the longest. Other weights have the full rate; a factor
            of 0 freezes weights. See `kp.transfer.rate_factors` and `depth_rates`.
        **kwargs: Arguments of `keras.optimizers.SGD`, except `weight_decay`.

    Raises:
        ValueError: for arguments that do not fit; from `build`, for a word or a name that
            fits no weight.

    Example:

    >>> import keras_preact as kp
    >>> kp.optimizers.CoupledSGD(0.1, coupled_weight_decay=1e-4).momentum
    0.9

    Source: appendix of arXiv 1603.05027, Sec. 3.4 of arXiv 1512.03385; rates by layer:
        Sec. 3.2 of arXiv 1801.06146.
    """

    def __init__(
        self,
        learning_rate=0.1,
        momentum: float = 0.9,
        nesterov: bool = False,
        coupled_weight_decay: float = 1e-4,
        exclude_from_decay: str | Sequence[str] = (),
        rate_factors: Mapping[str, float] | None = None,
        name: str = "coupled_sgd",
        **kwargs,
    ):
        if kwargs.pop("weight_decay", None) is not None:
            raise ValueError(
                "CoupledSGD takes `coupled_weight_decay`; `weight_decay` is Keras' decay outside "
                "the momentum."
            )
        _checks.not_negative(coupled_weight_decay, "coupled_weight_decay")
        super().__init__(
            learning_rate,
            momentum=float(momentum),
            nesterov=nesterov,
            exclude_from_decay=exclude_from_decay,
            rate_factors=rate_factors,
            name=name,
            **kwargs,
        )
        if self.ema_overwrite_frequency and self.gradient_accumulation_steps:
            # Keras would overwrite the weights at every part of an update, the first ones before
            # there is an average.
            raise ValueError(
                "`ema_overwrite_frequency` is not for accumulated gradients: use it without "
                f"`gradient_accumulation_steps`. Received: {self.ema_overwrite_frequency} and "
                f"{self.gradient_accumulation_steps}"
            )
        self.coupled_weight_decay = _checks.plain(coupled_weight_decay)

    def update_step(self, gradient, variable, learning_rate):
        if self.coupled_weight_decay and self._decayed[self._get_variable_index(variable)]:
            decay = ops.cast(self.coupled_weight_decay, gradient.dtype)
            gradient = ops.add(gradient, ops.multiply(ops.cast(variable, gradient.dtype), decay))
        super().update_step(gradient, variable, learning_rate)

    def _update_at_once(self, weights, gradients, rate):
        import torch

        rate, indices, tensors = float(rate), list(weights), list(weights.values())
        decayed = [n for n, index in enumerate(indices) if self._decayed[index]]
        if self.coupled_weight_decay and decayed:
            sums = torch._foreach_add(
                [gradients[n] for n in decayed],
                [tensors[n] for n in decayed],
                alpha=self.coupled_weight_decay,
            )
            for n, total in zip(decayed, sums, strict=True):
                gradients[n] = total
        if self.momentum:
            velocities = [self.momentums[index].value for index in indices]
            torch._foreach_mul_(velocities, self.momentum)
            torch._foreach_add_(velocities, gradients, alpha=-rate)
        if not self.momentum or self.nesterov:
            torch._foreach_add_(tensors, gradients, alpha=-rate)
        if self.momentum:
            share = self.momentum if self.nesterov else 1.0
            torch._foreach_add_(tensors, velocities, alpha=share)

    def get_config(self):
        return super().get_config() | {"coupled_weight_decay": self.coupled_weight_decay}


@keras.saving.register_keras_serializable("keras_preact")
class AdamW(_Optimizer, keras.optimizers.AdamW):
    """`keras.optimizers.AdamW` that does not decay weights with a word of
    `exclude_from_decay` in their path, and has a learning rate by layer.

    `rate_factors` are as in `CoupledSGD`. The decay of a weight is multiplied by its rate,
    so it has the same factor. The other arguments are as in `keras.optimizers.AdamW`.

    Example:

    >>> import keras_preact as kp
    >>> kp.optimizers.AdamW(1e-3, weight_decay=0.05, exclude_from_decay=["norm"]).beta_1
    0.9

    Source: arXiv 1711.05101.
    """

    def _update_at_once(self, weights, gradients, rate):
        hats = [self._velocity_hats[index].value for index in weights] if self.amsgrad else None
        _adam_on_torch(
            list(weights.values()),
            gradients,
            [self._momentums[index].value for index in weights],
            [self._velocities[index].value for index in weights],
            hats,
            rate=rate,
            step=self.iterations + 1,
            betas=(self.beta_1, self.beta_2),
            epsilon=self.epsilon,
        )


def _adam_on_torch(
    weights, gradients, momentums, velocities, largest=None, *, rate, step, betas, epsilon
) -> None:
    """Update lists of tensors as Adam does. `largest` are the largest velocities so far, for
    AMSGrad.
    """
    import torch

    step = ops.cast(step, "float32")
    unbiased = (1 - ops.power(betas[1], step)) ** 0.5 / (1 - ops.power(betas[0], step))
    torch._foreach_lerp_(momentums, gradients, 1 - betas[0])
    torch._foreach_mul_(velocities, betas[1])
    torch._foreach_addcmul_(velocities, gradients, gradients, 1 - betas[1])
    if largest is not None:
        torch._foreach_maximum_(largest, velocities)
    sizes = torch._foreach_sqrt(velocities if largest is None else largest)
    torch._foreach_add_(sizes, epsilon)
    steps = torch._foreach_div(momentums, sizes)
    torch._foreach_mul_(steps, ops.convert_to_tensor(rate) * unbiased)
    torch._foreach_sub_(weights, steps)


@keras.saving.register_keras_serializable("keras_preact")
class Lion(_Optimizer, keras.optimizers.Lion):
    """`keras.optimizers.Lion` that does not decay weights with a word of
    `exclude_from_decay` in their path, and has a learning rate by layer.

    `rate_factors` are as in `CoupledSGD`. The decay of a weight is multiplied by its rate,
    so it has the same factor. The other arguments are as in `keras.optimizers.Lion`.

    Every entry of a weight moves by the learning rate, so its rate should be 3 to 10 times
    lower than AdamW's, and its decay higher by the same factor.

    Example:

    >>> import keras_preact as kp
    >>> kp.optimizers.Lion(1e-4, weight_decay=0.5, exclude_from_decay=["norm"]).beta_2
    0.99

    Source: arXiv 2302.06675.
    """

    def _update_at_once(self, weights, gradients, rate):
        import torch

        momentums = [self._momentums[index].value for index in weights]
        steps = torch._foreach_lerp(momentums, gradients, 1 - self.beta_1)
        torch._foreach_sign_(steps)
        torch._foreach_mul_(steps, ops.convert_to_tensor(rate))
        torch._foreach_sub_(list(weights.values()), steps)
        torch._foreach_lerp_(momentums, gradients, 1 - self.beta_2)


#: The first and the last layers of the networks of this package.
FIRST_AND_LAST = ("stem_conv", "stem_dense", "stem_positions", "head_classifier")


@keras.saving.register_keras_serializable("keras_preact")
class Muon(_Optimizer, keras.optimizers.Muon):
    """SGD with momentum that makes the update of each kernel orthogonal, so that every
    direction of the matrix moves by the same amount.

        v = momentum * v + gradient
        w = w - learning_rate * rms_rate * sqrt(max(n, m)) * orthogonal(v)

    `keras.optimizers.Muon` does so only for dense kernels. Here the kernel of a
    convolution, `(height, width, channels in, channels out)`, is a matrix of n = height
    * width * channels in rows and m = channels out columns, and each unit of a stack has
    its own. Weights that are no matrices, depthwise kernels and excluded layers are
    trained by AdamW. The decay is outside the momentum.

    Args:
        learning_rate: A number or a schedule. With `rms_rate=0.2` the mean size of an
            update is a fifth of it.
        exclude_layers: Regular expressions; a weight with one of them in its path is
            trained by AdamW. By default the first and the last layers of the networks
            of this package, whether a model has them or not.
        exclude_from_decay: Words; a weight with one of them in its path is not decayed.
        rate_factors: Those of `CoupledSGD`, for both kinds of weights. The decay of a weight
            is multiplied by its rate, so it has the same factor.
        **kwargs: Arguments of `keras.optimizers.Muon`.

    Example:

    >>> import keras_preact as kp
    >>> kp.optimizers.Muon(0.03, weight_decay=0.1, adam_lr_ratio=0.1).ns_steps
    5

    Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks",
        2024; the size of updates: arXiv 2502.16982.
    """

    def __init__(
        self,
        learning_rate=0.02,
        exclude_layers: str | Sequence[str] = FIRST_AND_LAST,
        name: str = "muon",
        **kwargs,
    ):
        super().__init__(learning_rate, exclude_layers=_words(exclude_layers), name=name, **kwargs)

    def build(self, variables):
        words = [word for word in self.exclude_layers if word not in FIRST_AND_LAST]
        self._check_used(
            "exclude_layers", words, variables, lambda word, v: re.search(word, v.path)
        )
        # by index: on TensorFlow, `update_step` gets backend variables, which have no attributes
        self._stacked = [getattr(variable, "stacked_axes", 0) for variable in variables]
        super().build(variables)

    def _should_use_adamw(self, variable):
        shape = variable.shape[getattr(variable, "stacked_axes", 0) :]
        excluded = [*self.exclude_layers, *(["embedding"] if self.exclude_embeddings else [])]
        return (
            len(shape) < 2
            or shape[-1] == 1
            or any(re.search(word, variable.path) for word in excluded)
        )

    def _decay(self, index):
        if self._decayed[index] and self.adam_velocities[index] is not None:
            return self.adam_weight_decay
        return super()._decay(index)

    def _update_at_once(self, weights, gradients, rate):
        by_adam, by_muon = [], []
        for (index, weight), gradient in zip(weights.items(), gradients, strict=True):
            velocity, tensors = self.adam_velocities[index], (weight, gradient)
            if velocity is None:
                by_muon.append((*tensors, self.momentums[index].value, self._stacked[index]))
            else:
                by_adam.append((*tensors, self.momentums[index].value, velocity.value))
        if by_adam:
            _adam_on_torch(
                *map(list, zip(*by_adam, strict=True)),
                rate=rate * self.adam_lr_ratio,
                step=self.iterations + 1,
                betas=(self.adam_beta_1, self.adam_beta_2),
                epsilon=self.epsilon,
            )
        if by_muon:
            self._muon_on_torch(*map(list, zip(*by_muon, strict=True)), rate=rate)

    def _muon_on_torch(self, weights, gradients, momentums, stacked, *, rate) -> None:
        """Update kernels, those of one shape in one product for each iteration."""
        import torch

        torch._foreach_mul_(momentums, self.momentum)
        torch._foreach_add_(momentums, gradients)
        totals = momentums
        if self.nesterov:
            totals = torch._foreach_add(gradients, momentums, alpha=self.momentum)
        alike: dict[Any, list[tuple]] = {}
        for weight, matrices in zip(weights, map(_matrices, totals, stacked), strict=True):
            batch = matrices.reshape(-1, *matrices.shape[-2:])
            alike.setdefault(batch.shape[1:], []).append((weight, batch))
        for pairs in alike.values():
            of_shape, batches = zip(*pairs, strict=True)
            steps = self._step(torch.cat(batches), rate).split(list(map(len, batches)))
            for weight, step in zip(of_shape, steps, strict=True):
                weight.sub_(step.reshape(weight.shape))

    def _muon_update_step(self, gradient, variable, lr, m):
        self.assign_add(m, ops.add(gradient, m * (self.momentum - 1)))
        total = ops.add(gradient, self.momentum * m) if self.nesterov else m
        step = self._step(_matrices(total, self._stacked[self._get_variable_index(variable)]), lr)
        self.assign_sub(variable, ops.reshape(step, gradient.shape))

    def _step(self, matrices, rate):
        """Return what to subtract from matrices of one shape."""
        update = self.zeropower_via_newtonschulz5(matrices, self.ns_steps)
        scale = 1.0 if self.rms_rate is None else self.rms_rate * max(matrices.shape[-2:]) ** 0.5
        return ops.cast(rate, update.dtype) * scale * update


def _matrices(kernel, stacked: int):
    """Return a kernel as a matrix; in a stack, with `stacked` axes before, one for each unit."""
    shape = tuple(kernel.shape)
    return ops.reshape(kernel, (*shape[:stacked], -1, shape[-1]))


def depth_rates(model: keras.Model, optimizer: str) -> dict[str, float]:
    """Return the `rate_factors` for a network with `kp.shortcuts.DepthScaling`, so that it
    can be trained with the learning rate of a network of `base` units.

    The shortcut multiplies F(x) by a = m^-power, with m = units / base. L branches add up,
    so an update of one should change their sum by a share of 1 / L. The rate of branches
    is multiplied by:

    - SGD: m^(2 power - 1). The gradient of a branch is proportional to a, and so is what
      a change of its weights does to the sum.
    - AdamW, Lion and Muon: m^(power - 1). Their updates do not depend on the size of the
      gradient.

    The factor is for all weights of the branches, also biases and normalisations. Stem,
    head and projections have the full rate.

    Decay outside the gradient follows the rate, as in the released code of CompleteP. The
    coupled decay of `CoupledSGD` follows it too: for a power of 1, weights of branches are
    decayed m times as fast as at `base` units. To keep their decay, divide
    `coupled_weight_decay` by m^(2 power - 1); then other weights are decayed less.

    CompleteP also multiplies AdamW's `epsilon` of branches by a, as their gradients are
    smaller. Keras has one `epsilon` for all weights. Choose one that is small for all of
    them, such as `epsilon=1e-12`.

    Args:
        model: A network, before or after `compile`.
        optimizer: `"sgd"` (`CoupledSGD`), `"adamw"`, `"lion"` or `"muon"`.

    Returns:
        The factor of `"branch"` in a dictionary, which is empty if the factor is 1, if
        no branch is trained, or without `DepthScaling`.

    Raises:
        ValueError: for another optimizer, and for units with different shortcuts.

    Example:

    >>> import keras_preact as kp
    >>> h = kp.shortcuts.DepthScaling(power=0.5, base=3)
    >>> model = kp.models.resnet_cifar(74, input_shape=(8, 8, 1), shortcut=h)
    >>> rates = kp.optimizers.depth_rates(model, "adamw")
    >>> {name: round(factor, 3) for name, factor in rates.items()}
    {'branch': 0.289}
    >>> optimizer = kp.optimizers.AdamW(1e-3, rate_factors=rates)

    Source: SGD and Adam at a power of 1/2: Table 1 of arXiv 2310.02244, and Sec. 2 of
        arXiv 2309.16620 (SGD). SGD at every power: Table 1 of arXiv 2405.15712. AdamW at
        every power, and `epsilon`: Table 1 and Eq. 40 of arXiv 2505.01618. The rate of
        Lion and Muon is AdamW's by the same argument.
    """
    _checks.one_of(optimizer, ("sgd", "adamw", "lion", "muon"), "optimizer")
    every_h = [getattr(layer, "h", None) for layer in keras_private.layers(model)]
    found = [h for h in every_h if isinstance(h, Shortcut)]
    h = next((h for h in found if isinstance(h, DepthScaling)), None)
    if h is None:
        return {}
    if other := next((each for each in found if each != h), None):
        raise ValueError(
            "All units need the same shortcut for `depth_rates`. For other networks, give "
            f"`rate_factors` by the names of their layers. Received: {h!r} and {other!r}"
        )
    assert h.units is not None, "a unit in a model knows it"
    factor = (h.units / h.base) ** ((2 if optimizer == "sgd" else 1) * h.power - 1)
    trained = any(_place("branch", weight.path) for weight in model.trainable_weights)
    return {"branch": factor} if trained and factor != 1 else {}
