"""The environment in which PyTorch's operations run as JAX's: torchax, with this library's versions of a few of them.

torchax computes most operations well. Replaced are those that are slow in a federated simulation: recurrent layers
(torchax unrolls them over time), dropout (a random float for each entry), attention (also inside
``nn.MultiheadAttention``, which torchax decomposes), and linear layers on sequences.
Convolutions need nothing here: the engine rewrites them, as in any other loss (docs/lowering.md).

PyTorch and torchax are imported inside `environment`, so that importing this module costs nothing.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from types import FunctionType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedbraid.lowering import kernels
from fedbraid.lowering.operations import dense, linear, plain_products
from fedbraid.models.lstm import recurrence

__all__ = ["environment", "needed"]

Array = jax.Array


def needed(module: str) -> Any:
    """The module of this name, or an error that names the extra that installs it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ValueError(f"models of PyTorch need {error.name}: pip install 'fedbraid[torch]'") from error


@cache
def environment() -> Any:
    """A torchax environment of our own: what is replaced here does not change torchax for others."""
    torch = needed("torch")
    with _without_named_dimensions(torch):
        env = _mixing(torch, needed("torchax.tensor"))()
    on_arrays = partial(_on_arrays, env)
    functional = torch.nn.functional
    zeros = importlib.import_module("torchax.ops.jtorch")._zeros

    def marked_zeros(*size, **options):
        made = env.j2t_iso(zeros(*size, **options))
        made.zeros = made.jax()  # see `_is_zero`
        return made

    def new_key() -> Array:
        return env.get_and_rotate_prng_key()

    def drop(x, p=0.5, training=True, inplace=False):
        if p == 0 or not training:
            return x
        y = env.j2t_iso(_dropout(x.jax(), p, new_key()))
        return x.apply_jax_(lambda _: y.jax()) if inplace else y

    def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **options):
        drop = lambda x: _dropout(x, dropout_p, new_key()) if dropout_p else x  # noqa: E731
        return _attention(query, key, value, attn_mask, is_causal=is_causal, drop=drop, **options)

    replaced: dict[Any, Callable] = {
        torch.zeros: marked_zeros,
        functional.dropout: drop,
        torch.dropout: lambda x, p, train: drop(x, p, train),
        functional.linear: on_arrays(_linear),
        functional.scaled_dot_product_attention: on_arrays(attention),
        torch.lstm: partial(_recurrent_operator, env, _lstm),
        torch.gru: partial(_recurrent_operator, env, _gru),
        torch.rnn_tanh: partial(_recurrent_operator, env, partial(_rnn, jnp.tanh)),
        torch.rnn_relu: partial(_recurrent_operator, env, partial(_rnn, jax.nn.relu)),
    }
    whole = functional.multi_head_attention_forward  # else torchax decomposes the attention inside it
    replaced[whole] = _in_environment(env, whole)
    for operation, ours in replaced.items():
        env.override_op_definition(operation, ours)
    return env


@contextmanager
def _without_named_dimensions(torch: Any) -> Iterator[None]:
    """Lets torchax be imported with a PyTorch that has no named dimensions.

    While torchax 0.0.13 is imported, it lists operator overloads such as ``aten.prod.dim_Dimname``. PyTorch 2.13
    removed all overloads with named dimensions, so this ends in an AttributeError. torchax only uses them as keys of
    tables: a string does as well, and is never looked up. PyTorch itself is as before when this context ends.
    """
    packet = torch._ops.OpOverloadPacket
    found = packet.__getattr__

    def lenient(self: Any, name: str) -> Any:
        try:
            return found(self, name)
        except AttributeError:
            if "dimname" in name.lower() or "names" in name:
                return f"{self}.{name}, which this PyTorch does not have"
            raise

    packet.__getattr__ = lenient
    try:
        yield
    finally:
        packet.__getattr__ = found


def _mixing(torch: Any, tensor: Any) -> Any:
    """torchax's class of environments, made to accept PyTorch's own tensors as constants.

    A module's forward often makes tensors on the CPU (``torch.ones(3)``, a list of masks). torchax refuses to compute
    with these and its own tensors together.
    """

    class Environment(tensor.Environment):
        def t2j_iso(self, torchtensors):
            def own(x):
                known = isinstance(x, tensor.Tensor | tensor.View)
                return x if known or x.ndim == 0 else tensor.Tensor(self.t2j_copy(x), self)

            return super().t2j_iso(torch.utils._pytree.tree_map_only(torch.Tensor, own, torchtensors))

    return Environment


