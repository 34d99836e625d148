"""LoRA: small trainable adapters beside matrices that stay as they are.

E. Hu et al. LoRA: Low-Rank Adaptation of Large Language Models. ICLR 2022. A matrix W [in, out] of the base model is
used as

    W + (alpha / r) A B,    A [in, r] random, B [r, out] zero at the start,

and only A and B are trained. In a federation they are the parameters: what clients train, what messages hold, what
checkpoints save. (The paper writes W x + B A x: its A is our A', its B our B'.) The base weights are an argument of the
compiled programs, one copy per device, and are never sent.

Federated methods:

- FedIT (Zhang et al., "Towards Building the Federated GPT", 2024) averages A and B: `fedavg`, with AdamW on clients.
- FFA-LoRA (Sun et al., "Improving LoRA in Privacy-preserving Federated Learning", ICLR 2024) trains B only, so that the
  average of the products is the product of the averages: ``factors="b"``.
- FedSA-LoRA (Guo et al., "Selective Aggregation for Low-Rank Adaptation in Federated Learning", ICLR 2025) shares A and
  keeps B on its client: the transform ``private(alg, "*.lora_b")``.
- FlexLoRA (Bai et al., "Federated Fine-tuning of Large Language Models under Heterogeneous Tasks and Client Resources",
  NeurIPS 2024) averages the products A B and takes their best approximation of rank r: the algorithm `flexlora`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple
from zipfile import BadZipFile

import jax
import jax.numpy as jnp
import numpy as np

from fedbraid.core import check_choice, check_number
from fedbraid.local import APPLIES_MASK, HEAD, NORM, STATISTICS, WEIGHTS, leaf_names
from fedbraid.lowering.adapted import Adapted, with_adapted
from fedbraid.metric import as_metrics
from fedbraid.models.model import Array, Model, PyTree, check_sizes
from fedbraid.names import nearest
from fedbraid.notices import notice

__all__ = ["LORA_A", "LORA_B", "lora", "read_weights"]

LORA_A, LORA_B = "lora_a", "lora_b"  # names of the factors in the parameters
TARGETS = ("qkv", "q", "v")
AXES = {"first": 0, "last": 1}


class _Adapters(NamedTuple):
    """Which leaves of the base are adapted and which are trained whole; both by their place among all leaves."""

    names: tuple[str, ...]
    adapted: tuple[int, ...]
    whole: tuple[int, ...]
    scale: Any
    axis: int


def lora(
    model: Model,
    base: PyTree | None = None,
    *,
    rank: int = 8,
    alpha: float = 16.0,
    targets: str | Sequence[str] = TARGETS,
    train: str | Sequence[str] = (),
    factors: Literal["both", "b"] = "both",
    inputs: Literal["first", "last"] = "first",
) -> Model:
    """The model with adapters as its parameters, and the weights ``base`` frozen.

    The parameters are a dict: ``{"blocks.0.qkv.w": {"lora_a": A, "lora_b": B}, ...}``, and whole leaves for ``train``.
    ``merge(params)`` of the new model gives all weights with the adapters added, for the original model.

    Args:
        model: any `Model`: the library's, or one made by `from_equinox`, `from_torch` and others.
        base: the weights to adapt, such as pretrained ones; None is ``model.init(jax.random.key(0))``, which is what a
            module with weights of its own starts with.
        rank: r, the width of the adapters.
        alpha: the product A B is multiplied by alpha / r.
        targets: the matrices that get adapters: parts of their names (``"qkv"`` for ``blocks.0.qkv.w``), or patterns
            (``"blocks.*.up.w"``). Each must match a matrix. Without targets there are no adapters: the leaves of
            ``train`` are trained, and all others are frozen.
        train: further leaves that are trained whole, such as a new ``"head"``. They get no adapters.
        factors: ``"both"``, or ``"b"``, which keeps A as it was drawn (from a fixed key, the same at every client).
        inputs: the axis of a matrix that inputs are summed over: ``"first"`` for ``x @ w`` (this library, flax),
            ``"last"`` for ``w @ x`` (equinox, PyTorch).

    >>> import jax
    >>> from fedbraid.models import gpt
    >>> small = lora(gpt(50, layers=1, width=8, heads=2), rank=2)
    >>> params = small.init(jax.random.key(0))
    >>> {name: factors["lora_a"].shape for name, factors in params.items()}
    {'blocks.0.qkv.w': (8, 2)}
    """
    check_sizes(rank=rank)
    check_number("alpha", alpha, low=0, open_low=True)
    check_choice("factors", factors, ("both", "b"))
    check_choice("inputs", inputs, tuple(AXES))
    targets, train = _patterns("targets", targets), _patterns("train", train)
    _refuse_statistics(model)
    if isinstance(base, str | Path):
        raise ValueError(f"base must be weights, got the path {str(base)!r}: weights of [model.lora] reads such a file")
    base = jax.tree.map(jnp.asarray, model.init(jax.random.key(0)) if base is None else base)
    leaves, tree = jax.tree.flatten(base)
    _check_base(model, base)
    spec = _adapters(base, targets, train, alpha / rank, AXES[inputs])
    fixed = {} if factors == "both" else _drawn(jax.random.key(0), spec, leaves, rank)

    def init(key: Array) -> PyTree:
        drawn = _drawn(key, spec, leaves, rank)
        if fixed:
            drawn = {name: {LORA_B: pair[LORA_B]} for name, pair in drawn.items()}
        return drawn | {spec.names[i]: leaves[i] for i in spec.whole}

    def parts(params: PyTree) -> PyTree:
        mixed: list[Any] = list(leaves)
        for i in spec.whole:
            mixed[i] = params[spec.names[i]]
        for i in spec.adapted:
            pair = params[spec.names[i]] | ({LORA_A: fixed[spec.names[i]][LORA_A]} if fixed else {})
            mixed[i] = _matrix(leaves[i], pair, spec, partial(_watch, spec.names[i], spec.axis))
        return jax.tree.unflatten(tree, mixed)

    def loss(params: PyTree, batch: Any, key: Array | None = None) -> Array:
        return with_adapted(model.loss, parts(params), batch, key)

    def merge(params: PyTree) -> PyTree:
        wanted = jax.eval_shape(init, jax.random.key(0))
        if jax.tree.structure(params) != jax.tree.structure(wanted):
            raise ValueError(
                "merge takes the parameters of this model, adapters by the names of their matrices "
                f"({_without_numbers(list(wanted))}), such as those of a run's result"
            )
        silent = parts(params)
        return jax.tree.map(lambda leaf: _sum(leaf) if isinstance(leaf, Adapted) else leaf, silent, is_leaf=_is_adapted)

    setattr(loss, APPLIES_MASK, getattr(model.loss, APPLIES_MASK, False))
    weights = getattr(model.loss, WEIGHTS, None)
    if weights is not None:
        setattr(loss, WEIGHTS, lambda params, batch: weights(base, batch))
    for role in (HEAD, NORM):
        setattr(loss, role, _trained(getattr(model.loss, role, ()), jax.eval_shape(init, jax.random.key(0))))

    def through(function: Callable) -> Callable:
        return lambda params, given: with_adapted(function, parts(params), given)

    features = None if model.features is None else through(model.features)
    metrics = as_metrics(model.metrics).through(through)
    return Model(init, loss, metrics, through(model.predict), model.targets, features, merge)


def _is_adapted(leaf: Any) -> bool:
    return isinstance(leaf, Adapted)


def _sum(leaf: Adapted) -> Array:
    return leaf.w + (leaf.a @ leaf.b).astype(leaf.w.dtype)


def _refuse_statistics(model: Model) -> None:
    statistics = getattr(model.loss, STATISTICS, None)
    if statistics is not None:
        raise ValueError(
            f"model: its batch normalisation has running statistics ({', '.join(statistics.leaves[:3])}), which local "
            "steps would have to update, but all leaves without adapters are frozen. Use a model with group or layer "
            "normalisation, or from_torch(..., freeze_statistics=True)"
        )


def _trained(roles: Sequence[str], params: PyTree) -> tuple[str, ...]:
    """The patterns of ``roles`` (of the head, say) that match a leaf which is trained."""
    names = leaf_names(params)
    return tuple(one for one in roles if any(fnmatchcase(name, one) or name.startswith(f"{one}.") for name in names))


def _check_base(model: Model, base: PyTree) -> None:
    wanted = jax.eval_shape(model.init, jax.random.key(0))
    if jax.tree.structure(wanted) != jax.tree.structure(base):
        raise ValueError(
            "base has another structure than the parameters of the model: pass weights as model.init gives them"
        )
    for name, want, have in zip(leaf_names(base), *map(jax.tree.leaves, (wanted, base)), strict=True):
        if want.shape != have.shape:
            raise ValueError(f"base: the leaf {name!r} has shape {have.shape}, the model's has {want.shape}")


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or pattern in name.split(".")


def _patterns(argument: str, given: Any) -> tuple[str, ...]:
    patterns = (given,) if isinstance(given, str) else given
    if not isinstance(patterns, list | tuple) or not all(isinstance(pattern, str) for pattern in patterns):
        raise ValueError(
            f"{argument} must be names of leaves or patterns of them, such as ['qkv', 'up'], got {given!r}"
        )
    return tuple(patterns)


def _adapters(base: PyTree, targets: tuple[str, ...], train: tuple[str, ...], scale: Any, axis: int) -> _Adapters:
    names, leaves = leaf_names(base), jax.tree.leaves(base)
    every = targets == TARGETS  # the default names matrices of several kinds of models
    whole = [i for i, name in enumerate(names) if any(_matches(name, pattern) for pattern in train)]
    matrices = [i for i, leaf in enumerate(leaves) if leaf.ndim >= 2 and jnp.issubdtype(leaf.dtype, jnp.floating)]
    adapted = [i for i in matrices if i not in whole and any(_matches(names[i], pattern) for pattern in targets)]
    unmatched = [pattern for pattern in targets if not any(_matches(names[i], pattern) for i in matrices)]
    known = [names[i] for i in matrices]
    if unmatched and (not every or len(unmatched) == len(targets)):
        raise ValueError(
            f"targets: {unmatched[0]!r} matches no matrix of the model{_near(unmatched[0], known)}; its matrices are "
            f"{_without_numbers(known)}"
        )
    for pattern in train:
        if not any(_matches(name, pattern) for name in names):
            near = _near(pattern, names)
            raise ValueError(f"train: {pattern!r} matches no leaf of the model{near}; it has {_without_numbers(names)}")
    if targets and not adapted:
        raise ValueError(
            f"targets must name a matrix that train does not train whole, got targets = {list(targets)} and "
            f"train = {list(train)}; the matrices of the model are {_without_numbers(known)}"
        )
    if not targets and not whole:
        raise ValueError(
            "nothing is trained: name matrices that get adapters (targets), or leaves that are trained whole (train), "
            f"got targets = [] and train = {list(train)}; the model has {_without_numbers(names)}"
        )
    return _Adapters(tuple(names), tuple(adapted), tuple(whole), scale, axis)


def _near(given: str, names: Sequence[str]) -> str:
    return nearest(given, dict.fromkeys(part for name in names for part in name.split(".") if not part.isdigit()))


def _without_numbers(names: Sequence[str]) -> str:
    """The names of leaves as a list; those of equal layers once, as a pattern.

    >>> _without_numbers(["blocks.0.up.w", "blocks.1.up.w", "embedding"])
    'blocks.*.up.w, embedding'
    """
    whole = (".".join("*" if part.isdigit() else part for part in name.split(".")) for name in names)
    return ", ".join(dict.fromkeys(whole))


def _drawn(key: Array, spec: _Adapters, leaves: list[Array], rank: int) -> dict[str, dict[str, Array]]:
    """New factors: A uniform on +-1 / sqrt(inputs), as in the authors' code and in PEFT; B zero."""
    factors = {}
    for number, i in enumerate(spec.adapted):
        *stack, rows, columns = leaves[i].shape
        d, out = (rows, columns) if spec.axis == 0 else (columns, rows)
        dtype = jnp.promote_types(leaves[i].dtype, jnp.float32)  # steps are too small for the digits of bfloat16
        a = jax.random.uniform(jax.random.fold_in(key, number), (*stack, d, rank), jnp.float32, -1, 1) / d**0.5
        factors[spec.names[i]] = {LORA_A: a.astype(dtype), LORA_B: jnp.zeros((*stack, rank, out), dtype)}
    return factors


