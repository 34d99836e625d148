"""The convolutional network for EMNIST of Reddi et al., "Adaptive Federated Optimization", 2021 (appendix C).

Also the network of Karimireddy et al. (Mime) and of Charles and Konecny (LocalUpdate) on EMNIST-62.
"""

from __future__ import annotations

import jax

from fedbraid.lowering.operations import conv_relu, dense
from fedbraid.models import layers
from fedbraid.models.layers import as_floats, conv_init, dense_init, image_shape
from fedbraid.models.model import Model, check_sizes, head, supervised


def emnist_cnn(
    classes: int = 62, *, dropout: bool = True, image: tuple[int, ...] = (28, 28, 1), score: str = "classes"
) -> Model:
    """Conv 3x3 32, ReLU, conv 3x3 64, ReLU, max pool 2, dropout .25, dense 128, ReLU, dropout .5, dense ``classes``.

    Convolutions are valid (no padding). 1,206,590 parameters for 62 classes of 28x28 grey images; other sizes and
    channels through ``image``. Kernels start Glorot-uniform, biases zero, as in Keras.

    Args:
        classes: labels ``y`` run from 0 to classes - 1.
        dropout: False leaves out both dropout layers; training then uses no random numbers.
        image: (height, width, channels); ``x`` may be flat or without its channel axis.
        score: ``"values"`` makes it a regression with ``classes`` real numbers per example.

    >>> import jax
    >>> params = emnist_cnn().init(jax.random.key(0))
    >>> sum(leaf.size for leaf in jax.tree.leaves(params))
    1206590
    """
    height, width, channels = image_shape(image)
    check_sizes(classes=classes)
    last = head(score, classes)
    if min(height, width) < 6:
        raise ValueError(f"image must be at least 6 x 6 for two valid convolutions and a pool, got {tuple(image)}")
    rates = (0.25, 0.5) if dropout else (0.0, 0.0)
    rows, cols = (height - 4) // 2, (width - 4) // 2

    def init(key):
        first, second, third, fourth = jax.random.split(key, 4)
        return {
            "conv1": conv_init(first, (3, 3), channels, 32),
            "conv2": conv_init(second, (3, 3), 32, 64),
            "dense1": dense_init(third, rows * cols * 64, 128),
            "dense2": dense_init(fourth, 128, classes),
        }

    def features(params, x, key):
        keys = (None, None) if key is None else jax.random.split(key)
        x = as_floats(x, (height, width, channels))
        x = conv_relu(params["conv2"], conv_relu(params["conv1"], x), pool=True)
        x = layers.dropout(x.reshape(x.shape[0], -1), rates[0], keys[0])
        return layers.dropout(jax.nn.relu(dense(params["dense1"], x)), rates[1], keys[1])

    def apply(params, x, key):
        return last.shape(dense(params["dense2"], features(params, x, key)))

    return supervised(init, apply, last.score, targets=last.targets, features=features, head=("dense2",))
