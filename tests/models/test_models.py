"""Laws of all models, and each model against an independent computation."""

from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from scipy.special import expit, log_softmax, logsumexp
from sklearn.linear_model import LogisticRegression

from fedbraid import models
from fedbraid.lowering.operations import group_norm
from fedbraid.models import Model, total
from fedbraid.models.lstm import lstm, lstm_init, recurrence

B = 5


class Row(NamedTuple):
    model: Model
    batch: dict
    nonsense: float  # a target that padding may hold


def rows() -> dict[str, Row]:
    rng = np.random.default_rng(0)
    mask = np.ones(B, np.float32)
    features = rng.standard_normal((B, 6)).astype(np.float32)
    classes = np.array([0, 2, 1, 1, 0], np.int32)
    signs = np.array([0, 1, 1, 0, 1], np.int32)
    tokens = np.array([[3, 1, 4, 1], [5, 6, 0, 0], [2, 2, 2, 0], [1, 0, 0, 0], [6, 5, 3, 2]], np.int32)
    following = np.array([[1, 4, 1, 2], [6, 3, 0, 0], [2, 2, 3, 0], [4, 0, 0, 0], [5, 3, 2, 1]], np.int32)

    def row(model, x, y, nonsense):
        return Row(model, {"x": x, "y": y, "mask": mask}, nonsense)

    images = rng.random((B, 14, 12, 1), dtype=np.float32)
    colours = rng.random((B, 8, 8, 3), dtype=np.float32)
    values = rng.standard_normal(B).astype(np.float32)
    return {
        "least_squares": row(models.least_squares(6, l2=0.1), features, values, 1e6),
        "logistic": row(models.logistic(6, l2=0.1), features, signs, 77),
        "one_versus_all": row(models.one_versus_all(6, 3, l2=0.1), features, classes, 77),
        "softmax_regression": row(models.softmax_regression(6, 3), features, classes, 77),
        "mlp": row(models.mlp(6, 3, hidden=(7, 4)), features, classes, -1),
        "emnist_cnn": row(models.emnist_cnn(3, image=(14, 12, 1)), images, classes, 77),
        "resnet18_gn": row(models.resnet18_gn(3, image=(8, 8, 3), stem="large", width=4), colours, classes, 77),
        "char_lstm": row(models.char_lstm(7, layers=2, hidden=5, embed=3), tokens, following, 77),
        "word_lstm": row(models.word_lstm(7, hidden=5, embed=3), tokens, following, 77),
        "gpt": row(models.gpt(7, layers=1, width=6, heads=3, hidden=5, length=5), tokens, following, 77),
        "llama": row(models.llama(7, layers=2, width=8, heads=2, kv_heads=1, hidden=6), tokens, following, 77),
        "encoder": row(models.encoder(7, 3, layers=1, width=8, heads=2, positions="rotary"), tokens, classes, 77),
    }


ROWS = rows()
PENALISED = ("least_squares", "logistic", "one_versus_all")


def start(name, seed=0):
    """Parameters drawn by NumPy, none of them zero, so that every term of a gradient is tested."""
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(ROWS[name].model.init, jax.random.key(0))

    def draw(leaf):
        fan = np.prod(leaf.shape[:-1]) if leaf.ndim > 1 else 20
        return np.float32(rng.standard_normal(leaf.shape) / np.sqrt(fan))

    return jax.tree.map(draw, shapes)


def close(actual, expected, rtol=2e-5, atol=2e-6):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), actual, expected)


def pick(tree, i):
    return jax.tree.map(lambda leaf: leaf[i], tree)


@cache
def evaluation(name):
    """(params, batch) of several clients -> loss, metrics and gradient of each; compiled once."""
    model = ROWS[name].model

    def one(params, batch):
        loss, gradient = jax.value_and_grad(model.loss)(params, batch, None)
        return loss, model.metrics(params, batch), gradient

    return jax.jit(jax.vmap(one))


def clients(name, *batches, params=None):
    params = params or [start(name)] * len(batches)
    stack = lambda *leaves: np.stack(leaves)  # noqa: E731
    return evaluation(name)(jax.tree.map(stack, *params), jax.tree.map(stack, *batches))


def masked(batch, mask, x=None, y=None):
    """The batch with some rows turned into padding, which holds other inputs and targets."""
    hidden = np.asarray(mask) == 0
    batch = {key: np.array(value) for key, value in batch.items()} | {"mask": np.asarray(mask, np.float32)}
    if x is not None:
        batch["x"][hidden] = x
        batch["y"][hidden] = y
    return batch