def _on_arrays(env: Any, function: Callable) -> Callable:
    """A function of arrays as a function of torchax's tensors."""

    def run(*args, **options):
        args, options = env.t2j_iso((args, options))
        return env.j2t_iso(function(*args, **options))

    return run


def _in_environment(env: Any, function: Any) -> Callable:
    """PyTorch's own code of a function, so that the operations that it calls are those of the environment.

    A function of PyTorch first hands itself to the environment. This copy of its code does not.
    """
    names = {**function.__globals__, "has_torch_function": lambda _: False}
    own = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)

    def run(*args, **options):
        with env:
            return own(*args, **options)

    return run


def _linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    if weight.ndim == 1:
        return x @ weight if bias is None else x @ weight + bias
    out, d = weight.shape
    bias = jnp.zeros((), x.dtype) if bias is None else bias
    return dense({"w": _turned(weight) if out > d else weight.T, "b": bias}, x)


def _dropout(x: Array, rate: float, key: Array) -> Array:
    """Zeros with probability ``rate``, the rest scaled. Takes 8 random bits an entry if 256 rate is whole, else 16."""
    if rate >= 1:
        return jnp.zeros_like(x)
    bits = 8 if float(256 * rate).is_integer() else 16
    each = 32 // bits
    words = jax.random.bits(key, (-(-x.size // each),), jnp.uint32)
    numbers = (words[:, None] >> np.arange(0, 32, bits, dtype=np.uint32)) & np.uint32(2**bits - 1)
    kept = numbers.reshape(-1)[: x.size].reshape(x.shape) >= np.uint32(round(rate * 2**bits))
    return jnp.where(kept, x / (1 - rate), 0)


def _attention(
    query: Array,
    key: Array,
    value: Array,
    attn_mask: Array | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    drop: Callable[[Array], Array],
) -> Array:
    """``torch.nn.functional.scaled_dot_product_attention``; a query that may look nowhere gives zeros, as there."""
    if enable_gqa:
        key, value = (jnp.repeat(x, query.shape[-3] // x.shape[-3], axis=-3) for x in (key, value))
    scores = (query * (query.shape[-1] ** -0.5 if scale is None else scale)) @ key.swapaxes(-1, -2)
    nowhere = None
    if is_causal:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, UNSEEN)
    elif attn_mask is not None and attn_mask.dtype == jnp.bool_:
        scores, nowhere = jnp.where(attn_mask, scores, UNSEEN), ~jnp.any(attn_mask, axis=-1, keepdims=True)
    elif attn_mask is not None:
        scores = scores + jnp.maximum(attn_mask, UNSEEN)
        nowhere = jnp.all(attn_mask == -jnp.inf, axis=-1, keepdims=True)
    result = drop(jax.nn.softmax(scores, axis=-1)) @ value
    return result if nowhere is None else jnp.where(nowhere, 0, result)


UNSEEN = -1e30  # of scores: finite, so that the softmax over a query that sees nothing is no NaN


# Recurrent layers. A layer is (x [T, B, d], state, weights) -> outputs [T, B, hidden], last state. A state is a tuple
# of arrays [B, hidden], or None for zeros. Weights are PyTorch's: input kernel [gates, d], recurrent kernel, biases.


def _recurrent_operator(env: Any, layer: Callable, x: Any, states: Any, weights: Any, *options: Any) -> Any:
    """``torch.lstm``, ``torch.gru`` and ``torch.rnn_*``, as ``torch.nn`` calls them."""
    if isinstance(options[0], Sequence):  # (data, batch_sizes, states, weights, ...) of a packed sequence
        raise ValueError(
            "packed sequences cannot be traced, since their lengths are data: give the recurrent layer padded sequences"
        )
    has_biases, num_layers, dropout, train, bidirectional, batch_first = options
    states = states if isinstance(states, Sequence) else (states,)
    starts = None if all(map(_is_zero, states)) else env.t2j_iso(states)
    x = x.jax()
    x = x.swapaxes(0, 1) if batch_first else x
    directions = 2 if bidirectional else 1
    weights = env.t2j_iso(list(weights))
    each = len(weights) // (num_layers * directions)
    lasts = []
    for number in range(num_layers):
        outputs = []
        for direction in range(directions):
            at = number * directions + direction
            start = None if starts is None else tuple(state[at] for state in starts)
            own = _named(weights[at * each : (at + 1) * each], has_biases)
            y, last = layer(x[::-1] if direction else x, start, own)
            outputs.append(y[::-1] if direction else y)
            lasts.append(last)
        x = outputs[0] if directions == 1 else jnp.concatenate(outputs, axis=-1)
        if train and dropout and number < num_layers - 1:
            x = _dropout(x, dropout, env.get_and_rotate_prng_key())
    final = (jnp.stack(parts) for parts in zip(*lasts, strict=True))
    return env.j2t_iso((x.swapaxes(0, 1) if batch_first else x, *final))


def _is_zero(state: Any) -> bool:
    """Whether a state was made by ``torch.zeros`` (``torch.nn`` does, if none is given) and not changed since."""
    return getattr(state, "zeros", None) is not None and state.zeros is state.jax()


def _named(weights: Sequence[Array], has_biases: bool) -> dict[str, Any]:
    """One layer's weights as kernels [in, gates], biases [gates], and a projection [hidden, out] or None."""
    w, u, *rest = weights
    b, b_state = rest[:2] if has_biases else (jnp.zeros(len(w), w.dtype),) * 2
    projections = rest[2:] if has_biases else rest
    return {
        "w": _turned(w),
        "u": _turned(u),
        "b": b,
        "b_state": b_state,
        "out": projections[0].T if projections else None,
    }


def _turned(weight: Array) -> Array:
    """``weight.T`` of a kernel [out, in] with out > in.

    On a CPU its gradient is transposed after it is computed. XLA would compute the transposed product instead, and its
    left factor [rows, out] is then summed over its rows, which is slow.
    """
    if kernels.platform() != "cpu" or plain_products.value:
        return weight.T
    return linear(lambda _, w: w.T, lambda _, gradient: jax.lax.optimization_barrier(gradient).T, (), weight)


def _scanned(step: Callable, state: tuple[Array, ...], inputs: Array) -> tuple[Array, tuple[Array, ...]]:
    def body(state, at):
        state = step(state, at)
        return state, state[0]

    last, outputs = jax.lax.scan(body, state, inputs)
    return outputs, last


def _zeros(x: Array, size: int) -> Array:
    return jnp.zeros((x.shape[1], size), x.dtype)


def _lstm(x: Array, start: tuple[Array, ...] | None, p: dict[str, Any]) -> tuple[Array, tuple[Array, ...]]:
    inputs = dense({"w": p["w"], "b": p["b"] + p["b_state"]}, x)
    u, out, hidden = p["u"], p["out"], p["u"].shape[1] // 4
    if start is None and out is None:
        h = recurrence(inputs, u)
        before = jnp.concatenate([jnp.zeros_like(h[:1]), h[:-1]])
        i, f, g, _ = jnp.split(inputs + before @ u, 4, axis=-1)  # not computed unless the last cell is used
        cells = (jax.nn.sigmoid(f), jax.nn.sigmoid(i) * jnp.tanh(g))
        c = jax.lax.scan(lambda c, at: (at[0] * c + at[1], None), _zeros(x, hidden), cells)[0]
        return h, (h[-1], c)

    def step(state, gates):
        h, c = state
        i, f, g, o = jnp.split(gates + h @ u, 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h if out is None else h @ out), c

    return _scanned(step, start or (_zeros(x, len(u)), _zeros(x, hidden)), inputs)


def _gru(x: Array, start: tuple[Array, ...] | None, p: dict[str, Any]) -> tuple[Array, tuple[Array, ...]]:
    def step(state, gates):
        (h,) = state
        r, z, n = jnp.split(gates, 3, axis=-1)
        r_state, z_state, n_state = jnp.split(h @ p["u"] + p["b_state"], 3, axis=-1)
        r, z = jax.nn.sigmoid(r + r_state), jax.nn.sigmoid(z + z_state)
        return ((1 - z) * jnp.tanh(n + r * n_state) + z * h,)

    return _scanned(step, start or (_zeros(x, len(p["u"])),), dense({"w": p["w"], "b": p["b"]}, x))


def _rnn(
    activation: Callable, x: Array, start: tuple[Array, ...] | None, p: dict[str, Any]
) -> tuple[Array, tuple[Array, ...]]:
    inputs = dense({"w": p["w"], "b": p["b"] + p["b_state"]}, x)
    return _scanned(lambda state, at: (activation(at + state[0] @ p["u"]),), start or (_zeros(x, len(p["u"])),), inputs)
