"""The programs of benchmarks/gpu.py and benchmarks/users.py, traced as for an NVIDIA GPU on any machine.

Nothing runs here. A GPU's times depend on which rewrites apply, so these are asserted: fused convolutions, matrices
that are stored as rows, kernels of the recurrence, weights that are updated where their gradient is computed.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Var

import fedbraid as fb
from fedbraid import models
from fedbraid.local import ClientData
from fedbraid.lowering import Lanes, LoweringOptions, explain, kernels, lower
from fedbraid.lowering.mixed import narrow_activations

CONVOLUTIONS = [
    "convolution_relu x 1",
    "convolution_relu_pool x 1",
    "convolution_relu_pool_images x 1",
    "convolution_relu_pool_weights x 1",
    "convolution_relu_weights x 1",
]
ROWS = ["grown_added x 1", "grown_inner x 1", "grown_meets x 1", "grown_outer x 1", "grown_spread x 1"]


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(kernels, "platform", lambda: "cuda")
    monkeypatch.setattr(kernels, "_recent", lambda: True)


def client(size, **shapes):
    """Shapes of a client's examples in the flat arrays of 100 such clients."""
    arrays = {name: jax.ShapeDtypeStruct((100 * size, *shape), dtype) for name, (shape, dtype) in shapes.items()}
    number = jax.ShapeDtypeStruct((), jnp.int32)
    return ClientData(arrays, number, number, size)


def explained(model, data, *, clients, batch, **options):
    params = jax.eval_shape(model.init, jax.random.key(0))
    alg = fb.fedavg(model.loss, client_lr=0.05, batch_size=batch, epochs=1)
    return explain(alg, params, data, LoweringOptions(**options), Lanes(clients, data.cap))


@pytest.mark.parametrize("precision", ["default", "bfloat16"])
def test_the_emnist_cnn_fuses_its_convolutions_and_stores_its_dense_weights_as_rows(precision):
    data = client(200, x=((28, 28, 1), jnp.float32), y=((), jnp.int32))
    found = explained(models.emnist_cnn(62), data, clients=100, batch=20, precision=precision)
    assert found.grown() == [
        "carry.params['dense1']['w'] (9216, 128): the shared matrix plus 20 rows a step, 200 at most"
    ]
    assert found.kernels["train"] == CONVOLUTIONS + ROWS
    assert found.convolutions["train"] == []  # the program has no XLA convolution


class Network(eqx.Module):
    """The same network, written by a user of equinox."""

    conv1: eqx.nn.Conv2d
    conv2: eqx.nn.Conv2d
    pool: eqx.nn.MaxPool2d
    dense1: eqx.nn.Linear
    dense2: eqx.nn.Linear

    def __init__(self, key):
        first, second, third, last = jax.random.split(key, 4)
        self.conv1 = eqx.nn.Conv2d(1, 32, 3, key=first)
        self.conv2 = eqx.nn.Conv2d(32, 64, 3, key=second)
        self.pool = eqx.nn.MaxPool2d(2, 2)
        self.dense1 = eqx.nn.Linear(9216, 128, key=third)
        self.dense2 = eqx.nn.Linear(128, 62, key=last)

    def __call__(self, x):
        x = jax.nn.relu(self.conv2(jax.nn.relu(self.conv1(x[None]))))
        return self.dense2(jax.nn.relu(self.dense1(self.pool(x).ravel())))


@pytest.mark.parametrize("precision", ["default", "bfloat16"])
def test_so_does_a_users_network(precision):
    data = client(200, x=((28, 28), jnp.float32), y=((), jnp.int32))
    found = explained(models.from_equinox(Network), data, clients=100, batch=20, precision=precision)
    assert [line.split(": ", 1)[1] for line in found.convolutions["train"]] == [
        "one kernel, with its bias and ReLU",
        "one kernel, with its bias and ReLU and pool",
        "together with the convolution before it",
    ]
    assert found.grown() == [
        "carry.params.dense1.weight (128, 9216): the shared matrix plus 20 rows a step, 200 at most"
    ]
    assert found.kernels["train"] == CONVOLUTIONS + ROWS


@pytest.mark.parametrize(("compute", "precision"), [("float32", "default"), ("bfloat16", "bfloat16")])
def test_the_lstm_runs_its_recurrence_in_kernels(compute, precision):
    data = client(30, x=((80,), jnp.int32), y=((80,), jnp.int32))
    found = explained(models.char_lstm(90, compute=compute), data, clients=20, batch=10, precision=precision)
    updates = ["add_scaled x 1"] if precision == "bfloat16" else []  # biases are updated together
    assert found.kernels["train"] == [*updates, "lstm_backwards x 1", "lstm_forwards x 1"]
    assert found.grown() == []
    assert all("whole, too small" in line for line in found.matrices["train"])


