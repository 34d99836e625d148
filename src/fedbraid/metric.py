"""Metrics and the direction in which they improve.

Choosing the best of several models, naming the worst clients and calling a change a regression all need to know whether
a higher or a lower value is better. A metric says so itself. Well-known names (`KNOWN`: accuracy, loss, perplexity and
so on) need no declaration; any other name is declared with `Metrics` by whoever computes it, and is refused otherwise.
Names are compared as a whole: "error_free" has nothing to do with "error".

Columns of a run are named after metrics: ``test_accuracy`` over all test examples, ``test_accuracy_client_worst`` over
clients, ``train/loss`` as the clients of the exchange "train" reported it. ``test_personal_accuracy`` is the accuracy
of the clients' own models, each on its own test examples. `metric_of_column` reads such names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

__all__ = [
    "KNOWN",
    "PERSONAL",
    "Better",
    "Metric",
    "Metrics",
    "as_metrics",
    "declared_by",
    "declares",
    "directions",
    "global_column",
    "is_client_column",
    "is_personal_column",
    "metric_of_column",
    "part",
    "personal_column",
    "shown_values",
]

Better = Literal["higher", "lower"]
PERSONAL = "personal_"
PREFIXES = ("test_", "validation_", "server_", "adapted_", PERSONAL)
MEAN, WORST_TENTH, WORST = "_client_mean", "_client_worst_tenth", "_client_worst"
DEVIATION, GINI = "_client_deviation", "_client_gini"
SPREADS = (DEVIATION, GINI)  # of any metric: lower is fairer
CLIENT_SUFFIXES = (MEAN, WORST_TENTH, WORST, *SPREADS)


@dataclass(frozen=True)
class Metric:
    """A metric's name and which direction is better.

    of: computes the metric from the means of others, by name, as in the root mean squared error below. None for a
        metric that is itself a mean over examples. It must work element by element, for all clients at once.
    shown: False for sums that only other metrics need (see `part`); they get no column.

    >>> perplexity = Metric("perplexity", better="lower")
    >>> perplexity.is_better(12.0, than=15.0), perplexity.best([15.0, 12.0, 13.0])
    (True, 12.0)
    >>> rmse = Metric("rmse", better="lower", of=lambda means: means["squared_error"] ** 0.5)
    >>> shown_values({"squared_error": 9.0}, [rmse])
    {'squared_error': 9.0, 'rmse': 3.0}
    """

    name: str
    better: Better
    of: Callable[[Mapping[str, Any]], Any] | None = field(default=None, repr=False)
    shown: bool = field(default=True, repr=False)

    def __post_init__(self) -> None:
        if self.better not in get_args(Better):
            raise ValueError(f"better of metric {self.name!r} must be 'higher' or 'lower', got {self.better!r}")

    @property
    def lower_is_better(self) -> bool:
        """Whether lower values are better."""
        return self.better == "lower"

    @property
    def sign(self) -> float:
        """1 where higher is better, -1 where lower is: the best value has the largest ``sign * value``."""
        return -1.0 if self.lower_is_better else 1.0

    def is_better(self, value: Any, *, than: Any) -> bool:
        """Whether ``value`` is strictly better than ``than``."""
        return bool(self.sign * value > self.sign * than)

    def best(self, values: Iterable[Any]) -> Any:
        """The best of some values."""
        return max(values, key=lambda value: self.sign * value)

    def reached(self, values: Any, target: float) -> Any:
        """Whether a value, or each value of an array, is at the target or better.

        >>> Metric("accuracy", "higher").reached(0.9, 0.8), Metric("loss", "lower").reached(0.9, 0.8)
        (True, False)
        """
        return values <= target if self.lower_is_better else values >= target


def part(name: str) -> Metric:
    """A sum that other metrics are computed from; it gets no column of its own."""
    return Metric(name, "lower", shown=False)


def shown_values(means: Mapping[str, Any], declared: Iterable[Metric] = ()) -> dict[str, Any]:
    """The values of all metrics that have columns, from the means of everything that was summed."""
    declared = tuple(declared)
    hidden = {metric.name for metric in declared if not metric.shown}
    values = {name: value for name, value in means.items() if name not in hidden}
    return values | {metric.name: metric.of(means) for metric in declared if metric.of is not None}


def _known(better: Better, *names: str) -> Iterator[Metric]:
    return (Metric(name, better) for name in names)


KNOWN: tuple[Metric, ...] = (
    *_known("higher", "accuracy", "top1_accuracy", "top5_accuracy", "precision", "recall", "f1", "auc", "r2"),
    *_known("lower", "loss", "error", "squared_error", "absolute_error", "mse", "rmse", "mae", "perplexity", "gap"),
)
"""Metrics whose names need no declaration."""


@dataclass(frozen=True)
class Metrics:
    """A function that computes metrics, with a declaration of those metrics; it is called like the function.

    ``function(params, batch)`` gives ``{name: (sums [B], weights [B])}``: one number per example, 0 for padding
    (where the mask is 0). ``declared`` holds a `Metric` for every name that is not in `KNOWN`, and may override one
    that is. It also holds the metrics that are computed from others. ``check(data)``, if there is one, raises a
    ValueError for data that the metrics cannot score, such as labels that a model does not have; ``simulate`` calls it
    before the first round.

    >>> import jax.numpy as jnp
    >>> def on_time(params, batch):
    ...     return {"on_time": (1.0 * (batch["x"] < params), jnp.ones(len(batch["x"])))}
    >>> metrics = Metrics(on_time, (Metric("on_time", better="higher"),))
    >>> metrics(2.0, {"x": jnp.array([1.0, 3.0])})["on_time"][0].tolist()
    [1.0, 0.0]
    """

    function: Callable[..., Any]
    declared: tuple[Metric, ...] = ()
    check: Callable[[Any], None] | None = None

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise ValueError(f"function of Metrics must be callable, got {self.function!r}")
        object.__setattr__(self, "declared", tuple(self.declared))
        for metric in self.declared:
            if not isinstance(metric, Metric):
                raise ValueError(f"declared must hold Metric(name, better=...) values, got {metric!r}")

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self.function(*arguments, **options)

    def through(self, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Metrics:
        """The same metrics computed by ``wrap(function)``."""
        return replace(self, function=wrap(self.function))


def declares(*declared: Metric) -> Callable[[Callable[..., Any]], Metrics]:
    """`Metrics` as a decorator.

    >>> @declares(Metric("rank", better="lower"))
    ... def rank(params, batch): ...
    >>> rank.declared
    (Metric(name='rank', better='lower'),)
    """
    return lambda function: Metrics(function, declared)


def as_metrics(function: Callable[..., Any]) -> Metrics:
    """``function`` as `Metrics`; a plain function declares nothing."""
    return function if isinstance(function, Metrics) else Metrics(function)


def declared_by(source: Any) -> tuple[Metric, ...]:
    """The metrics that a `Metrics`, or another object with ``declared``, declares; none for a plain function."""
    return getattr(source, "declared", ())


def is_client_column(column: str) -> bool:
    """Whether a column is a statistic over clients.

    >>> is_client_column("test_loss_client_worst"), is_client_column("test_loss")
    (True, False)
    """
    return column.endswith(CLIENT_SUFFIXES)


def personal_column(column: str) -> str:
    """The column of the clients' own models that belongs to a column of the global model.

    >>> personal_column("test_accuracy_client_worst")
    'test_personal_accuracy_client_worst'
    """
    prefix = next((prefix for prefix in PREFIXES if column.startswith(prefix)), "")
    return prefix + PERSONAL + column.removeprefix(prefix)


def is_personal_column(column: str) -> bool:
    """Whether a column is about the clients' own models.

    >>> is_personal_column("test_personal_loss"), is_personal_column("test_loss")
    (True, False)
    """
    return global_column(column) != column


def global_column(column: str) -> str:
    """The column of the global model that belongs to one of the clients' own models; others are returned unchanged.

    >>> global_column("test_personal_accuracy"), global_column("personal_loss"), global_column("test_loss")
    ('test_accuracy', 'loss', 'test_loss')
    """
    for prefix in ("test_", "validation_", ""):
        if column.startswith(prefix + PERSONAL):
            return prefix + column.removeprefix(prefix + PERSONAL)
    return column


def metric_of_column(column: str, declared: Iterable[Metric] = ()) -> Metric:
    """The direction of a column of a run, by the metric that the column is named after.

    >>> metric_of_column("test_accuracy_client_worst_tenth").better, metric_of_column("train/loss").better
    ('higher', 'lower')
    >>> metric_of_column("test_accuracy_client_deviation").better
    'lower'
    >>> metric_of_column("test_error_free", [Metric("error_free", "higher")]).better
    'higher'
    >>> metric_of_column("test_error_free")
    Traceback (most recent call last):
    ...
    ValueError: metric 'error_free' has no known direction: declare whether higher or lower is better where it is \
