"""Break the code in one place at a time, and see whether a test fails.

    python tests/mutants.py                  # all mutants, one after another
    python tests/mutants.py wrong_fan --jobs 2 'bn_*'
    python tests/mutants.py --list

Each mutant replaces one piece of text in one file of a copy of the tree, and runs the
tests that must notice. First, the same tests run on the unbroken copy: they must pass.
The exit status is 0 if every mutant is killed, 1 if one survives, 2 for an error, such
as a replacement that no longer applies.
"""

import argparse
import concurrent.futures
import dataclasses
import fnmatch
import os
import queue
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
CORE, TRAINING = "tests/keras_preact", "tests/training"


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One broken place.

    Args:
        name: What is broken.
        file: Where, from the root of the repository.
        old: Text that the file has exactly once.
        new: What takes its place.
        tests: Files or node ids of fast tests, of which one must fail.
        only: An expression for pytest's `-k`, to run fewer of them.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    only: str = ""

    def apply(self, folder: Path) -> str:
        """Break the file below `folder` and return its text from before."""
        path = folder / self.file
        text = path.read_text() if path.is_file() else ""
        if text.count(self.old) != 1:
            raise LookupError(
                f"{self.name}: {self.file} has the text {text.count(self.old)} times, not once: "
                f"{self.old!r}"
            )
        path.write_text(text.replace(self.old, self.new))
        return text


def mutants_of(file: str, tests: str, *rows: tuple) -> list[Mutant]:
    """Return the mutants of one file: rows of name, old text, new text, and other tests
    than `tests` or a `-k` expression where those differ.
    """
    made = []
    for name, old, new, *rest in rows:
        own = [each for each in rest if each.startswith("tests/")] or [tests]
        only = next((each for each in rest if not each.startswith("tests/")), "")
        made.append(Mutant(name, file, old, new, tuple(own), only))
    return made


REFERENCE = f"{CORE}/test_unit_reference.py"
NETWORKS = f"{CORE}/test_networks.py"
INITIALIZERS = f"{CORE}/test_initializers.py"