def resnet(precision):
    data = client(100, x=((24, 24, 3), jnp.float32), y=((), jnp.int32))
    return explained(models.resnet18_gn(100), data, clients=20, batch=20, precision=precision)


def test_the_resnet_normalises_and_convolves_in_kernels_and_stores_values_narrow():
    found = resnet("bfloat16")
    assert found.kernels["train"] == [
        "add_scaled x 2",  # scales and shifts of norms, in two groups
        "convolution x 20",  # strides, windows of 1 x 1 and 512 channels included
        "convolution_images x 19",  # the first layer needs no gradient of its images
        "convolution_kernel_gradient x 20",
        "group_norm x 20",
        "group_norm_back x 20",
    ]
    assert {line.split(": ")[1] for line in found.convolutions["train"]} == {
        "one kernel, which gathers its patches itself"
    }


def test_in_float32_the_resnets_wide_layers_are_products_over_patches():
    found = resnet("default")
    assert found.kernels["train"] == [
        "convolution x 10",
        "convolution_images x 9",
        "convolution_kernel_gradient x 10",
        "group_norm x 20",
        "group_norm_back x 20",
    ]


def gpt(**options):
    data = client(40, x=((128,), jnp.int32), y=((128,), jnp.int32))
    return explained(models.gpt(2048, tied=False, **options), data, clients=20, batch=8, precision="bfloat16")


def test_the_gpt_attends_normalises_and_activates_in_kernels():
    found = gpt()
    assert found.kernels["train"] == [
        "add_product x 17",  # every matrix, with the product that is its gradient
        "add_row_norm x 8",
        "add_row_norm_back x 8",
        "add_scaled x 2",
        "attention_back_with_bias x 4",
        "attention_with_bias x 4",
        "dense_activation x 4",  # with the product before it
        "dense_activation_back x 4",
        "log_sum_exp x 1",
        "row_norm x 1",
        "row_norm_back x 1",
    ]


def test_with_remat_the_gpt_attends_again_for_the_gradient():
    found = gpt(remat=True)
    assert {"attention_with_bias x 8", "attention_back_with_bias x 4"} < set(found.kernels["train"])


def test_the_gpt_reads_its_logits_once_for_the_loss():
    model = models.gpt(2048, tied=False)
    params = jax.eval_shape(model.init, jax.random.key(0))
    batch = {name: jax.ShapeDtypeStruct((8, 128), jnp.int32) for name in ("x", "y")}
    program = jax.make_jaxpr(narrow_activations(model.loss))(params, batch, jax.random.key(0))
    values, equations = set(program.jaxpr.outvars), []
    for equation in reversed(program.jaxpr.eqns):  # those that the loss needs
        if values.intersection(equation.outvars):
            equations.append(equation)
            values.update(v for v in equation.invars if isinstance(v, Var))
    readers = [e.primitive.name for e in equations if any(v.aval.shape == (8, 128, 2048) for v in e.invars)]
    assert sorted(readers) == ["custom_jvp_call", "linear"]  # the kernel, and the choice of the labels


@pytest.mark.parametrize("precision", ["default", "tf32", "bfloat16"])
def test_values_between_layers_are_bfloat16_if_asked(precision):
    model, data = models.mlp(6, 3, hidden=(5, 4)), client(20, x=((6,), jnp.float32), y=((), jnp.int32))
    params = jax.eval_shape(model.init, jax.random.key(0))
    alg = lower(fb.fedavg(model.loss, batch_size=10, epochs=1), LoweringOptions(precision=precision))
    down = jax.eval_shape(lambda p: alg.exchanges[0].send(alg.init(p)), params)
    program = str(jax.make_jaxpr(alg.exchanges[0].client)(down, (), data, jax.random.key(0)))
    assert ("bf16[10,5] = dot_general" in program) == (precision == "bfloat16")


def test_what_is_switched_off_is_off():
    data = client(200, x=((28, 28), jnp.float32), y=((), jnp.int32))
    options = {"clients": 100, "batch": 20, "matrices": "whole", "convolutions": "native"}
    found = explained(models.from_equinox(Network), data, **options)
    assert found.kernels["train"] == found.matrices["train"] == []
    assert all(line.endswith("left to XLA, as asked") for line in found.convolutions["train"])
