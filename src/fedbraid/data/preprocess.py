"""Preprocessing inside the compiled step: stores can keep small integers, and every step has new augmentation.

A preprocessing function is pure: ``f(batch, key, train, **options) -> batch`` on a dict of arrays ``[B, ...]``. It does
not change fields that it does not name, nor the mask. ``train`` is a Python bool. If it is False, there is no
augmentation, the function is deterministic and ``key`` may be None. Functions have names, for stores and configs:

>>> import numpy as np
>>> pipeline = Pipeline.of({"name": "scale", "factor": 1 / 16})
>>> float(pipeline({"x": np.full((1, 2), 8, np.uint8)}, None, False)["x"][0, 0])
0.5

The recipes follow Reddi et al., *Adaptive Federated Optimization* (CIFAR-100: crop to 24x24, flip, per-image
normalisation), Karimireddy et al., *Breaking the centralized barrier* (EMNIST: 1 - x) and Pathak & Wainwright,
*FedSplit*, App. B.2.2 (random features of FEMNIST).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

__all__ = [
    "FUNCTIONS",
    "Pipeline",
    "crop_flip",
    "flatten",
    "integers",
    "invert",
    "random_features",
    "scale",
    "scaling_of",
    "standardize",
    "unscaled_bytes",
]

Batch = Mapping[str, Any]


def scale(
    batch: Batch, key: Any, train: bool, *, factor: float = 1 / 255, offset: float = 0.0, field: str = "x"
) -> dict[str, Any]:
    """``factor * x + offset`` in float32."""
    return {**batch, field: jnp.asarray(batch[field], jnp.float32) * factor + offset}


def invert(batch: Batch, key: Any, train: bool, *, field: str = "x") -> dict[str, Any]:
    """``1 - x``. In EMNIST, paper is 1 and ink 0; after this step ink is 1, as in MNIST."""
    return {**batch, field: 1.0 - jnp.asarray(batch[field], jnp.float32)}


def integers(batch: Batch, key: Any, train: bool, *, fields: str = "x") -> dict[str, Any]:
    """Small stored integers (tokens as uint8 or uint16) as int32; ``fields`` is a comma-separated list."""
    return {**batch, **{field: jnp.asarray(batch[field], jnp.int32) for field in fields.split(",")}}


def flatten(batch: Batch, key: Any, train: bool, *, field: str = "x") -> dict[str, Any]:
    """``[B, ...] -> [B, d]`` in row-major order."""
    x = jnp.asarray(batch[field])
    return {**batch, field: x.reshape(len(x), -1)}


def standardize(batch: Batch, key: Any, train: bool, *, field: str = "x") -> dict[str, Any]:
    """Per-image ``(x - mean) / std``; the std is at least ``1 / sqrt(pixels)``, so constant images stay finite."""
    x = jnp.asarray(batch[field], jnp.float32)
    axes = tuple(range(1, x.ndim))
    mean, std = x.mean(axes, keepdims=True), x.std(axes, keepdims=True)
    floor = 1.0 / np.sqrt(max(1, int(np.prod(x.shape[1:]))))
    return {**batch, field: (x - mean) / jnp.maximum(std, floor)}


def crop_flip(batch: Batch, key: Any, train: bool, *, size: int = 24, field: str = "x") -> dict[str, Any]:
    """In training, a random ``size`` x ``size`` crop and horizontal flip of ``[B, H, W, ...]``; else a centre crop."""
    x = jnp.asarray(batch[field])
    if x.ndim < 3:
        raise ValueError(f"crop_flip crops images [B, H, W, ...], the field {field!r} has shape {x.shape}")
    height, width = x.shape[1] - size, x.shape[2] - size
    if height < 0 or width < 0:
        raise ValueError(f"crop_flip: size = {size} is larger than the images ({x.shape[1]} x {x.shape[2]})")
    if not train:
        top, left = height // 2, width // 2
        return {**batch, field: x[:, top : top + size, left : left + size]}
    k_top, k_left, k_flip = jax.random.split(key, 3)
    n = len(x)
    tops = jax.random.randint(k_top, (n,), 0, height + 1)
    lefts = jax.random.randint(k_left, (n,), 0, width + 1)
    flips = jax.random.bernoulli(k_flip, 0.5, (n,))

    def one(image, top, left, flip):
        start = (top, left) + (0,) * (image.ndim - 2)
        image = jax.lax.dynamic_slice(image, start, (size, size, *image.shape[2:]))
        return jnp.where(flip, image[:, ::-1], image)

    return {**batch, field: jax.vmap(one)(x, tops, lefts, flips)}


def random_features(
    batch: Batch, key: Any, train: bool, *, features: int = 3000, seed: int = 0, field: str = "x"
) -> dict[str, Any]:
    """FedSplit's features ``(1, u, (R u)+, (G u)+)``, R of random signs, G standard normal: d = 6,785 for 28 x 28."""
    u = jnp.asarray(batch[field], jnp.float32)
    u = u.reshape(len(u), -1)
    r, g = _random_maps(u.shape[1], features, seed)
    a = jnp.concatenate([jnp.ones((len(u), 1), u.dtype), u, jax.nn.relu(u @ r), jax.nn.relu(u @ g)], axis=1)
    return {**batch, field: a}


