"""Programs in which large captured arrays are arguments, not constants.

A loss may use arrays that are not trained: the base model under LoRA adapters, the frozen layers of a PyTorch module,
a table. ``jax.jit`` writes an array that a function captures into the program as a constant. XLA then copies it and
evaluates operations on it while it compiles: with a base model of 135 million weights this took 3.8 GB. A program of
:func:`jit` takes such arrays as arguments. All clients of a device share them, and they are never sent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from fedbraid.core import is_traced

__all__ = ["COMPILER", "LARGE", "Program", "captured_bytes", "inlined", "jit"]

COMPILER = "compiler_options"
LARGE = 1 << 16  # bytes of the smallest array that becomes an argument; XLA may fold smaller ones


def jit(function: Callable, *, sharding: Any = None, static_argnums: tuple[int, ...] = (), **options: Any) -> Program:
    """``jax.jit(function, **options)``, but arrays of at least LARGE bytes that it captures are arguments.

    sharding: where captured arrays are placed, for a program on several devices, or a function from the shape of an
        array to that; None leaves them where they are.

    >>> import jax.numpy as jnp
    >>> table = jnp.ones((200, 100))
    >>> program = jit(lambda x: x @ table)
    >>> program(jnp.ones(200)).shape, "constant" in program.lower(jnp.ones(200)).as_text()
    ((100,), False)
    """
    return Program(function, sharding, tuple(static_argnums), options)


def inlined(function: Callable) -> Callable:
    """``function``, traced once for several uses inside a program.

    From jax 0.11 on, arrays that a jitted function captures stay its constants, although it is inlined, and `jit` does
    not see them. There the function is traced for every use.
    """
    return jax.jit(function, inline=True) if jax.__version_info__ < (0, 11) else function


class Program:
    """A compiled function, as `jit` makes it. It compiles when it is first called with arguments of new shapes."""

    def __init__(self, function: Callable, sharding: Any, static: tuple[int, ...], options: dict[str, Any]) -> None:
        self._plain: Any = jax.jit(function, static_argnums=static, **options)
        # jax refuses compiler options of a program inside another one, which has its own
        self._inner = jax.jit(function, static_argnums=static, **{k: options[k] for k in options if k != COMPILER})
        self._sharding, self._static, self._options = sharding, static, options
        self._lifted: dict[int, _Lifted | None] = {}  # by the identity of a traced jaxpr, which jax's cache keeps
        self._jaxprs: list[Any] = []  # keeps these identities unique
        self._small: set[Any] = set()  # structures and shapes of arguments with which it captures no large array

    def __call__(self, *args: Any) -> Any:
        leaves, tree = jax.tree.flatten([arg for i, arg in enumerate(args) if i not in self._static])
        if any(map(is_traced, leaves)):
            return self._inner(*args)
        # jax takes three times as long to find a traced program as to call a compiled one
        shapes = (tree, *(args[i] for i in self._static), *map(_shape, leaves))
        if shapes in self._small:
            return self._plain(*args)
        lifted = self._of(args)
        if lifted is not None:
            return lifted(leaves)
        self._small.add(shapes)
        return self._plain(*args)

    def lower(self, *args: Any) -> Any:
        """The lowered program for arguments of these shapes; its ``compile()`` can be called like this program."""
        lifted = self._of(args)
        return self._plain.lower(*args) if lifted is None else _Lowered(lifted, self._leaves, self._leaves(args))

    @property
    def compilations(self) -> int:
        """How many programs it has compiled: one for every new set of shapes."""
        return self._plain._cache_size() + sum(each.program._cache_size() for each in self._lifted.values() if each)

    def _leaves(self, args: tuple[Any, ...]) -> list[Any]:
        return jax.tree.leaves([arg for i, arg in enumerate(args) if i not in self._static])

    def _is_inside(self, args: tuple[Any, ...]) -> bool:
        """Whether it is called as part of a larger program, which has its own constants and compiler options."""
        return any(is_traced(leaf) for leaf in self._leaves(args))

    def _of(self, args: tuple[Any, ...]) -> _Lifted | None:
        """The program with lifted arrays; None if the function captures no large array."""
        if self._is_inside(args):
            return None
        traced = self._plain.trace(*args)  # from jax's cache, except for the first time
        name = id(traced.jaxpr.jaxpr)
        if name not in self._lifted:
            self._jaxprs.append(traced.jaxpr.jaxpr)
            large = any(_is_large(const) for const in traced.jaxpr.consts)
            self._lifted[name] = _Lifted(traced, self._sharding, self._options) if large else None
        return self._lifted[name]


class _Lifted:
    """A traced function as a program of its captured arrays and its flat arguments."""

    def __init__(self, traced: Any, sharding: Any, options: dict[str, Any]) -> None:
        closed, self.tree = traced.jaxpr, traced.out_tree
        at = [i for i, const in enumerate(closed.consts) if _is_large(const) or is_traced(const)]
        self.captured = [_placed(closed.consts[i], sharding) for i in at]
        small = {i: const for i, const in enumerate(closed.consts) if i not in set(at)}

        def run(captured: list[Any], leaves: list[Any]) -> list[Any]:
            consts = small | dict(zip(at, captured, strict=True))
            inside = ClosedJaxpr(closed.jaxpr, [consts[i] for i in range(len(consts))])
            return jaxpr_as_fun(inside)(*leaves)

        self.program: Any = jax.jit(run, **options)

    def __call__(self, leaves: list[Any]) -> Any:
        return jax.tree.unflatten(self.tree, self.program(self.captured, leaves))


class _Lowered:
    """A lowered and a compiled program at once: what `Program.lower` returns for lifted arrays."""

    def __init__(self, lifted: _Lifted, flat: Callable, leaves: list[Any]) -> None:
        self.lifted, self.flat = lifted, flat
        self.lowered = lifted.program.lower(lifted.captured, leaves)
        self.compiled: Any = None

    def as_text(self) -> str:
        return self.lowered.as_text()

    def compile(self, **options: Any) -> _Lowered:
        self.compiled = self.lowered.compile(**options)
        return self

    def memory_analysis(self) -> Any:
        return self.compiled.memory_analysis()

    def cost_analysis(self) -> Any:
        return self.compiled.cost_analysis()

    def __call__(self, *args: Any) -> Any:
        results = self.compiled(self.lifted.captured, self.flat(args))
        return jax.tree.unflatten(self.lifted.tree, results)


def captured_bytes(function: Callable, *args: Any) -> int:
    """Bytes of the large arrays that a function captures, found by tracing. Arguments may be shapes."""
    consts = jax.make_jaxpr(function)(*args).consts
    return sum(const.nbytes for const in consts if _is_large(const))


def _shape(leaf: Any) -> Any:
    return (leaf.shape, leaf.dtype) if hasattr(leaf, "dtype") else type(leaf)


def _is_large(const: Any) -> bool:
    return isinstance(const, np.ndarray | jax.Array) and not is_traced(const) and const.nbytes >= LARGE


def _placed(const: Any, sharding: Any) -> Any:
    if is_traced(const):
        return const
    return jax.device_put(const, sharding(const.shape) if callable(sharding) else sharding)