computed, as in Metrics(function, (Metric('error_free', better="higher"),)); well-known names are accuracy, \
top1_accuracy, top5_accuracy, precision, recall, f1, auc, r2, loss, error, squared_error, absolute_error, mse, rmse, \
mae, perplexity, gap
    """
    known: dict[str, Better] = {metric.name: metric.better for metric in (*KNOWN, *declared)}
    names = list(_names(column))
    for name in names:
        if name in known:
            spread = name != column and column.endswith(SPREADS)
            return Metric(column, "lower" if spread else known[name])
    raise ValueError(
        f"metric {names[-1]!r} has no known direction: declare whether higher or lower is better where it is computed, "
        f'as in Metrics(function, (Metric({names[-1]!r}, better="higher"),)); well-known names are '
        + ", ".join(metric.name for metric in KNOWN)
    )


def _names(column: str) -> Iterator[str]:
    """What may be the metric's name in a column's: the whole, then less and less of it."""
    yield column
    name = column.rpartition("/")[2]
    for suffix in CLIENT_SUFFIXES:
        name = name.removesuffix(suffix)
    yield name
    while prefix := next((prefix for prefix in PREFIXES if name.startswith(prefix)), None):
        name = name.removeprefix(prefix)
        yield name


def directions(columns: Iterable[str], declared: Iterable[Metric] = ()) -> dict[str, Better]:
    """The direction of every evaluated or reported column that has one, statistics over clients left out.

    Counters such as ``train/arrived`` have no direction. An evaluated metric without one is refused.

    >>> directions(["round", "train/loss", "train/arrived", "test_accuracy", "test_accuracy_client_mean"])
    {'train/loss': 'lower', 'test_accuracy': 'higher'}
    """
    declared, found = tuple(declared), {}
    for column in columns:
        if column == "round" or is_client_column(column):
            continue
        if "/" in column or not column.startswith(PREFIXES):
            known = {metric.name for metric in (*KNOWN, *declared)}
            if not known.intersection(_names(column)):
                continue
        found[column] = metric_of_column(column, declared).better
    return found
