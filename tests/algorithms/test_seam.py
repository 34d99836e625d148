"""Algorithms differentiate through ``fedbraid.local``: outside an engine like jax, inside with the engine's rewrite."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbraid as fb
from fedbraid.algorithms import ALGORITHMS
from fedbraid.local import HEAD, grad, masked_mean, rewriting, rewritten, value_and_grad
from fedbraid.lowering import LoweringOptions, fast_convolutions, lower
from fedbraid.transforms import elastic
from zoo import ELSEWHERE

RNG = np.random.default_rng(0)
DATA = fb.ClientData.of({"x": RNG.standard_normal((6, 1, 5, 5)).astype(np.float32), "y": np.arange(6.0, dtype="f")})
PARAMS = {"w": jnp.asarray(RNG.standard_normal((2, 1, 3, 3)), jnp.float32), "b": jnp.float32(0.1)}
BATCH = DATA.everything()


def outputs(params, batch):
    y = jax.lax.conv(batch["x"], params["w"], (1, 1), "VALID") + params["b"]
    return jax.lax.reduce_window(jnp.tanh(y), -jnp.inf, jax.lax.max, (1, 1, 3, 3), (1, 1, 3, 3), "VALID")[..., 0, 0]


def loss(params, batch, key):
    return masked_mean((outputs(params, batch).sum(1) - batch["y"]) ** 2, batch["mask"])


setattr(loss, HEAD, ("b",))  # the last layer, which some methods keep on the clients


def programs(alg):
    """The clients of all exchanges, as jaxprs."""
    server, state = alg.init(PARAMS), alg.init_client(PARAMS)
    for exchange in alg.exchanges:
        yield str(jax.make_jaxpr(exchange.client)(exchange.send(server), state, DATA, jax.random.key(0)))


NATIVE = ("conv_general_dilated[", "reduce_window_max[", "select_and_")


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name not in ELSEWHERE])
def test_convolutions_of_a_client_are_rewritten_unless_they_shall_stay(name):
    alg = ALGORITHMS[name](loss)
    for program in programs(lower(alg, LoweringOptions())):
        assert not [primitive for primitive in NATIVE if primitive in program]
    for program in programs(lower(alg, LoweringOptions(convolutions="native"))):
        assert "conv_general_dilated[" in program
        assert "reduce_window_max[" in program


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name not in ELSEWHERE])
def test_the_loss_is_rewritten_before_it_is_differentiated(name):
    """Only through ``fedbraid.local``, without the engine's rewrite of programs that were differentiated by jax."""

    def changed(work):
        def run(*args):
            with rewriting(fast_convolutions):
                return work(*args)

        return run

    for program in programs(fb.local.map_work(ALGORITHMS[name](loss), changed)):
        assert not [primitive for primitive in NATIVE if primitive in program]


def test_so_are_the_outputs_that_elastic_aggregation_looks_at():
    alg = elastic(fb.fedavg(lambda params, batch, key: jnp.sum(params["w"] ** 2)), outputs)
    (fast,), (native,) = (programs(lower(alg, LoweringOptions(how))) for how in ("fast", "native"))
    assert "conv_general_dilated[" not in fast
    assert "conv_general_dilated[" in native


def test_outside_an_engine_derivatives_are_jaxs():
    ours, theirs = value_and_grad(loss)(PARAMS, BATCH, None), jax.value_and_grad(loss)(PARAMS, BATCH, None)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    jax.tree.map(np.testing.assert_array_equal, grad(loss)(PARAMS, BATCH, None), theirs[1])
    assert str(jax.make_jaxpr(value_and_grad(loss))(PARAMS, BATCH, None)) == str(
        jax.make_jaxpr(jax.value_and_grad(loss))(PARAMS, BATCH, None)
    )


def test_inside_they_agree_to_rounding():
    theirs = jax.value_and_grad(loss)(PARAMS, BATCH, None)
    with rewriting(fast_convolutions):
        ours = value_and_grad(loss)(PARAMS, BATCH, None)
        curved = jax.hessian(lambda b: rewritten(loss)(PARAMS | {"b": b}, BATCH, None))(PARAMS["b"])
        with rewriting(None):
            inner = str(jax.make_jaxpr(grad(loss))(PARAMS, BATCH, None))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), ours, theirs)
    expected = jax.hessian(lambda b: loss(PARAMS | {"b": b}, BATCH, None))(PARAMS["b"])
    np.testing.assert_allclose(curved, expected, rtol=1e-3, atol=1e-4)
    assert "conv_general_dilated[" in inner


def test_a_compiled_function_is_not_reused_under_another_rewrite():
    @jax.jit
    def step(params):
        return grad(loss)(params, BATCH, None)

    before = str(jax.make_jaxpr(step)(PARAMS))
    with rewriting(fast_convolutions):
        inside = str(jax.make_jaxpr(step)(PARAMS))
    assert "conv_general_dilated[" in before
    assert "conv_general_dilated[" not in inside
    assert str(jax.make_jaxpr(step)(PARAMS)) == before
