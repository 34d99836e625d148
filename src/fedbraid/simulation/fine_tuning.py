"""Evaluation after adaptation: the scores of a model on a client after a few steps on that client's own examples.

Meta-learning optimizes these scores, not those of the model before adaptation (C. Finn, P. Abbeel, S. Levine, ICML
2017). But any model can be adapted, and FedAvg followed by fine-tuning is a strong baseline (Y. Jiang et al., Improving
federated learning personalization via model agnostic meta learning, 2019). So the scores contain the values before and
after adaptation, and `compare_adapted` always has a row for FedAvg.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedbraid.core import check_count, check_number
from fedbraid.data.federated import FederatedData, Split
from fedbraid.local import Batches, ClientData
from fedbraid.lowering import LoweringOptions, captured, lower_function, lower_metrics
from fedbraid.metric import declared_by
from fedbraid.simulation.evaluate import Evaluator, summarize

__all__ = ["FEDAVG_ROW", "adaptation", "compare_adapted", "divide"]

PyTree = Any
Scores = dict[str, Any]
FEDAVG_ROW = "fedavg + fine-tuning"
CHUNK = 32  # clients adapted at a time on an accelerator; on a CPU one at a time


def adaptation(
    loss: Callable,
    metrics: Callable,
    data: Split | FederatedData,
    *,
    steps: int = 5,
    lr: Any = 0.1,
    batch_size: int | None = 20,
    support: float = 0.5,
    seed: int = 0,
) -> Evaluator:
    """A function of params: fine-tune on each client's support set by ``steps`` steps of SGD, test on its query set.

    data: a split or federated data. The examples of each client in a split are divided at random into support (the
        share ``support``) and query examples, the same for every params. Federated data must have a test split with the
        same clients as the training split: a client adapts on its training examples and is tested on its test
        examples, and ``support`` is not used.
    returns: like an evaluator, ``{name: [2, clients]}`` of sums and weights for `summarize`. A metric has its own name
        before adaptation and ``adapted_<name>`` after it. A client without query examples has weight 0.

    >>> split = Split.from_clients([{"x": np.full((4, 1), c)} for c in (1.0, 3.0)])
    >>> loss = lambda params, batch, key: 0.5 * jnp.sum((params - batch["x"]) ** 2 * batch["mask"][:, None]) / 2
    >>> def metrics(params, batch):
    ...     return {"error": (jnp.abs(params - batch["x"])[:, 0] * batch["mask"], batch["mask"])}
    >>> row = summarize(adaptation(loss, metrics, split, steps=50)(jnp.array([2.0])), "")
    >>> round(float(row["error"]), 3), round(float(row["adapted_error"]), 3)
    (1.0, 0.005)
    """
    check_count("steps", steps)
    check_number("lr", lr, low=0)
    loss, metrics = lower_function(loss, LoweringOptions()), lower_metrics(metrics, LoweringOptions())
    batches = Batches(batch_size, steps=steps)
    tuning, query = _sets(data, support, seed)
    on_device = [{name: jnp.asarray(a) for name, a in split.arrays.items()} for split in (tuning, query)]
    places = [(jnp.asarray(s.offsets[:-1], jnp.int32), jnp.asarray(s.sizes, jnp.int32)) for s in (tuning, query)]
    caps = [max(int(s.sizes.max()), 1) for s in (tuning, query)]

    @captured.jit
    def evaluate(params: PyTree, arrays: Any, places: Any) -> Scores:
        def one(client: tuple) -> Scores:
            number, (start, size), (test_start, test_size) = client
            own = ClientData(arrays[0], start, size, caps[0], tuning.preprocess)
            test = ClientData(arrays[1], test_start, test_size, caps[1], query.preprocess).everything()
            key = jax.random.fold_in(jax.random.key(seed), number)
            order, noise = jax.random.fold_in(key, 0), jax.random.fold_in(key, 1)

            def step(k: Any, y: PyTree) -> PyTree:
                step_key = jax.random.fold_in(noise, k)
                g = jax.grad(loss)(y, batches.take(own, k, order, step_key), step_key)
                return jax.tree.map(lambda y, g: y - lr * g, y, g)

            adapted = jax.lax.fori_loop(0, steps, step, params)
            after = {f"adapted_{name}": score for name, score in metrics(adapted, test).items()}
            both = metrics(params, test) | after
            return {name: jnp.stack([jnp.sum(s), jnp.sum(w)]) for name, (s, w) in both.items()}

        chunk = None if jax.default_backend() == "cpu" else CHUNK
        scores = jax.lax.map(one, (jnp.arange(tuning.num_clients), *places), batch_size=chunk)
        return {name: score.T for name, score in scores.items()}

    return Evaluator(lambda params: evaluate(params, on_device, places), declared_by(metrics))


def compare_adapted(
    adapt: Callable[[PyTree], Scores], fedavg: PyTree, others: Mapping[str, PyTree]
) -> dict[str, dict[str, float]]:
    """One row of summarized scores per model, before and after adaptation. The first row is FedAvg + fine-tuning.

    adapt: the result of `adaptation`; fedavg: params trained by FedAvg on the same data; others: params by name.

    >>> adapt = lambda params: {"accuracy": jnp.array([[params], [1.0]]), "adapted_accuracy": jnp.ones((2, 1))}
    >>> table = compare_adapted(adapt, 0.5, {"maml": 0.25})
    >>> [(name, row["accuracy"], row["adapted_accuracy"]) for name, row in table.items()]
    [('fedavg + fine-tuning', 0.5, 1.0), ('maml', 0.25, 1.0)]
    """
    if FEDAVG_ROW in others:
        raise ValueError(f"the name {FEDAVG_ROW!r} is reserved for FedAvg's row; use another name in others")
    rows = {FEDAVG_ROW: fedavg, **others}
    return {
        name: {key: float(value) for key, value in summarize(adapt(params), "", declared_by(adapt)).items()}
        for name, params in rows.items()
    }


def divide(split: Split, support: float, *, seed: int = 0) -> tuple[Split, Split]:
    """Divide each client's examples at random into two splits of the same clients: support and query.

    A client's support set has at least one example. A client with a single example has no query examples.

    >>> a, b = divide(Split.from_clients([{"x": np.arange(4)}, {"x": np.arange(1)}]), 0.5)
    >>> a.sizes.tolist(), b.sizes.tolist()
    ([2, 1], [2, 0])
    """
    check_number("support", support, low=0, high=1, open_low=True, open_high=True)
    inner, outer = [], []
    for i, (start, n) in enumerate(zip(split.offsets[:-1], split.sizes, strict=True)):
        rows = start + np.random.default_rng([seed, i]).permutation(int(n))
        cut = min(max(1, round(support * int(n))), max(1, int(n) - 1))
        inner.append(rows[:cut])
        outer.append(rows[cut:])
    parts = [Split.from_assignment(split.arrays, parts, split.ids) for parts in (inner, outer)]
    return replace(parts[0], preprocess=split.preprocess), replace(parts[1], preprocess=split.preprocess)


def _sets(data: Split | FederatedData, support: float, seed: int) -> tuple[Split, Split]:
    if isinstance(data, Split):
        data.check()
        tuning, query = divide(data, support, seed=seed)
    else:
        if data.test is None or not data.aligned:
            raise ValueError(
                "adaptation to federated data needs a test split with the training clients, in the same order; to "
                "adapt other clients give their split (data.test or data.unseen), which is then divided by support"
            )
        data.check()
        tuning, query = data.train, data.test
    if query.num_examples == 0:
        raise ValueError("no client has a query example to test on: lower support")
    return tuning, query
