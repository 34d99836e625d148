"""Recurrent language models of the federated benchmarks.

Characters: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", 2017, as used
by Karimireddy et al., "Mime", 2021 (one layer) and by Charles and Konecny, "Convergence and Accuracy Trade-Offs in
Federated Learning and Meta-Learning", 2021 (two layers). Words: Reddi et al., "Adaptive Federated Optimization", 2021.

A batch holds ``x`` [B, T] token ids and ``y`` [B, T] the ids one position later. Id 0 is padding: it counts neither in
the loss nor in the metrics, and as it only ends a sequence it changes nothing before it. The loss is the mean over all
real tokens of all real examples, so a long sequence counts more than a short one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp

from fedbraid.models.layers import dense, dense_init, glorot_uniform
from fedbraid.models.model import Array, Model, check_sizes, score_tokens, supervised

PADDING = 0


def char_lstm(vocab: int = 90, *, layers: int = 1, hidden: int = 256, embed: int = 8) -> Model:
    """Embedding ``embed``, LSTM layers of ``hidden``, dense ``vocab``: the next character at every position.

    With 90 symbols (86 characters, beginning, end, padding, unknown): 820,522 parameters in two layers, 295,210 in one.

    >>> import jax
    >>> shapes = jax.eval_shape(char_lstm(layers=2).init, jax.random.key(0))
    >>> sum(leaf.size for leaf in jax.tree.leaves(shapes))
    820522
    """
    check_sizes(vocab=vocab, layers=layers, hidden=hidden, embed=embed)
    return _language_model(vocab, layers, hidden, embed, projection=None, uncounted=())


def word_lstm(vocab: int = 10_004, *, hidden: int = 670, embed: int = 96, uncounted: Sequence[int] = ()) -> Model:
    """Embedding ``embed``, one LSTM of ``hidden``, dense ``embed``, dense ``vocab``: the next word at every position.

    4,050,748 parameters with 10,000 words, padding, beginning, end and unknown.

    Args:
        vocab: the number of ids, special ones included.
        uncounted: ids left out of the accuracy besides padding, such as unknown and end (Reddi et al.).

    >>> import jax
    >>> shapes = jax.eval_shape(word_lstm().init, jax.random.key(0))
    >>> sum(leaf.size for leaf in jax.tree.leaves(shapes))
    4050748
    """
    check_sizes(vocab=vocab, hidden=hidden, embed=embed)
    return _language_model(vocab, 1, hidden, embed, projection=embed, uncounted=tuple(uncounted))


def _language_model(vocab, layers, hidden, embed, projection, uncounted) -> Model:
    def init(key):
        table, *cells, middle, last = jax.random.split(key, layers + 3)
        widths = [embed] + [hidden] * (layers - 1)
        params = {
            "embedding": jax.random.uniform(table, (vocab, embed), jnp.float32, -0.05, 0.05),
            "lstm": [lstm_init(k, width, hidden) for k, width in zip(cells, widths, strict=True)],
            "dense": dense_init(last, projection or hidden, vocab),
        }
        return params | ({"projection": dense_init(middle, hidden, projection)} if projection else {})

    def apply(params, x, key):
        x = jnp.take(params["embedding"], x.astype(jnp.int32), axis=0)
        for cell in params["lstm"]:
            x = lstm(cell, x)
        if projection:
            x = dense(params["projection"], x)
        return dense(params["dense"], x)

    return supervised(init, apply, partial(score_tokens, padding=PADDING, uncounted=uncounted))


def lstm_init(key: Array, d: int, hidden: int) -> dict[str, Array]:
    """Keras' defaults: Glorot-uniform kernel, orthogonal recurrent kernel, zero biases but 1 for the forget gate."""
    first, second = jax.random.split(key)
    return {
        "w": glorot_uniform(first, (d, 4 * hidden)),
        "u": jax.nn.initializers.orthogonal()(second, (hidden, 4 * hidden), jnp.float32),
        "b": jnp.zeros(4 * hidden).at[hidden : 2 * hidden].set(1.0),
    }


def lstm(params: dict[str, Array], x: Array) -> Array:
    """All hidden states [B, T, hidden] over a sequence [B, T, d], from zero state; gates in the order i, f, g, o."""
    hidden = params["u"].shape[0]
    # The inputs' share of the gates needs no recurrence: one product for all positions.
    inputs = dense({"w": params["w"], "b": params["b"]}, x).swapaxes(0, 1)

    def step(carry, gates):
        h, c = carry
        i, f, g, o = jnp.split(gates + h @ params["u"], 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    start = jnp.zeros((x.shape[0], hidden), inputs.dtype)
    _, states = jax.lax.scan(step, (start, start), inputs)
    return states.swapaxes(0, 1)
