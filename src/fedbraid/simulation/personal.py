"""Evaluation of the clients' own models: each on its client's own test examples.

Where an algorithm has ``personal``, the model that client i uses is ``personal(server, state of client i)``. A client
that never took part has its first state. Clients are evaluated in chunks, so that only the states of one chunk are in
memory. In a chunk the examples are divided into blocks of rows of one client; all blocks have the same size, so that
one program evaluates every chunk.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedbraid.core import Algorithm
from fedbraid.costs import nbytes
from fedbraid.data.federated import FederatedData, Split
from fedbraid.local import MASK
from fedbraid.metric import PERSONAL, Metric, declared_by
from fedbraid.notices import notice
from fedbraid.simulation.evaluate import Scores, client_values, in_batches, summarize
from fedbraid.simulation.states import HostStates

__all__ = [
    "Blocks",
    "Layout",
    "PersonalEvaluator",
    "has_own_models",
    "layout_of",
    "personal_evaluator",
    "read_states",
    "score_blocks",
]

PyTree = Any
CHUNK_BYTES = 1 << 26  # of client states that are read at a time
MOST_CLIENTS = 1024  # in a chunk
BLOCK = (16, 256)  # fewest and most rows of a block
AT_ONCE = 32  # blocks evaluated at a time on an accelerator; on a CPU one at a time


class Blocks(NamedTuple):
    """The blocks of a chunk of clients: the client's place in the chunk, the first row and the number of rows."""

    owner: np.ndarray
    start: np.ndarray
    rows: np.ndarray


class Layout(NamedTuple):
    """The chunks of a split: their clients (padded with numbers past the last one), their blocks, and two sizes."""

    chunks: tuple[tuple[np.ndarray, Blocks], ...]
    clients: int  # in a chunk
    rows: int  # of a block
    population: int


def has_own_models(alg: Algorithm, data: FederatedData, split: Split | None) -> bool:
    """Whether clients of the run have own models that can be evaluated on ``split``, by default the test split.

    Says once why not, if the algorithm has own models but the split has other clients.
    """
    split = data.test if split is None else split
    if alg.personal is None or split is None:
        return False
    if not same_clients(data.train, split):
        _say_other_clients()
        return False
    return True


def same_clients(a: Split, b: Split) -> bool:
    """Whether client ``i`` of one split is client ``i`` of the other."""
    return FederatedData(a, b).aligned


@functools.cache
def _say_other_clients() -> None:
    notice(
        "this method has an own model for every client, but the evaluated clients are not the training clients, so "
        "only the global model is evaluated. Use data whose test split has the same clients (data.test_fraction)"
    )


def score_blocks(
    metrics: Callable,
    alg: Algorithm,
    server: PyTree,
    states: PyTree,
    batches: dict[str, Any],
    blocks: Any,
    *,
    layout: Layout,
    preprocess: Callable | None,
) -> Scores:
    """Sums and weights of every metric for a chunk of clients; works under ``jit`` and ``vmap``.

    states: stacked over the chunk. batches: the examples, as `in_batches` lays them out.
    """
    personal = alg.personal
    assert personal is not None
    flat = {name: array.reshape(-1, *array.shape[2:]) for name, array in batches.items()}
    place = jnp.arange(layout.rows, dtype=jnp.int32)

    def one(block: Any) -> Scores:
        params = personal(server, jax.tree.map(lambda leaf: leaf[block.owner], states))
        batch = {name: jnp.take(array, block.start + place, axis=0, mode="clip") for name, array in flat.items()}
        batch[MASK] = (place < block.rows).astype(flat[MASK].dtype)
        found = metrics(params, batch if preprocess is None else preprocess(batch, None, False))
        return {name: jnp.stack([jnp.sum(s, 0), jnp.sum(w, 0)]) for name, (s, w) in found.items()}

    at_once = None if jax.default_backend() == "cpu" else AT_ONCE
    found = jax.lax.map(one, blocks, batch_size=at_once)
    summed = {name: jax.ops.segment_sum(score, blocks.owner, layout.clients) for name, score in found.items()}
    return {name: jnp.moveaxis(score, 0, 1) for name, score in summed.items()}


