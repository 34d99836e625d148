"""Base optimizers as pairs (U, V): U gives the direction of a step, V the next state.

S. P. Karimireddy, M. Jaggi, S. Kale, M. Mohri, S. J. Reddi, S. U. Stich, A. T. Suresh. Breaking the centralized barrier
for cross-device federated learning (Mime). NeurIPS 2021. Table 5.

One step with the gradient g, the state s and the learning rate lr (eta) is

    x <- x - lr U(g, s),    s <- V(g, s),

so U uses the state from before g. U is linear in g for a fixed s (Theorem I needs that); V may be nonlinear.

    base        s       U(g, s)                                       V(g, s)
    sgd         -       g                                             -
    momentum    m       (1 - beta) g + beta m                         m = (1 - beta) g + beta m
    adagrad     v       g / (eps + sqrt(v))                           v = v + g^2
    adam        m, v    ((1 - b1) g + b1 m) / (eps + sqrt(v))         m = (1 - b1) g + b1 m,  v = (1 - b2) g^2 + b2 v

Adam's state holds plain moving averages. With ``bias_correction`` they are divided by 1 - b^t when they are used; the
stored averages are not corrected. Without it, Adam is that of Table 5.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypedDict, Unpack

import jax
import jax.numpy as jnp
import optax

from fedbraid.core import check_choice, check_number, is_traced, is_zero
from fedbraid.notices import notice

__all__ = [
    "BASES",
    "BaseOptimizer",
    "BaseOptions",
    "adagrad",
    "adam",
    "base_optimizer",
    "from_optax",
    "momentum",
    "sgd",
    "warn_if_not_linear",
]

PyTree = Any


class BaseOptimizer(NamedTuple):
    """A centralized optimizer as (U, V). ``x`` is for rules such as weight decay; the bases of Table 5 ignore it."""

    name: str
    init: Callable  # (x) -> s
    update: Callable  # U: (g, s, x) -> direction; the model moves along -lr * direction
    track: Callable  # V: (g, s, x) -> s
    lr: float  # default learning rate
    linear: bool = True  # whether U is linear (up to a constant) in g for a fixed s
    tracks: bool = True  # False: s is empty, so no gradient is needed for it


def sgd() -> BaseOptimizer:
    """``x <- x - lr g``, without state.

    >>> base = sgd()
    >>> float(base.update(jnp.array(3.0), base.init(jnp.array(0.0)), None))
    3.0
    """
    return BaseOptimizer("sgd", lambda x: (), lambda g, s, x: g, lambda g, s, x: s, lr=0.1, tracks=False)


def _average(weight: Any, new: PyTree, old: PyTree) -> PyTree:
    """``weight old + (1 - weight) new``, leaf by leaf."""
    return jax.tree.map(lambda a, b: (1 - weight) * a + weight * b, new, old)


def momentum(beta: Any = 0.9) -> BaseOptimizer:
    """SGD with momentum as a moving average; the step uses the average that includes the new gradient.

    >>> base = momentum(beta=0.75)
    >>> float(base.track(jnp.array(4.0), jnp.array(8.0), None))
    7.0
    """
    check_number("beta", beta, low=0, high=1, open_high=True)

    def mixed(g: PyTree, m: PyTree, x: PyTree) -> PyTree:
        return _average(beta, g, m)

    return BaseOptimizer("momentum", lambda x: jax.tree.map(jnp.zeros_like, x), mixed, mixed, lr=0.1)


def adagrad(eps: Any = 1e-3, initial: Any = 0.1) -> BaseOptimizer:
    """AdaGrad; v starts at ``initial``.

    >>> base = adagrad(eps=1.0, initial=4.0)
    >>> v = base.init(jnp.array(0.0))
    >>> float(base.update(jnp.array(6.0), v, None)), float(base.track(jnp.array(6.0), v, None))
    (2.0, 40.0)
    """
    check_number("eps", eps, low=0, open_low=True)
    check_number("initial", initial, low=0)

    def update(g: PyTree, v: PyTree, x: PyTree) -> PyTree:
        return jax.tree.map(lambda g, v: g / (eps + jnp.sqrt(v)), g, v)

    def track(g: PyTree, v: PyTree, x: PyTree) -> PyTree:
        return jax.tree.map(lambda g, v: v + g * g, g, v)

    return BaseOptimizer(
        "adagrad", lambda x: jax.tree.map(lambda p: jnp.full_like(p, initial), x), update, track, lr=0.1
    )


class AdamState(NamedTuple):
    """``count`` exists only with bias correction: the state is sent to clients, so it has no unused fields."""

    m: PyTree
    v: PyTree
    count: Any = ()


def adam(
    b1: Any = 0.9, b2: Any = 0.99, eps: Any = 1e-3, initial: Any = 0.0, bias_correction: bool = False
) -> BaseOptimizer:
    """Adam; v starts at ``initial``.

    U divides by the v of earlier gradients only. While v is 0, as in the first round, the step is ``lr g / eps``. So do
    not use the eps of a centralized Adam (1e-8) without a positive ``initial``.

    >>> base = adam(b1=0.5, b2=0.75, eps=1.0)
    >>> s = base.track(jnp.array(4.0), base.init(jnp.array(0.0)), None)
    >>> float(s.m), float(s.v), float(base.update(jnp.array(6.0), s, None))
    (2.0, 4.0, 1.3333333730697632)
    """
    check_number("b1", b1, low=0, high=1, open_high=True)
    check_number("b2", b2, low=0, high=1, open_high=True)
    check_number("eps", eps, low=0, open_low=True)
    check_number("initial", initial, low=0)
    if bias_correction and not is_traced(initial) and not is_zero(initial):
        raise ValueError(f"initial must be 0 with bias_correction, which assumes averages from 0, got {initial!r}")

    def init(x: PyTree) -> AdamState:
        count = jnp.zeros((), jnp.int32) if bias_correction else ()
        return AdamState(jax.tree.map(jnp.zeros_like, x), jax.tree.map(lambda p: jnp.full_like(p, initial), x), count)

    def update(g: PyTree, s: AdamState, x: PyTree) -> PyTree:
        m, v = _average(b1, g, s.m), s.v
        if bias_correction:
            t = s.count.astype(jnp.result_type(float))
            m = jax.tree.map(lambda m: m / (1 - b1 ** (t + 1)).astype(m.dtype), m)  # m includes g: t + 1 gradients
            held = jnp.where(t > 0, 1 - b2**t, 1.0)  # v includes t gradients; no correction for t = 0
            v = jax.tree.map(lambda v: v / held.astype(v.dtype), v)
        return jax.tree.map(lambda m, v: m / (eps + jnp.sqrt(v)), m, v)

    def track(g: PyTree, s: AdamState, x: PyTree) -> AdamState:
        v = jax.tree.map(lambda g, v: (1 - b2) * g * g + b2 * v, g, s.v)
        return AdamState(_average(b1, g, s.m), v, s.count + 1 if bias_correction else ())

    return BaseOptimizer("adam", init, update, track, lr=0.01)


def from_optax(tx: optax.GradientTransformation, *, name: str = "optax", linear: bool = False) -> BaseOptimizer:
    """Any optax optimizer: U is the update it returns, V the state it returns.

    Most optax optimizers add g to the state before they use the state, so U is only approximately linear in g, and
    methods that need a linear U warn. Pass ``linear=True`` if ``tx`` is linear, such as ``optax.sgd`` with or without
    momentum. The learning rate inside ``tx`` is multiplied by that of the method, which is 1 unless you set it.

    >>> base = from_optax(optax.sgd(0.5), linear=True)
    >>> float(base.update(jnp.array(4.0), base.init(jnp.array(1.0)), jnp.array(1.0)))
    2.0
    """

    def update(g: PyTree, s: Any, x: PyTree) -> PyTree:
        return jax.tree.map(jnp.negative, tx.update(g, s, x)[0])

    def track(g: PyTree, s: Any, x: PyTree) -> Any:
        return tx.update(g, s, x)[1]

    return BaseOptimizer(name, tx.init, update, track, lr=1.0, linear=linear)


def warn_if_not_linear(method: str, base: BaseOptimizer) -> None:
    """Warn if U is not linear; the guarantee of the method needs a linear U."""
    if not base.linear:
        notice(
            f"{method}: the update of the base optimizer {base.name!r} is only approximately linear in the gradient, "
            f"and {method} averages updates as if it were linear; use a base of Table 5 ({', '.join(BASES)}), or pass "
            "linear=True to from_optax if it is linear",
        )


# --- by name, for configurations -------------------------------------------------------------------------------------

BASES: dict[str, Callable[..., BaseOptimizer]] = {
    "sgd": sgd,
    "momentum": momentum,
    "adam": adam,
    "adagrad": adagrad,
}

OPTIONS: dict[str, tuple[str, ...]] = {
    "sgd": (),
    "momentum": ("beta",),
    "adam": ("b1", "b2", "eps", "initial", "bias_correction"),
    "adagrad": ("eps", "initial"),
}


class BaseOptions(TypedDict, total=False):
    """The options of bases that are given by name."""

    beta: Any  # momentum
    b1: Any  # adam
    b2: Any
    eps: Any  # adam, adagrad
    initial: Any
    bias_correction: bool | None  # adam


def base_optimizer(base: str | BaseOptimizer, **options: Unpack[BaseOptions]) -> BaseOptimizer:
    """A base by its name and options (None: the base's own default). A `BaseOptimizer` is returned unchanged.

    >>> base_optimizer("adam", b2=0.999, beta=None).name
    'adam'
    """
    given = {name: value for name, value in options.items() if value is not None}
    if isinstance(base, BaseOptimizer):
        if given:
            raise ValueError(f"{min(given)} is an option of a base given by name; {base.name!r} is built already")
        return base
    check_choice("base", base, tuple(BASES))
    unknown = sorted(set(given) - set(OPTIONS[base]))
    if unknown:
        allowed = ", ".join(OPTIONS[base]) or "none"
        raise ValueError(f"{unknown[0]} is not an option of base={base!r}; its options are: {allowed}")
    return BASES[base](**given)
