"""Recurrent language models of the federated benchmarks.

Characters: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", 2017, as used
by Karimireddy et al., "Mime", 2021 (one layer) and by Charles and Konecny, "Convergence and Accuracy Trade-Offs in
Federated Learning and Meta-Learning", 2021 (two layers). Words: Reddi et al., "Adaptive Federated Optimization", 2021.

A batch holds ``x`` [B, T] token ids and ``y`` [B, T] the ids one position later. Id 0 is padding: it is left out of the
loss and of the metrics. Padding is only at the end of a sequence, so it does not change the outputs before it. The loss
is the mean over all real tokens of all real examples, so a long sequence has more weight than a short one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp

from fedbraid.core import check_choice
from fedbraid.lowering import kernels
from fedbraid.lowering.operations import along_weights, computed_by, dense, linear
from fedbraid.models.layers import dense_init, glorot_uniform
from fedbraid.models.model import Array, Model, check_sizes, score_tokens, supervised
from fedbraid.models.targets import Targets

PADDING = 0
Compute = Literal["float32", "bfloat16"]
COMPUTE = ("float32", "bfloat16")
Init = Literal["keras", "haiku"]
INITS = ("keras", "haiku")


def char_lstm(
    vocab: int = 90,
    *,
    layers: int = 1,
    hidden: int = 256,
    embed: int = 8,
    compute: Compute = "float32",
    init: Init = "keras",
    tanh: bool = False,
) -> Model:
    """Embedding ``embed``, LSTM layers of ``hidden``, dense ``vocab``: predicts the next character at every position.

    ``compute="bfloat16"`` rounds both factors of the recurrent products. Sums, states and weights stay float32. On a
    GPU most of the time of a step is reading the recurrent weights, and this halves it.

    ``init`` names the library whose default initialisation is used. Keras' embeddings are uniform on +-0.05. Haiku's
    are normal with standard deviation 1, its other weights have 1 / sqrt(fan in), and all are truncated at two standard
    deviations. The choice matters for many rounds: FedAvg on Shakespeare has an accuracy of 46.3% after 200 rounds with
    Keras' initialisation, and of 48.7% with Haiku's.

    ``tanh`` applies a tanh to the outputs of every LSTM layer, as the published code of Mime (FedJAX) does. The state
    that a layer passes to its next position stays as it is.

    With 90 symbols (86 characters, beginning, end, padding, unknown): 820,522 parameters in two layers, 295,210 in one.

    >>> import jax
    >>> shapes = jax.eval_shape(char_lstm(layers=2).init, jax.random.key(0))
    >>> sum(leaf.size for leaf in jax.tree.leaves(shapes))
    820522
    """
    check_sizes(vocab=vocab, layers=layers, hidden=hidden, embed=embed)
    layer = _layer_of(compute, tanh=tanh)
    return _language_model(vocab, layers, hidden, embed, projection=None, uncounted=(), layer=layer, start=init)


def word_lstm(
    vocab: int = 10_004,
    *,
    hidden: int = 670,
    embed: int = 96,
    uncounted: Sequence[int] = (),
    compute: Compute = "float32",
    init: Init = "keras",
) -> Model:
    """Embedding ``embed``, one LSTM of ``hidden``, dense ``embed``, dense ``vocab``: predicts the next word.

    4,050,748 parameters with 10,000 words, padding, beginning, end and unknown.

    Args:
        vocab: the number of ids, special ones included.
        uncounted: ids left out of the accuracy besides padding, such as unknown and end (Reddi et al.).
        compute: dtype of the factors of recurrent products, as in `char_lstm`.
        init: the library whose default initialisation is used, as in `char_lstm`.

    >>> import jax
    >>> shapes = jax.eval_shape(word_lstm().init, jax.random.key(0))
    >>> sum(leaf.size for leaf in jax.tree.leaves(shapes))
    4050748
    """
    check_sizes(vocab=vocab, hidden=hidden, embed=embed)
    options = {"uncounted": tuple(uncounted), "layer": _layer_of(compute), "start": init}
    return _language_model(vocab, 1, hidden, embed, projection=embed, **options)


def _layer_of(compute: Compute, *, tanh: bool = False) -> Callable[[dict[str, Array], Array], Array]:
    """An LSTM layer, positions first; with ``tanh``, of its outputs."""
    check_choice("compute", compute, COMPUTE)
    if tanh:
        return lambda cell, x: jnp.tanh(_layer(cell, x, compute))
    return lambda cell, x: _layer(cell, x, compute)


def _language_model(vocab, layers, hidden, embed, projection, uncounted, layer, start) -> Model:
    check_choice("init", start, INITS)

    def init(key):
        table, *cells, middle, last = jax.random.split(key, layers + 3)
        widths = [embed] + [hidden] * (layers - 1)
        params = {
            "embedding": jax.random.uniform(table, (vocab, embed), jnp.float32, -0.05, 0.05),
            "lstm": [lstm_init(k, width, hidden) for k, width in zip(cells, widths, strict=True)],
            "dense": dense_init(last, projection or hidden, vocab),
        }
        params |= {"projection": dense_init(middle, hidden, projection)} if projection else {}
        return params if start == "keras" else _as_haiku(key, params)

    def states(params, x):
        x = jnp.take(params["embedding"], x.T.astype(jnp.int32), axis=0)  # positions first, in all layers
        for cell in params["lstm"]:
            x = layer(cell, x)
        if projection:
            x = dense(params["projection"], x)
        return x

    def apply(params, x, key):
        return dense(params["dense"], states(params, x)).swapaxes(0, 1)

    score = score_tokens.through(lambda score: partial(score, padding=PADDING, uncounted=uncounted))
    return supervised(
        init,
        apply,
        score,
        targets=Targets("tokens", vocab, ids=vocab),
        head=("dense",),
        features=lambda params, x, key: states(params, x).swapaxes(0, 1),
    )


def _as_haiku(key: Array, params: Any) -> Any:
    """The parameters with their weights drawn again with Haiku's initialisation; biases stay."""

    def draw(key: Array, like: Array, fan_in: int) -> Array:
        return jax.nn.initializers.truncated_normal(1 / fan_in**0.5)(key, like.shape, like.dtype)

    keys = iter(jax.random.split(key, len(jax.tree.leaves(params))))
    cells = [
        cell | {name: draw(next(keys), cell[name], len(cell["w"]) + len(cell["u"])) for name in ("w", "u")}
        for cell in params["lstm"]
    ]
    layers = {name: params[name] for name in ("dense", "projection") if name in params}
    return {
        "embedding": draw(next(keys), params["embedding"], 1),
        "lstm": cells,
        **{name: layer | {"w": draw(next(keys), layer["w"], len(layer["w"]))} for name, layer in layers.items()},
    }


