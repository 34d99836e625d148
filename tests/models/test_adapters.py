"""Models of other libraries, models by name, and the rewriting of their convolutions."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fedbraid import models
from fedbraid.local import rewriting, value_and_grad
from fedbraid.lowering import explain_function, fast_convolutions
from fedbraid.models import build, from_equinox, from_flax, from_functions, resolve, total

RNG = np.random.default_rng(0)
IMAGES = RNG.standard_normal((3, 2, 10, 9)).astype(np.float32)
BATCH = {"x": IMAGES, "y": np.array([0, 2, 1]), "mask": np.array([1.0, 1.0, 0.0], np.float32)}


class Net(eqx.Module):
    conv: eqx.nn.Conv2d
    wide: eqx.nn.Conv2d
    pool: eqx.nn.MaxPool2d
    drop: eqx.nn.Dropout
    out: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.conv = eqx.nn.Conv2d(2, 8, 3, padding=1, key=keys[0])
        self.wide = eqx.nn.Conv2d(8, 4, 3, key=keys[1])
        self.pool = eqx.nn.MaxPool2d(2, 2)
        self.drop = eqx.nn.Dropout(0.5)
        self.out = eqx.nn.Linear(4 * 4 * 3, 3, key=keys[2])

    def __call__(self, x, key=None):
        x = self.pool(jax.nn.relu(self.wide(jax.nn.relu(self.conv(x)))))
        return self.out(self.drop(x.reshape(-1), key=key))


NET = Net(jax.random.key(0))


def primitives(function, *args):
    return str(jax.make_jaxpr(function)(*args))


def test_an_equinox_network_keeps_its_meaning_and_loses_its_convolutions():
    model = from_equinox(NET)
    params = model.init(jax.random.key(0))
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(params))
    network = eqx.nn.inference_mode(NET)

    def plain(params):
        logits = jax.vmap(eqx.combine(params, network))(IMAGES[:2])
        return -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(2), BATCH["y"][:2]])

    def ours(params):
        with rewriting(fast_convolutions):
            both = value_and_grad(model.loss)(params, BATCH, None)
        return both, fast_convolutions(model.metrics)(params, BATCH)

    (loss, gradient), metrics = jax.jit(ours)(params)
    expected_loss, expected = jax.jit(jax.value_and_grad(plain))(params)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    np.testing.assert_allclose(total(metrics["loss"]), expected_loss, rtol=1e-5)
    for mine, theirs in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-3, atol=1e-5)
    assert "conv_general" in primitives(plain, params)
    program = primitives(ours, params)
    assert "conv_general" not in program
    assert "select_and" not in program  # a pool's slow gradient


def test_an_equinox_network_drops_out_in_training_alone():
    model = from_equinox(NET)
    params = model.init(jax.random.key(5))
    loss = jax.jit(model.loss)
    losses = [float(loss(params, BATCH, key)) for key in (None, jax.random.key(0), jax.random.key(1))]
    assert len(set(losses)) == 3
    jax.tree.map(np.testing.assert_array_equal, params, model.init(jax.random.key(6)))  # the module's own weights


def test_equinox_modules_over_batches_and_values():
    linear = lambda key: eqx.nn.Linear(4, 1, key=key)  # noqa: E731
    model = from_equinox(linear, score="values")
    params = model.init(jax.random.key(0))
    x, y = RNG.standard_normal((5, 4)).astype(np.float32), np.ones((5, 1), np.float32)
    error = np.square(x @ np.asarray(params.weight).T + np.asarray(params.bias) - y)
    np.testing.assert_allclose(model.loss(params, {"x": x, "y": y}, None), error.mean() / 2, rtol=1e-5)

    class Whole(eqx.Module):
        w: jax.Array

        def __call__(self, x):
            return (x - x.mean(0)) @ self.w  # needs the whole batch

    whole = from_equinox(Whole(jnp.ones((4, 2))), batched=True)
    np.testing.assert_allclose(
        whole.predict(whole.init(jax.random.key(0)), x), (x - x.mean(0)) @ np.ones((4, 2)), atol=1e-5
    )


def test_equinox_refusals():
    with pytest.raises(ValueError, match="keeps state"):
        from_equinox(lambda key: eqx.nn.SpectralNorm(eqx.nn.Linear(3, 3, key=key), "weight", key=key))
    with pytest.raises(ValueError, match="with batched=False"):
        from_equinox(lambda key: eqx.nn.BatchNorm(3, "batch", mode="batch"), batched=True)
    with pytest.raises(ValueError, match="module or a function"):
        from_equinox(3)
    with pytest.raises(ValueError, match="returned a"):
        from_equinox(lambda key: jnp.ones(2))
    with pytest.raises(ValueError, match="classes, values, tokens"):
        from_equinox(Net, score="logits")


class FlaxLike:
    """The interface of ``flax.linen`` modules: init and apply, state in collections, random streams by name."""

    def __init__(self, state=()):
        self.state = state

    def init(self, key, x, train):
        assert train is False
        return {"params": {"w": jax.random.normal(key, (x.shape[-1], 3))}} | {name: {} for name in self.state}

    def apply(self, variables, x, train, rngs=None):
        if train:
            x = x + jax.random.normal(rngs["dropout"], x.shape)
        return x @ variables["params"]["w"]


def test_from_flax():
    model = from_flax(FlaxLike(), jnp.ones((1, 4)), training={"train": True}, evaluation={"train": False})
    params = model.init(jax.random.key(0))
    x = RNG.standard_normal((2, 4)).astype(np.float32)
    np.testing.assert_allclose(model.predict(params, x), x @ np.asarray(params["w"]), rtol=1e-5)
    batch = {"x": x, "y": np.array([0, 1])}
    noisy = x + jax.random.normal(jax.random.key(3), x.shape)
    logits = np.asarray(noisy @ params["w"])
    expected = np.mean(np.log(np.exp(logits).sum(1)) - logits[[0, 1], [0, 1]])
    np.testing.assert_allclose(model.loss(params, batch, jax.random.key(3)), expected, rtol=1e-5)
    with pytest.raises(ValueError, match="batch_stats"):
        from_flax(FlaxLike(["batch_stats"]), jnp.ones((1, 4)), evaluation={"train": False})
    with pytest.raises(ValueError, match="Net without init"):
        from_flax(NET, jnp.ones((1, 4)))


def test_from_functions_scores_the_loss_alone_unless_told():
    model = from_functions(
        lambda key: jnp.ones(()), lambda p, b, key: p * jnp.sum(b["x"] * b["mask"]) / b["mask"].sum()
    )
    batch = {"x": jnp.array([1.0, 3.0, 9.0]), "mask": jnp.array([1.0, 1.0, 0.0])}
    assert float(total(model.metrics(2.0, batch)["loss"])) == float(model.loss(2.0, batch, None)) == 4.0
    with pytest.raises(ValueError, match="without predict"):
        model.predict(1.0, batch["x"])
    with pytest.raises(ValueError, match="callable loss"):
        from_functions(lambda key: 0.0, None)


def conv(x, w, **options):
    return lax.conv_general_dilated(x, w, **{"window_strides": (1, 1), "padding": "SAME"} | options)


W = RNG.standard_normal((2, 2, 3, 3)).astype(np.float32)


def calls(x, w):
    """All kinds of calls in one pytree, so that they compile only once."""
    axes = {"dimension_numbers": ("NCHW", "IOHW", "HWNC"), "window_strides": (2, 1), "padding": ((1, 0), (2, 3))}
    return {
        "jit": (jax.jit(conv)(x, w), None),
        "vmap": jax.vmap(lambda one: conv(one[None], w))(x),
        "axes": conv(x, w, **axes),
        "one axis": conv(x[:, :, 0], w[:, :, 0], window_strides=(2,)),
        "pool": lax.reduce_window(conv(x, w), -jnp.inf, lax.max, (1, 1, 2, 3), (1, 1, 2, 3), "VALID"),
        "checkpoint": jax.checkpoint(lambda x, w: jnp.sin(conv(x, w)))(x, w),
        "untouched": w,
    }


PROGRAMS = {
    "calls": calls,
    "scan": lambda x, w: lax.scan(lambda c, _: (conv(c, w), c.sum()), x, None, length=2),
    "while": lambda x, w: lax.fori_loop(0, 2, lambda i, c: conv(c, w), x),
    "cond": lambda x, w: lax.cond(x.sum() > 0, lambda x: conv(x, w), lambda x: x, x),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_fast_convolutions_changes_no_value_and_no_derivative(program):
    plain = PROGRAMS[program]
    fast = fast_convolutions(plain)

    def result(function):
        def size(x, w):
            values = function(x, w)
            return sum(jnp.vdot(leaf, jnp.cos(leaf)) for leaf in jax.tree.leaves(values)), values

        derived = jax.value_and_grad(size, (0, 1), has_aux=True)
        return jax.jit(derived if program != "while" else size)(IMAGES, 0.1 * W)

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), result(fast), result(plain))
    assert jax.eval_shape(fast, IMAGES, W) == jax.eval_shape(plain, IMAGES, W)
    assert "conv_general" not in primitives(fast, IMAGES, W)
    assert "reduce_window" not in primitives(fast, IMAGES, W)


def test_fast_convolutions_leaves_functions_with_their_own_derivative():
    @jax.custom_vjp
    def own(x):
        return conv(x, W)

    own.defvjp(lambda x: (own(x), None), lambda _, g: (7 * g,))
    assert float(jax.grad(lambda x: fast_convolutions(own)(x).sum())(IMAGES)[0, 0, 0, 0]) == 7.0


def test_operations_after_a_convolution_run_in_its_layout():
    """With channels first, as equinox and PyTorch have them, nothing is transposed between two convolutions."""
    second = RNG.standard_normal((3, 2, 3, 3)).astype(np.float32)

    def network(x, w, bias):
        y = jax.nn.relu(conv(x, w) + bias[None, :, None, None])
        y = jax.nn.relu(conv(y, second) + np.ones((1, 3, 1, 1), np.float32))
        return lax.reduce_window(y, -jnp.inf, lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")

    arguments = IMAGES, W, np.array([0.3, -0.2], np.float32)
    fast = fast_convolutions(network)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4),
        *(
            jax.jit(jax.value_and_grad(lambda *a, f=f: jnp.sin(f(*a)).sum(), (0, 1, 2)))(*arguments)
            for f in (fast, network)
        ),
    )
    assert explain_function(network, *arguments) == [
        "convolution of (3, 2, 10, 9) with (2, 2, 3, 3): matrix products (patches)",
        "convolution of (3, 2, 10, 9) with (3, 2, 3, 3): matrix products (patches)",
        "max pool of (3, 3, 10, 9): together with the convolution before it",
    ]
    moved = [e for e in jax.make_jaxpr(fast)(*arguments).jaxpr.eqns if e.primitive.name == "transpose"]
    images = [e.params["permutation"] for e in moved if e.invars[0].aval.shape[0] == len(IMAGES)]
    assert images == [(0, 2, 3, 1), (0, 3, 1, 2)]  # the input and the output only


SHAPES = {
    "least_squares": ({"x": (3, 2), "y": ()}, None),
    "logistic": ({"x": (6,), "y": ()}, 2),
    "one_versus_all": ({"x": (28, 28), "y": ()}, 10),
    "softmax_regression": ({"x": (28, 28), "y": ()}, 10),
    "mlp": ({"x": (784,), "y": ()}, 10),
    "emnist_cnn": ({"x": (784,), "y": ()}, 62),
    "resnet18_gn": ({"x": (24, 24, 3), "y": ()}, 100),
    "char_lstm": ({"x": (80,), "y": (80,)}, 90),
    "word_lstm": ({"x": (20,), "y": (20,)}, 1004),
    "gpt": ({"x": (20,), "y": (20,)}, 90),
    "encoder": ({"x": (20,), "y": ()}, 5),
    "llama": ({"x": (20,), "y": (20,)}, 90),
}


@pytest.mark.parametrize("name", [name for name in models.MODELS if name != "smollm2"])  # whose sizes are fixed
def test_build_sizes_every_model_from_its_data(name):
    shapes, classes = SHAPES[name]
    model = build(name, shapes, classes, **({"vocab": 30} if name == "encoder" else {}))
    params = jax.eval_shape(model.init, jax.random.key(0))
    integer = "lstm" in name or name in ("gpt", "encoder", "llama")
    x = jax.ShapeDtypeStruct((2, *shapes["x"]), jnp.int32 if integer else jnp.float32)
    outputs = jax.eval_shape(model.predict, params, x)
    assert outputs.shape == {
        "least_squares": (2,),
        "logistic": (2,),
        "char_lstm": (2, 80, 90),
        "word_lstm": (2, 20, 1004),
        "gpt": (2, 20, 90),
        "llama": (2, 20, 90),
    }.get(name, (2, classes))


def test_build_takes_the_users_own(monkeypatch, tmp_path):
    (tmp_path / "my_models.py").write_text(
        "from fedbraid import models\n"
        "import fedbraid as fb\n"
        "def tiny(num_classes, *, width=3) -> models.Model:\n    return models.mlp(4, num_classes, hidden=(width,))\n"
        "@fb.factory('model')\ndef wrong():\n    return 3\n"
        "def undeclared():\n    raise SystemError('called')\n"
        "FINISHED = models.mlp(4, 2)\nNUMBER = 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    model = build("my_models:tiny", {"x": (4,)}, 5, width=6)
    assert [layer["w"].shape for layer in jax.eval_shape(model.init, jax.random.key(0))] == [(4, 6), (6, 5)]
    assert build("my_models:FINISHED", {"x": (4,)}) is resolve("my_models:FINISHED")
    for name, options, message in (
        ("my_models:FINISHED", {"width": 2}, "takes no options"),
        ("my_models:NUMBER", {}, "not declared as a factory of a model"),
        ("my_models:undeclared", {}, "not declared as a factory of a model"),
        ("my_models:wrong", {}, "returned a int"),
        ("my_models:tiny", {"depth": 2}, "depth"),
        ("my_models:absent", {}, "has no 'absent'"),
        ("no_such_module:f", {}, "cannot import the module 'no_such_module'"),
        ("my_models:", {}, "module:attribute"),
        ("os:system", {"command": "exit 1"}, "not declared as a factory of a model"),
    ):
        with pytest.raises(ValueError, match=message):
            build(name, {"x": (4,)}, 2, **options)


@pytest.mark.parametrize(
    ("name", "shapes", "classes", "options", "message"),
    [
        ("cnn", {"x": (28, 28)}, 10, {}, "model 'cnn' does not exist.*there are: char_lstm, emnist_cnn, encoder, gpt"),
        ("mlp", {"x": (4,)}, 10, {"layers": 2}, "no option 'layers'; it takes d, classes, hidden"),
        ("mlp", {"x": (4,)}, None, {}, "needs 'classes'"),
        ("mlp", {"pixels": (4,)}, 10, {}, r"the data has \['pixels'\]"),
        ("emnist_cnn", {"x": (5, 4, 3, 2)}, 10, {}, "set the option image"),
        ("encoder", {"x": (20,), "y": ()}, 5, {}, "needs 'vocab', which the data does not have: set the option vocab"),
        ("gpt", {"x": (20,)}, 9, {"tied": "no"}, "option tied of model 'gpt' must be true or false, got 'no'"),
        ("emnist_cnn", {"x": (28, 28)}, 9, {"dropout": 0.5}, "dropout of .* must be true or false, got 0.5"),
        ("gpt", {"x": (20,)}, 9, {"dropout": "0.1"}, "dropout of model 'gpt' must be a number, got '0.1'"),
    ],
)
def test_build_refuses(name, shapes, classes, options, message):
    with pytest.raises(ValueError, match=message):
        build(name, shapes, classes, **options)
