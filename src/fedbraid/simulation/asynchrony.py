"""When the server takes a step: after a round of all clients, or as soon as some uploads have arrived.

- FedBuff (J. Nguyen et al., Federated Learning with Buffered Asynchronous Aggregation, AISTATS 2022): the server keeps
  ``cohort`` clients busy. When a buffer of K uploads is full, it takes a step with their mean, in which each upload is
  multiplied by its staleness weight, 1 / sqrt(1 + tau).
- FedAsync (C. Xie, S. Koyejo, I. Gupta, Asynchronous Federated Optimization, 2019): every upload is a step. The
  client's new model is mixed into the server's: x <- (1 - alpha s(tau)) x + alpha s(tau) x_client.
- Semi-synchronous rounds: the server asks more clients than it needs, takes the first ones, and ends at a deadline.

The staleness tau of an upload is the number of server steps since its client was sent its model. These are schedules of
the usual rounds: the algorithm's client, reducer and ``receive`` stay as they are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedbraid.core import Algorithm, Down, Up, check_choice, check_count, check_number, message_shapes

__all__ = [
    "Asynchrony",
    "Jobs",
    "Versions",
    "check_asynchrony",
    "fedasync",
    "fedbuff",
    "semi_synchronous",
    "stale_lift",
]

PyTree = Any
NAMES = ("none", "fedbuff", "fedasync", "semi-synchronous")
STALENESS = ("constant", "polynomial", "hinge")


@dataclass(frozen=True)
class Asynchrony:
    """When the server takes a step. In every mode ``cohort`` clients work at the same time.

    name: "none" (rounds), "fedbuff", "fedasync" or "semi-synchronous".
    buffer: number of uploads in a step of FedBuff, K in its paper; at most the cohort. FedAsync has 1.
    staleness: weight of an upload that is tau steps old: "constant" 1, "polynomial" (1 + tau)^-a, or "hinge", 1 up to
        tau = b and 1 / (a (tau - b) + 1) beyond.
    a, b: see ``staleness``; a is 0.5 for the polynomial and 10 for the hinge unless it is given.
    alpha: weight of a client's model in a step of FedAsync.
    over: a semi-synchronous server asks ``over`` times the cohort and takes the first uploads, one cohort of them.
    deadline: seconds of simulated time after which a semi-synchronous round ends with the uploads that are there.
    order: a file with the arrivals of a deployed run, to be repeated in the same order (FedBuff and FedAsync).

    >>> [round(float(w), 3) for w in fedbuff().weights(np.array([0, 3, 8]))]
    [1.0, 0.5, 0.333]
    """

    name: Literal["none", "fedbuff", "fedasync", "semi-synchronous"] = "none"
    buffer: int = 10
    staleness: Literal["constant", "polynomial", "hinge"] = "polynomial"
    a: float | None = None
    b: float = 4.0
    alpha: float = 0.6
    over: float = 1.0
    deadline: float | None = None
    order: str | None = None

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}  # configurations refuse unknown keys

    def __post_init__(self) -> None:
        check_choice("name", self.name, NAMES)
        check_choice("staleness", self.staleness, STALENESS)
        check_count("buffer", self.buffer)
        if self.a is not None:
            check_number("a", self.a, low=0)
        check_number("b", self.b, low=0)
        check_number("alpha", self.alpha, low=0, high=1, open_low=True)
        check_number("over", self.over, low=1)
        if self.deadline is not None:
            check_number("deadline", self.deadline, low=0, open_low=True)
        if self.order is not None and not self.is_asynchronous:
            raise ValueError(f"order = {self.order!r}: only fedbuff and fedasync repeat an order, not {self.name!r}")

    @property
    def is_asynchronous(self) -> bool:
        """Whether clients may work on an older model than the server's."""
        return self.name in ("fedbuff", "fedasync")

    @property
    def mixes(self) -> bool:
        """Whether the client's model is mixed into the server's (FedAsync), and not its change added."""
        return self.name == "fedasync"

    def uploads(self, cohort: int) -> int:
        """The largest number of uploads that a step takes in, if ``cohort`` clients work at the same time."""
        if not self.is_asynchronous:
            return cohort
        taken = 1 if self.name == "fedasync" else self.buffer
        if taken > cohort:
            raise ValueError(
                f"asynchrony.buffer = {taken}: the buffer cannot hold more uploads than clients work at a time, and "
                f"cohort = {cohort}; use a smaller buffer or a larger cohort"
            )
        return taken

    def asked(self, cohort: int) -> int:
        """How many clients a round asks for ``cohort`` uploads."""
        return math.ceil(self.over * cohort - 1e-9) if self.name == "semi-synchronous" else cohort

    def weights(self, tau: Any) -> np.ndarray:
        """The factor of uploads that are ``tau`` steps old: the staleness weight, for FedAsync times alpha."""
        tau = np.asarray(tau, float)
        scale = self.alpha if self.mixes else 1.0
        if self.staleness == "constant":
            return np.full(tau.shape, scale)
        if self.staleness == "polynomial":
            return scale * (1.0 + tau) ** -(0.5 if self.a is None else self.a)
        slope = 10.0 if self.a is None else self.a
        return np.where(tau <= self.b, scale, scale / (slope * np.maximum(tau - self.b, 0) + 1))


