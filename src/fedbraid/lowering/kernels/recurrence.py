"""The positions of an LSTM on a GPU, with two kernels for each: the product, and all other operations.

XLA alone makes six or seven kernels of a position: the product with the recurrent weights, the gates, one for every
array that is written to, and one for the counter. For most of them the launch takes as long as the work. Here all
operations after the product are one kernel, which writes in place into the arrays of all positions and increments the
counter. The products are left to XLA, which tunes them.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as gpu

from fedbraid.lowering.kernels import interpreted

__all__ = ["cotangent", "states"]

Array = jax.Array
BLOCK = 512  # values of a program
UNROLL = 8  # positions per iteration of the loop, which XLA can launch as one CUDA graph
_clock = jax.ShapeDtypeStruct((1,), jnp.int32)


def _call(kernel, shapes, aliases: dict[int, int], batch: int, hidden: int):
    return pl.pallas_call(
        partial(kernel, hidden=hidden),
        grid=(-(-batch * hidden // BLOCK),),
        out_shape=shapes,
        input_output_aliases=aliases,
        compiler_params=gpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpreted(),
        name=kernel.__name__.strip("_"),
    )


def _times(x: Array, u: Array) -> Array:
    return jnp.matmul(x, u, preferred_element_type=jnp.float32)


def states(inputs: Array, u: Array) -> tuple[Array, Array, Array]:
    """States h, cells c [T, B, hidden] and gates after activation [T, B, 4 hidden]. u may be bfloat16."""
    length, batch, _ = inputs.shape
    hidden = u.shape[0]
    shapes = [(length, batch, hidden), (length, batch, hidden), (length, batch, 4 * hidden)]
    arrays = [jax.ShapeDtypeStruct(shape, inputs.dtype) for shape in shapes]
    now = jax.ShapeDtypeStruct((batch, hidden), u.dtype)
    kernel = _call(_lstm_forwards, [_clock, now, *arrays], {3: 2, 4: 3, 5: 4}, batch, hidden)

    def step(_, carry):
        t, h, *arrays = carry
        return tuple(kernel(t, _times(h, u), inputs, *arrays))

    start = tuple(jnp.zeros(a.shape, a.dtype) for a in (_clock, now, *arrays))
    _, _, h, c, gates = lax.fori_loop(0, length, step, start, unroll=min(UNROLL, length))
    return h, c, gates


def _lstm_forwards(t_ref, product, inputs, h_in, c_in, gates_in, t_out, now, h_out, c_out, gates_out, *, hidden: int):
    t, row, unit, real = _here(t_ref, h_out, hidden)
    t_out[0] = t + 1
    before = real & (t > 0)
    c = gpu.load(c_in.at[jnp.maximum(t - 1, 0), row, unit], mask=before, other=0.0)
    i, f, g, o = (
        gpu.load(product.at[row, gate * hidden + unit], mask=real, other=0.0)
        + gpu.load(inputs.at[t, row, gate * hidden + unit], mask=real, other=0.0)
        for gate in range(4)
    )
    i, f, g, o = jax.nn.sigmoid(i), jax.nn.sigmoid(f), jnp.tanh(g), jax.nn.sigmoid(o)
    c = f * c + i * g
    h = o * jnp.tanh(c)
    gpu.store(now.at[row, unit], h.astype(now.dtype), mask=real)
    gpu.store(h_out.at[t, row, unit], h, mask=real)
    gpu.store(c_out.at[t, row, unit], c, mask=real)
    for gate, value in enumerate((i, f, g, o)):
        gpu.store(gates_out.at[t, row, gate * hidden + unit], value, mask=real)


def _here(t_ref, like, hidden: int):
    """The position t, and for each value of this program its row, its unit and whether it is inside the array."""
    at = pl.program_id(0) * BLOCK + jnp.arange(BLOCK)
    return t_ref[0], lax.div(at, hidden), lax.rem(at, hidden), at < like.shape[1] * hidden


def cotangent(u: Array, c: Array, gates: Array, dh: Array) -> Array:
    """The gradients of the gates before activation [T, B, 4 hidden], given those of the states [T, B, hidden]."""
    length, batch, hidden = c.shape
    now = jax.ShapeDtypeStruct(gates.shape[1:], u.dtype)
    arrays = [jax.ShapeDtypeStruct(gates.shape, dh.dtype), jax.ShapeDtypeStruct((batch, hidden), dh.dtype)]
    kernel = _call(_lstm_backwards, [_clock, now, *arrays], {5: 2, 6: 3}, batch, hidden)
    columns = u.T

    def step(_, carry):
        t, d, *arrays = carry
        return tuple(kernel(t, _times(d, columns), dh, c, gates, *arrays))

    last = jnp.full(_clock.shape, length - 1, _clock.dtype)
    start = (last, *(jnp.zeros(a.shape, a.dtype) for a in (now, *arrays)))
    return lax.fori_loop(0, length, step, start, unroll=min(UNROLL, length))[2]


def _lstm_backwards(t_ref, product, dh, c, gates, d_in, dc_in, t_out, now, d_out, dc_out, *, hidden: int):
    t, row, unit, real = _here(t_ref, c, hidden)
    t_out[0] = t - 1
    load = partial(gpu.load, mask=real, other=0.0)
    slope = load(product.at[row, unit]) + load(dh.at[t, row, unit])
    i, f, g, o = (load(gates.at[t, row, gate * hidden + unit]) for gate in range(4))
    squashed = jnp.tanh(load(c.at[t, row, unit]))
    before = gpu.load(c.at[jnp.maximum(t - 1, 0), row, unit], mask=real & (t > 0), other=0.0)
    dc = load(dc_in.at[row, unit]) + o * (1 - squashed * squashed) * slope
    gpu.store(dc_out.at[row, unit], f * dc, mask=real)
    changes = (dc * g * i * (1 - i), dc * before * f * (1 - f), dc * i * (1 - g * g), slope * squashed * o * (1 - o))
    for gate, value in enumerate(changes):
        gpu.store(d_out.at[t, row, gate * hidden + unit], value, mask=real)
        gpu.store(now.at[row, gate * hidden + unit], value.astype(now.dtype), mask=real)
