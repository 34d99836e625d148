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
    # The inputs' share of the gates needs no recurrence: one product for all positions.
    inputs = dense({"w": params["w"], "b": params["b"]}, x).swapaxes(0, 1)
    return recurrence(inputs, params["u"]).swapaxes(0, 1)


@jax.custom_jvp
def recurrence(inputs: Array, u: Array) -> Array:
    """States h [T, B, hidden] of an LSTM whose gates, before activation, are inputs [T, B, 4 hidden] + h_before @ u."""
    return _unrolled(inputs, u)[0]


def _unrolled(inputs: Array, u: Array) -> tuple[Array, ...]:
    """The states, and what their derivative needs: the cell before, the four gates, tanh of the cell after."""

    def step(carry, gates):
        h, before = carry
        i, f, g, o = jnp.split(gates + h @ u, 4, axis=-1)
        i, f, g, o = jax.nn.sigmoid(i), jax.nn.sigmoid(f), jnp.tanh(g), jax.nn.sigmoid(o)
        c = f * before + i * g
        squashed = jnp.tanh(c)
        h = o * squashed
        return (h, c), (h, before, i, f, g, o, squashed)

    start = jnp.zeros((inputs.shape[1], u.shape[0]), inputs.dtype)
    return jax.lax.scan(step, (start, start), inputs)[1]


@recurrence.defjvp
def _recurrence_jvp(primals, tangents):
    # Left to itself, JAX adds each position's share of u's gradient to an array of u's size: more memory traffic than
    # the whole rest. Written like this, u's tangent enters before the loop, for all positions at once, and so its
    # gradient leaves it as one product. The rule is exact and differentiable; forward mode works as well.
    (inputs, u), (d_inputs, d_u) = primals, tangents
    h, before, i, f, g, o, squashed = _unrolled(inputs, u)
    h_before = jnp.concatenate([jnp.zeros_like(h[:1]), h[:-1]])
    entering = d_inputs + h_before @ d_u
    slopes = (g * i * (1 - i), before * f * (1 - f), i * (1 - g * g), squashed * o * (1 - o))
    through = o * (1 - squashed * squashed)
    columns = u.T  # so that the product of the transposed loop, the one that runs in training, reads u by rows

    def step(carry, at):
        dh, dc = carry
        entering, slopes, f, through = at
        gates = entering + jax.lax.dot_general(dh, columns, (((1,), (1,)), ((), ())))
        di, df, dg, do = (gate * slope for gate, slope in zip(jnp.split(gates, 4, axis=-1), slopes, strict=True))
        dc = f * dc + di + df + dg
        dh = do + through * dc
        return (dh, dc), dh

    start = jnp.zeros_like(h[0])
    return h, jax.lax.scan(step, (start, start), (entering, slopes, f, through))[1]
