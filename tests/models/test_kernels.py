"""GPU kernels in Pallas' interpret mode against XLA's own operations, and lowered for a GPU without having one."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import export, lax

from fedbraid import models
from fedbraid.lowering import kernels
from fedbraid.lowering import operations as layers
from fedbraid.lowering.kernels import activated, convolution, grown, recurrence, updates
from fedbraid.lowering.kernels.convolution import Geometry, convolve
from fedbraid.lowering.rewrite import explain_function, fast_convolutions
from fedbraid.models import lstm


def _normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def _distance(a, b):
    """Of two arrays, over the length of the second."""
    a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def _xla(stride, pads):
    return lambda x, w: lax.conv_general_dilated(x, w, stride, pads, dimension_numbers=("NHWC", "HWIO", "NHWC"))


def _close(ours, theirs):
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * max(1.0, float(np.abs(b).max())))


def _with_gradients(function):
    """(cotangent, arguments) -> output and gradients, in one program: a compilation of each operation takes longer."""

    @jax.jit
    def run(cotangent, *args):
        out, back = jax.vjp(function, *args)
        return out, *back(cotangent)

    return run


def _derivatives(function, x, w):
    """Output, both gradients and a tangent; the cotangent and the direction depend on the shapes only."""
    cotangent, directions = (
        _normal(2, *jax.eval_shape(function, x, w).shape),
        (_normal(3, *x.shape), _normal(4, *w.shape)),
    )
    tangent = jax.jit(lambda args, directions: jax.jvp(function, args, directions)[1])((x, w), directions)
    return _with_gradients(function)(cotangent, x, w), tangent


def _compare(x, w, stride, pads):
    """Output, both gradients and a tangent of a convolution, by the kernel and by XLA."""
    theirs = _xla(stride, pads)
    out = jax.eval_shape(theirs, x, w).shape[1:3]
    geometry = Geometry(w.shape[:2], stride, low=(pads[0][0], pads[1][0]), out=out)
    _close(_derivatives(lambda x, w: convolve(x, w, geometry), x, w), _derivatives(theirs, x, w))


@given(st.data())
@settings(max_examples=5, deadline=None)
def test_a_convolution_and_its_gradients_are_xlas(data):
    draw = data.draw
    channels, out = draw(st.sampled_from([1, 3, 16, 20, 32])), draw(st.sampled_from([1, 5, 16, 33]))
    window = draw(st.tuples(st.integers(1, 4), st.integers(1, 4)))
    stride = draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    pads = draw(st.tuples(*[st.tuples(st.integers(0, 2), st.integers(0, 2))] * 2))
    size = draw(st.tuples(st.integers(4, 9), st.integers(4, 9)))
    x, w = _normal(0, draw(st.integers(1, 3)), *size, channels), _normal(1, *window, channels, out)
    _compare(x, w, stride, pads)


def test_more_positions_than_a_tile_and_more_outputs_than_a_block():
    _compare(_normal(0, 2, 14, 13, 32), _normal(1, 3, 3, 32, 70), (1, 1), ((0, 0), (1, 1)))


@pytest.mark.parametrize(
    ("size", "channels", "out", "window", "stride"),
    [(6, 64, 128, 3, 2), (5, 128, 64, 3, 1), (4, 64, 192, 1, 2), (7, 64, 64, 2, 3)],
)
def test_wide_layers_in_bfloat16(size, channels, out, window, stride, as_if_on_a_gpu):
    pad = window // 2
    theirs = _xla((stride, stride), ((pad, pad), (pad, pad)))
    x, w = _normal(0, 2, size, size, channels), 0.1 * _normal(1, window, window, channels, out)
    x, w = x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)

    def ours(x, w):
        return layers.conv2d(x, w, stride=stride, padding=pad)

    with jax.default_matmul_precision("BF16_BF16_F32"):
        assert "name=convolution\n" in str(jax.make_jaxpr(ours)(x, w))
        dy = _normal(2, *jax.eval_shape(ours, x, w).shape).astype(jnp.bfloat16)
        found = _with_gradients(ours)(dy, x, w)
    exact = _with_gradients(theirs)(*(a.astype(jnp.float32) for a in (dy, x, w)))
    for a, b in zip(found, exact, strict=True):
        assert a.dtype == jnp.bfloat16
        assert 0 < _distance(a, b) < 0.004  # its last rounding


def test_a_wide_layer_with_its_bias_and_relu_in_bfloat16(as_if_on_a_gpu):
    layer = {"w": (0.1 * _normal(0, 3, 3, 64, 192)).astype(jnp.bfloat16), "b": 0.1 * _normal(1, 192)}
    x = _normal(2, 1, 4, 4, 64).astype(jnp.bfloat16)

    def loss(layer, x):
        return (layers.conv_relu(layer, x, stride=2, padding=1).astype(jnp.float32) ** 2).sum()

    exact = jax.jit(jax.grad(loss, (0, 1)))(*jax.tree.map(lambda a: a.astype(jnp.float32), (layer, x)))
    with jax.default_matmul_precision("BF16_BF16_F32"):
        assert "name=convolution_relu\n" in str(jax.make_jaxpr(loss)(layer, x))
        found = jax.jit(jax.grad(loss, (0, 1)))(layer, x)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True):
        assert 0 < _distance(a, b) < 0.02


def test_the_gradient_of_strided_images_multiplies_only_what_meets():
    """Of a window of 3 x 3 with stride 2, an image's value meets 1, 2, 2 or 4 places."""
    back = convolution._back(Geometry((3, 3), (2, 2), low=(1, 1), out=(3, 3)), (6, 6))
    parts = [convolution._part(back, jnp.int32(i)) for i in range(4)]
    assert [int(part.many[0] * part.many[1]) for part in parts] == [1, 2, 2, 4]
    assert [(int(part.first[0]), int(part.first[1])) for part in parts] == [(1, 1), (1, 0), (0, 1), (0, 0)]
    assert [(int(part.shift[0]), int(part.shift[1])) for part in parts] == [(0, 0), (0, 0), (0, 0), (0, 0)]