def lstm_init(key: Array, d: int, hidden: int) -> dict[str, Array]:
    """Keras' defaults: Glorot-uniform kernel, orthogonal recurrent kernel, biases 1 for the forget gate, else 0."""
    first, second = jax.random.split(key)
    return {
        "w": glorot_uniform(first, (d, 4 * hidden)),
        "u": jax.nn.initializers.orthogonal()(second, (hidden, 4 * hidden), jnp.float32),
        "b": jnp.zeros(4 * hidden).at[hidden : 2 * hidden].set(1.0),
    }


def lstm(params: dict[str, Array], x: Array, compute: Compute = "float32") -> Array:
    """All hidden states [B, T, hidden] over a sequence [B, T, d], from zero state; gates in the order i, f, g, o."""
    return _layer(params, x.swapaxes(0, 1), compute).swapaxes(0, 1)


def _layer(params: dict[str, Array], x: Array, compute: Compute) -> Array:
    """`lstm` with positions first: [T, B, d] to [T, B, hidden]."""
    # The inputs' part of the gates needs no recurrence: one product for all positions.
    return recurrence(dense({"w": params["w"], "b": params["b"]}, x), params["u"], compute)


def _rounded(u: Array, compute: Compute) -> Array:
    """The weights in the dtype of the products: rounded once, not at every position."""
    return u.astype(jnp.bfloat16) if compute == "bfloat16" else u


def _times(x: Array, u: Array) -> Array:
    """``x @ u`` with x rounded to the dtype of u, summed in the dtype of x."""
    return jnp.matmul(x.astype(u.dtype), u, preferred_element_type=x.dtype)


def _states(inputs: Array, u: Array) -> tuple[Array, Array, Array]:
    """States h, cells c [T, B, hidden] and gates after activation [T, B, 4 hidden] in the order i, f, g, o."""
    if not _has_kernels(inputs):
        return _states_loop(inputs, u)
    from fedbraid.lowering.kernels import recurrence

    return computed_by(recurrence.states, _states_loop)(inputs, u)


def _has_kernels(x: Array) -> bool:
    return kernels.available() and x.dtype == jnp.float32