def _matrix(w: Array, pair: Mapping[str, Array], spec: _Adapters, used: Callable) -> Adapted:
    a, b = pair[LORA_A].astype(w.dtype), (spec.scale * pair[LORA_B]).astype(w.dtype)
    if spec.axis == 0:
        return Adapted(w, a, b, used)
    return Adapted(w, b.swapaxes(-1, -2), a.swapaxes(-1, -2), used)


@cache
def _say_whole(name: str) -> None:
    notice(
        f"lora: the matrix {name!r} is used by another operation than a product, so W + A B is computed: every client "
        "then has such a matrix of its own in memory"
    )


def _watch(name: str, expected: int, axis: int | None) -> None:
    """Called for every use of an adapted matrix while the model is traced."""
    if axis is None:
        _say_whole(name)
    elif axis != expected:
        first, last = "first", "last"
        raise ValueError(
            f"lora: inputs of the matrix {name!r} are summed over its {(first, last)[axis]} axis: set "
            f"inputs={(first, last)[axis]!r}, got {(first, last)[expected]!r}"
        )


def read_weights(path: str | Path, model: Model) -> PyTree:
    """The weights of a model from an ``.npz`` file, such as ``fedbraid export`` writes: arrays by name."""
    wanted = jax.eval_shape(model.init, jax.random.key(0))
    names = leaf_names(wanted)
    if not Path(path).is_file():
        raise ValueError(f"weights: there is no file {path} (in {Path.cwd()}); `fedbraid export` writes such files")
    try:
        with Path(path).open("rb") as file, np.load(file, allow_pickle=False) as found:
            arrays = {name: found[name] for name in found.files}
    except TypeError:  # NumPy reads a file of one array as an array, which is no context
        raise ValueError(
            f"weights: {path} holds one array; an .npz file with an array for each leaf is needed"
        ) from None
    except (ValueError, OSError, EOFError, BadZipFile):
        raise ValueError(
            f"weights: {path} is not a NumPy archive: a file NAME.npz is needed, such as "
            "`fedbraid export RUN NAME.npz` writes"
        ) from None
    if missing := sorted(set(names) ^ set(arrays)):
        whose = "the file" if missing[0] in arrays else "the model"
        adapters = any(name.endswith((LORA_A, LORA_B)) for name in arrays)
        hint = ". It holds adapters: `fedbraid export --merged` writes all weights" if adapters else ""
        raise ValueError(f"{path} does not hold the weights of this model: only {whose} has {missing[0]!r}{hint}")
    return jax.tree.unflatten(jax.tree.structure(wanted), [jnp.asarray(arrays[name]) for name in names])