def test_each_client_has_its_own_kernel():
    x, w = _normal(0, 3, 2, 6, 6, 16), _normal(1, 3, 3, 3, 16, 8)
    geometry = Geometry((3, 3), out=(4, 4))

    def gradients(function):
        return jax.jit(jax.grad(lambda x, w: (jax.vmap(function)(x, w) ** 2).sum(), (0, 1)))(x, w)

    _close(gradients(lambda x, w: convolve(x, w, geometry)), gradients(_xla((1, 1), ((0, 0), (0, 0)))))


def test_second_derivatives():
    x, w = _normal(0, 1, 5, 5, 2), _normal(1, 3, 3, 2, 3)
    geometry = Geometry((3, 3), out=(3, 3))

    def hessian_product(function):
        gradient = jax.grad(lambda x, w: jnp.sin(function(x, w)).sum(), (0, 1))
        directions = _normal(2, *x.shape), _normal(3, *w.shape)
        return jax.jit(lambda args, directions: jax.jvp(gradient, args, directions)[1])((x, w), directions)

    _close(hessian_product(lambda x, w: convolve(x, w, geometry)), hessian_product(_xla((1, 1), ((0, 0), (0, 0)))))


def _layer(geometry, pads, pool):
    """ReLU(convolution + bias), or ReLU(max pool(convolution) + bias), with XLA's operations."""

    def run(x, weights):
        kernel = weights[:-1].reshape(*geometry.window, x.shape[-1], -1)
        z = _xla((1, 1), pads)(x, kernel)
        if pool:
            z = lax.reduce_window(z, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        return jax.nn.relu(z + weights[-1])

    return run


def _layers(geometry, pads):
    yield _layer(geometry, pads, False), lambda x, w: activated.convolve_relu(x, w, geometry)
    yield _layer(geometry, pads, True), lambda x, w: activated.convolve_relu_pool(x, w, geometry)


@given(st.data())
@settings(max_examples=2, deadline=None)
def test_a_convolution_with_what_follows_it_is_xlas(data):
    draw = data.draw
    channels, out = draw(st.sampled_from([16, 20, 40])), draw(st.sampled_from([1, 8, 33, 70]))
    window = draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    pads = draw(st.tuples(*[st.tuples(st.integers(0, 2), st.integers(0, 2))] * 2))
    size = draw(st.tuples(st.integers(5, 9), st.integers(5, 9)))
    x, w = _normal(0, draw(st.integers(1, 3)), *size, channels), _normal(1, window[0] * window[1] * channels + 1, out)
    after = tuple(n + sum(p) - k + 1 for n, p, k in zip(size, pads, window, strict=True))
    geometry = Geometry(window, low=(pads[0][0], pads[1][0]), out=after)
    for theirs, ours in _layers(geometry, pads):
        _close(_derivatives(ours, x, w), _derivatives(theirs, x, w))


def test_second_derivatives_of_a_convolution_with_what_follows_it():
    x, w = _normal(0, 2, 1, 6, 6, 16), _normal(1, 2, 9 * 16 + 1, 3)

    def hessian_product(function):
        gradient = jax.grad(lambda x, w: jnp.sin(jax.vmap(function)(x, w)).sum(), (0, 1))
        directions = _normal(2, *x.shape), _normal(3, *w.shape)
        return jax.jit(lambda args, directions: jax.jvp(gradient, args, directions)[1])((x, w), directions)

    for theirs, ours in _layers(Geometry((3, 3), out=(4, 4)), ((0, 0), (0, 0))):
        _close(hessian_product(ours), hessian_product(theirs))


@pytest.mark.parametrize(("clients", "parts"), [(1, 16), (25, 10), (50, 5), (100, 5)])
def test_a_gradient_is_divided_into_as_many_programs_as_a_gpu_runs_at_a_time(clients, parts, monkeypatch):
    """With six programs each, 25 clients left nearly half of an H200 idle, and 100 three quarters of the last wave."""
    grids, call = {}, activated._call

    def watched(kernel, grid, shapes, tiles, name):
        grids[name] = grid  # the last one is that of all clients
        return call(kernel, grid, shapes, tiles, name)

    monkeypatch.setattr(activated, "_call", watched)
    function = lambda x, w: activated.convolve_relu_pool(x, w, Geometry((3, 3), out=(4, 4))).sum()  # noqa: E731
    x, w = _normal(0, clients, 1, 6, 6, 32), _normal(1, clients, 9 * 32 + 1, 64)
    jax.jit(jax.vmap(jax.grad(function, 1))).lower(x, w)
    assert grids["convolution_relu_pool_weights"] == (parts, 1, 1)


def test_results_do_not_depend_on_how_many_clients_share_the_gpu():
    function = lambda x, w: (activated.convolve_relu_pool(x, w, Geometry((3, 3), out=(6, 6))) ** 2).sum()  # noqa: E731
    x, w = _normal(0, 30, 2, 8, 8, 16), _normal(1, 9 * 16 + 1, 8)
    many = jax.jit(jax.vmap(jax.grad(function, 1), (0, None)))(x, w)
    one = jax.jit(jax.grad(function, 1))(x[3], w)
    np.testing.assert_allclose(many[3], one, rtol=1e-4, atol=1e-4)


def test_of_equals_the_first_has_the_gradient_and_what_is_not_a_number_is_seen():
    geometry = Geometry((1, 1), out=(2, 2))
    x, weights = jnp.ones((1, 2, 2, 16)), jnp.ones((17, 1))
    pooled = jax.jit(lambda x: activated.convolve_relu_pool(x, weights, geometry))
    plain = jax.jit(lambda x: activated.convolve_relu(x, weights, geometry))
    gradient = np.asarray(jax.jit(jax.grad(lambda x: pooled(x).sum()))(x))
    assert gradient[0, :, :, 0].tolist() == [[1.0, 0.0], [0.0, 0.0]]
    for place in np.ndindex(2, 2):
        broken = np.array(x)
        broken[0, *place] = np.nan
        assert np.isnan(pooled(broken)).all()
        assert np.isnan(np.asarray(plain(broken))[0, *place]).all()


def test_values_kept_in_bfloat16_cost_no_more_than_their_rounding(as_if_on_a_gpu):
    first = {"w": 0.3 * _normal(0, 3, 3, 2, 16), "b": 0.1 * _normal(1, 16)}
    second = {"w": 0.1 * _normal(2, 3, 3, 16, 8), "b": 0.1 * _normal(3, 8)}
    x = _normal(4, 2, 10, 10, 2)

    def loss(layers_):
        y = layers.conv_relu(layers_[1], layers.conv_relu(layers_[0], x), pool=True)
        return (y.astype(jnp.float32) ** 2).sum()

    exact = jax.jit(jax.value_and_grad(loss))((first, second))
    with jax.default_matmul_precision("BF16_BF16_F32"):
        assert jax.eval_shape(layers.conv_relu, first, x).dtype == jnp.bfloat16
        rounded = jax.jit(jax.value_and_grad(loss))((first, second))
    for a, b in zip(jax.tree.leaves(rounded), jax.tree.leaves(exact), strict=True):
        assert a.dtype == jnp.float32
        assert 0 < _distance(a, b) < 0.02


@pytest.mark.parametrize(("batch", "hidden", "length"), [(3, 8, 5), (10, 70, 9)])
def test_lstm_states_and_cotangents_are_those_of_the_loop(batch, hidden, length):
    inputs, u = _normal(0, 2, length, batch, 4 * hidden), 0.3 * _normal(1, 2, hidden, 4 * hidden)
    of_all = lambda function: jax.jit(jax.vmap(function))  # noqa: E731
    h, c, gates = states = of_all(lstm._states_loop)(inputs, u)
    _close(of_all(recurrence.states)(inputs, u), states)
    dh = _normal(2, *h.shape)
    _close(of_all(recurrence.cotangent)(u, c, gates, dh), of_all(lstm._cotangent_loop)(u, c, gates, dh))


def test_rounded_weights_are_summed_in_float32():
    inputs, u = _normal(0, 4, 3, 4 * 16), 0.3 * _normal(1, 16, 4 * 16).astype(jnp.bfloat16)
    _close(recurrence.states(inputs, u), lstm._states_loop(inputs, u))


@pytest.fixture
def as_if_on_a_gpu(monkeypatch):
    monkeypatch.setattr(kernels, "available", lambda: True)  # use kernels, in interpret mode


@pytest.mark.parametrize("name", ["emnist_cnn", "char_lstm"])
def test_a_model_has_the_same_loss_and_gradient_with_kernels(name, as_if_on_a_gpu, monkeypatch):
    rng = np.random.default_rng(0)
    if name == "emnist_cnn":
        model = models.emnist_cnn(3, image=(8, 9, 2), dropout=False)
        batch = {"x": _normal(0, 2, 8, 9, 2), "y": jnp.asarray([0, 2]), "mask": jnp.ones(2)}
    else:
        model = models.char_lstm(7, layers=2, hidden=8, embed=4)
        text = jnp.asarray(rng.integers(1, 7, (3, 6)))
        batch = {"x": text[:, :-1], "y": text[:, 1:], "mask": jnp.ones(3)}
    params = model.init(jax.random.key(0))

    def both():
        return jax.jit(jax.value_and_grad(lambda p: model.loss(p, batch, None)))(params)

    ours = both()
    monkeypatch.setattr(kernels, "available", lambda: False)
    _close(ours, both())


def test_products_that_must_be_exact_or_have_many_channels_are_left_to_xla(as_if_on_a_gpu):
    x, kernel = jnp.ones((1, 4, 4, 16)), jnp.ones((3, 3, 16, 16))
    assert layers.has_kernel(x, kernel)
    assert not layers.has_kernel(x, kernel, precision="highest")
    assert not layers.has_kernel(x, jnp.ones((3, 3, 16, convolution.MOST_CHANNELS + 1)))
    assert not layers.has_kernel(x.astype(jnp.bfloat16), kernel.astype(jnp.bfloat16))
    with jax.default_matmul_precision("float32"):
        assert not layers.has_kernel(x, kernel)


def _pool(x, axes=(1, 2)):
    window = tuple(2 if axis in axes else 1 for axis in range(4))
    return lax.reduce_window(x, -jnp.inf, lax.max, window, window, "VALID")


def _net(x, w, **options):
    return lax.conv_general_dilated(x, w, dimension_numbers=("NHWC", "HWIO", "NHWC"), **{**VALID, **options})


VALID = {"window_strides": (1, 1), "padding": "VALID"}
relu = jax.nn.relu
NETS = {  # operations after a convolution [2, 8, 8, 16] -> [2, 6, 6, 8], and the kernel that computes them
    "bias, relu": (lambda x, w, b: relu(_net(x, w) + b), "convolution_relu"),
    "bias spread first": (lambda x, w, b: relu(_net(x, w) + jnp.broadcast_to(b, (2, 6, 6, 8))), "convolution_relu"),
    "relu alone": (lambda x, w, b: relu(_net(x, w)) + b, "convolution_relu"),
    "relu, pool": (lambda x, w, b: _pool(relu(b + _net(x, w))), "convolution_relu_pool"),
    "pool, relu": (lambda x, w, b: relu(_pool(_net(x, w) + b)), "convolution_relu_pool"),
    "pool, bias, relu": (lambda x, w, b: relu(_pool(_net(x, w)) + b), "convolution_relu_pool"),
    "layouts": (
        lambda x, w, b: _pool(relu(_net(x, w).transpose(0, 3, 1, 2)[:, None][:, 0] + b[:, None, None]), (2, 3)),
        "convolution_relu_pool",
    ),
    "strides, padding": (
        lambda x, w, b: relu(_net(x, w, window_strides=(2, 1), padding="SAME") + b),
        "convolution_relu",
    ),
    "pool of strides": (lambda x, w, b: _pool(relu(_net(x, w, window_strides=(1, 2)) + b)), "convolution"),
    "two pools": (lambda x, w, b: _pool(_pool(relu(_net(x, w, padding="SAME") + b))), "convolution_relu_pool"),
    "pool of one axis": (lambda x, w, b: _pool(relu(_net(x, w) + b), (1,)), "convolution_relu"),
    "no relu": (lambda x, w, b: jnp.tanh(_net(x, w) + b), "convolution"),
    "half of a relu": (lambda x, w, b: jnp.maximum(_net(x, w) + b, 0.0), "convolution"),
    "used twice": (lambda x, w, b: (lambda y: relu(y + b) * y)(_net(x, w)), "convolution"),
    "a number of every place": (
        lambda x, w, b: relu(_net(x, w) + jnp.arange(36.0).reshape(6, 6, 1) + b),
        "convolution",
    ),
}


@pytest.mark.parametrize("name", NETS)
def test_what_follows_anyones_convolution_becomes_part_of_it(name, as_if_on_a_gpu):
    net, kernel = NETS[name]
    x, w, b = _normal(0, 2, 8, 8, 16), _normal(1, 3, 3, 16, 8), _normal(2, 8)
    program = str(jax.make_jaxpr(fast_convolutions(net))(x, w, b))
    assert "conv_general_dilated" not in program
    assert f"name={kernel}\n" in program
    assert program.count("name=convolution") == 1, "computed once"
    cotangent = _normal(3, *jax.eval_shape(net, x, w, b).shape)
    _close(_with_gradients(fast_convolutions(net))(cotangent, x, w, b), _with_gradients(net)(cotangent, x, w, b))


def test_layers_of_anyones_network_hand_over_what_they_computed(as_if_on_a_gpu):
    """Values between two layers are bfloat16; values that the program reads are float32."""
    first, second, pool = (
        eqx.nn.Conv2d(1, 16, 3, key=jax.random.key(0)),
        eqx.nn.Conv2d(16, 24, 3, key=jax.random.key(1)),
        eqx.nn.MaxPool2d(2, 2),
    )

    def net(convolutions, x):
        first, second = convolutions
        return jax.vmap(lambda x: pool(relu(second(relu(first(x))))))(x)

    x = _normal(0, 3, 1, 10, 10)
    program = str(jax.make_jaxpr(fast_convolutions(net))((first, second), x))
    assert program.count("name=convolution_relu\n") == program.count("name=convolution_relu_pool\n") == 1
    exact = eqx.filter_jit(net)((first, second), x)
    _close(eqx.filter_jit(fast_convolutions(net))((first, second), x), exact)
    lines = explain_function(net, (first, second), x)
    assert [line.rsplit(": ", 1)[1] for line in lines] == [
        "one kernel, with its bias and ReLU",
        "one kernel, with its bias and ReLU and pool",
        "together with the convolution before it",
    ]
    with jax.default_matmul_precision("BF16_BF16_F32"):
        rounded = eqx.filter_jit(fast_convolutions(net))((first, second), x)
    assert rounded.dtype == jnp.float32
    assert 0 < _distance(rounded, exact) < 0.02


def test_images_of_other_channels_are_refused_before_a_kernel_reads_them(as_if_on_a_gpu):
    layer = {"w": jnp.ones((3, 3, 16, 8)), "b": jnp.zeros(8)}
    with pytest.raises(ValueError, match=r"images \[B, H, W, 16\].*got \(1, 8, 8, 3\)"):
        layers.conv_relu(layer, jnp.ones((1, 8, 8, 3)))


def test_explain_says_so(as_if_on_a_gpu):
    def run(x, w):
        return lax.conv(x, w, (1, 1), "SAME")

    x, w = jnp.ones((1, 4, 8, 8)), jnp.ones((16, 4, 3, 3))
    assert explain_function(run, x, w)[0].endswith("(16, 4, 3, 3): one kernel, which gathers its patches itself")
    assert "matrix products" in explain_function(run, x, jnp.ones((convolution.MOST_CHANNELS + 1, 4, 3, 3)))[0]


def test_no_kernel_runs_on_a_cpu():
    assert jax.default_backend() != "cpu" or not kernels.available()


def test_kernels_lower_for_a_gpu(monkeypatch):
    for module in (activated, convolution, grown, recurrence, updates):
        monkeypatch.setattr(module, "interpreted", lambda: False)
    geometry = Geometry((3, 3), (2, 2), low=(1, 1), out=(4, 4))

    def convolution_step(x, w):
        return jax.grad(lambda x, w: (jax.vmap(lambda x, w: convolve(x, w, geometry))(x, w) ** 2).sum(), (0, 1))(x, w)

    def layer_step(x, w):
        return jax.grad(
            lambda x, w: (
                jax.vmap(lambda x, w: activated.convolve_relu_pool(x, w, geometry._replace(stride=(1, 1))))(x, w) ** 2
            ).sum(),
            (0, 1),
        )(x, w)

    def lstm_step(inputs, u, dh):
        _, c, gates = jax.vmap(recurrence.states)(inputs, u)
        return jax.vmap(recurrence.cotangent)(u, c, gates, dh)

    def grown_step(x, left, h, count):
        meets, left = jax.vmap(grown.inner)(x, left, count)
        left = jax.vmap(grown.added)(left, x, count)
        sums = jax.vmap(lambda lane: grown.total(left, left, lane, lane))(count)
        return meets, jax.vmap(grown.outer)(x, h, left, count), sums, grown.empty((3,), x.dtype)

    def updates_step(w, x, y, vectors):
        new = jax.vmap(updates.add_product)(w, x, y, vectors[:, 0])
        few = jax.vmap(lambda a, b: updates.add_scaled([a, b], [(b, 0, 0.5), (a, 0, -0.5)]))(vectors, vectors)
        return new, few

    half = jnp.bfloat16

    def shape(*sizes, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(sizes, dtype)

    programs = [
        (convolution_step, (shape(2, 3, 8, 8, 32), shape(2, 3, 3, 32, 64))),
        (convolution_step, (shape(2, 3, 8, 8, 64, dtype=half), shape(2, 3, 3, 64, 256, dtype=half))),
        (layer_step, (shape(2, 3, 8, 8, 32), shape(2, 289, 64))),
        (layer_step, (shape(2, 3, 8, 8, 32, dtype=jnp.bfloat16), shape(2, 289, 64))),
        (updates_step, (shape(2, 90, 70), shape(2, 40, 90, dtype=half), shape(2, 40, 70, dtype=half), shape(2, 5))),
        (lstm_step, (shape(2, 9, 4, 64), shape(2, 16, 64, dtype=jnp.bfloat16), shape(2, 9, 4, 16))),
    ]
    for dtype in (jnp.float32, jnp.bfloat16):
        arrays = [shape(*sizes, dtype=dtype) for sizes in ((2, 20, 300), (2, 60, 300), (2, 20, 60))]
        programs.append((grown_step, (*arrays, shape(2, dtype=jnp.int32))))
    custom = [export.DisabledSafetyCheck.custom_call(name) for name in ("xla.gpu.triton", "__gpu$xla.gpu.triton")]
    for program, shapes in programs:
        with kernels.lowered_for():
            exported = export.export(jax.jit(program), platforms=["cuda"], disabled_checks=custom)(*shapes)
        assert "triton" in exported.mlir_module()