def _states_loop(inputs: Array, u: Array) -> tuple[Array, Array, Array]:
    scale = jnp.repeat(jnp.array([0.5, 0.5, 1.0, 0.5], inputs.dtype), u.shape[0])

    def step(carry, gates):
        h, c = carry
        gates = scale * jnp.tanh(scale * (gates + _times(h, u))) + (1 - scale)  # sigmoid(x) is 1/2 tanh(x/2) + 1/2
        i, f, g, o = jnp.split(gates, 4, axis=-1)
        c = f * c + i * g
        h = o * jnp.tanh(c)
        return (h, c), (h, c, gates)

    start = jnp.zeros((inputs.shape[1], u.shape[0]), inputs.dtype)
    return jax.lax.scan(step, (start, start), inputs)[1]


def _before(x: Array) -> Array:
    """The value one position earlier; zero at the first."""
    return jnp.concatenate([jnp.zeros_like(x[:1]), x[:-1]])


def _slopes(c: Array, gates: Array) -> tuple[Array, Array, Array, Array]:
    """Derivatives by the gates before activation: of c by i, f, g, and of h by o. Also f = dc/dc_before, and dh/dc."""
    i, f, g, o = jnp.split(gates, 4, axis=-1)
    squashed = jnp.tanh(c)
    to_cell = jnp.concatenate([g * i * (1 - i), _before(c) * f * (1 - f), i * (1 - g * g)], axis=-1)
    return to_cell, squashed * o * (1 - o), f, o * (1 - squashed * squashed)


def _tangent(residuals: tuple[Array, ...], entering: Array) -> Array:
    """The tangent of the states, given that of the gates before activation at every position."""
    u, c, gates = residuals

    def step(carry, at):
        dh, dc = carry
        entering, to_cell, to_state, f, through = at
        d_gates, d_o = jnp.split(entering + _times(dh, u), [3 * u.shape[0]], axis=-1)
        dc = f * dc + sum(jnp.split(d_gates * to_cell, 3, axis=-1))
        dh = d_o * to_state + through * dc
        return (dh, dc), dh

    start = jnp.zeros_like(c[0])
    return jax.lax.scan(step, (start, start), (entering, *_slopes(c, gates)))[1]


def _cotangent(residuals: tuple[Array, ...], dh: Array) -> Array:
    """The transpose of `_tangent`: the cotangent of the gates before activation, given that of the states."""
    u, c, gates = residuals
    if not _has_kernels(dh):
        return _cotangent_loop(u, c, gates, dh)
    from fedbraid.lowering.kernels import recurrence

    return computed_by(recurrence.cotangent, _cotangent_loop)(u, c, gates, dh)


def _cotangent_loop(u: Array, c: Array, gates: Array, dh: Array) -> Array:
    columns = u.T

    def step(carry, at):
        d_gates, dc = carry  # of the next position
        dh, to_cell, to_state, f, through = at
        dh = dh + _times(d_gates, columns)
        dc = dc + through * dh
        d_gates = jnp.concatenate([jnp.tile(dc, 3) * to_cell, dh * to_state], axis=-1)
        return (d_gates, f * dc), d_gates

    start = (jnp.zeros_like(gates[0]), jnp.zeros_like(c[0]))
    return jax.lax.scan(step, start, (dh, *_slopes(c, gates)), reverse=True)[1]


@partial(jax.custom_jvp[Array], nondiff_argnums=(2,))
def recurrence(inputs: Array, u: Array, compute: Compute = "float32") -> Array:
    """States h [T, B, hidden] of an LSTM whose gates, before activation, are inputs [T, B, 4 hidden] + h_before @ u."""
    return _states(inputs, _rounded(u, compute))[0]


@recurrence.defjvp
def _recurrence_jvp(compute, primals, tangents):
    # By default, JAX adds each position's part of u's gradient to an array of u's size. This is more memory traffic
    # than all other operations together. Here u's tangent enters before the loop, for all positions at once, so its
    # gradient is one product after the loop. The rule is exact and differentiable, and forward mode works, too.
    (inputs, u), (d_inputs, d_u) = primals, tangents
    rounded = _rounded(u, compute)
    h, c, gates = _states(inputs, rounded)
    # The transposed loop is written by hand: JAX's own reads and writes twice as many arrays at every position.
    entering = d_inputs + along_weights(_before(h), d_u)
    return h, linear(_tangent, _cotangent, (rounded, c, gates), entering)
