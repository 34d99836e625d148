"""Models by the name in a config file, with sizes taken from the data set."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fedbraid.models.cnn import emnist_cnn
from fedbraid.models.linear import least_squares, logistic, one_versus_all, softmax_regression
from fedbraid.models.low_rank import lora, read_weights
from fedbraid.models.lstm import char_lstm, word_lstm
from fedbraid.models.model import Model
from fedbraid.models.perceptron import mlp
from fedbraid.models.pretrained import llama, smollm2
from fedbraid.models.resnet import resnet18_gn
from fedbraid.models.transformer import encoder, gpt
from fedbraid.names import Names, check_types, nearest, resolve

__all__ = ["MODELS", "NAMES", "build", "resolve"]

Shapes = Mapping[str, Sequence[int]]

MODELS: dict[str, Callable[..., Model]] = {
    "least_squares": least_squares,
    "logistic": logistic,
    "one_versus_all": one_versus_all,
    "softmax_regression": softmax_regression,
    "mlp": mlp,
    "emnist_cnn": emnist_cnn,
    "resnet18_gn": resnet18_gn,
    "char_lstm": char_lstm,
    "word_lstm": word_lstm,
    "gpt": gpt,
    "encoder": encoder,
    "llama": llama,
    "smollm2": smollm2,
}
"""The library's own models, and their factories."""

NAMES = Names("model", MODELS, Model, instances=True)
"""Every model that a config can name: those, the models of installed packages, and ``module:attribute``."""


def _image(shapes: Shapes) -> tuple[int, ...]:
    shape = tuple(shapes["x"])
    if len(shape) == 1 and math.isqrt(shape[0]) ** 2 == shape[0]:
        return (math.isqrt(shape[0]), math.isqrt(shape[0]), 1)
    if len(shape) not in (2, 3):
        raise ValueError(f"this model reads images, the data's 'x' has shape {shape}: set the option image")
    return shape


# What each factory takes from the data set: argument -> (shapes, num_classes) -> value.
_FEATURES = {"d": lambda shapes, classes: math.prod(shapes["x"])}
_CLASSES = {"classes": lambda shapes, classes: classes}
_IMAGE = {"image": lambda shapes, classes: _image(shapes)}
_VOCAB = {"vocab": lambda shapes, classes: classes}
_LENGTH = {"length": lambda shapes, classes: shapes["x"][0] if len(shapes["x"]) == 1 else None}
_OPTION = {"vocab": lambda shapes, classes: None}  # a data set with labels does not say how many token ids it has
_SIZES: dict[str, dict[str, Callable[[Shapes, int | None], Any]]] = {
    "least_squares": _FEATURES,
    "logistic": _FEATURES,
    "one_versus_all": _FEATURES | _CLASSES,
    "softmax_regression": _FEATURES | _CLASSES,
    "mlp": _FEATURES | _CLASSES,
    "emnist_cnn": _IMAGE | _CLASSES,
    "resnet18_gn": _IMAGE | _CLASSES,
    "char_lstm": _VOCAB,
    "word_lstm": _VOCAB,
    "gpt": _VOCAB | _LENGTH,
    "encoder": _OPTION | _CLASSES | _LENGTH,
    "llama": _VOCAB,
    "smollm2": {},
}


def build(name: str, example_shapes: Shapes, num_classes: int | None = None, **options: Any) -> Model:
    """The model called ``name``, sized for a data set.

    Args:
        name: a name in ``NAMES``: of the library, of an installed package, or ``"module:attribute"`` of a ``Model`` or
            of a factory that returns one (marked with ``@fedbraid.factory("model")``, or annotated ``-> Model``). That
            factory gets ``options``, and ``example_shapes`` and ``num_classes`` if it takes them.
        example_shapes: the shape of one example of each field, such as ``{"x": (28, 28), "y": ()}``.
        num_classes: the number of labels (for sequences: of symbols); None for regression.
        options: further arguments of the factory; they override the sizes of the data set. ``lora`` is a table of
            options of `fedbraid.models.lora`: the model then has adapters as its parameters. Its ``weights`` names an
            ``.npz`` file with the base weights.

    >>> model = build("mlp", {"x": (28, 28), "y": ()}, 62, hidden=[50])
    >>> import jax
    >>> [layer["w"].shape for layer in model.init(jax.random.key(0))]
    [(784, 50), (50, 62)]
    """
    if "lora" in options:
        given = options.pop("lora")
        if not isinstance(given, Mapping):
            raise ValueError(f"lora must be a table of options, such as [model.lora] with rank = 8, got {given!r}")
        table = dict(given)
        model = build(name, example_shapes, num_classes, **options)
        weights = table.pop("weights", None)
        _check_lora(table)
        return lora(model, None if weights is None else read_weights(weights, model), **table)
    found = NAMES.find(name)
    if not found.own:
        return NAMES.call(
            found, options, {"example_shapes": lambda: example_shapes, "num_classes": lambda: num_classes}
        )
    factory = found.thing
    allowed = list(inspect.signature(factory).parameters)
    for option in options:
        if option not in allowed:
            near = nearest(option, allowed)
            raise ValueError(f"model {name!r} has no option {option!r}{near}; it takes {', '.join(allowed)}")
    check_types(f"model {name!r}", factory, options)
    if "x" not in example_shapes:
        raise ValueError(f"model {name!r} reads the field 'x', the data has {sorted(example_shapes)}; rename its input")
    sizes = {}
    for argument, size in _SIZES[name].items():
        if argument in options:
            continue
        regression = argument == "classes" and options.get("score") == "values"
        sizes[argument] = math.prod(example_shapes.get("y", ())) if regression else size(example_shapes, num_classes)
        if sizes[argument] is None:
            raise ValueError(
                f"model {name!r} needs {argument!r}, which the data does not have: "
                + (
                    'for a regression set score = "values", else '
                    if argument == "classes" and "score" in allowed
                    else ""
                )
                + f"set the option {argument}"
            )
    return factory(**sizes, **options)


def _check_lora(table: Mapping[str, Any]) -> None:
    allowed = [name for name in inspect.signature(lora).parameters if name not in ("model", "base")]
    for option in table:
        if option not in allowed:
            raise ValueError(f"lora has no option {option!r}; it takes {', '.join([*allowed, 'weights'])}")