MUTANTS = [
    *mutants_of(
        "keras_preact/arrangements.py",
        REFERENCE,
        (
            "swapped_components",
            '"full_preactivation": Arrangement(first=NORM_ACTIVATION,',
            '"full_preactivation": Arrangement(first=("activation", "norm"),',
            "full_preactivation and identity",
        ),
        (
            "missing_activation_after_addition",
            '"original": Arrangement(last=NORM, after_addition=ACTIVATION,',
            '"original": Arrangement(last=NORM, after_addition=(),',
            "original and identity",
        ),
        (
            "missing_norm_after_projection",
            '"relu_before_addition": Arrangement(last=NORM_ACTIVATION, projection=NORM)',
            '"relu_before_addition": Arrangement(last=NORM_ACTIVATION)',
            "relu_before_addition and changed and identity",
        ),
        (
            "missing_final_norm",
            "Arrangement(first=NORM_ACTIVATION, head=NORM_ACTIVATION)",
            "Arrangement(first=NORM_ACTIVATION, head=ACTIVATION)",
            f"{NETWORKS}::test_cifar_networks",
            "full_preactivation and basic",
        ),
        (
            "swapped_stem",
            'stem=("activation", "norm"),',
            'stem=("norm", "activation"),',
            f"{NETWORKS}::test_layers_around_the_units",
        ),
        (
            "first_unit_activates_again",
            "return dataclasses.replace(self, first=()) if activated else self",
            "return self",
            f"{NETWORKS}::test_both_paths_of_the_first_unit_see_the_first_activation",
        ),
    ),
    *mutants_of(
        "keras_preact/shortcuts.py",
        REFERENCE,
        (
            "scaling_on_the_wrong_path",
            "return self.shortcut * x, self.residual * residual",
            "return self.residual * x, self.shortcut * residual",
            "factors",
        ),
        (
            "gate_bias_sign",
            "keras.initializers.Constant(self.bias)",
            "keras.initializers.Constant(-self.bias)",
            f"{INITIALIZERS}::test_gate_bias_at_the_start",
        ),
        (
            "swapped_gate",
            "return (1 - gate) * x, gate * residual",
            "return gate * x, (1 - gate) * residual",
            "exclusive_gating and full_preactivation",
        ),
        (
            "gate_on_both_paths",
            "return (1 - self.gate(x)) * x, residual",
            "return (1 - self.gate(x)) * x, self.gate(x) * residual",
            "shortcut_only_gating and full_preactivation",
        ),
        (
            "zeros_before_the_channels",
            "= (0, self.missing)",
            "= (self.missing, 0)",
            f"{REFERENCE}::test_units_that_change_the_shape",
            "zero_pad",
        ),
        (
            "dropout_shortcut_at_inference",
            "return self.dropout(x, training=training), residual",
            "return self.dropout(x, training=True), residual",
            "dropout and full_preactivation",
        ),
    ),
    *mutants_of(
        "keras_preact/units.py",
        REFERENCE,
        (
            "activated_identity_shortcut",
            "self._activate_both = changes_shape and options.activate_shape_shortcut",
            "self._activate_both = options.activate_shape_shortcut",
            "full_preactivation and kept",
        ),
        (
            "projection_from_the_raw_input",
            "activated if self._activate_both else x",
            "x",
            "full_preactivation and changed and identity",
        ),
        (
            "dropout_place",
            'is_last == (options.dropout_at == "before_addition")',
            'is_last != (options.dropout_at == "before_addition")',
            f"{CORE}/test_dropout.py::test_before_addition",
        ),
        (
            "zero_pad_in_place_of_projection",
            'if options.shape_shortcut == "zero_pad":',
            'if options.shape_shortcut != "projection":',
            "full_preactivation and changed and identity",
        ),
        (
            "lesion_of_the_shortcut",
            "residual = residual * ops.cast(residual_scale, residual.dtype)",
            "x = x * ops.cast(residual_scale, x.dtype)",
            f"{CORE}/analysis/test_ensemble.py",
        ),
    ),
    *mutants_of(
        "keras_preact/blocks.py",
        REFERENCE,
        ("wrong_stride_place", 'self.kernel_sizes.index(3) if self.stride_on == "3x3" else 0',
         "0", "3x3 or bottleneck"),
        ("width_of_groups", "int(filters * self.base_width / 64) * self.groups",
         "int(filters * self.base_width / 64)", "groups"),
    ),
    *mutants_of(
        "keras_preact/layers/chains.py",
        REFERENCE,
        ("bn_momentum", "axis=axis, momentum=0.9, epsilon=1e-5",
         "axis=axis, momentum=0.99, epsilon=1e-5", "full_preactivation and identity"),
        ("bn_epsilon", "axis=axis, momentum=0.9, epsilon=1e-5",
         "axis=axis, momentum=0.9, epsilon=1e-3", "full_preactivation and identity"),
        ("groups_of_group_norm", "math.gcd(32, n)", "math.gcd(16, n) // 2 or 1", "group"),
        ("stochastic_depth_rate", "keep = 1 - (self.rate", "keep = 1 - 0.5 * (self.rate",
         f"{CORE}/test_stochastic_depth.py"),
        ("stochastic_depth_of_single_values", "shape = (ops.shape(x)[0], *[1] * (x.ndim - 1))",
         "shape = ops.shape(x)", f"{CORE}/test_stochastic_depth.py"),
    ),
    *mutants_of(
        "keras_preact/layers/batch_norm.py",
        REFERENCE,
        ("biased_variance", "batch_variance * ((n - 1) / n)", "batch_variance",
         "full_preactivation and identity"),
        ("frozen_norm_updated", "in_training = bool(training and self.trainable)",
         "in_training = bool(training)", f"{CORE}/test_frozen.py"),
    ),
    *mutants_of(
        "keras_preact/preprocessing.py",
        f"{CORE}/models/test_first_batch.py",
        ("small_std_passes", "LARGEST_SIZE, SMALLEST_STD = 5.0, 0.1",
         "LARGEST_SIZE, SMALLEST_STD = 5.0, 0.0"),
        ("raw_pixels_pass", "LARGEST_SIZE, SMALLEST_STD = 5.0, 0.1",
         "LARGEST_SIZE, SMALLEST_STD = 500.0, 0.1"),
        ("black_images_alarm", "if not varied or std >=", "if std >="),
    ),
    *mutants_of(
        "keras_preact/models/first_batch.py",
        f"{CORE}/models/test_first_batch.py",
        ("second_batch_is_judged", "            i == 0,\n", "            i == 1,\n"),
        ("generator_loses_its_first_batch", "        yield element\n",
         "        if i:\n            yield element\n"),
        ("loss_on_logits_passes", "if not from_logits and activation in (None, \"linear\"):",
         "if not from_logits and activation == \"linear\":"),
        ("labels_of_one_class_too_many", "or high >= classes:", "or high > classes:"),
    ),
    *mutants_of(
        "keras_preact/analysis/audit/order.py",
        f"{CORE}/analysis/test_audit.py",
        ("design_taken_for_a_mistake",
         "0 < 2 * len(without[kind]) <= len(inside[kind])", "0 < len(without[kind])"),
        ("relu_after_addition_is_bearable", '== ["norm", "activation"]\n    ]',
         '== ["weight"]\n    ]'),
        ("epsilon_is_not_read", "EPSILON_LIMIT = 0.01", "EPSILON_LIMIT = 1.0"),
    ),
    *mutants_of(
        "keras_preact/graph.py",
        f"{CORE}/analysis/test_audit.py",
        ("names_of_a_trace_go_on", 'return f"{kind}_{number}" if number else kind',
         "return operation.name"),
    ),
    *mutants_of(
        "keras_preact/serving/tensors.py",
        f"{CORE}/serving/test_tf_serving_api.py",
        ("range_is_judged_too_kindly", "> span / 8:", "> 0:"),
    ),
    *mutants_of(
        "keras_preact/health/activations.py",
        f"{CORE}/test_training_health.py",
        ("sample_is_judged_before_preprocessing",
         "z = ops.convert_to_numpy(values[step.inputs[0]])",
         "z = ops.convert_to_numpy(values[self.graph.inputs[0]])", "TestInput"),
    ),
    *mutants_of(
        "keras_preact/squeeze_excitation.py",
        f"{CORE}/test_unit_options.py",
        ("gate_of_the_squeeze", '"expand", "sigmoid"', '"expand", "tanh"'),
        ("squeeze_without_reduction", "channels // self.reduction", "channels",
         "squeeze"),
    ),
    *mutants_of(
        "keras_preact/layers/whitening.py",
        f"{CORE}/test_whitening.py",
        ("components_not_whitened", "components / np.sqrt(np.maximum(variances, 0) + EPSILON)",
         "components / 1.0"),
        ("patches_not_centred", " - np.outer(mean, mean)", ""),
        ("order_of_a_patch", "np.moveaxis(windows, 3, -1)", "windows"),
        ("trained_whitening", 'kwargs.setdefault("trainable", False)', "pass"),
    ),
    *mutants_of(
        "keras_preact/downsampling.py",
        f"{CORE}/test_unit_options.py",
        ("no_blur_in_the_stem", "branch=(1, 2, 1), stem=(1, 2, 1)", "branch=(1, 2, 1)"),
        ("strided_shortcut_beside_maxima", 'projection=(1, 1), weight="max"', 'weight="max"'),
    ),
    *mutants_of(
        "keras_preact/layers/spatial.py",
        f"{CORE}/test_padding.py",
        ("kernels_not_centred", "return ops.cast(centred * ops.rsqrt",
         "return ops.cast(kernel * ops.rsqrt", f"{CORE}/test_unit_options.py"),
        ("padding_of_one_side", 'self.padding, self.pad = "valid", self.kernel_size[0] // 2',
         "pass"),
        ("pairs_not_padded", '"same" if self.pool_size[0] == 2',
         '"valid" if self.pool_size[0] == 2'),
        ("max_pooling_over_zeros", 'value = 0.0 if self.zeros else float("-inf")', "value = 0.0"),
    ),
    *mutants_of(
        "keras_preact/initializers.py",
        INITIALIZERS,
        ("wrong_fan", '2.0, mode="fan_out"', '2.0, mode="fan_in"'),
        ("truncated_normal", 'distribution="untruncated_normal", seed=seed',
         'distribution="truncated_normal", seed=seed'),
        ("classifier_limit", '1 / 3, mode="fan_in"', '1, mode="fan_in"'),
        ("equal_kernels", 'config["seed"] = derive_seed(seed, *place)', 'config["seed"] = seed'),
        ("fixup_exponent", "units ** (-1 / (weights - 1))", "units ** (-1 / weights)"),
    ),
    *mutants_of(
        "keras_preact/optimizers.py",
        f"{CORE}/test_muon.py",
        ("one_matrix_for_all_units", "(*shape[:stacked], -1, shape[-1])", "(-1, shape[-1])",
         "units_of_a_stack"),
        ("smaller_side", "max(matrix.shape[-2:])", "min(matrix.shape[-2:])", "is_a_matrix"),
        ("orthogonal_gradient", "self.momentum * m) if", "0 * m) if", "is_a_matrix"),
    ),
    *mutants_of(
        "keras_preact/optimizers.py",
        f"{CORE}/test_optimizers.py",
        ("doubled_decay", "ops.cast(self.coupled_weight_decay, gradient.dtype)",
         "ops.cast(2 * self.coupled_weight_decay, gradient.dtype)"),
        ("decoupled_decay",
         "gradient = ops.add(gradient, ops.multiply(ops.cast(variable, gradient.dtype), decay))",
         "self.assign_sub(variable, learning_rate * decay * variable)"),
        ("missing_momentum", "momentum=float(momentum)", "momentum=0.0"),
        ("decayed_norms", "not any(word in variable.path for word",
         "not any(word is variable.path for word"),
        ("decayed_but_for_all_words", "not any(word in variable.path for word",
         "not all(word in variable.path for word"),
    ),
    *mutants_of(
        "keras_preact/schedules.py",
        f"{CORE}/test_schedules.py",
        ("warmup_off_by_one", "[step - 1 for step in boundaries]", "[step for step in boundaries]"),
        ("wrong_drop", "drops: Sequence[int] = (32_000, 48_000)",
         "drops: Sequence[int] = (32_000, 40_000)"),
        ("cosine_ends_late", "steps - warmup_steps,", "steps,"),
    ),
    *mutants_of(
        "keras_preact/losses.py",
        f"{CORE}/test_losses.py",
        ("smoothing_of_other_classes", "return (1 - self.label_smoothing) * of_label",
         "return of_label"),
        ("smoothing_sum", "of_all = -ops.mean(", "of_all = -ops.sum("),
    ),
    *mutants_of(
        "keras_preact/models/cifar.py",
        f"{CORE}/test_parameter_counts.py",
        ("imagenet_widths", "WIDTHS = (16, 32, 64)", "WIDTHS = (64, 128, 256)", "test_basic"),
        ("projection_in_place_of_zero_pad",
         'options["shape_shortcut"] = "projection" if projects else "zero_pad"',
         'options["shape_shortcut"] = "projection"', "test_basic"),
        ("strides_of_the_stages", "STRIDES = (1, 2, 2)", "STRIDES = (2, 2, 1)",
         f"{NETWORKS}::test_units_of_every_depth"),
    ),
    *mutants_of(
        "keras_preact/stacks.py",
        f"{CORE}/test_stacks.py",
        ("one_seed_for_all_units", "[initializers.derive_seed(seed, name_of(i)), 0]", "[seed, 0]",
         "masks_are_those"),
        ("equal_units", "initializers.spawn(initializer, name_of(i))(own, dtype=dtype)",
         "initializer(own, dtype=dtype)", "values_of_its_own"),
        ("unsaved_statistics", "self._body.stacked[i].assign(value)", "pass", "step_in_training"),
        ("groups_of_units_reversed", "ops.concatenate(groups)", "ops.concatenate(groups[::-1])",
         "seeded_units"),
    ),
    *mutants_of(
        "keras_preact/backend/loops.py",
        f"{CORE}/test_stacks.py",
        ("lost_last_segment", "if ends < length:", "if False:", "step_in_training"),
    ),
    *mutants_of(
        "keras_preact/layers/attention.py",
        f"{CORE}/test_transformer.py",
        ("mask_off_by_one", "place[:, None] >= place", "place[:, None] > place - 2", "causal"),
        ("unscaled_scores", "query * size**-0.5", "query", "test_unit"),
    ),
    *mutants_of(
        "keras_preact/transfer/freezing.py",
        f"{CORE}/transfer/test_freezing.py",
        ("last_part_not_frozen", "model.layers[: last + 1]", "model.layers[:last]"),
    ),
    *mutants_of(
        "keras_preact/transfer/calibration.py",
        f"{CORE}/transfer/test_calibration.py",
        ("temperature_upside_down", "return 1 / high", "return high", "lowest_cross_entropy"),
        ("bisection_ends_early", "range(60)", "range(3)", "lowest_cross_entropy"),
        ("weights_multiplied", "weight / temperature", "weight * temperature", "divided"),
    ),
    *mutants_of(
        "keras_preact/transfer/rates.py",
        f"{CORE}/transfer/test_rates.py",
        ("rates_upside_down", "(len(parts) - 1 - i)", "i"),
        ("decay_at_one_rate", "rate * self._decay_factor", "rate"),
    ),
    *mutants_of(
        "keras_preact/health/records.py",
        f"{CORE}/test_training_health.py",
        ("inverted_gradient_ratio", "ratio = first / last if", "ratio = last / first if",
         "norms_of_every_step"),
        ("ratio_to_the_gradient", "return _ratio(self.update_norms, self.weight_norms)",
         "return _ratio(self.update_norms, self.gradient_norms)", "norms_of_every_step"),
    ),
    *mutants_of(
        "keras_preact/weights/layout.py",
        f"{CORE}/weights/test_torch_cifar.py",
        ("kernels_not_transposed", "array.transpose(2, 3, 1, 0), lambda", "array, lambda"),
    ),
    *mutants_of(
        "keras_preact/weights/family.py",
        f"{CORE}/weights/test_torch_cifar.py",
        ("sample_not_compared", "self.compare(model, check)", "pass", "sample"),
        ("only_the_first_output_compared", "np.abs(outputs - expected).max()",
         "np.abs(outputs - expected)[0, 0]", f"{CORE}/weights/test_keras_hub.py", "sample"),
        ("stages_always_whole", "sum(map(operator.ne, row, units)) == 1", "False", "cut_short"),
    ),
    *mutants_of(
        "keras_preact/serving/batching.py",
        f"{CORE}/serving/test_batching.py",
        ("row_of_another_request", "output[stop - len(rows) : stop]", "output[: len(rows)]"),
        ("admission_off_by_one", "len(entry.images) > self._max_queue",
         "len(entry.images) >= self._max_queue"),
        ("batch_limit_off_by_one", "if rows > self._max_batch_size:",
         "if rows >= self._max_batch_size:"),
        ("only_the_first_of_a_failed_batch_is_told",
         "            for entry in batch:\n                failure",
         "            for entry in batch[:1]:\n                failure"),
    ),
    *mutants_of(
        "keras_preact/serving/gate.py",
        f"{CORE}/serving/test_gate.py",
        ("bodies_are_not_counted", "self.bytes += len(chunk)", "self.bytes += 0",
         f"{CORE}/serving/test_server.py", "limited_together"),
        ("any_host_is_answered", "if name not in self._hosts:", "if False:"),
    ),
    *mutants_of(
        "keras_preact/health/callback.py",
        f"{CORE}/test_training_health.py",
        ("gap_of_the_wrong_sign",
         'float(logs[accuracies[0]]) - float(logs[f"val_{accuracies[0]}"])',
         'float(logs[f"val_{accuracies[0]}"]) - float(logs[accuracies[0]])'),
    ),
    *mutants_of(
        "keras_preact/analysis/audit/checks.py",
        f"{CORE}/analysis/test_audit.py",
        ("dead_channels_pass", "Limits((0, 0.1), (0, 0.5))", "Limits((0, 0.7), (0, 0.8))", "dead"),
        ("any_weight_scale_passes", "Limits((1e-2, 10), (1e-4, 100))",
         "Limits((1e-5, 1e4), (1e-5, 1e4))", "wrong_size"),
        ("any_logits_pass", "Limits((0, 10), (0, 100))", "Limits((0, 1e4), (0, 1e4))",
         "wrong_size"),
        ("any_growth_passes", "Limits((0, 10), (0, 1e3))", "Limits((0, 1e9), (0, 1e9))"),
    ),
    *mutants_of(
        "training/runs.py",
        f"{TRAINING}/test_runs.py",
        ("a_lock_that_waits_for_nobody", "except BlockingIOError as error:",
         "except InterruptedError as error:"),
    ),
    *mutants_of(
        "training/evaluate.py",
        f"{TRAINING}/test_evaluate.py",
        ("confidence_without_right", "np.bincount(places.astype(int), confidence - right)",
         "np.bincount(places.astype(int), confidence)"),
    ),
    *mutants_of(
        "training/data/crops.py",
        f"{TRAINING}/test_data_crops.py",
        ("black_padding_for_mean", 'np.rint(mean).astype("uint8")', 'np.zeros(len(mean), "uint8")'),
        ("flip_never_drawn", "random.integers(0, 2, count).astype(bool)", "np.zeros(count, bool)"),
        ("wrong_crop_offset", "random.integers(0, offsets(border), (2, count))",
         "random.integers(0, offsets(border) - 1, (2, count))"),
        ("mirrored_channels", "pixels[flip][:, :, ::-1]", "pixels[flip][:, ::-1]"),
    ),
    *mutants_of(
        "training/data/order.py",
        f"{TRAINING}/test_data_streams.py",
        ("order_not_seeded", "np.random.default_rng((seed, purpose, number))",
         "np.random.default_rng((purpose, number))"),
    ),
    *mutants_of(
        "training/data/sources.py",
        f"{TRAINING}/test_data.py",
        ("holdout_overlaps_training",
         "train=files([path for i, path in enumerate(train) if i not in held])",
         "train=files(train)"),
    ),
    *mutants_of(
        "training/checkpoints.py",
        f"{TRAINING}/test_checkpoints.py",
        ("half_written_checkpoint", 'hashlib.file_digest(file, "sha256").hexdigest()[:16]',
         '"0" * 16'),
    ),
    *mutants_of(
        "training/variables.py",
        f"{TRAINING}/test_checkpoints.py",
        ("unsaved_seed_state", "for variable in network.variables}.values()",
         "for variable in network.weights}.values()"),
    ),
    *mutants_of(
        "training/predict.py",
        f"{TRAINING}/test_predict.py",
        ("top_k_off_by_one", 'kind="stable")[:top]', 'kind="stable")[: top + 1]'),
    ),
    *mutants_of(
        "training/evaluate.py",
        f"{TRAINING}/test_evaluate.py",
        ("top_4_for_top_5", "np.argpartition(-logits, 5, axis=1)[:, :5]",
         "np.argpartition(-logits, 5, axis=1)[:, :4]"),
    ),
    *mutants_of(
        "keras_preact/export/_flat.py",
        f"{CORE}/export/test_export.py::test_folded_networks_give_the_same",
        ("kernel_without_folding_factor", "copy.kernel.assign(value(weight.kernel, 1) * factor)",
         "copy.kernel.assign(value(weight.kernel, 1))"),
        ("bias_without_folding_factor",
         "(value(weight.bias, 0) - value(norm.moving_mean, 0)) * factor",
         "(value(weight.bias, 0) - value(norm.moving_mean, 0))"),
    ),
    *mutants_of(
        "keras_preact/layers/batch_norm.py",
        f"{CORE}/test_batch_norm.py",
        ("weights_of_16_bits_take_the_kernel", 'and self.variable_dtype == "float32"', ""),
        ("moving_variance_over_n_minus_1", "batch_variance * ((n - 1) / n)", "batch_variance"),
        ("statistics_of_the_batch_at_inference", "is_training=training", "is_training=True"),
    ),
    *mutants_of(
        "keras_preact/layers/chains.py",
        f"{CORE}/test_batch_norm.py",
        ("kernel_in_front_of_a_tanh", "= is_relu and names", "= names", "compiled_inference"),
    ),
    *mutants_of(
        "keras_preact/layers/spatial.py",
        f"{CORE}/test_padding.py",
        ("products_of_averages", "ops.average_pool(images, 1, strides,",
         "ops.average_pool(images, strides, strides,"),
        ("products_at_inference", '(backend == "tensorflow" and bool(training))',
         'backend == "tensorflow"', "one_pixel"),
        ("groups_in_front_of_a_relu", "if self.groups > 1 and keras",
         "if self.groups > 99 and keras",
         f"{CORE}/export/test_export.py::test_groups_without_onednn"),
    ),
    *mutants_of(
        "keras_preact/preprocessing.py",
        f"{CORE}/test_preprocessing.py",
        ("channels_of_pixels_reversed", '- np.asarray(self.mean, "float32")) / np.asarray(\n',
         '- np.asarray(self.mean[::-1], "float32")) / np.asarray(\n', "last_axis"),
    ),
    *mutants_of(
        "keras_preact/analysis/ensemble.py",
        f"{CORE}/analysis/test_ensemble.py",
        ("lesion_of_the_wrong_unit", "factors[list(without)] = 0",
         "factors[[i - 1 for i in without]] = 0"),
    ),
    *mutants_of(
        "keras_preact/analysis/propagation.py",
        f"{CORE}/analysis/test_propagation.py",
        ("weight_gradients_of_a_stack_reversed",
         "_norms(gradients[id(weight)], site.depth)",
         "_norms(gradients[id(weight)], site.depth)[::-1]", "unit_by_unit"),
        ("gradients_of_a_stack_reversed", "_norms(gradient, len(gradient))",
         "_norms(gradient, len(gradient))[::-1]", "unit_by_unit"),
    ),
    *mutants_of(
        "keras_preact/analysis/sites.py",
        f"{CORE}/analysis/test_propagation.py",
        ("lesions_of_a_stack_reversed", "residual_scale[first:last]",
         "residual_scale[first:last][::-1]",
         f"{CORE}/analysis/test_ensemble.py::test_errors_without_units"),
        ("observed_units_of_a_stack_reversed", "return outputs[-1], found\n",
         "return outputs[-1], found[::-1]\n", "unit_by_unit"),
    ),
    *mutants_of(
        "keras_preact/analysis/identities.py",
        f"{CORE}/analysis/test_identities.py",
        ("sign_of_the_exclusive_gates_gain",
         "ExclusiveGating: lambda shortcut: 1 / (1 + np.exp(shortcut.bias))",
         "ExclusiveGating: lambda shortcut: 1 / (1 + np.exp(-shortcut.bias))", "gates"),
    ),
]  # fmt: skip


