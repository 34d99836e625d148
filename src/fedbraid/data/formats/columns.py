"""Checks that all formats share: labels in range, pixels stored without loss, optional packages."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

__all__ = ["as_labels", "as_pixels", "need", "open_image", "twice_in"]


def as_labels(values: Any, at: str, classes: int | None = None) -> np.ndarray:
    """Integer labels as int32, each at least 0 and below ``classes``.

    >>> as_labels([0, 2], "file: client a", 3).dtype.name
    'int32'
    """
    labels = np.asarray(values)
    if labels.ndim == 0:
        raise ValueError(f"{at}: expected one label per example, got a single value")
    if labels.ndim != 1:
        labels = labels.reshape(len(labels), -1)
        if labels.shape[1] != 1:
            raise ValueError(f"{at}: expected one label per example, got shape {list(labels.shape)}")
        labels = labels[:, 0]
    if labels.dtype.kind == "f" and np.array_equal(labels, np.rint(labels)):
        labels = labels.astype(np.int64)
    if labels.dtype.kind == "f" and not np.isfinite(labels).all():
        bad = ~np.isfinite(labels)
        raise ValueError(f"{at}: {int(bad.sum())} labels are not finite, first in row {int(np.argmax(bad))}")
    if labels.dtype.kind not in "iub":
        raise ValueError(f"{at}: labels must be integers, got {labels.dtype}")
    bad = (labels < 0) | (labels >= (classes if classes is not None else 2**31))
    if bad.any():
        row = int(np.argmax(bad))
        allowed = f"0 to {classes - 1}" if classes is not None else "0 or more"
        raise ValueError(f"{at}: label {labels[row]} in row {row} is out of range ({allowed})")
    return labels.astype(np.int32)


def as_pixels(values: Any, at: str, shape: tuple[int, ...] | None = None) -> np.ndarray:
    """Pixels as uint8. Floats must be multiples of 1/255 in [0, 1], so that bytes store them without loss.

    >>> as_pixels([[0.0, 1.0]], "file: client a", (1, 2)).tolist()
    [[[0, 255]]]
    """
    try:
        pixels = np.asarray(values)
    except ValueError as error:
        raise ValueError(f"{at}: images differ in shape") from error
    if pixels.dtype == object:
        raise ValueError(f"{at}: images differ in shape")
    if shape is not None:
        if len(pixels) and pixels[0].size != int(np.prod(shape)):
            raise ValueError(f"{at}: images of {pixels[0].size} values, {list(shape)} expected")
        pixels = pixels.reshape(len(pixels), *shape)
    if pixels.dtype == np.uint8:
        return pixels
    if pixels.dtype.kind == "f":
        scaled = pixels * 255.0
        whole = np.rint(scaled)
        if not np.isfinite(scaled).all() or (len(scaled) and np.abs(scaled - whole).max() > 0.01):
            raise ValueError(f"{at}: pixels are not multiples of 1/255; store them unchanged (--pixels keep)")
        pixels = whole
    elif pixels.dtype.kind not in "iu":
        raise ValueError(f"{at}: pixels must be numbers, got {pixels.dtype}")
    if len(pixels) and (pixels.min() < 0 or pixels.max() > 255):
        raise ValueError(f"{at}: pixels outside 0 to 255 (or 0 to 1); store them unchanged (--pixels keep)")
    return pixels.astype(np.uint8)


def twice_in(names: Sequence[Hashable]) -> list[Hashable]:
    """The names that appear more than once, in order.

    >>> twice_in(["a", "b", "a"])
    ['a']
    """
    return [name for name, count in Counter(names).items() if count > 1]


_IMAGES = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF")  # others may start programs (EPS) or read other files


def open_image(source: Any, at: str, *, like: np.ndarray | None = None) -> np.ndarray:
    """An encoded image (a path or a file) as uint8: grey images ``[H, W]``, others ``[H, W, 3]``.

    Its declared size is checked before it is decoded: against pillow's limit, and against the image ``like``.
    """
    image_module = need("PIL.Image")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", image_module.DecompressionBombWarning)
            with image_module.open(source, formats=_IMAGES) as image:
                shape = (image.size[1], image.size[0])
                if like is not None and shape != like.shape[:2]:
                    found = [*shape, 3] if image.mode not in ("1", "L") else list(shape)
                    raise _OtherShape(f"{at}: shape {found} differs from {list(like.shape)} of the first image")
                return np.asarray(image.convert("L" if image.mode in ("1", "L") else "RGB"))
    except _OtherShape as error:
        raise ValueError(str(error)) from None
    except MemoryError:
        raise
    except Exception as error:  # pillow's decoders raise many types on damaged images
        raise ValueError(f"{at}: not a readable image ({' '.join(str(error).split())})") from error


class _OtherShape(ValueError):
    pass


def need(module: str, extra: str = "data") -> Any:
    """Import an optional package, or raise an error with the extra that installs it."""
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(f"this format needs {module}: pip install 'fedbraid[{extra}]'") from error