def test_the_table_holds_every_model():
    assert set(ROWS) == set(models.MODELS) - {"smollm2"}  # a llama with weights from a file: models/test_llama.py


SHALLOW = [name for name in ROWS if name != "resnet18_gn"]  # slow to compile: has its own test


@pytest.mark.parametrize("name", SHALLOW)
def test_losses_are_masked_means_of_metrics(name):
    row = ROWS[name]
    some = [1, 0, 1, 1, 0]
    batches = (row.batch, masked(row.batch, some, 3, row.nonsense), masked(row.batch, some, 1, 0))
    losses, metrics, gradients = clients(name, *batches, masked(row.batch, [0] * B))
    full, padded, repadded, empty = (pick((losses, metrics, gradients), i) for i in range(4))
    assert np.all(np.isfinite(losses))
    # The loss is the total of the metric, with and without padding. The values of padding do not matter.
    for loss, scores, _ in (full, padded):
        close(total(scores["loss"]), loss)
        assert all(sums.shape == weights.shape == (B,) for sums, weights in scores.values())
    kept = np.array(some, bool)
    for metric, (sums, weights) in padded[1].items():
        close((sums[kept], weights[kept]), pick(full[1][metric], kept), rtol=1e-4, atol=1e-5)
        assert not np.any(sums[~kept])
        assert not np.any(weights[~kept])
    close(repadded, padded, rtol=1e-4, atol=1e-5)
    # For a batch of padding, only the penalty remains.
    w = np.asarray(start(name)["w"]) if name in PENALISED else np.zeros(1)
    close(empty[0], np.float32(0.05 * np.sum(w**2)))
    if name in PENALISED:
        close(empty[2]["w"], 0.1 * w)
    else:
        assert not any(np.any(leaf) for leaf in jax.tree.leaves(empty[2]))


@pytest.mark.parametrize("name", SHALLOW)
def test_gradients_are_differences(name):
    batch, params = ROWS[name].batch, start(name)
    other = start(name, 1)
    _, _, gradients = clients(name, *[batch] * 4, params=[params, other, params, params])
    gradient = pick(gradients, 0)
    close(pick(gradients, 2), gradient, rtol=1e-6)
    assert any(not np.allclose(a[0], a[1]) for a in jax.tree.leaves(gradients))  # each client has its own parameters
    size = np.sqrt(sum(float(np.sum(np.square(leaf))) for leaf in jax.tree.leaves(gradient)))
    rng = np.random.default_rng(3)
    direction = jax.tree.map(lambda g: g / size + 0.3 * rng.standard_normal(g.shape) / np.sqrt(g.size), gradient)
    slope = sum(jax.tree.leaves(jax.tree.map(lambda g, v: float(np.sum(g * v)), gradient, direction)))
    moved = [
        jax.tree.map(lambda p, v, t=t: np.float32(p + t * v), params, direction) for t in (1e-2, -1e-2, 5e-3, -5e-3)
    ]
    losses, _, _ = clients(name, *[batch] * 4, params=moved)
    far, near = (losses[0] - losses[1]) / 2e-2, (losses[2] - losses[3]) / 1e-2
    assert (4 * near - far) / 3 == pytest.approx(slope, rel=0.01, abs=1e-3)


@pytest.mark.parametrize("name", ["mlp", "char_lstm"])
def test_init_follows_its_key_and_gives_arrays_alone(name):
    init = jax.jit(ROWS[name].model.init)
    first, again, other = init(jax.random.key(0)), init(jax.random.key(0)), init(jax.random.key(1))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(other), strict=True):
        assert isinstance(a, jax.Array)
        assert a.dtype == jnp.float32
        assert a.ndim < 2 or not np.allclose(a, b)


@pytest.mark.parametrize(
    ("model", "count"),
    [
        (models.softmax_regression(784, 62), 784 * 62 + 62),
        (models.mlp(784, 62), 784 * 300 + 300 + 300 * 100 + 100 + 100 * 62 + 62),
        (models.emnist_cnn(62), 1_206_590),
        (models.resnet18_gn(1000, image=(224, 224, 3), stem="large"), 11_689_512),  # as published for ImageNet
        (models.char_lstm(90), 295_210),
        (models.char_lstm(90, layers=2), 820_522),
        (models.word_lstm(10_004), 4_050_748),
        (models.gpt(50_257, layers=12, width=768, heads=12, length=1024), 124_439_808),  # GPT-2, the smallest
    ],
)
def test_parameters_are_as_many_as_published(model, count):
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == count


