"""The settings that the sites of a deployed run share, and the report of one of its rounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from fedbraid.core import check_count
from fedbraid.data.description import Preprocess
from fedbraid.flower import wire
from fedbraid.flower.identity import Schema
from fedbraid.flower.policy import Policy
from fedbraid.masking import Secure
from fedbraid.metric import is_client_column
from fedbraid.simulation.asynchrony import Asynchrony
from fedbraid.units import format_bytes

__all__ = ["Round", "Site"]

WAYS = ("down", "up")
DEFAULT_POLICY = Policy()
ROUNDS = Asynchrony()  # the server waits for every cohort


class Round(NamedTuple):
    """The report of one round, for the terminal and as a row of the history."""

    round: int  # number of completed rounds
    rounds: int
    row: dict[str, float]
    evaluation: dict[str, float]
    seconds: float
    notes: tuple[str, ...]  # which clients were left out, and why

    def total(self, column: str) -> float:
        """A column summed over the round's exchanges, without the evaluation."""
        own = f"{wire.EVALUATE}/{column}"
        return sum(value for name, value in self.row.items() if name.endswith(f"/{column}") and name != own)

    def line(self) -> str:
        """One line for the terminal: uploads accepted / asked for, bytes, metrics."""
        tested = {name: self.row.get(f"{wire.EVALUATE}/{name}", 0.0) for name in ("asked", "tested")}
        sent = {way: self.total(f"wire_{way}") + self.row.get(f"{wire.EVALUATE}/wire_{way}", 0.0) for way in WAYS}
        evaluation = f"  tested {tested['tested']:g}/{tested['asked']:g}" if tested["asked"] else ""
        shown = {k: v for k, v in self.evaluation.items() if not is_client_column(k)}
        shown = shown or {k: v for k, v in self.row.items() if k.split("/")[-1] == "loss"}
        scores = "".join(f"  {name} {value:.4g}" for name, value in list(shown.items())[:3])
        scores += f"  epsilon {self.row['epsilon']:.3g}" if "epsilon" in self.row else ""
        return (
            f"round {self.round}/{self.rounds}  nodes {self.total('arrived'):g}/{self.total('asked'):g}  "
            f"down {format_bytes(sent['down'])}  up {format_bytes(sent['up'])}"
            f"{evaluation}{scores}  {self.seconds:.1f} s"
        )


@dataclass(frozen=True)
class Site:
    """The settings that all sites of a deployed run share, except the algorithm.

    schema: shapes and dtypes of the data's fields (:func:`fedbraid.flower.schema_of`). A node with other fields is
        refused.
    population: number of clients (SCAFFOLD's N). cohort: how many are asked in a round (default: all).
    seed: of cohorts and clients. The simulator draws the same ones. The noise and the cohorts of private algorithms do
        not come from it, but from the operating system (:mod:`fedbraid.flower.entropy`).
    policy: deadlines, and what happens when nodes are missing.
    fingerprint: a name for what clients compute, the same on all nodes; None makes one from the programs.
    preprocess: the same as in the nodes' :func:`client_app`.
    secure: secure aggregation, the same as in the nodes' :func:`client_app`. ``secure.clients`` is the cohort's size.
    asynchrony: when the server takes a step; by default after a round of all clients.
    """

    schema: Schema
    population: int
    cohort: int | None = None
    seed: int = 0
    policy: Policy = DEFAULT_POLICY
    fingerprint: str | None = None
    preprocess: Preprocess | None = None
    secure: Secure | None = None
    asynchrony: Asynchrony = ROUNDS

    def __post_init__(self) -> None:
        check_count("population", self.population)
        if self.cohort is not None and check_count("cohort", self.cohort) > self.population:
            raise ValueError(f"cohort must be at most the population of {self.population} clients, got {self.cohort}")
        self.policy.check()
        if self.policy.minimum > self.size:
            raise ValueError(f"minimum must be at most the cohort of {self.size}, got {self.policy.minimum}")
        if self.secure is not None and self.secure.clients != self.size:
            raise ValueError(f"secure.clients must be the cohort's size {self.size}, got {self.secure.clients}")
        if self.secure is not None and self.asynchrony.name != "none":
            raise ValueError(
                f"{self.asynchrony.name} with secure aggregation: the clients of a sum agree on their masks before "
                "they send, so all of them must take part in the same round. Use synchronous rounds"
            )
        if self.policy.minimum > self.asynchrony.uploads(self.size):
            raise ValueError(
                f"minimum must be at most the buffer of {self.asynchrony.uploads(self.size)}, got {self.policy.minimum}"
            )

    @property
    def size(self) -> int:
        """How many clients are asked in a round."""
        return self.population if self.cohort is None else self.cohort
