"""Metrics know their direction: by declaration or by a well-known name, never by a part of a name."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbraid as fb
from fedbraid import models
from fedbraid.local import masked_mean
from fedbraid.metric import KNOWN, Metric, Metrics, as_metrics, declared_by, directions, metric_of_column
from fedbraid.models.model import score_classes
from fedbraid.models.modules import from_flax
from fedbraid.simulation import evaluator, metrics_of, summarize
from fedbraid.simulation.fine_tuning import adaptation, compare_adapted


class Scale:
    """The interface of flax.linen modules."""

    def init(self, key, x):
        return {"params": jnp.ones(x.shape[1:])}

    def apply(self, variables, x, rngs=None):
        return x * variables["params"]


SPLIT = fb.Split.from_clients([{"x": np.full((n, 1), v, np.float32)} for n, v in ((2, 1.0), (1, 5.0), (3, 2.0))])


def measure(name):
    """Each example's value is its x plus params."""
    return lambda params, batch: {name: ((batch["x"][:, 0] + params) * batch["mask"], batch["mask"])}


@pytest.mark.parametrize("name", ["error_free", "lossless", "accuracy_gap", "testing", "p10"])
def test_a_part_of_a_name_says_nothing(name):
    with pytest.raises(ValueError, match=rf"metric '{name}' .*Metrics\(function, \(Metric\('{name}'"):
        metric_of_column(f"test_{name}")


@pytest.mark.parametrize("better", ["higher", "lower"])
def test_a_declaration_decides_and_overrides_what_is_known(better):
    for name in ("error_free", "loss", "test_metric"):
        declared = [Metric(name, better)]
        for column in (name, f"test_{name}", f"validation_{name}_client_worst", f"train/{name}", f"adapted_{name}"):
            assert metric_of_column(column, declared) == Metric(column, better)


def test_columns_that_count_have_no_direction():
    columns = ["round", "train/loss", "train/arrived", "seconds", "bytes_up", "test_perplexity_client_worst"]
    assert directions(columns) == {"train/loss": "lower"}
    with pytest.raises(ValueError, match="'rank'"):
        directions(["test_rank"])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Metric("a", "up"), "better of metric 'a' must be 'higher' or 'lower', got 'up'"),  # type: ignore[arg-type]
        (lambda: Metrics(3, ()), "must be callable, got 3"),  # type: ignore[arg-type]
        (lambda: Metrics(len, ("a",)), "Metric"),  # type: ignore[arg-type]
    ],
)
def test_bad_declarations_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize(("better", "worst", "tenth"), [("higher", 1.0, 1.2), ("lower", 5.0, 4.4)])
def test_the_worst_clients_are_those_at_the_bad_end(better, worst, tenth):
    evaluate = evaluator(Metrics(measure("error_free"), (Metric("error_free", better),)), SPLIT)
    row = evaluate.summary(0.0)
    assert float(row["test_error_free_client_worst"]) == pytest.approx(worst)
    assert float(row["test_error_free_client_worst_tenth"]) == pytest.approx(tenth)
    assert float(row["test_error_free"]) == pytest.approx((2 * 1 + 5 + 3 * 2) / 6)
    assert float(row["test_error_free_client_mean"]) == pytest.approx((1 + 5 + 2) / 3)


def test_simulate_refuses_an_undeclared_metric_before_a_round_runs():
    def loss(params, batch, key):
        raise AssertionError("traced: something was run")

    data = fb.FederatedData(SPLIT, SPLIT)
    run = {"rounds": 1, "devices": 1}
    with pytest.raises(ValueError, match="metric 'foo' has no known direction"):
        fb.simulate(fb.fedavg(loss), jnp.zeros(()), data, metrics=measure("foo"), **run)
    good = lambda params, batch, key: masked_mean(batch["x"][:, 0] * params, batch["mask"])  # noqa: E731
    declared = Metrics(measure("foo"), (Metric("foo", better="lower"),))
    result = fb.simulate(fb.fedavg(good), jnp.zeros(()), data, metrics=declared, **run)
    assert result.evaluations["test_foo_client_worst"][-1] == max(
        float(result.params) + value for value in (1.0, 5.0, 2.0)
    )


def test_every_model_declares_what_it_measures():
    built = {
        "least_squares": models.least_squares(2),
        "logistic": models.logistic(2),
        "one_versus_all": models.one_versus_all(2, 3),
        "softmax_regression": models.softmax_regression(2, 3),
        "mlp": models.mlp(2, 3, hidden=[2]),
        "char_lstm": models.char_lstm(5, hidden=2, embed=2),
    }
    for name, model in built.items():
        shape, dtype = ((1, 3), np.int32) if "lstm" in name else ((1, 2), np.float32)
        target = np.zeros((1, 3) if "lstm" in name else 1, np.float32 if name == "least_squares" else np.int32)
        split = fb.Split.from_clients([{"x": np.zeros(shape, dtype), "y": target}])
        params = jax.eval_shape(model.init, jax.random.key(0))
        declared = {Metric(metric.name, metric.better) for metric in declared_by(model.metrics)}
        assert set(metrics_of(model.metrics, params, split)) == declared, name
        assert Metric("loss", "lower") in declared_by(model.metrics)


def test_declarations_survive_wrapping_and_user_models():
    declared = (Metric("foo", "higher"),)
    own = Metrics(measure("foo"), declared)
    model = models.from_functions(lambda key: jnp.zeros(()), lambda p, b, k: p, own)
    assert declared_by(model.metrics) == declared
    assert declared_by(as_metrics(model.metrics).through(lambda f: lambda *a: f(*a))) == declared
    scored = from_flax(Scale(), jnp.ones((1, 3)), score=Metrics(score_classes, (*score_classes.declared, *declared)))
    assert declared_by(scored.metrics) == (Metric("loss", "lower"), Metric("accuracy", "higher"), *declared)
    assert declared_by(measure("foo")) == ()


def test_adapted_metrics_have_the_direction_of_the_metric():
    loss = lambda params, batch, key: jnp.mean((params - batch["x"]) ** 2)  # noqa: E731
    metrics = Metrics(measure("foo"), (Metric("foo", "higher"),))
    adapt = adaptation(loss, metrics, SPLIT, steps=1, lr=0.0)
    row = summarize(adapt(jnp.zeros(())), "", adapt.declared)
    assert row["adapted_foo_client_worst"] == row["foo_client_worst"] == 1.0  # the client of x = 5 has no query example
    table = compare_adapted(adapt, jnp.zeros(()), {})
    assert table["fedavg + fine-tuning"]["adapted_foo_client_worst"] == 1.0


def test_a_result_is_three_lines():
    data = fb.FederatedData(SPLIT, SPLIT)
    loss = lambda params, batch, key: masked_mean(batch["x"][:, 0] * params, batch["mask"])  # noqa: E731
    with_metrics = fb.simulate(fb.fedavg(loss), jnp.zeros(()), data, rounds=2, metrics=measure("loss"), devices=1)
    lines = repr(with_metrics).splitlines()
    assert len(lines) == 3
    assert lines[0] == "Result: 2 rounds of 3 clients, 1 parameters"
    assert lines[1] == f"  last: test_loss {float(with_metrics.evaluations['test_loss'][-1]):.4g}"
    several = jax.vmap(lambda p: fb.simulate(fb.fedavg(loss), p, data, rounds=1, metrics=measure("loss"), devices=1))
    assert len(repr(several(jnp.zeros(2))).splitlines()) == 3


def test_known_names_are_unique():
    names = [metric.name for metric in KNOWN]
    assert len(set(names)) == len(names)
