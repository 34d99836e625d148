"""What the columns of a report's tables mean: the texts that the page shows over their heads."""

from __future__ import annotations

from fedbraid.metric import DEVIATION, GINI, MEAN, PERSONAL, WORST, WORST_TENTH, Metric

__all__ = ["COLUMNS", "explain", "explain_metric"]

COLUMNS = {
    "run": "The name of the run's folder. Runs that differ only in the seed are one row.",
    "algorithm": "The federated algorithm, as the configuration names it.",
    "seeds": "The number of runs of this row. They differ only in the seed; values are means ± standard deviations.",
    "sent": "Bytes that the server and all clients sent over the whole run, both ways.",
    "time": "Seconds that the run took, mean over seeds.",
    "tuning": "The sweep, or the method of a comparison, that was tuned.",
    "best": "The best point of the search.",
    "judged by": "The criterion that ranks the points.",
    "trials": "The number of trials: points times seeds.",
    "method": "The method, as the comparison labels it. Rows in italics are baselines without a federation.",
    "tuned to": "The values that tuning chose on a validation split, without the test set.",
    "clients a round": "The number of clients in each round (the cohort).",
    "models a client": "What a client sends and receives in a round, divided by the size of the model. FedAvg has 2.",
    "rounds to": "The first evaluated round in which the metric is at the target or better; mean over seeds.",
    "simulated time": "Simulated time of the whole run, by the clock of its configuration; mean over seeds.",
    "simulated time to": "Simulated time until the target is reached; mean over seeds.",
    "sent to": "Bytes sent, both ways, until the target is reached; mean over seeds.",
    "worst tenth of clients": "A tenth of the clients are worse than this value, each on its own test examples.",
    "median client": "Half of the clients are worse than this value, each on its own test examples.",
    "worst client": "The value of the worst client, on its own test examples.",
    "deviation of clients": "The standard deviation over clients, each on its own test examples. Lower is fairer.",
    "sent in all": "Bytes that the server and all clients sent over the whole run, both ways; mean over seeds.",
    "diverged trials": "How many of the trials of the tuning diverged.",
    "data": "The data set.",
    "clients": "The number of all training clients.",
    "cohort": "The number of clients in each round.",
    "partition": "How the examples are divided over the clients.",
    "model": "The model, with its options.",
    "rounds": "The number of rounds.",
    "date": "When the run ended (UTC).",
    "hardware": "The processor or accelerator, with the number of devices that jax used and the number of cores.",
    "versions": "The versions of fedbraid and jax that computed the run.",
    "key": "A key of the configuration.",
}
"""Explanations by column. Those of metrics are made by `explain_metric`."""

METRICS = {
    "accuracy": "The share of test examples that are classified correctly.",
    "loss": "The mean loss of the test examples.",
    "perplexity": "The exponential of the mean loss per token.",
    "rmse": "The root of the mean squared error.",
    "mae": "The mean absolute error.",
    "r2": "The share of the variance that the model explains; 1 is perfect, 0 is as good as the mean.",
    "f1": "The mean over classes of the harmonic mean of precision and recall.",
    "auc": "The probability that the model ranks a positive example above a negative one.",
}
OVER_CLIENTS = {
    MEAN: "Mean over clients, each on its own test examples.",
    WORST_TENTH: "A tenth of the clients are worse than this value, each on its own test examples.",
    WORST: "The worst client, on its own test examples.",
    DEVIATION: "Standard deviation over clients, each on its own test examples.",
    GINI: "Gini coefficient over clients: 0 if all have the same value.",
}


def explain(head: str) -> str:
    """The explanation of a column by its head; heads that end with a target have the explanation of what precedes it.

    >>> explain("rounds to 0.9") == COLUMNS["rounds to"]
    True
    """
    if head in COLUMNS:
        return COLUMNS[head]
    return next((text for name, text in COLUMNS.items() if name.endswith(" to") and head.startswith(f"{name} ")), "")


def explain_metric(column: str, metric: Metric) -> str:
    """The explanation of a column of a metric.

    >>> explain_metric("test_accuracy_client_worst", Metric("test_accuracy", "higher"))
    'accuracy: The worst client, on its own test examples. Higher is better.'
    """
    name = column.removeprefix("test_")
    if name.startswith(PERSONAL):
        about = explain_metric(name.removeprefix(PERSONAL), metric)
        return f"Of the clients' own models, each on its own test examples. {about}"
    better = f"{metric.better.capitalize()} is better."
    for suffix, text in OVER_CLIENTS.items():
        if name.endswith(suffix):
            return f"{name.removesuffix(suffix).replace('_', ' ')}: {text} {better}"
    return f"{METRICS.get(name, f'The metric {name!r} over all test examples.')} {better}"