class PersonalEvaluator(NamedTuple):
    """Scores of the clients' own models on a split.

    chunk: ``(server, states of a chunk, its blocks) -> scores``, compiled.
    """

    chunk: Callable[[PyTree, PyTree, Blocks], Scores]
    layout: Layout
    declared: tuple[Metric, ...] = ()

    def scores(self, server: PyTree, read: Callable[[np.ndarray], PyTree], axis: int = 1) -> Scores:
        """``{name: [2, clients]}`` of sums and weights. read: from numbers of clients to their stacked states.

        axis: that of the clients in the results of ``chunk``; 2 if several points run together.
        """
        parts = [self.chunk(server, read(ids), blocks) for ids, blocks in self.layout.chunks]
        whole = {name: jnp.concatenate([part[name] for part in parts], axis) for name in parts[0]}
        return {n: jax.lax.slice_in_dim(one, 0, self.layout.population, axis=axis) for n, one in whole.items()}

    def summary(self, server: PyTree, read: Callable, prefix: str = "test_") -> dict[str, Any]:
        """The scores as one row of columns, such as ``test_personal_accuracy``; see `summarize`."""
        return summarize(self.scores(server, read), prefix + PERSONAL, self.declared)

    def of_points(self, prefix: str, keep: Callable[[dict[str, Any]], Any]) -> Callable[[PyTree, Callable], Any]:
        """`summary` of several points at once; ``keep`` is called with every metric for each client's own model."""
        row = jax.vmap(lambda scores: summarize(scores, prefix + PERSONAL, self.declared))
        each = jax.vmap(lambda scores: client_values(scores, self.declared))

        def score(server: PyTree, read: Callable) -> dict[str, Any]:
            scores = self.scores(server, read, axis=2)
            keep({prefix + PERSONAL + name: values for name, values in each(scores).items()})
            return row(scores)

        return score

    def by_client(self, server: PyTree, read: Callable, prefix: str = "test_") -> dict[str, Any]:
        """Every metric for each client's own model."""
        values = client_values(self.scores(server, read), self.declared)
        return {prefix + PERSONAL + name: value for name, value in values.items()}


def personal_evaluator(metrics: Callable, alg: Algorithm, params: PyTree, split: Split) -> PersonalEvaluator:
    """The evaluator of the clients' own models on ``split``, whose clients are those of the run.

    >>> import fedbraid as fb
    >>> train = Split.from_clients([{"x": np.full((4, 1), c, np.float32)} for c in (1.0, 3.0)])
    >>> loss = lambda p, batch, key: jnp.sum(((p["b"] + p["w"] - batch["x"]) ** 2)[:, 0] * batch["mask"]) / 4
    >>> def metrics(p, batch):
    ...     return {"error": (jnp.abs(p["b"] + p["w"] - batch["x"])[:, 0] * batch["mask"], batch["mask"])}
    >>> alg = fb.transforms.private(fb.fedavg(loss, client_lr=0.2, steps=9), "b")
    >>> params = {"b": jnp.zeros(1), "w": jnp.zeros(1)}
    >>> result = fb.simulate(alg, params, train, rounds=9)
    >>> evaluate = personal_evaluator(metrics, alg, params, train)
    >>> row = evaluate.summary(result.server, read_states(result.states))
    >>> round(float(row["test_personal_error_client_worst"]), 2)
    0.0
    """
    layout = layout_of(split, alg, params)
    batches, _ = in_batches(split)
    score = functools.partial(score_blocks, metrics, alg, layout=layout, preprocess=split.preprocess)
    compiled = jax.jit(score)
    return PersonalEvaluator(
        lambda server, states, blocks: compiled(server, states, batches, blocks), layout, declared_by(metrics)
    )


def layout_of(split: Split, alg: Algorithm, params: PyTree) -> Layout:
    """The layout for an algorithm whose client states are those of the model ``params``."""
    return chunks_of(split, nbytes(jax.eval_shape(alg.init_client, params)))


def chunks_of(split: Split, state_bytes: int) -> Layout:
    """The clients of a split in chunks with their blocks.

    >>> layout = chunks_of(Split.from_clients([{"x": np.zeros(n)} for n in (3, 0, 40)]), 8)
    >>> ids, blocks = layout.chunks[0]
    >>> layout.rows, ids.tolist(), blocks.owner.tolist(), blocks.rows.tolist()
    (16, [0, 1, 2], [0, 2, 2, 2], [3, 16, 16, 8])
    """
    few, most = BLOCK
    size = int(np.clip(1 << int(np.ceil(np.log2(max(split.sizes.mean(), 1)))), few, most))
    number = max(1, min(split.num_clients, MOST_CLIENTS, CHUNK_BYTES // max(state_bytes, 1)))
    blocks = -(-split.sizes // size)  # of each client
    firsts = range(0, split.num_clients, number)
    width = max(1, max(int(blocks[at : at + number].sum()) for at in firsts))  # the same for all chunks

    def of_chunk(at: int) -> Blocks:
        mine = blocks[at : at + number]
        owner = np.repeat(np.arange(len(mine)), mine)
        nth = np.arange(len(owner)) - np.repeat(np.cumsum(mine) - mine, mine)  # of its client's blocks
        rows = np.minimum(split.sizes[at + owner] - nth * size, size)
        found = owner, split.offsets[at + owner] + nth * size, rows
        return Blocks(*(np.pad(column, (0, width - len(column))).astype(np.int32) for column in found))

    chunks = tuple((np.arange(at, at + number), of_chunk(at)) for at in firsts)
    return Layout(chunks, number, size, split.num_clients)


def read_states(states: PyTree, axis: int = 0) -> Callable[[np.ndarray], PyTree]:
    """A function from numbers of clients to their stacked states, from a run's states in any form.

    axis: that of the clients in states on devices. Numbers past the last client read some other client's state.
    """
    if isinstance(states, HostStates):
        return states.read
    return lambda ids: jax.tree.map(lambda leaf: jnp.take(leaf, jnp.asarray(ids), axis=axis, mode="clip"), states)