def fedbuff(buffer: int = 10, *, staleness: Any = "polynomial", a: float | None = None, b: float = 4.0) -> Asynchrony:
    """FedBuff: a step for every ``buffer`` uploads, with staleness weights. See :class:`Asynchrony`.

    J. Nguyen, K. Malik, H. Zhan, A. Yousefpour, M. Rabbat, M. Malek, D. Huba. Federated Learning with Buffered
    Asynchronous Aggregation. AISTATS 2022.
    """
    return Asynchrony("fedbuff", buffer=buffer, staleness=staleness, a=a, b=b)


def fedasync(
    alpha: float = 0.6, *, staleness: Any = "polynomial", a: float | None = None, b: float = 4.0
) -> Asynchrony:
    """FedAsync: a step for every upload, with mixing weight ``alpha``. See :class:`Asynchrony`.

    C. Xie, S. Koyejo, I. Gupta. Asynchronous Federated Optimization. arXiv:1903.03934, 2019.
    """
    return Asynchrony("fedasync", alpha=alpha, staleness=staleness, a=a, b=b)


def semi_synchronous(over: float = 1.3, *, deadline: float | None = None) -> Asynchrony:
    """Rounds that ask ``over`` times the cohort, and take the first uploads until the deadline.

    K. Bonawitz et al. Towards Federated Learning at Scale: System Design. MLSys 2019.
    """
    return Asynchrony("semi-synchronous", over=over, deadline=deadline)


class Jobs(NamedTuple):
    """The uploads of one server step, by slot: which model each client was sent.

    store has one entry per device, all equal: the place of the model that the server has before this step.
    """

    version: Any  # number of the model: the server steps that were done when it was sent
    place: Any  # where the past model is kept
    weight: Any  # staleness weight
    store: Any


class Versions(NamedTuple):
    """What an asynchronous program carries from step to step: the server, and the models clients still work on."""

    server: PyTree
    past: PyTree  # messages down, stacked by place


def no_past(alg: Algorithm, server: PyTree, places: int) -> PyTree:
    """Uninitialised places for past models. Every step stores its model before any client reads it."""
    down = jax.eval_shape(alg.exchanges[0].send, server)
    return jax.tree.map(lambda leaf: jnp.zeros((places, *leaf.shape), leaf.dtype), down)


def stale_lift(how: Asynchrony, lifted: Up, total: Any, weight: Any, current: Down, sent: Down) -> Up:
    """A lifted upload as the server adds it: times its staleness weight; for FedAsync from the current model.

    total: the weight in ``lifted``. With x_client = sent - pseudograd, FedAsync's step is x - alpha s (pseudograd +
    x - sent).
    """
    change = lifted.pseudograd
    if how.mixes:
        change = jax.tree.map(
            lambda g, x, was: g + jnp.asarray(total, g.dtype) * (x - was).astype(g.dtype),
            change,
            current.params,
            sent.params,
        )
    return lifted._replace(pseudograd=jax.tree.map(lambda g: g * jnp.asarray(weight, g.dtype), change))


def check_asynchrony(alg: Algorithm, params: PyTree, data: PyTree, how: Asynchrony) -> None:
    """Refuse an algorithm that cannot run in this mode, with the reason. ``data``: shapes of a client's data."""
    exchange, mode = alg.exchanges[0], how.name
    if how.name == "none":
        return
    if any(e.sealed is not None for e in alg.exchanges):
        raise ValueError(
            f"{mode} with differential privacy: the accountant assumes that cohorts are drawn at random, but here fast "
            "clients take part more often, so its epsilon would be wrong. Use synchronous rounds"
        )
    if not how.is_asynchronous:
        return
    if len(alg.exchanges) > 1:
        names = ", ".join(e.name for e in alg.exchanges)
        raise ValueError(
            f"{mode}: a round of this algorithm has {len(alg.exchanges)} exchanges ({names}), which must follow each "
            "other for all clients together. Use synchronous or semi-synchronous rounds, or an algorithm with one "
            "exchange such as fedavg"
        )
    reason = exchange.lockstep or (
        "the server's state must agree with the clients' states, which staleness weights would break"
        if exchange.keeps
        else ""
    )
    if reason:
        raise ValueError(
            f"{mode}: this algorithm needs uploads of the current model: {reason}. Use synchronous or semi-synchronous "
            "rounds, or an algorithm without such a state, such as fedavg or fedprox"
        )
    message = message_shapes(alg, params, data)[0]
    scalar = jax.ShapeDtypeStruct((), jnp.result_type(float))
    lifted = jax.eval_shape(exchange.reducer.lift, message.up, scalar)
    sent = jax.tree.structure(message.down.params)
    if not isinstance(lifted, Up) or jax.tree.structure(lifted.pseudograd) != sent:
        raise ValueError(
            f"{mode}: the reducer of exchange {exchange.name!r} does not add changes of the model, so uploads cannot "
            "have staleness weights. Use synchronous rounds, or leave out the transform that changes the reducer"
        )
