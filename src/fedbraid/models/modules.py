"""Models written with equinox, flax, or plain functions."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax

from fedbraid.local import leaf_names
from fedbraid.models.model import SCORES, Array, Batch, Model, Normalised, PyTree, mask_of, supervised
from fedbraid.models.targets import Targets

Score = Callable[[Array, Array, Array], Mapping[str, tuple[Array, Array]]]


def from_functions(
    init: Callable[[Array], PyTree],
    loss: Callable[[PyTree, Batch, Array | None], Array],
    metrics: Callable[[PyTree, Batch], dict[str, tuple[Array, Array]]] | None = None,
    predict: Callable[[PyTree, Array], Array] | None = None,
    targets: Targets | None = None,
    features: Callable[[PyTree, Array], Array] | None = None,
) -> Model:
    """A model from the user's own functions. The engine makes their convolutions fast (docs/lowering.md).

    Args:
        init: (key) -> params.
        loss: (params, batch, key) -> scalar; it must apply ``batch["mask"]`` itself.
        metrics: (params, batch) -> {name: (sums [B], weights [B])}; without it the only metric is the batch's loss.
            Use a `fedbraid.Metrics` to declare names that are not well known.
        predict: (params, x) -> outputs.
        targets: which labels the model can have, such as ``Targets("classes", 10)``; None: labels are not checked.
        features: (params, x) -> activations before the last layer, for methods that compare them (MOON, FedProto).

    >>> import jax, jax.numpy as jnp
    >>> model = from_functions(lambda key: jnp.zeros(2), lambda p, batch, key: jnp.sum((p - batch["x"]) ** 2))
    >>> float(model.loss(model.init(jax.random.key(0)), {"x": jnp.ones(2)}, None))
    2.0
    """
    for name, function in (("init", init), ("loss", loss)):
        if not callable(function):
            raise ValueError(f"from_functions needs a callable {name}, got {function!r}")

    def loss_alone(params: PyTree, batch: Batch) -> dict[str, tuple[Array, Array]]:
        mask = mask_of(batch)
        return {"loss": (mask * loss(params, batch, None), mask)}

    def no_predict(params: PyTree, x: Array) -> Array:
        raise ValueError("this model was made by from_functions without predict: pass predict=(params, x) -> outputs")

    return Model(init, loss, metrics or loss_alone, predict or no_predict, targets, features)


def from_equinox(module: Any, *, score: str | Score = "classes", batched: bool = False) -> Model:
    """A model from an equinox module. The engine makes its convolutions fast (docs/lowering.md).

    ``params`` are the module's floating-point arrays; everything else in it is fixed. In training the module gets a
    ``key`` for each example if its call takes one. In evaluation it runs in ``equinox.nn.inference_mode``, without key.
    The running statistics of ``equinox.nn.BatchNorm`` become leaves of ``params``, which methods with private leaves
    (``fedbn``) keep on the clients; its call is ``module(x, state) -> (outputs, state)``, as in equinox.

    Args:
        module: the module, or (key) -> module. A module starts with its own weights, for every seed. With a state, as
            ``equinox.nn.make_with_state`` makes it: (module, state), or (key) -> (module, state).
        score: ``"classes"`` (cross entropy, accuracy), ``"values"`` (squared and absolute error), ``"tokens"``
            (sequences, 0 is padding), or (outputs, y, mask) -> {name: (sums [B], weights [B])} with a metric
            ``"loss"``, as a `fedbraid.Metrics` if other names are not well known.
        batched: the module takes a whole batch; by default it takes one example and is mapped over the batch.

    >>> import equinox as eqx, jax
    >>> model = from_equinox(lambda key: eqx.nn.MLP(4, 3, width_size=8, depth=1, key=key))
    >>> model.predict(model.init(jax.random.key(0)), jax.numpy.ones((5, 4))).shape
    (5, 3)
    """
    import equinox as eqx

    from fedbraid.models import equinox_norm

    given = module if isinstance(module, tuple) else (module, None)
    made = module if callable(module) and not isinstance(module, eqx.Module) else lambda key: given
    if not isinstance(given[0], eqx.Module) and not callable(given[0]):
        raise ValueError(f"from_equinox needs an equinox module or a function (key) -> module, got {module!r}")

    def make(key: Array) -> Any:
        found = made(key)
        found, state = found if isinstance(found, tuple) else (found, None)
        if not isinstance(found, eqx.Module):
            raise ValueError(f"from_equinox: the function returned a {type(found).__name__}, not an equinox module")
        return equinox_norm.with_own_statistics(found, state)

    sample = make(jax.random.key(0))
    _refuse_state(sample, eqx)
    takes_key, takes_state = _takes(sample, "key"), _takes(sample, "state")

    # Everything else in the module (functions, flags, integer tables) is the same for every key.
    first, fixed = eqx.partition(sample, eqx.is_inexact_array)

    def init(key):
        return eqx.filter(make(key), eqx.is_inexact_array)

    def apply(params, x, key):
        network = eqx.combine(params, fixed)
        if key is None:
            network = eqx.nn.inference_mode(network)
        if key is None or not takes_key:
            return network(x) if batched else jax.vmap(network)(x)
        if batched:
            return network(x, key=key)
        return jax.vmap(lambda one, k: network(one, key=k))(x, jax.random.split(key, x.shape[0]))

    if not any(map(equinox_norm.is_norm, jax.tree.leaves(first, is_leaf=equinox_norm.is_norm))):
        return supervised(init, apply, scorer(score), targets=targets_of(score))
    if batched or not takes_state:
        raise ValueError(
            f"{type(sample).__name__} has batch normalisation: its call must take one example and a state, (x, state), "
            "and return (outputs, state), with batched=False"
        )

    def one(network: Any, x: Array, key: Array | None) -> Array:
        return network(x, None, **({"key": key} if takes_key and key is not None else {}))[0]

    def evaluate(params: PyTree, x: Array, key: Array | None) -> Array:
        del key
        network = eqx.nn.inference_mode(eqx.combine(params, fixed))
        return jax.vmap(lambda x: one(network, x, None))(x)

    def train(params: PyTree, x: Array, mask: Array, key: Array) -> tuple[Array, PyTree]:
        network = eqx.combine(params, fixed)

        def mapped(x: Array, weight: Array, key: Array) -> tuple[Array, Any]:
            with equinox_norm.normalising(weight) as seen:
                return one(network, x, key), seen

        keys = jax.random.split(key, x.shape[0])
        outputs, seen = jax.vmap(mapped, axis_name=equinox_norm.AXIS, out_axes=(0, None))(x, mask, keys)
        return outputs, equinox_norm.new_statistics(params, seen)

    layers = jax.tree.map(lambda n: n if equinox_norm.is_norm(n) else None, first, is_leaf=equinox_norm.is_norm)
    return supervised(
        init,
        evaluate,
        scorer(score),
        targets=targets_of(score),
        norm=tuple(leaf_names(layers)),
        normalised=Normalised(tuple(leaf_names(equinox_norm.new_statistics(first, {}))), train),
    )


def from_flax(
    module: Any,
    example: Any,
    *,
    score: str | Score = "classes",
    training: Mapping[str, Any] | None = None,
    evaluation: Mapping[str, Any] | None = None,
) -> Model:
    """A model from a ``flax.linen`` module, or from any object with its ``init`` and ``apply``.

    The engine makes its convolutions fast (docs/lowering.md).

    Args:
        module: a module over whole batches, without state other than its parameters (no batch normalisation).
        example: an input of the right shape, with its batch axis, for ``module.init``.
        score: as in ``from_equinox``.
        training: further arguments of a training call, such as ``{"train": True}``; its key is ``rngs["dropout"]``.
        evaluation: further arguments of an evaluation call and of ``init``, such as ``{"train": False}``.

    >>> class Scale:  # has the methods of a flax.linen module
    ...     def init(self, key, x):
    ...         return {"params": jax.numpy.ones(x.shape[1:])}
    ...     def apply(self, variables, x, rngs=None):
    ...         return x * variables["params"]
    >>> import jax
    >>> from_flax(Scale(), jax.numpy.ones((1, 3))).init(jax.random.key(0)).shape
    (3,)
    """
    for method in ("init", "apply"):
        if not callable(getattr(module, method, None)):
            raise ValueError(
                f"from_flax needs a flax.linen module, got a {type(module).__name__} without {method}(); "
                "wrap other modules with from_functions"
            )
    training, evaluation = dict(training or {}), dict(evaluation or {})
    collections = jax.eval_shape(lambda key: module.init(key, example, **evaluation), jax.random.key(0))
    extra = sorted(set(collections) - {"params"})
    if extra:
        raise ValueError(
            f"{type(module).__name__} keeps state in {', '.join(extra)}, which clients cannot average like parameters; "
            "use group or layer normalisation instead of batch normalisation"
        )

    def init(key):
        return module.init(key, example, **evaluation)["params"]

    def apply(params, x, key):
        if key is None:
            return module.apply({"params": params}, x, **evaluation)
        return module.apply({"params": params}, x, rngs={"dropout": key}, **training)

    return supervised(init, apply, scorer(score), targets=targets_of(score))


def from_nnx(module: Any, *, score: str | Score = "classes") -> Model:
    """A model from a ``flax.nnx`` module (extra ``flax``) over whole batches.

    ``params`` are the values of its ``nnx.Param``, as nested dicts. The module is copied: it starts with its own
    weights, for every seed, and is not changed. In training it runs after ``module.train()``, and its random streams
    (dropout) start from the given key; in evaluation it runs after ``module.eval()``. The engine makes its convolutions
    fast (docs/lowering.md).

    Example::

        model = from_nnx(nnx.Linear(784, 62, rngs=nnx.Rngs(0)))

    Args:
        module: a module without state other than its parameters and random streams (no batch normalisation).
        score: as in ``from_equinox``.
    """
    try:
        nnx: Any = importlib.import_module("flax.nnx")
    except ModuleNotFoundError as error:
        raise ValueError("from_nnx needs flax: pip install 'fedbraid[flax]'") from error
    if not isinstance(module, nnx.Module):
        raise ValueError(f"from_nnx needs a flax.nnx module, got a {type(module).__name__}")
    definition, weights, streams, state = nnx.split(module, nnx.Param, nnx.RngState, ...)
    kept = sorted({type(variable).__name__ for _, variable in nnx.to_flat_state(state)})
    if kept:
        raise ValueError(
            f"{type(module).__name__} keeps state in {', '.join(kept)}, which clients cannot average like parameters; "
            "use group or layer normalisation instead of batch normalisation"
        )
    start = nnx.to_pure_dict(weights)

    def init(key):
        del key
        return jax.tree.map(jax.numpy.array, start)

    def apply(params, x, key):
        # Copies: nnx only changes variables that were made in the same trace.
        own, random = (jax.tree.map(lambda leaf: leaf, kind) for kind in (weights, streams))
        nnx.replace_by_pure_dict(own, params)
        if key is not None:
            _seed(random, key, nnx)
        network = nnx.merge(definition, own, random)
        network.train() if key is not None else network.eval()
        return network(x)

    return supervised(init, apply, scorer(score), targets=targets_of(score))


def _seed(streams: Any, key: Array, nnx: Any) -> None:
    """Gives each random stream of an nnx module a key of its own that follows from ``key``, and restarts it."""
    for number, (_, variable) in enumerate(nnx.to_flat_state(streams)):
        fresh = jax.random.fold_in(key, number) if isinstance(variable, nnx.RngKey) else 0 * variable.get_value()
        variable.set_value(fresh)


def scorer(score: str | Score) -> Score:
    if callable(score):
        return score
    if score not in SCORES:
        raise ValueError(f"score must be one of {', '.join(SCORES)} or a function, got {score!r}")
    return SCORES[score]


def targets_of(score: str | Score) -> Targets | None:
    """The labels that a score by name takes; a user's own function is not checked."""
    if callable(score):
        return None
    return {"classes": Targets("classes"), "values": Targets("values"), "tokens": Targets("tokens")}[score]


def _takes(module: Any, argument: str) -> bool:
    parameters = inspect.signature(type(module).__call__).parameters
    return argument in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _refuse_state(module: Any, eqx: Any) -> None:
    leaves = jax.tree.leaves(module, is_leaf=lambda leaf: isinstance(leaf, eqx.nn.StateIndex))
    if any(isinstance(leaf, eqx.nn.StateIndex) for leaf in leaves):
        raise ValueError(
            f"{type(module).__name__} keeps state (such as spectral normalisation), which clients cannot average like "
            "parameters; use group or layer normalisation. Batch normalisation is the one exception"
        )
