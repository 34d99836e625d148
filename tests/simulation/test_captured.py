"""Arrays that a loss captures (frozen parts) are arguments of every program, not constants in it."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbraid as fb
from fedbraid.lowering import captured
from fedbraid.simulation.fine_tuning import adaptation

RNG = np.random.default_rng(0)
BASE = jnp.asarray(RNG.standard_normal((160, 160)), jnp.float32)  # 100 KB
CLIENTS = [{"x": RNG.standard_normal((n, 160)).astype(np.float32)} for n in (4, 4, 2)]
DATA = fb.FederatedData(fb.Split.from_clients(CLIENTS), fb.Split.from_clients(CLIENTS))
START = {"a": jnp.zeros((160, 2)), "b": jnp.ones((2, 3))}


def loss(params, batch, key):
    errors = jnp.sum(jnp.square(jnp.tanh(batch["x"] @ BASE) @ params["a"] @ params["b"] - 1), -1)
    return fb.local.masked_mean(errors, batch["mask"])


def metrics(params, batch):
    return {"loss": (batch["mask"] * loss(params, batch, None), batch["mask"])}


@contextlib.contextmanager
def lowered_programs(folder):
    """The longest line of each program that jax lowers; an array that is a constant is one line, in hexadecimal."""
    sizes = []
    jax.config.update("jax_dump_ir_to", str(folder))
    try:
        yield sizes
    finally:
        jax.config.update("jax_dump_ir_to", "")
        sizes += [max(map(len, path.read_text().splitlines())) for path in folder.iterdir()]


@pytest.fixture
def programs(tmp_path):
    @contextlib.contextmanager
    def small():
        with lowered_programs(tmp_path) as sizes:
            yield
        assert sizes
        assert max(sizes) < BASE.nbytes, "a program holds the captured array as a constant"

    return small


def test_a_captured_array_is_seen_in_a_dump_of_plain_jit(tmp_path):
    """The check of the other tests can fail."""
    with lowered_programs(tmp_path) as sizes:
        jax.jit(lambda x: x @ BASE)(jnp.ones(160))
    assert max(sizes) > 2 * BASE.nbytes


@pytest.mark.parametrize("plan", [{"plan": "sequential"}, {"plan": "lanes"}, {"plan": "chunks", "chunk": 2}])
def test_a_run_has_no_large_constant(plan, programs):
    alg = fb.fedavg(loss, client_lr=0.01, batch_size=2)
    with programs():
        result = fb.simulate(alg, START, DATA, rounds=2, metrics=metrics, **plan)
    # messages are the trainable leaves only
    assert result.info.cost.up == result.info.cost.down == 4 * (320 + 6)
    assert jax.tree.structure(result.params) == jax.tree.structure(START)
    again = fb.simulate(alg, START, DATA, rounds=2, plan="sequential")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), result.params, again.params)


def test_evaluation_and_fine_tuning_have_no_large_constant(programs):
    with programs():
        found = fb.simulation.evaluator(metrics, DATA.test).summary(START)
        adaptation(loss, metrics, DATA, steps=2)(START)
    assert float(found["test_loss"]) == pytest.approx(float(jnp.mean(jnp.array([3.0]))))


def test_points_that_run_together_share_the_array(programs):
    def run(lr):
        return fb.simulate(fb.fedavg(loss, client_lr=lr, batch_size=2), START, DATA, rounds=1).params["a"]

    with programs():
        both = jax.vmap(run)(jnp.array([0.0, 0.01]))
    np.testing.assert_array_equal(both[0], START["a"])
    assert np.any(both[1] != 0)


def test_a_program_has_the_results_and_shapes_of_plain_jit():
    program = captured.jit(lambda n, x: {"y": x * n, "z": [x @ BASE]}, static_argnums=(0,))
    x = jnp.ones((2, 160))
    for n in (2, 3):
        found = program(n, x)
        np.testing.assert_array_equal(found["y"], n * x)
        np.testing.assert_allclose(found["z"][0], x @ BASE, rtol=1e-6)
    compiled = program.lower(2, x).compile()
    assert compiled.memory_analysis().argument_size_in_bytes >= BASE.nbytes
    np.testing.assert_array_equal(compiled(2, x)["y"], 2 * x)
    assert captured.captured_bytes(lambda x: x @ BASE, x) == BASE.nbytes


def test_a_program_with_compiler_options_can_be_part_of_another():
    """jax allows compiler options of the outermost program only."""
    program = captured.jit(lambda x: x @ BASE[:3, :3], compiler_options={"xla_backend_optimization_level": 1})
    x = jnp.arange(3.0)
    assert jax.eval_shape(program, x).shape == (3,)
    np.testing.assert_allclose(jax.jit(lambda x: 2 * program(x))(x), 2 * program(x), rtol=1e-6)


def test_a_call_with_the_same_shapes_does_not_look_for_captured_arrays_again(monkeypatch):
    """Rounds are short: a search costs more than the call of a compiled program."""
    program = captured.jit(lambda tree, power: {"y": tree["x"] ** power}, static_argnums=(1,))
    program({"x": jnp.ones(3)}, 2)
    searches = []
    monkeypatch.setattr(captured.Program, "_of", lambda self, args: searches.append(args))
    np.testing.assert_allclose(program({"x": jnp.full(3, 2.0)}, 2)["y"], 4.0)
    assert not searches
    for other in (({"x": jnp.ones(4)}, 2), ({"x": jnp.ones(3, jnp.int32)}, 2), ({"x": jnp.ones(3)}, 3)):
        program(*other)
    assert len(searches) == 3


def test_an_array_that_only_some_shapes_need_is_an_argument(programs):
    program = captured.jit(lambda x: x @ BASE if x.shape[-1] == 160 else x.sum())
    with programs():
        assert float(program(jnp.ones(3))) == 3.0
        np.testing.assert_allclose(program(jnp.ones(160)), BASE.sum(0), rtol=1e-4, atol=1e-4)
