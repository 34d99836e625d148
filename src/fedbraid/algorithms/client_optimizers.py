"""Optimizers for the local steps of clients: any optax optimizer, by name, by factory or as a transformation.

A local method computes a direction g (a gradient, possibly corrected) and moves its model by ``y <- y + update(g)``.
With ``client_opt="sgd"``, the default, the update is ``-client_lr g``. The state of another optimizer starts anew in
every round (``client_opt_state="reset"``), or each client keeps its own between rounds (``"kept"``), which makes the
method stateful: the same clients must take part again.

Some optimizers find their rate themselves. "delta_sgd" measures the smoothness in every round and uses ``client_lr``
for its first step only. "dog", "dowg" and "prodigy" need no rate at all: ``client_lr`` has no effect. They find it over
a whole run, from the distance to the model at the start of the run, so they need ``client_opt_state="kept"``.
"schedule_free" averages the local steps of one round, so that their rate need not fall; its state must be reset.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import optax
from optax import contrib

from fedbraid.algorithms.local_smoothness import delta_sgd_steps
from fedbraid.algorithms.schedules import schedule
from fedbraid.core import check_choice, check_number, is_traced, is_zero
from fedbraid.local import LocalOptions
from fedbraid.names import nearest
from fedbraid.notices import notice

__all__ = ["OPTIMIZERS", "ClientOptimizer", "ClientOptions", "OptimizerSpec", "client_optimizer", "optimizer"]

OptimizerSpec = str | Mapping[str, Any] | optax.GradientTransformation | Callable[..., optax.GradientTransformation]
PyTree = Any


class ClientOptions(LocalOptions, total=False):
    """The options of local methods whose clients may use any optimizer."""

    client_opt: OptimizerSpec  # default "sgd"; see `optimizer`
    client_opt_state: Literal["reset", "kept"]  # default "reset"


def _momentum(learning_rate: Any, momentum: Any = 0.9) -> optax.GradientTransformation:
    return optax.sgd(learning_rate, momentum)


def _nesterov(learning_rate: Any, momentum: Any = 0.9) -> optax.GradientTransformation:
    return optax.sgd(learning_rate, momentum, nesterov=True)


# A loss times a constant must give the same steps, so the constants that only avoid a division by 0 are tiny.
TINY = 1e-30


def _dog(learning_rate: Any, initial: Any = 1e-4) -> optax.GradientTransformation:
    return contrib.dog(learning_rate, init_step=("heuristic", initial), eps=TINY)


def _dowg(learning_rate: Any, initial: Any = 1e-4) -> optax.GradientTransformation:
    return contrib.dowg(learning_rate, init_estim_sq_dist=initial**2, eps=TINY)


def _prodigy(
    learning_rate: Any, b1: Any = 0.9, b2: Any = 0.999, initial: Any = 1e-4, weight_decay: Any = 0.0
) -> optax.GradientTransformation:
    opt = contrib.prodigy(learning_rate, (b1, b2), eps=TINY, estim_lr0=initial, weight_decay=weight_decay)
    return optax.GradientTransformation(opt.init, opt.update)


def _schedule_free(learning_rate: Any, b1: Any = 0.9) -> optax.GradientTransformation:
    if callable(learning_rate):
        raise ValueError("schedule_free replaces a schedule of the rate: leave out the option schedule")
    opt = contrib.schedule_free_sgd(learning_rate, b1=b1)
    return optax.GradientTransformation(opt.init, opt.update)


OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {
    "sgd": optax.sgd,
    "momentum": _momentum,
    "nesterov": _nesterov,
    "adam": optax.adam,
    "adamw": optax.adamw,
    "nadam": optax.nadam,
    "radam": optax.radam,
    "adagrad": optax.adagrad,
    "rmsprop": optax.rmsprop,
    "adabelief": optax.adabelief,
    "lion": optax.lion,
    "yogi": optax.yogi,
    "lamb": optax.lamb,
    "delta_sgd": delta_sgd_steps,
    "dog": _dog,
    "dowg": _dowg,
    "prodigy": _prodigy,
    "schedule_free": _schedule_free,
}
"""The optimizers that a configuration can name; in Python any optax optimizer works."""

WITHOUT_RATE = ("dog", "dowg", "prodigy")  # they find their rate over a whole run

COMMON = ("weight_decay", "clip_norm", "schedule")
_SHARE = {"low": 0, "high": 1, "open_high": True}
RANGES: dict[str, dict[str, Any]] = {  # of options of optax, which does not check them
    "weight_decay": {"low": 0},
    "b1": _SHARE,
    "b2": _SHARE,
    "momentum": _SHARE,
    "decay": _SHARE,
    "eps": {"low": 0},
}


def optimizer(spec: OptimizerSpec, lr: Any, *, what: str = "client_opt") -> optax.GradientTransformation:
    """An optax optimizer with the learning rate ``lr``.

    spec: a name in `OPTIMIZERS`; a table with a ``name`` and options; a function
        ``(learning_rate) -> GradientTransformation`` such as ``optax.adamw``; or a ``GradientTransformation``, which
        has its own rate.

    The options of a table are those of the optax function, and three that all have: ``weight_decay`` (decoupled: adds
    ``-lr * weight_decay * params`` to every update), ``clip_norm`` (scales a gradient down to this norm) and
    ``schedule`` (the rate over the optimizer's own steps; see `fedbraid.algorithms.schedules.schedule`).

    >>> import jax.numpy as jnp
    >>> opt = optimizer({"name": "adamw", "b2": 0.95, "clip_norm": 1.0}, 0.1)
    >>> update, _ = opt.update(jnp.array([30.0]), opt.init(jnp.zeros(1)), jnp.zeros(1))
    >>> round(float(update[0]), 3)
    -0.1
    """
    if isinstance(spec, optax.GradientTransformation):
        notice(f"{what} is a GradientTransformation with its own rate: the learning rate {lr!r} has no effect")
        return _promoting(spec)
    if callable(spec):
        return _promoting(spec(lr))
    table = {**spec} if isinstance(spec, Mapping) else {"name": spec}
    name = table.pop("name", None)
    if not isinstance(name, str) or name not in OPTIMIZERS:
        near = nearest(name, OPTIMIZERS) if isinstance(name, str) else ""
        raise ValueError(
            f"{what} must be one of {', '.join(OPTIMIZERS)}, or a table with such a name, got {name!r}{near}"
        )
    factory = OPTIMIZERS[name]
    if name in WITHOUT_RATE:
        if is_traced(lr) or lr != 1.0:
            rate = "the learning rate" if is_traced(lr) else f"the learning rate {lr!r}"
            notice(f"{what} {name!r} finds its rate itself: {rate} has no effect; set it to 1.0 to say so")
        lr = 1.0
    own = [option for option in inspect.signature(factory).parameters if option != "learning_rate"]
    for option in table:
        if option not in (*own, *COMMON):
            near, takes = nearest(option, (*own, *COMMON)), ", ".join(dict.fromkeys((*own, *COMMON)))
            raise ValueError(f"{what} {name!r} has no option {option!r}{near}; it takes {takes}")
    for option, value in table.items():
        if option in RANGES and value is not None:
            check_number(f"{what}.{option}", value, **RANGES[option])
    return _promoting(_composed(factory, own, table, lr, what))


def _promoting(opt: optax.GradientTransformation) -> optax.GradientTransformation:
    """``opt`` under jax's usual promotion of dtypes, which optax needs: it multiplies floats by counts of steps."""

    def update(updates: PyTree, state: Any, params: PyTree = None) -> tuple[PyTree, Any]:
        with jax.numpy_dtype_promotion("standard"):
            return opt.update(updates, state, params)

    return optax.GradientTransformation(opt.init, update)


def _composed(
    factory: Callable[..., optax.GradientTransformation], own: list[str], table: dict[str, Any], lr: Any, what: str
) -> optax.GradientTransformation:
    """The optimizer with the options that optax does not give to all."""
    clip = table.pop("clip_norm", None)
    decay = 0.0 if "weight_decay" in own else table.pop("weight_decay", 0.0)
    factor = schedule(table.pop("schedule", None), f"{what}.schedule")
    rate = lr if factor is None else lambda count: lr * factor(count)
    parts = [factory(rate, **table)]
    if clip is not None:
        check_number(f"{what}.clip_norm", clip, low=0, open_low=True)
        parts.insert(0, optax.clip_by_global_norm(clip))
    if not is_zero(decay):
        parts.append(_decay(lr, decay, factor))
    return parts[0] if len(parts) == 1 else optax.chain(*parts)


def _decay(lr: Any, decay: Any, factor: Callable | None) -> optax.GradientTransformation:
    """Adds ``-lr * decay * params`` to the update."""
    if factor is None:
        steps = optax.scale(-lr * decay)
    else:
        steps = optax.scale_by_schedule(lambda count: -lr * decay * factor(count))

    def update(updates: PyTree, state: Any, params: PyTree = None) -> tuple[PyTree, Any]:
        shrink, state = steps.update(params, state)
        return jax.tree.map(lambda u, s: u + s, updates, shrink), state

    return optax.GradientTransformation(steps.init, update)


def _check_state(client_opt: OptimizerSpec, client_opt_state: str) -> None:
    """Refuse a state that is reset or kept where the optimizer's theory needs the other."""
    name = client_opt.get("name") if isinstance(client_opt, Mapping) else client_opt
    if not isinstance(name, str):
        return
    if name in WITHOUT_RATE and client_opt_state != "kept":
        raise ValueError(
            f"client_opt {name!r} finds its rate over a whole run, from tiny first steps: with client_opt_state="
            f"{client_opt_state!r} every round starts with them again. Set client_opt_state='kept', or use the "
            "algorithm feddog, whose server keeps what is needed"
        )
    if name == "schedule_free" and client_opt_state != "reset":
        raise ValueError(
            "client_opt 'schedule_free' averages the steps since its start, which must be the server's model: "
            f"set client_opt_state='reset', got {client_opt_state!r}"
        )


class ClientOptimizer(NamedTuple):
    """How a client moves its model along a direction.

    kept: whether the client keeps the optimizer's state between rounds. plain: whether it is SGD without options.
    """

    init: Callable  # (params) -> state
    step: Callable  # (params, direction, state) -> (params, state)
    kept: bool
    plain: bool

    def start(self, params: PyTree, kept: PyTree) -> PyTree:
        """The state at the beginning of a round: the one that the client kept, or a new one."""
        return kept if self.kept else self.init(params)

    def of_client(self, params: PyTree) -> PyTree:
        """The state that a client keeps before its first round; () if it keeps none."""
        return self.init(params) if self.kept else ()

    def after(self, state: PyTree) -> PyTree:
        """The state that a client keeps after a round."""
        return state if self.kept else ()


def client_optimizer(
    lr: Any, client_opt: OptimizerSpec = "sgd", client_opt_state: Literal["reset", "kept"] = "reset"
) -> ClientOptimizer:
    """The optimizer of a client's local steps.

    >>> import jax.numpy as jnp
    >>> opt = client_optimizer(0.5)
    >>> float(opt.step(jnp.array(3.0), jnp.array(4.0), opt.init(jnp.array(3.0)))[0])
    1.0
    """
    check_choice("client_opt_state", client_opt_state, ("reset", "kept"))
    if client_opt == "sgd":

        def descend(params: PyTree, direction: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
            moved = params if is_zero(lr) else jax.tree.map(lambda y, g: y - lr * g, params, direction)
            return moved, state

        return ClientOptimizer(lambda params: (), descend, kept=False, plain=True)
    _check_state(client_opt, client_opt_state)
    opt = optimizer(client_opt, lr)

    def step(params: PyTree, direction: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
        updates, state = opt.update(direction, state, params)
        return optax.apply_updates(params, updates), state

    return ClientOptimizer(opt.init, step, kept=client_opt_state == "kept", plain=False)
