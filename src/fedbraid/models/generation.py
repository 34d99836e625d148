"""Text that a language model writes: one token at a time, each drawn from the model's distribution of the next one."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from fedbraid.core import check_count, check_number
from fedbraid.lowering import captured
from fedbraid.models.lstm import PADDING
from fedbraid.models.model import Array, Model, PyTree

__all__ = ["generate"]


def generate(
    model: Model,
    params: PyTree,
    prompt: Sequence[int] | np.ndarray,
    *,
    tokens: int = 100,
    length: int = 128,
    temperature: float = 1.0,
    end: Sequence[int] = (),
    key: Array | None = None,
) -> list[int]:
    """The ids that a model of the next token adds to a prompt; padding is never drawn.

    Args:
        model: a `Model` whose ``predict`` gives logits [B, T, vocab] that depend on earlier tokens only.
        params: its parameters.
        prompt: token ids, at least one.
        tokens: how many are added at most.
        length: how many of the last tokens the model sees, at most the ``length`` of a `gpt`.
        temperature: logits are divided by it; 0 takes the most probable token.
        end: ids after which it stops.
        key: of the random draws; None is ``jax.random.key(0)``.

    >>> from fedbraid.models import from_functions
    >>> next_one = lambda params, x: jax.nn.one_hot((x + 1) % 5, 5) * 100.0
    >>> model = from_functions(lambda key: (), lambda params, batch, key: 0.0, predict=next_one)
    >>> generate(model, (), [1], tokens=5, length=4, temperature=0.0)
    [2, 3, 4, 1, 2]
    """
    check_count("tokens", tokens)
    check_count("length", length, low=2)
    check_number("temperature", temperature, low=0)
    given = [int(i) for i in np.asarray(prompt).reshape(-1)]
    if not given:
        raise ValueError("prompt has no tokens; begin with at least one")
    key = jax.random.key(0) if key is None else key
    shape = jax.eval_shape(model.predict, params, jax.ShapeDtypeStruct((1, length), jnp.int32)).shape
    if len(shape) != 3 or shape[:2] != (1, length):
        raise ValueError(f"a language model gives logits [B, T, vocab], this one gives {shape} for ids [1, {length}]")

    def drawn(params: PyTree, window: Array, count: Array, key: Array) -> Array:
        logits = model.predict(params, window[None])[0, count - 1].at[PADDING].set(-jnp.inf)
        if temperature == 0:
            return jnp.argmax(logits)
        return jax.random.categorical(key, logits / temperature)

    draw, added = captured.jit(drawn), list[int]()  # the frozen weights of a model are an argument of the program
    for step in range(tokens):
        seen = (given + added)[-length:]
        window = np.full(length, PADDING, np.int32)
        window[: len(seen)] = seen
        new = int(draw(params, window, np.int32(len(seen)), jax.random.fold_in(key, step)))
        added.append(new)
        if new in end:
            break
    return added