def copy_of_the_tree(target: Path) -> Path:
    """Copy what git tracks, or would track if it were added."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name)
    return target


def run_tests(folder: Path, tests: list[str], only: str = "") -> subprocess.CompletedProcess:
    """Run fast tests of the tree in `folder`, up to the first failure."""
    command = [sys.executable, "-m", "pytest", "-x", "-n", "0", "-p", "no:cacheprovider"]
    environment = os.environ | {
        "PYTHONPATH": str(folder),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        [*command, "-m", "not slow", *(["-k", only] if only else []), *tests],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def survives(mutant: Mutant, folder: Path) -> bool:
    """Break the tree in `folder`, run the mutant's tests and mend it again.

    Raises:
        LookupError: if the text is not there exactly once.
        RuntimeError: if the tests do not run.
    """
    text = mutant.apply(folder)
    try:
        done = run_tests(folder, list(mutant.tests), mutant.only)
    finally:
        (folder / mutant.file).write_text(text)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{mutant.name}: pytest ended with {done.returncode}\n{done.stdout}")
    return done.returncode == 0


def failures_without_mutants(mutants: list[Mutant], folder: Path) -> str:
    """Return what pytest says if the tests fail on the unbroken tree, else nothing."""
    for parts in ([m for m in mutants if not m.only], [m for m in mutants if m.only]):
        tests = sorted({test for mutant in parts for test in mutant.tests})
        only = " or ".join(sorted({f"({mutant.only})" for mutant in parts if mutant.only}))
        done = run_tests(folder, tests, only) if parts else None
        if done and done.returncode:
            return done.stdout
    return ""


def check(mutants: list[Mutant], jobs: int) -> int:
    """Run the mutants in `jobs` copies of the tree; return the exit status."""
    with tempfile.TemporaryDirectory() as temporary:
        folders: queue.Queue[Path] = queue.Queue()
        for number in range(jobs):
            folders.put(copy_of_the_tree(Path(temporary) / f"tree{number}"))

        def result(mutant: Mutant) -> str:
            folder = folders.get()
            try:
                return "SURVIVED" if survives(mutant, folder) else "killed"
            except (LookupError, RuntimeError) as error:
                return f"ERROR {error}"
            finally:
                folders.put(folder)

        if said := failures_without_mutants(mutants, Path(temporary) / "tree0"):
            print(f"The tests fail on the unbroken code:\n{said}")
            return 2
        results = []
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            for mutant, found in zip(mutants, pool.map(result, mutants), strict=True):
                print(f"{mutant.name:36} {found}", flush=True)
                results.append(found)
    killed, survived = results.count("killed"), results.count("SURVIVED")
    errors = len(results) - killed - survived
    print(f"{killed} of {len(mutants)} killed, {survived} survived, {errors} not run")
    return 2 if errors else int(survived > 0)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="names of mutants, or patterns such as 'bn_*'")
    parser.add_argument("--list", action="store_true", help="list the mutants, run none")
    parser.add_argument("--jobs", type=int, default=1, help="mutants that run at the same time")
    options = parser.parse_intermixed_args()
    chosen = [
        mutant
        for mutant in MUTANTS
        if not options.names or any(fnmatch.fnmatch(mutant.name, each) for each in options.names)
    ]
    unknown = [
        each
        for each in options.names
        if not any(fnmatch.fnmatch(mutant.name, each) for mutant in MUTANTS)
    ]
    if unknown:
        parser.error(f"no such mutant: {', '.join(unknown)}. --list names them all")
    if options.list:
        for mutant in chosen:
            print(f"{mutant.name:36} {mutant.file}")
        return 0
    return check(chosen, options.jobs)


if __name__ == "__main__":
    sys.exit(main())
