"""The loop over lanes as on a GPU: what it carries and what it repeats. The results are the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbraid as fb
from fedbraid import models
from fedbraid.lowering import captured, grown, kernels
from fedbraid.lowering.grown import Extent, grow
from fedbraid.lowering.halves import rounded_leaves
from fedbraid.simulation import lanes
from told import told


@pytest.fixture(autouse=True)
def as_if_on_a_gpu(monkeypatch):
    monkeypatch.setattr(kernels, "platform", lambda: "cuda")
    monkeypatch.setattr(kernels, "_recent", lambda: True)


def _run(sizes, chunk):
    rng = np.random.default_rng(0)
    rows = int(np.sum(sizes))
    arrays = {"x": rng.random((rows, 6), dtype=np.float32), "y": rng.integers(0, 3, rows).astype(np.int32)}
    split = fb.Split(arrays, np.concatenate([[0], np.cumsum(sizes)]))
    model = models.mlp(6, 3, hidden=(8, 5))
    alg = fb.fedavg(model.loss, client_lr=0.3, batch_size=4, epochs=2)
    params = model.init(jax.random.key(0))
    options = {"plan": "lanes", "chunk": chunk, "precision": "bfloat16", "matrices": "whole"}
    return fb.simulate(alg, params=params, data=split, rounds=2, cohort=len(sizes), **options).params


@pytest.mark.parametrize(("sizes", "chunk"), [([8] * 8, 2), ([8] * 8, 1), ([4, 9, 13, 8, 5], 1)])
def test_weights_stored_in_bfloat16_beside_float32_change_nothing(sizes, chunk, monkeypatch):
    found = []

    def watched(*args):
        found.append(grow(*args))
        return found[-1]

    monkeypatch.setattr("fedbraid.simulation.lanes.grow", watched)
    plain = _run(sizes, chunk)
    assert found[0].halves == ()  # too small
    found.clear()
    monkeypatch.setattr(grown, "HEAVY", 0)
    stored = _run(sizes, chunk)
    assert len(found[0].halves) == 2  # the last layer's product is float32
    jax.tree.map(np.testing.assert_array_equal, stored, plain)


def test_only_what_a_step_itself_rounds_is_stored(monkeypatch):
    monkeypatch.setattr(grown, "HEAVY", 0)

    def advance(slot, k, carry):
        a, b, c = carry
        return a - a.astype(jnp.bfloat16).astype(jnp.float32), b + (2 * b).astype(jnp.bfloat16), c

    def begin(slot):
        return tuple(slot + jnp.ones(3) for _ in range(3))

    growth = grow(begin, advance, (jnp.int32(0), jnp.int32(0)), Extent(1, 1, 2), "whole")
    assert growth.halves == (0,)
    rest = growth.rest(begin(jnp.int32(0)))
    assert [leaf.dtype for leaf in rest] == [jnp.float32] * 3 + [jnp.bfloat16]
    new, _ = growth.step(jnp.int32(0), jnp.int32(0), rest, ())
    expected = advance(0, 0, begin(jnp.int32(0)))
    jax.tree.map(np.testing.assert_array_equal, growth.carry(new, []), expected)
    assert rounded_leaves(jax.make_jaxpr(lambda slot, k, *leaves: leaves)(0, 0, *rest), 2) == []


def test_clients_that_end_together_are_one_loop(monkeypatch):
    """If no client waits for a lane, no model is stored for a next one."""
    loops, loop = [], jax.lax.fori_loop

    def watched(low, high, body, start):
        loops.append(body.__name__)
        return loop(low, high, body, start)

    monkeypatch.setattr(jax.lax, "fori_loop", watched)
    together = _run([8] * 8, 2)  # four devices
    assert "tick" in loops
    assert "ending" not in loops
    one_after_the_other = _run([8] * 8, 1)
    assert "ending" in loops
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), together, one_after_the_other)


@pytest.mark.parametrize("few", [0, 1 << 24])
def test_clients_start_on_their_lanes_whether_lanes_are_written_whole_or_in_place(few, monkeypatch):
    monkeypatch.setattr(lanes, "FEW", few)
    width, places = 4, jnp.array([2, 4, 0], jnp.int32)  # 4 is padding
    old, new = jnp.arange(8.0).reshape(4, 2), -jnp.arange(1.0, 7.0).reshape(3, 2)
    found, keys = lanes._replace((old, jnp.zeros(width, jnp.int32)), places, (new, jnp.array([7, 8, 9], jnp.int32)))
    assert found.tolist() == [[-5.0, -6.0], [2.0, 3.0], [-1.0, -2.0], [6.0, 7.0]]
    assert keys.tolist() == [9, 0, 7, 0]


def test_lanes_of_unequal_clients_run_as_cuda_graphs(monkeypatch):
    """Else the GPU waits for the host after each step, because the length of the loop is not known."""
    programs = []
    plainly = captured.jit

    def watched(function, **options):
        programs.append((function.__name__, options.get("compiler_options", {})))
        return plainly(function, **options)

    monkeypatch.setattr("fedbraid.simulation.program.captured.jit", watched)
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    ragged = _run([4, 9, 13, 8, 5], 1)
    assert "WHILE" in dict(programs)["many"]["xla_gpu_enable_command_buffer"]
    programs.clear()
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_command_buffer=")
    again = _run([4, 9, 13, 8, 5], 1)
    assert dict(programs)["many"] == {"xla_gpu_graph_min_graph_size": 1}  # the user's choice is kept
    jax.tree.map(np.testing.assert_array_equal, ragged, again)
    programs.clear()
    _run([8] * 8, 2)
    assert dict(programs)["many"] == {}  # all clients end together
    programs.clear()
    monkeypatch.setattr(kernels, "platform", lambda: "cpu")
    with told("no effect on a CPU"):
        _run([4, 9, 13, 8, 5], 1)
    assert dict(programs)["many"] == {}