@lru_cache(maxsize=4)
def _random_maps(d: int, features: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    signs = 2.0 * rng.integers(0, 2, (d, features)) - 1.0
    return signs.astype(np.float32), rng.standard_normal((d, features)).astype(np.float32)


FUNCTIONS: Mapping[str, Callable[..., dict[str, Any]]] = {
    "scale": scale,
    "invert": invert,
    "integers": integers,
    "flatten": flatten,
    "standardize": standardize,
    "crop-flip": crop_flip,
    "random-features": random_features,
}


@dataclass(frozen=True)
class Pipeline:
    """A sequence of named functions. It is hashable (equal pipelines share a compiled program); ``spec()`` is JSON.

    >>> Pipeline.of({"name": "scale"}, {"name": "invert"}).spec()
    [{'name': 'scale'}, {'name': 'invert'}]
    """

    steps: tuple[tuple[str, tuple[tuple[str, Any], ...]], ...] = ()

    @classmethod
    def of(cls, *steps: Mapping[str, Any]) -> Pipeline:
        """A pipeline of steps in their JSON form; unknown names and options are errors."""
        out = []
        for step in steps:
            options = dict(step)
            name = options.pop("name", None)
            if name not in FUNCTIONS:
                raise ValueError(f"unknown preprocessing {name!r}; known: {', '.join(sorted(FUNCTIONS))}")
            known = FUNCTIONS[name].__kwdefaults__ or {}
            if extra := sorted(set(options) - set(known)):
                raise ValueError(
                    f"preprocessing {name!r} has no option {extra[0]!r}; it takes {', '.join(sorted(known))}"
                )
            for option, value in options.items():
                _check_option(name, option, value, known[option])
            out.append((name, tuple(sorted(options.items()))))
        return cls(tuple(out))

    def spec(self) -> list[dict[str, Any]]:
        """The steps in their JSON form: the name and the options of each."""
        return [{"name": name, **dict(options)} for name, options in self.steps]

    def __call__(self, batch: Batch, key: Any, train: bool) -> dict[str, Any]:
        for i, (name, options) in enumerate(self.steps):
            step_key = None if key is None else jax.random.fold_in(key, i)
            try:
                batch = FUNCTIONS[name](batch, step_key, train, **dict(options))
            except KeyError as field:
                have = ", ".join(sorted(batch))
                raise ValueError(f"preprocessing {name!r} reads the field {field}; the data has {have}") from None
        return dict(batch)


def _check_option(name: str, option: str, value: Any, default: Any) -> None:
    """An option must have the type of its default; numbers must be finite."""
    kinds = (int, float) if isinstance(default, float) else (type(default),)
    if type(value) not in kinds or (isinstance(value, float) and not np.isfinite(value)):
        raise ValueError(
            f"preprocessing {name!r}: {option} = {value!r} must be {kinds[-1].__name__}, such as {default!r}"
        )


def pipeline(spec: Sequence[Mapping[str, Any]] | None) -> Pipeline | None:
    """A pipeline from its JSON form, or None if that is None or empty."""
    return Pipeline.of(*spec) if spec else None


def scaling_of(arrays: Mapping[str, Any]) -> Pipeline | None:
    """The default pipeline of a set without one: divides ``x`` by 255 if it holds uint8 images.

    >>> scaling_of({"x": np.zeros((5, 28, 28), np.uint8), "y": np.zeros(5, np.int32)}).spec()
    [{'name': 'scale'}]
    """
    return Pipeline.of({"name": "scale"}) if _byte_images(arrays) else None


def unscaled_bytes(split: Any) -> str | None:
    """The field of a split without preprocessing that holds uint8 images, or None."""
    return "x" if split.preprocess is None and _byte_images(split.arrays) else None


def _byte_images(arrays: Mapping[str, Any]) -> bool:
    """Whether ``x`` looks like uint8 images or vectors of pixels. Tokens do not: they have a label at each position."""
    x, y = arrays.get("x"), arrays.get("y")
    if x is None or getattr(x, "dtype", None) != np.uint8 or x.ndim < 2:
        return False
    return x.ndim >= 3 or y is None or y.ndim == 1
