"""ResNet-18 with group normalisation, for small images.

He et al., "Deep Residual Learning for Image Recognition", 2016; Wu and He, "Group Normalization", 2018. A client has
few and similar examples, so its batch statistics are wrong for other clients. Federated work therefore uses group
normalisation (Hsieh et al., "The Non-IID Data Quagmire", 2020), with two groups a layer as in Reddi et al., "Adaptive
Federated Optimization", 2021.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from fedbraid.lowering.operations import conv2d, dense, group_norm, max_pool
from fedbraid.models.layers import as_floats, dense_init, glorot_uniform, image_shape
from fedbraid.models.model import Array, Model, check_sizes, head, supervised

STRIDES = (1, 1, 2, 1, 2, 1, 2, 1)  # of the eight blocks; a stride of 2 doubles the channels


def resnet18_gn(
    classes: int,
    *,
    image: tuple[int, ...] = (24, 24, 3),
    groups: int = 2,
    width: int = 64,
    stem: Literal["small", "large"] = "small",
    score: str = "classes",
) -> Model:
    """Residual network of 18 layers with group normalisation; ``x`` [B, *image], ``y`` [B] in 0 .. classes - 1.

    Args:
        classes: the number of labels.
        image: (height, width, channels); 24x24x3 are the cropped images of federated CIFAR-100.
        groups: groups of channels normalised together.
        width: channels of the first blocks, doubled three times.
        score: ``"values"`` makes it a regression with ``classes`` real numbers per example.
        stem: ``"small"`` starts with a 3x3 convolution at full size, as is usual for 32x32 images. ``"large"`` starts
            with a 7x7 convolution of stride 2 and a max pool of 2, similar to ImageNet: a sixteenth of the work.

    >>> import jax
    >>> shapes = jax.eval_shape(resnet18_gn(100).init, jax.random.key(0))
    >>> sum(leaf.size for leaf in jax.tree.leaves(shapes))
    11220132
    """
    rows, cols, channels = image_shape(image)
    check_sizes(classes=classes, groups=groups, width=width)
    if width % groups:
        raise ValueError(f"groups must divide the width of {width} channels, got {groups}")
    if stem not in ("small", "large"):
        raise ValueError(f"stem must be 'small' or 'large', got {stem!r}")
    last = head(score, classes)
    window, stride = (3, 1) if stem == "small" else (7, 2)

    def init(key):
        keys = iter(jax.random.split(key, 32))
        params = {"stem": _unit_init(next(keys), window, channels, width), "blocks": []}
        before = width
        for step in STRIDES:
            out = before * step
            block = {"one": _unit_init(next(keys), 3, before, out), "two": _unit_init(next(keys), 3, out, out)}
            if step != 1:
                block["shortcut"] = _unit_init(next(keys), 1, before, out)
            params["blocks"].append(block)
            before = out
        return params | {"dense": dense_init(next(keys), before, classes)}

    def unit(params, x, stride, **after):
        # The padding of the original: k // 2 on every side, also under strides.
        x = conv2d(x, params["w"], stride=stride, padding=params["w"].shape[0] // 2)
        return group_norm(x, params["scale"], params["shift"], groups, **after)

    def features(params, x, key):
        x = unit(params["stem"], as_floats(x, (rows, cols, channels)), stride, relu=True)
        if stem == "large":
            x = max_pool(x, 2)
        for block, step in zip(params["blocks"], STRIDES, strict=True):
            past = unit(block["shortcut"], x, step) if "shortcut" in block else x
            x = unit(block["two"], unit(block["one"], x, step, relu=True), 1, relu=True, residual=past)
        return x.astype(jnp.float32).mean((1, 2))

    def apply(params, x, key):
        return last.shape(dense(params["dense"], features(params, x, key)))

    return supervised(init, apply, last.score, targets=last.targets, features=features, head=("dense",))


def _unit_init(key: Array, window: int, channels: int, out: int) -> dict[str, Array]:
    kernel = glorot_uniform(key, (window, window, channels, out))
    return {"w": kernel, "scale": jnp.ones(out), "shift": jnp.zeros(out)}