# Each model against another computation


def test_least_squares_by_its_normal_equations():
    row, params = ROWS["least_squares"], start("least_squares")
    x, y = row.batch["x"].astype(float), row.batch["y"].astype(float)
    w = np.asarray(params["w"], float)
    gradient = x.T @ (x @ w - y) / B + 0.1 * w
    close(jax.grad(row.model.loss)(params, row.batch, None)["w"], gradient)
    best = np.linalg.solve(x.T @ x / B + 0.1 * np.eye(6), x.T @ y / B)
    at_best = jax.grad(row.model.loss)({"w": jnp.asarray(best, jnp.float32)}, row.batch, None)["w"]
    np.testing.assert_allclose(at_best, 0, atol=1e-6)
    close(total(row.model.metrics(params, row.batch)["squared_error"]), np.mean((x @ w - y) ** 2))


def test_logistic_takes_both_label_conventions_and_stops_where_scikit_learn_does():
    row = ROWS["logistic"]
    x, y = row.batch["x"], row.batch["y"]
    best = LogisticRegression(C=1 / (0.1 * B), fit_intercept=False, tol=1e-10).fit(x.astype(float), y).coef_[0]
    params = {"w": jnp.asarray(best, jnp.float32)}
    for labels in (y, 2 * y - 1):
        gradient = jax.grad(row.model.loss)(params, row.batch | {"y": labels}, None)["w"]
        np.testing.assert_allclose(gradient, 0, atol=1e-5)
        metrics = row.model.metrics(params, row.batch | {"y": labels})
        close(total(metrics["accuracy"]), np.mean((x @ best > 0) == (y > 0)))
    assert float(row.model.loss({"w": jnp.array([200.0] + [0.0] * 5)}, row.batch, None)) < np.inf  # no overflow


def test_one_versus_all_sums_one_logistic_a_class():
    row, params = ROWS["one_versus_all"], start("one_versus_all")
    x, y, w = row.batch["x"].astype(float), row.batch["y"], np.asarray(params["w"], float)
    b = 2 * np.eye(3)[y] - 1
    expected = np.mean(np.sum(np.log1p(np.exp(-b * (x @ w))), axis=1)) + 0.05 * np.sum(w**2)
    close(row.model.loss(params, row.batch, None), expected)
    gradient = x.T @ (-b * expit(-b * (x @ w))) / B + 0.1 * w
    close(jax.grad(row.model.loss)(params, row.batch, None)["w"], gradient)


def test_softmax_regression_and_intercepts_by_hand():
    row, params = ROWS["softmax_regression"], start("softmax_regression")
    x, y = row.batch["x"].astype(float), row.batch["y"]
    logits = x @ np.asarray(params["w"], float) + np.asarray(params["b"], float)
    close(row.model.predict(params, row.batch["x"]), logits)
    close(row.model.loss(params, row.batch, None), np.mean(logsumexp(logits, 1) - logits[np.arange(B), y]))
    residual = np.exp(log_softmax(logits, axis=1)) - np.eye(3)[y]
    close(jax.grad(row.model.loss)(params, row.batch, None), {"w": x.T @ residual / B, "b": residual.mean(0)})
    with_b = models.least_squares(6, intercept=True)
    assert float(with_b.predict({"w": jnp.ones(6), "b": jnp.float32(2)}, jnp.ones((1, 6)))[0]) == 8.0


def test_a_label_out_of_range_is_loud():
    row, params = ROWS["softmax_regression"], start("softmax_regression")
    assert np.isnan(row.model.loss(params, row.batch | {"y": np.full(B, 77, np.int32)}, None))


def test_mlp_is_numpys():
    params, x = start("mlp"), ROWS["mlp"].batch["x"]
    for layer in params[:-1]:
        x = np.maximum(x @ np.asarray(layer["w"]) + np.asarray(layer["b"]), 0)
    close(ROWS["mlp"].model.predict(params, ROWS["mlp"].batch["x"]), x @ params[-1]["w"] + params[-1]["b"])


def xla_conv(x, w, stride=1, padding="VALID"):
    return lax.conv_general_dilated(x, w, (stride, stride), padding, dimension_numbers=("NHWC", "HWIO", "NHWC"))


