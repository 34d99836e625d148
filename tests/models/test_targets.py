"""Labels are checked against the model before training; regression heads, F1, AUC and R2 agree with scikit-learn."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn import metrics as reference

import fedbraid as fb
from fedbraid.experiment.assembly import assemble
from fedbraid.experiment.config import ConfigError, load_config
from fedbraid.models import (
    build,
    check_targets,
    emnist_cnn,
    encoder,
    from_equinox,
    gpt,
    least_squares,
    logistic,
    mlp,
    resnet18_gn,
    softmax_regression,
    with_metrics,
)
from fedbraid.simulation.evaluate import evaluator
from told import collecting, told

RNG = np.random.default_rng(0)


def data_of(y, *, test=None, features=2) -> fb.FederatedData:
    """One or two clients with these targets."""

    def split(y):
        y, half = np.asarray(y), len(y) // 2
        x = RNG.normal(size=(len(y), features)).astype(np.float32)
        return fb.Split.from_clients([{"x": x[:half], "y": y[:half]}, {"x": x[half:], "y": y[half:]}])

    return fb.FederatedData(split(y), test=None if test is None else split(test))


REFUSED = {
    "several labels for two classes": (logistic(2), np.arange(26), "labels from 0 to 25: use softmax_regression"),
    "a label too large": (
        softmax_regression(2, 3),
        [0, 1, 2, 3],
        r"label 3 \(client 1, row 1\), and this",
    ),
    "a negative label": (mlp(2, 3), [0, 1, -1, 2], "label -1"),
    "real numbers for classes": (mlp(2, 3), [0.0, 0.5, 1.0, 2.0], 'regression use least_squares, or score = "values"'),
    "a class at every position": (
        encoder(9, 3, layers=1, width=4, heads=2, length=5),
        np.ones((4, 5), int),
        r"one class for each example, and 'y' has the shape \[5\] for each: .* such as gpt",
    ),
    "one class for a sequence of tokens": (
        gpt(9, layers=1, width=4, heads=2, length=5),
        np.ones(4, int),
        "a token at every position, .* one label for each example: .* such as encoder",
    ),
    "labels from 1 to k": (softmax_regression(2, 2), [1, 2, 1, 2], "number the labels from 0"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_labels_that_the_model_cannot_have_are_refused(what):
    model, y, message = REFUSED[what]
    with pytest.raises(ValueError, match=message):
        check_targets(model, data_of(y))


@pytest.mark.parametrize("model", [encoder(9, 3, layers=1, width=4, heads=2), gpt(9, layers=1, width=4, heads=2)])
def test_tokens_that_the_model_does_not_read_are_refused(model):
    def data(token):
        x = np.ones((4, 5), np.int32)
        x[3, 2] = token
        y = np.ones(4 if model.targets.kind == "classes" else (4, 5), np.int32)
        return fb.FederatedData(fb.Split({"x": x, "y": y}, np.array([0, 2, 4])))

    check_targets(model, data(8))
    with pytest.raises(ValueError, match=r"token 9 in 'x' \(client 1, row 1\), .* 9 tokens, .* 0 to 8: set vocab = 10"):
        check_targets(model, data(9))
    with pytest.raises(ValueError, match=r"token -1 in 'x' .*number the tokens from 0"):
        check_targets(model, data(-1))


def test_every_split_is_checked():
    with pytest.raises(ValueError, match="the test split has the label 2"):
        check_targets(softmax_regression(2, 2), data_of([0, 1, 0, 1], test=[0, 1, 2, 0]))


@pytest.mark.parametrize(
    ("model", "y"),
    [
        (logistic(2), [0, 1, 1, 0]),
        (logistic(2), [-1.0, 1.0, 1.0, -1.0]),
        (logistic(2), [True, False, True, True]),
        (softmax_regression(2, 4), [0, 3, 1, 2]),
        (mlp(2, 4), np.array([0.0, 3.0, 1.0, 2.0])),  # whole numbers, stored as floats
        (least_squares(2), [0.5, -3.0, 2.0, 7.0]),
        (mlp(2, 1, score="values"), [0.5, -3.0, 2.0, 7.0]),
    ],
    ids=lambda value: str(np.asarray(value).tolist()) if not hasattr(value, "targets") else value.targets.kind,
)
def test_labels_that_fit_are_accepted(model, y):
    check_targets(model, data_of(y))


def test_the_number_of_classes_of_a_users_network_is_its_number_of_outputs():
    import equinox as eqx

    model = from_equinox(lambda key: eqx.nn.Linear(2, 3, key=key))
    check_targets(model, data_of([0, 1, 2, 1]))
    with pytest.raises(ValueError, match=r"has the label 3.*this model has 3 classes"):
        check_targets(model, data_of([0, 1, 2, 3]))


def test_data_without_labels_is_refused_before_training():
    unlabelled = fb.FederatedData(fb.Split.from_clients([{"x": np.ones((4, 2), np.float32)}] * 2))
    with pytest.raises(ValueError, match=r"predicts the field 'y', and the data has none \(it has x\).*--label"):
        check_targets(least_squares(2), unlabelled)
    with pytest.raises(ConfigError, match="predicts the field 'y'"):
        assemble(load_config(settings=["model.name=least_squares", "cohort=2"]), unlabelled)


def test_class_labels_in_a_regression_are_told():
    with told("whole numbers 0 to 9.*if they are classes"):
        check_targets(least_squares(2), data_of(np.arange(10)))
    with collecting() as texts:
        check_targets(least_squares(2), data_of([0.5, 1.5, 2.5, 3.0]))
    assert not texts


def test_one_class_is_refused_and_the_message_leads_to_a_regression():
    for make in (lambda: mlp(2, 1), lambda: emnist_cnn(1), lambda: resnet18_gn(1), lambda: softmax_regression(2, 1)):
        with pytest.raises(ValueError, match='regression set score = "values"'):
            make()
    with pytest.raises(ValueError, match='for a regression set score = "values", else set the option classes'):
        build("mlp", {"x": (2,), "y": ()}, None)


def test_a_configuration_is_refused_before_training():
    data = fb.FederatedData(data_of(np.arange(26)).train, info={"classes": 26})
    with pytest.raises(ConfigError, match="this model is for two classes"):
        assemble(load_config(settings=["model={name='logistic'}", "cohort=2"]), data)


# --- regression ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda: build("mlp", {"x": (6, 6), "y": ()}, None, hidden=[5], score="values"),
        lambda: build("emnist_cnn", {"x": (6, 6), "y": ()}, None, score="values"),
        lambda: build("mlp", {"x": (6, 6), "y": (2,)}, None, hidden=[5], score="values"),
    ],
    ids=["mlp", "emnist_cnn", "mlp, two values"],
)
def test_regression_heads(make):
    model = make()
    params = model.init(jax.random.key(0))
    x = jnp.asarray(RNG.normal(size=(4, 6, 6)), jnp.float32)
    outputs = model.predict(params, x)
    assert outputs.shape in ((4,), (4, 2))
    y = jnp.asarray(RNG.normal(size=outputs.shape), jnp.float32)
    batch = {"x": x, "y": y, "mask": jnp.array([1.0, 1.0, 1.0, 0.0])}
    error = np.asarray(((outputs - y) ** 2).reshape(4, -1).sum(1))[:3]
    np.testing.assert_allclose(model.loss(params, batch, None), error.mean() / 2, rtol=1e-5)


def test_the_regression_head_of_a_resnet():
    model = build("resnet18_gn", {"x": (6, 6), "y": ()}, None, score="values", width=4)
    x = jax.ShapeDtypeStruct((4, 6, 6), jnp.float32)
    assert jax.eval_shape(lambda x: model.predict(model.init(jax.random.key(0)), x), x).shape == (4,)
    assert model.targets.kind == "values"


def test_regression_metrics_agree_with_scikit_learn():
    y = 1998 + 11 * RNG.normal(size=400)  # a mean far above the deviation, which float32 sums would lose
    test = 1998 + 11 * RNG.normal(size=200)
    data = data_of(y.astype(np.float32), test=test.astype(np.float32))
    experiment = assemble(load_config(settings=["model={name='least_squares', intercept=true}", "cohort=2"]), data)
    params = {"w": jnp.array([3.0, -1.0]), "b": jnp.array(2000.0)}
    found = evaluator(experiment.metrics, data.test).summary(params)
    guess = np.asarray(data.test.arrays["x"]) @ np.array([3.0, -1.0]) + 2000
    truth = data.test.arrays["y"].astype(np.float64)
    np.testing.assert_allclose(found["test_rmse"], np.sqrt(np.mean((guess - truth) ** 2)), rtol=1e-4)
    np.testing.assert_allclose(found["test_mae"], reference.mean_absolute_error(truth, guess), rtol=1e-4)
    np.testing.assert_allclose(found["test_r2"], reference.r2_score(truth, guess), atol=1e-3)
    assert not {"test_r2_mean", "test_r2_square"} & set(found)  # the sums behind R2 have no columns
    own = [reference.r2_score(t, g) for t, g in zip(np.split(truth, 2), np.split(guess, 2), strict=True)]
    np.testing.assert_allclose(found["test_r2_client_worst"], min(own), atol=1e-3)


# --- classification --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [2, 5])
def test_f1_and_auc_agree_with_scikit_learn(classes):
    model = with_metrics(softmax_regression(3, classes), ["f1", "auc"])
    params = {"w": jnp.asarray(RNG.normal(size=(3, classes)), jnp.float32), "b": jnp.zeros(classes)}
    x = RNG.normal(size=(600, 3)).astype(np.float32)
    y = (np.argmax(x @ np.asarray(params["w"]) + 2 * RNG.normal(size=(600, classes)), 1)).astype(np.int32)
    split = fb.Split.from_clients([{"x": x[:250], "y": y[:250]}, {"x": x[250:], "y": y[250:]}])
    found = evaluator(model.metrics, split, batch_size=128).summary(params)
    logits = x @ np.asarray(params["w"])
    chance = np.asarray(jax.nn.softmax(logits))
    np.testing.assert_allclose(found["test_f1"], reference.f1_score(y, logits.argmax(1), average="macro"), rtol=1e-5)
    area = np.mean([reference.roc_auc_score(y == k, chance[:, k]) for k in range(classes)])
    np.testing.assert_allclose(found["test_auc"], area, atol=2e-3)
    assert found["test_auc"] > 0.55


def test_f1_and_auc_of_one_output():
    model = with_metrics(logistic(1), ["f1", "auc"])
    x = RNG.normal(size=(300, 1)).astype(np.float32)
    y = (x[:, 0] + RNG.normal(size=300) > 0.5).astype(np.int32)
    split = fb.Split.from_clients([{"x": x, "y": y}])
    found = evaluator(model.metrics, split).summary({"w": jnp.array([2.0])})
    np.testing.assert_allclose(found["test_f1"], reference.f1_score(y, x[:, 0] > 0), rtol=1e-5)
    np.testing.assert_allclose(found["test_auc"], reference.roc_auc_score(y, x[:, 0]), atol=2e-3)


def test_metrics_that_do_not_fit_the_model_are_refused():
    with pytest.raises(ValueError, match="'auc' is for models of classes or two classes; this model is for values"):
        with_metrics(least_squares(2), ["auc"])
    with pytest.raises(ConfigError, match=r"evaluation.metrics: the metric 'r2' is for models of values"):
        assemble(
            load_config(settings=["model={name='softmax_regression'}", "cohort=2", "evaluation.metrics=['r2']"]),
            fb.FederatedData(data_of([0, 1, 0, 1]).train, info={"classes": 2}),
        )


def test_simulate_refuses_labels_that_the_model_does_not_have():
    rows = [{"x": np.ones((4, 3), np.float32), "y": np.array([0, 1, 2, label])} for label in (1, 7)]
    data = fb.FederatedData(fb.Split.from_clients(rows), fb.Split.from_clients(rows))
    model = softmax_regression(3, 5)
    alg, params = fb.fedavg(model.loss), model.init(jax.random.key(0))
    with pytest.raises(ValueError, match=r"train split has the label 7 .*row 3.* 5 classes, labelled 0 to 4"):
        fb.simulate(alg, params, data, rounds=1, cohort=2, metrics=model.metrics)
    more = with_metrics(model, ["f1"])
    with pytest.raises(ValueError, match="label 7"):
        fb.simulate(alg, params, data, rounds=1, cohort=2, metrics=more.metrics)
