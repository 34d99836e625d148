"""Transformers: a language model and an encoder for classification, with normalisation before each layer.

The language model is that of Radford et al., "Language Models are Unsupervised Multitask Learners", 2019 (GPT-2): layer
normalisation before attention and before the two dense layers (Xiong et al., "On Layer Normalization in the Transformer
Architecture", 2020), GELU in its tanh form, the output matrix tied to the embedding (Press and Wolf, 2017). The encoder
has the same blocks without the causal mask. Positions are learned, or rotary (Su et al., "RoFormer", 2021).

A batch holds ``x`` [B, T] token ids. Id 0 is padding, at the end of a sequence only. For `gpt`, ``y`` [B, T] are the
ids one position later, and the loss is the mean over all real tokens, as in `fedbraid.models.lstm`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedbraid.core import check_choice, check_number
from fedbraid.lowering.operations import Dense, dense
from fedbraid.models.layers import dropout as drop
from fedbraid.models.lstm import PADDING
from fedbraid.models.model import Array, Model, PyTree, check_sizes, head, score_tokens, supervised
from fedbraid.models.targets import Targets

__all__ = ["encoder", "gpt", "layer_norm", "rotated", "rotations"]

Positions = Literal["learned", "rotary"]
POSITIONS = ("learned", "rotary")
STD = 0.02  # standard deviation of GPT-2's initial weights
EPSILON = 1e-5  # added to the variance in a layer normalisation, as in GPT-2


class Sizes(NamedTuple):
    """The sizes of a transformer, checked by `_sizes`."""

    layers: int
    width: int
    heads: int
    hidden: int
    length: int
    positions: Positions
    dropout: float
    remat: bool


def gpt(
    vocab: int = 90,
    *,
    layers: int = 4,
    width: int = 256,
    heads: int = 4,
    hidden: int | None = None,
    length: int = 128,
    positions: Positions = "learned",
    tied: bool = True,
    dropout: float = 0.0,
    remat: bool = False,
    uncounted: Sequence[int] = (),
) -> Model:
    """A decoder with causal attention: predicts the next token at every position, from those before it.

    Weights start normal with standard deviation 0.02, and those that end a residual branch with
    0.02 / sqrt(2 ``layers``), as in GPT-2. Biases start at zero.

    Args:
        vocab: the number of token ids, padding (0) included.
        layers: the number of blocks; each is an attention and two dense layers.
        width: of the activations; a multiple of ``heads``.
        heads: of the attention.
        hidden: width between the two dense layers of a block; None is 4 ``width``.
        length: the longest sequence (the size of the table of learned positions).
        positions: ``"learned"`` or ``"rotary"``; the latter has no parameters.
        tied: use the embedding as output matrix; False gives the output its own matrix.
        dropout: rate for the embedded tokens and for the end of each residual branch, in training.
        remat: compute the activations inside a block again for its gradient, instead of storing them: less memory and
            about a third more time on a GPU. On a CPU the compiler undoes it.
        uncounted: ids left out of the accuracy besides padding.

    >>> import jax
    >>> shapes = jax.eval_shape(gpt(2048, tied=False).init, jax.random.key(0))
    >>> sum(leaf.size for leaf in jax.tree.leaves(shapes))
    4240896
    """
    sizes = _sizes(layers, width, heads, hidden, length, positions, dropout, remat)
    check_sizes(vocab=vocab)

    def init(key):
        first, second = jax.random.split(key)
        params = _trunk_init(first, vocab, sizes)
        return params if tied else params | {"head": {"w": _normal(second, (width, vocab))}}

    def apply(params, x, key):
        x = _trunk(params, x.astype(jnp.int32), key, sizes, causal=True)
        return x @ (params["embedding"].T if tied else params["head"]["w"])

    score = score_tokens.through(lambda score: partial(score, padding=PADDING, uncounted=tuple(uncounted)))
    return supervised(init, apply, score, targets=Targets("tokens", vocab, ids=vocab))


def encoder(
    vocab: int,
    classes: int = 2,
    *,
    layers: int = 2,
    width: int = 128,
    heads: int = 4,
    hidden: int | None = None,
    length: int = 128,
    positions: Positions = "learned",
    dropout: float = 0.0,
    remat: bool = False,
    score: str = "classes",
) -> Model:
    """An encoder whose tokens all see each other: classifies a whole sequence by the mean of its last activations.

    ``x`` [B, T] token ids, where 0 is padding: other tokens do not see it, and it is left out of the mean. ``y`` [B]
    are classes. Initial weights are those of `gpt`.

    Args:
        vocab: the number of token ids, padding (0) included.
        classes: labels ``y`` run from 0 to classes - 1.
        layers: the number of blocks; each is an attention and two dense layers.
        width: of the activations; a multiple of ``heads``.
        heads: of the attention.
        hidden: width between the two dense layers of a block; None is 4 ``width``.
        length: the longest sequence (the size of the table of learned positions).
        positions: ``"learned"`` or ``"rotary"``; the latter has no parameters.
        dropout: rate for the embedded tokens and for the end of each residual branch, in training.
        remat: compute the activations inside a block again for its gradient, instead of storing them: less memory and
            about a third more time on a GPU. On a CPU the compiler undoes it.
        score: ``"values"`` makes it a regression with ``classes`` real numbers per example.

    >>> import jax, jax.numpy as jnp
    >>> model = encoder(50, classes=3, layers=1, width=8, heads=2, length=6)
    >>> model.predict(model.init(jax.random.key(0)), jnp.ones((5, 6), jnp.int32)).shape
    (5, 3)
    """
    sizes = _sizes(layers, width, heads, hidden, length, positions, dropout, remat)
    check_sizes(vocab=vocab, classes=classes)
    last = head(score, classes)

    def init(key):
        first, second = jax.random.split(key)
        return _trunk_init(first, vocab, sizes) | {"head": _dense(second, width, classes)}

    def apply(params, x, key):
        x = x.astype(jnp.int32)
        real = x != PADDING
        outputs = _trunk(params, x, key, sizes, causal=False, seen=real)
        real = real.astype(outputs.dtype)
        count = jnp.maximum(real.sum(-1, keepdims=True), 1)
        return last.shape(dense(params["head"], jnp.einsum("btd,bt->bd", outputs, real) / count))

    return supervised(init, apply, last.score, targets=replace(last.targets, ids=vocab))


def _sizes(layers, width, heads, hidden, length, positions, dropout, remat) -> Sizes:
    hidden = 4 * width if hidden is None else hidden
    check_sizes(layers=layers, width=width, heads=heads, hidden=hidden, length=length)
    check_choice("positions", positions, POSITIONS)
    if width % heads:
        raise ValueError(f"width must be a multiple of heads, got width = {width} and heads = {heads}")
    if positions == "rotary" and width // heads % 2:
        raise ValueError(
            f"rotary positions need an even number of values per head, got width / heads = {width // heads}: "
            "change heads or width"
        )
    check_number("dropout", dropout, low=0, high=1, open_high=True)
    return Sizes(layers, width, heads, hidden, length, positions, dropout, remat)


def _normal(key: Array, shape: tuple[int, ...], std: float = STD) -> Array:
    return std * jax.random.normal(key, shape)


def _dense(key: Array, d: int, out: int, std: float = STD) -> Dense:
    return {"w": _normal(key, (d, out), std), "b": jnp.zeros(out)}


def _norm(width: int) -> dict[str, Array]:
    return {"scale": jnp.ones(width), "bias": jnp.zeros(width)}


def _trunk_init(key: Array, vocab: int, sizes: Sizes) -> dict[str, PyTree]:
    table, places, *blocks = jax.random.split(key, sizes.layers + 2)
    params = {
        "embedding": _normal(table, (vocab, sizes.width)),
        "blocks": [_block_init(block, sizes) for block in blocks],
        "norm": _norm(sizes.width),
    }
    learned = {"positions": _normal(places, (sizes.length, sizes.width))}
    return params | (learned if sizes.positions == "learned" else {})


def _block_init(key: Array, sizes: Sizes) -> dict[str, Any]:
    width, hidden, ends = sizes.width, sizes.hidden, STD / (2 * sizes.layers) ** 0.5
    keys = jax.random.split(key, 4)
    return {
        "norm1": _norm(width),
        "qkv": _dense(keys[0], width, 3 * width),
        "out": _dense(keys[1], width, width, ends),
        "norm2": _norm(width),
        "up": _dense(keys[2], width, hidden),
        "down": _dense(keys[3], hidden, width, ends),
    }


def _trunk(params: PyTree, tokens: Array, key, sizes: Sizes, *, causal: bool, seen: Array | None = None) -> Array:
    """The activations [B, T, width] after all blocks and the last normalisation; ``seen`` [B, T] masks the keys."""
    t = tokens.shape[1]
    keys = [None] * (2 * sizes.layers + 1) if key is None else list(jax.random.split(key, 2 * sizes.layers + 1))
    x = jnp.take(params["embedding"], tokens, axis=0)
    turns = None
    if sizes.positions == "rotary":
        turns = rotations(t, sizes.width // sizes.heads)
    else:
        if t > sizes.length:
            raise ValueError(f"sequences of {t} tokens, but the model has length = {sizes.length}: set length = {t}")
        x = x + params["positions"][:t]
    x = drop(x, sizes.dropout, keys[0])

    def run(block: PyTree, x: Array, first: Array | None, second: Array | None) -> Array:
        attended = _attention(block, layer_norm(block["norm1"], x), sizes.heads, turns, causal, seen)
        x = x + drop(attended, sizes.dropout, first)
        between = jax.nn.gelu(dense(block["up"], layer_norm(block["norm2"], x)), approximate=True)
        return x + drop(dense(block["down"], between), sizes.dropout, second)

    run = jax.checkpoint(run) if sizes.remat else run
    for block, first, second in zip(params["blocks"], keys[1::2], keys[2::2], strict=True):
        x = run(block, x, first, second)
    return layer_norm(params["norm"], x)


def _attention(block: PyTree, x: Array, heads: int, turns, causal: bool, seen: Array | None) -> Array:
    b, t, width = x.shape
    q, k, v = jnp.split(dense(block["qkv"], x).reshape(b, t, 3 * heads, width // heads), 3, axis=2)
    if turns is not None:
        q, k = rotated(q, turns), rotated(k, turns)
    mask = None if seen is None else seen[:, None, None, :]
    attended = jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=causal)
    return dense(block["out"], attended.reshape(b, t, width))


def layer_norm(params: dict[str, Array], x: Array) -> Array:
    """``scale * (x - mean) / sqrt(variance + 1e-5) + bias`` over the last axis."""
    mean = x.mean(-1, keepdims=True)
    centred = x - mean
    variance = jnp.square(centred).mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt(variance + EPSILON) * params["scale"] + params["bias"]


def rotations(length: int, size: int, theta: float = 10_000.0) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines [T, size / 2] of the angles t * theta^(-2i / size) of rotary positions."""
    angles = np.outer(np.arange(length), theta ** (-np.arange(0, size, 2) / size))
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def rotated(x: Array, turns: tuple[np.ndarray, np.ndarray]) -> Array:
    """[B, T, heads, size] with the pairs (i, i + size / 2) of every head turned by their position's angles."""
    cos, sin = (table[:, None, :].astype(x.dtype) for table in turns)
    left, right = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)