def test_emnist_cnn_is_xlas_in_the_papers_order():
    row, params = ROWS["emnist_cnn"], start("emnist_cnn")
    x = jnp.asarray(row.batch["x"])
    for name in ("conv1", "conv2"):
        x = jnp.maximum(xla_conv(x, params[name]["w"]) + params[name]["b"], 0)
    x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID").reshape(B, -1)
    x = jnp.maximum(x @ params["dense1"]["w"] + params["dense1"]["b"], 0)
    expected = x @ params["dense2"]["w"] + params["dense2"]["b"]
    close(jax.jit(row.model.predict)(params, row.batch["x"]), expected, rtol=1e-4, atol=1e-4)


def test_emnist_cnn_drops_out_in_training_alone():
    row, params = ROWS["emnist_cnn"], start("emnist_cnn")
    loss = jax.jit(row.model.loss)
    evaluated = float(loss(params, row.batch, None))
    trained = [float(loss(params, row.batch, jax.random.key(i))) for i in range(3)]
    assert len({evaluated, *trained}) == 4
    assert trained[0] == float(loss(params, row.batch, jax.random.key(0)))
    plain = models.emnist_cnn(3, image=(14, 12, 1), dropout=False)
    assert float(jax.jit(plain.loss)(params, row.batch, jax.random.key(0))) == evaluated


def test_images_may_come_as_bytes_flat_or_without_channels():
    """Images may have any dtype and are not scaled: preprocessing scales bytes, models do not."""
    model = models.softmax_regression(12, 3)
    params = {"w": jnp.arange(36.0).reshape(12, 3), "b": jnp.zeros(3)}
    pixels = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    expected = pixels.reshape(2, 12).astype(float) @ np.asarray(params["w"])
    for x in (pixels, pixels[..., None], pixels.reshape(2, 12), pixels.astype(np.float32)):
        close(model.predict(params, x), expected)
    with pytest.raises(ValueError, match=r"\(12,\).*\(2, 5\)"):
        model.predict(params, np.ones((2, 5)))


def test_group_norm_is_numpys():
    rng = np.random.default_rng(0)
    x, scale, shift = rng.standard_normal((2, 3, 4, 6)), rng.standard_normal(6), rng.standard_normal(6)
    expected = np.empty_like(x)
    for b in range(2):
        for group in (slice(0, 3), slice(3, 6)):
            values = x[b, :, :, group]
            expected[b, :, :, group] = (values - values.mean()) / np.sqrt(values.var() + 1e-5)
    close(group_norm(jnp.float32(x), jnp.float32(scale), jnp.float32(shift), 2), expected * scale + shift, 1e-4, 1e-5)


def test_resnet_is_xlas():
    row, params = ROWS["resnet18_gn"], start("resnet18_gn")

    @jax.jit
    def expected(x):
        def unit(p, x, stride=1):
            k = p["w"].shape[0] // 2
            x = xla_conv(x, p["w"], stride, ((k, k), (k, k)))
            return group_norm(x, p["scale"], p["shift"], 2)

        relu = jax.nn.relu
        x = relu(unit(params["stem"], x, 2))
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        for block, stride in zip(params["blocks"], (1, 1, 2, 1, 2, 1, 2, 1), strict=True):
            short = unit(block["shortcut"], x, stride) if "shortcut" in block else x
            x = relu(short + unit(block["two"], relu(unit(block["one"], x, stride))))
        return x.mean((1, 2)) @ params["dense"]["w"] + params["dense"]["b"]

    some = np.array([1, 1, 0, 1, 0], np.float32)
    logits, metrics = jax.jit(lambda p, b: (row.model.predict(p, b["x"]), row.model.metrics(p, b)))(
        params, row.batch | {"mask": some}
    )
    close(logits, expected(row.batch["x"]), rtol=1e-3, atol=1e-3)
    losses = -log_softmax(np.asarray(logits, float), axis=1)[np.arange(B), row.batch["y"]]
    close(metrics["loss"], (losses * some, some))
    assert ["shortcut" in block for block in params["blocks"]] == [False, False, True, False, True, False, True, False]


def test_lstm_is_numpys_recurrence():
    params = lstm_init(jax.random.key(0), 3, 5)
    u = np.asarray(params["u"])
    np.testing.assert_allclose(u @ u.T, np.eye(5), atol=1e-5)  # orthogonal
    assert np.asarray(params["b"]).tolist() == [0] * 5 + [1] * 5 + [0] * 10
    x = np.random.default_rng(0).standard_normal((2, 6, 3))
    h = c = np.zeros((2, 5))
    states = []
    for t in range(6):
        z = x[:, t] @ np.asarray(params["w"]) + h @ u + np.asarray(params["b"])
        i, f, g, o = z[:, :5], z[:, 5:10], z[:, 10:15], z[:, 15:]
        c = expit(f) * c + expit(i) * np.tanh(g)
        h = expit(o) * np.tanh(c)
        states.append(h)
    close(lstm(params, jnp.float32(x)), np.stack(states, 1), rtol=1e-5, atol=1e-6)


def test_lstm_derivatives_of_both_orders_are_those_of_the_plain_loop():
    rng = np.random.default_rng(1)
    inputs, u = np.float32(rng.standard_normal((3, 2, 12))), np.float32(rng.standard_normal((3, 12)))
    direction = np.float32(rng.standard_normal(inputs.shape)), np.float32(rng.standard_normal(u.shape))

    def plain(inputs, u):
        h = c = jnp.zeros((2, 3))
        states = []
        for gates in inputs:
            i, f, g, o = jnp.split(gates + h @ u, 4, axis=-1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            states.append(h)
        return jnp.stack(states)

    def derivatives(function):
        loss = lambda inputs, u: jnp.sum(jnp.sin(2 * function(inputs, u)))  # noqa: E731
        gradient = jax.grad(loss, (0, 1))
        curvature = jax.jvp(gradient, (inputs, u), direction)[1]
        again = jax.grad(lambda *args: sum(map(jnp.vdot, gradient(*args), direction)), (0, 1))(inputs, u)
        return gradient(inputs, u), curvature, again

    expected = jax.jit(lambda: derivatives(plain))()
    close(jax.jit(lambda: derivatives(recurrence))(), expected, rtol=1e-4, atol=1e-5)
    close(expected[1], expected[2], rtol=1e-4, atol=1e-5)


def test_sequences_count_their_real_tokens():
    row, params = ROWS["word_lstm"], start("word_lstm")
    y = row.batch["y"]
    predict, measure = jax.jit(row.model.predict), jax.jit(row.model.metrics)
    logits = np.asarray(predict(params, row.batch["x"]), float)
    assert logits.shape == (B, 4, 7)
    losses = -np.take_along_axis(log_softmax(logits, axis=-1), y[..., None], -1)[..., 0]
    hits = logits.argmax(-1) == y
    metrics = measure(params, row.batch)
    close(total(metrics["loss"]), losses[y > 0].mean())
    assert np.asarray(metrics["loss"][1]).tolist() == [4, 2, 3, 1, 4]
    close(total(metrics["accuracy"]), hits[y > 0].mean())
    # Uncounted ids are left out of the accuracy, not of the loss.
    partly = jax.jit(models.word_lstm(7, hidden=5, embed=3, uncounted=[2]).metrics)(params, row.batch)
    close(partly["loss"], metrics["loss"])
    close(total(partly["accuracy"]), hits[(y > 0) & (y != 2)].mean())
    # Padding after a sequence does not change the outputs before it.
    longer = np.pad(row.batch["x"], ((0, 0), (0, 3)))
    close(predict(params, longer)[:, :4], logits, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: models.least_squares(0), "d must be"),
        (lambda: models.logistic(3, l2=-1.0), "l2 must be 0 or more, got -1.0"),
        (lambda: models.one_versus_all(3, 2.5), "classes must be .* got 2.5"),
        (lambda: models.mlp(3, 2, hidden=(4, 0)), "hidden must be"),
        (lambda: models.mlp(3, 2, hidden=4), "list of widths .* got 4"),
        (lambda: models.emnist_cnn(62, image=(5, 28, 1)), "at least 6 x 6"),
        (lambda: models.emnist_cnn(62, image=(28,)), r"image must be .* got \(28,\)"),
        (lambda: models.dropout(jnp.ones(2), 1.0, jax.random.key(0)), "less than 1, got 1.0"),
        (lambda: models.resnet18_gn(10, groups=3), "groups must divide"),
        (lambda: models.resnet18_gn(10, stem="tiny"), "'small' or 'large', got 'tiny'"),
        (lambda: models.char_lstm(layers=0), "layers must be"),
        (lambda: models.word_lstm(True), "vocab must be"),
    ],
)
def test_factories_refuse(make, message):
    with pytest.raises(ValueError, match=message):
        make()
