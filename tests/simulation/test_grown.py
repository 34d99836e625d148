"""Matrices stored as the shared matrix plus low-rank updates: which ones qualify, and that results do not change."""

import json
from contextlib import nullcontext
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import fedbraid as fb
from fedbraid import models
from fedbraid.cli.app import make_app
from fedbraid.costs import data_shapes
from fedbraid.experiment.config import load_config
from fedbraid.experiment.explain import explain_config
from fedbraid.local import batches_of, local_work, masked_mean
from fedbraid.lowering import Lanes, LoweringOptions, explain, kernels
from fedbraid.lowering.grown import Extent, _pays, grow
from fedbraid.lowering.kernels import grown as rows
from fedbraid.lowering.rows import Site
from told import told

# --- single steps ----------------------------------------------------------------------------------------------------


def walk(step, start, inputs, *, most=None, how="grown"):
    """The matrices after steps over inputs [K, ...], and the rows per step of those that were stored as updates."""
    tree = jax.tree.map(jnp.asarray, start)
    each = jnp.asarray(inputs)

    def run(tree, each):
        growth = grow(
            lambda slot: tree,
            lambda slot, k, carry: step(carry, each[k], tree),
            (jnp.int32(0), jnp.int32(0)),
            Extent(len(inputs) if most is None else most, 1, 1),
            how,
        )
        grew.append({site.leaf: site.rows for site in growth.sites})
        rest, rows = growth.rest(tree), jax.tree.map(lambda a: a[0], growth.empty(1))
        for k in range(len(inputs)):
            rest, rows = growth.step(jnp.int32(0), jnp.int32(k), rest, rows)
        rows = jax.tree.map(lambda a: a[None], rows)
        made = (
            growth.matrices(rows)
            if most is None
            else growth.matrices_on(rows, jnp.zeros(1, int), jnp.array([len(inputs)]))
        )
        return growth.carry(rest, [matrix[0] for matrix in made])

    grew = []
    return jax.jit(run)(tree, each), grew[0]


def outputs(x):
    """A gradient of outputs that depends on the product, and so on all earlier steps."""
    return jnp.tanh(x)


def descend(w, x, start):
    return w - 0.1 * x.T @ outputs(x @ w)


def turned(w, x, start):
    """The matrix layout of PyTorch and equinox: out x in."""
    return w - 0.1 * (outputs(w @ x.T) @ x)


def prox(w, x, start):
    return w - 0.1 * (x.T @ outputs(x @ w) + 0.5 * (w - start))


def shrink(w, x, start):
    """A step towards the start, with a factor that is not a constant."""
    by = jnp.abs(x[0, 0]) + 0.5
    return start + (w - start) / by - (x.T * 0.1) @ outputs(x @ w)


def back(w, x, start):
    """A step with a product along the other axis, too."""
    y = outputs(x @ w)
    return w - 0.1 * (x + 0.3 * outputs(y @ w.T)).T @ y


def twice(w, x, start):
    return w - 0.1 * x.T @ outputs(x @ w) + (0.05 * outputs(2 * x @ w).T @ x).T


def halves(w, x, start):
    """Inputs in bfloat16, as between convolutions on a GPU; the product's result is float32."""
    y = outputs(x @ w)
    return w - jnp.asarray(0.1, w.dtype) * jnp.matmul(x.astype(jnp.bfloat16).T, y)


def narrow(w, x, start):
    """As under mixed precision: the matrix and the inputs in bfloat16, and the gradient back in float32."""
    half = jnp.bfloat16
    x, v = x.astype(half), w.astype(half)
    y = outputs(x @ v)
    g = jnp.matmul((x + (0.3 * outputs(y @ v.T))).T, y, preferred_element_type=half)
    return w - 0.1 * g.astype(w.dtype)


@pytest.mark.parametrize("shape", [(7, 4), (4, 7)], ids=["tall", "wide"])
def test_a_matrix_that_is_converted_for_its_products_grows(shape):
    rng = np.random.default_rng(0)
    w, inputs = rng.standard_normal(shape).astype(np.float32), rng.standard_normal((3, 2, shape[0])).astype(np.float32)
    found, grew = walk(narrow, w, inputs)
    assert grew == {0: 2}
    exact = by_numpy("back", w.astype(np.float64), inputs.astype(np.float64))
    assert 0 < np.linalg.norm(found - exact) < 0.01 * np.linalg.norm(exact - w)


@pytest.mark.parametrize("shape", [(7, 4), (4, 7)], ids=["tall", "wide"])
def test_a_product_of_two_dtypes_grows_and_its_rate_is_not_rounded(shape):
    rng = np.random.default_rng(0)
    w = rng.standard_normal(shape).astype(np.float32)
    inputs = np.asarray(jnp.asarray(rng.standard_normal((3, 2, shape[0])), jnp.bfloat16).astype(jnp.float32))
    found, grew = walk(halves, w, inputs)
    assert grew == {0: 2}
    np.testing.assert_allclose(found, by_numpy("descend", w, inputs), rtol=1e-5, atol=1e-6)


def by_numpy(name, w, inputs):
    """The same steps on whole matrices, in NumPy."""
    start, tanh = w, np.tanh
    for x in inputs:
        if name == "turned":
            w = w - 0.1 * (tanh(w @ x.T) @ x)
        elif name == "prox":
            w = w - 0.1 * (x.T @ tanh(x @ w) + 0.5 * (w - start))
        elif name == "shrink":
            w = start + (w - start) / (abs(x[0, 0]) + 0.5) - 0.1 * x.T @ tanh(x @ w)
        elif name == "back":
            y = tanh(x @ w)
            w = w - 0.1 * (x + 0.3 * tanh(y @ w.T)).T @ y
        elif name == "twice":
            w = w - 0.1 * x.T @ tanh(x @ w) + 0.05 * x.T @ tanh(2 * x @ w)
        else:
            w = w - 0.1 * x.T @ tanh(x @ w)
    return w


STEPS = {"descend": descend, "turned": turned, "prox": prox, "shrink": shrink, "back": back, "twice": twice}


@pytest.mark.parametrize("name", STEPS)
@settings(deadline=None, max_examples=6)
@given(d=st.integers(1, 9), o=st.integers(1, 9), b=st.integers(1, 5), steps=st.integers(1, 5), room=st.integers(0, 2))
def test_steps_are_the_same_on_matrices_that_grow(name, d, o, b, steps, room):
    rng = np.random.default_rng(d + 10 * o + 100 * b + steps)
    w, inputs = rng.standard_normal((d, o)), rng.standard_normal((steps, b, d))
    w = w.T.copy() if name == "turned" else w
    with jax.enable_x64(True):
        found, grew = walk(STEPS[name], w, inputs, most=steps + room if room else None)
        np.testing.assert_allclose(found, by_numpy(name, w, inputs), rtol=1e-10, atol=1e-12)
    if b not in (d, o):  # else a product may have the shape of the matrix
        assert grew == {0: 2 * b if name == "twice" else b}


def momentum(carry, x, start):
    w, m = carry
    m = 0.9 * m + x.T @ outputs(x @ w)
    return w - 0.1 * m, m


def clipped(w, x, start):
    g = x.T @ outputs(x @ w)
    return w - 0.1 * g / jnp.maximum(1.0, jnp.sqrt(jnp.sum(g**2)))


def decayed(w, x, start):
    return 0.99 * w - 0.1 * x.T @ outputs(x @ w)


def looked_at(w, x, start):
    return w - 0.1 * x.T @ outputs(x @ w + jnp.sum(w))


def rounded(w, x, start):
    return (w.astype(jnp.bfloat16).astype(w.dtype)) - 0.1 * x.T @ outputs(x @ w)


def scanned(w, x, start):
    _, y = jax.lax.scan(lambda c, row: (c, row @ w), 0.0, x)
    return w - 0.1 * x.T @ outputs(y)


def mixed(w, x, start):
    """A product of bfloat16 values, summed in float32."""
    y, x = outputs(x @ w).astype(jnp.bfloat16), x.astype(jnp.bfloat16)
    return w - 0.1 * jnp.matmul(x.T, y, preferred_element_type=w.dtype)


def frozen(w, x, start):
    return w + 0 * jnp.sum(x)


@pytest.mark.parametrize("step", [momentum, clipped, decayed, looked_at, rounded, scanned, mixed, frozen])
def test_a_matrix_that_is_seen_otherwise_stays_whole(step):
    rng = np.random.default_rng(0)
    w, inputs = rng.standard_normal((7, 4)).astype(np.float32), rng.standard_normal((3, 2, 7)).astype(np.float32)
    start = (w, np.zeros_like(w)) if step is momentum else w
    found, grew = walk(step, start, inputs)
    assert grew == {}
    expected = jax.tree.map(jnp.asarray, start)
    for x in inputs:
        expected = step(expected, jnp.asarray(x), jax.tree.map(jnp.asarray, start))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected)


def test_two_matrices_and_a_bias():
    rng = np.random.default_rng(1)
    start = [rng.standard_normal(s).astype(np.float32) for s in ((6, 5), (5,), (5, 3))]
    inputs = rng.standard_normal((4, 2, 6)).astype(np.float32)

    def step(carry, x, _):
        def loss(params):
            hidden = jax.nn.relu(x @ params[0] + params[1])
            return jnp.sum((hidden @ params[2]) ** 2)

        return jax.tree.map(lambda w, g: w - 0.01 * g, carry, jax.grad(loss)(carry))

    found, grew = walk(step, start, inputs)
    assert grew == {0: 2, 2: 2}
    expected, _ = walk(step, start, inputs, how="whole")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), found, expected)


def test_it_pays_for_a_large_matrix_and_few_steps():
    def pays(shape, b, extent, dtype=jnp.bfloat16):
        start = jax.ShapeDtypeStruct(shape, jnp.float32)
        return _pays(Site(0, b, b * extent.most, dtype, start, start), extent)

    large = (9216, 128)
    assert pays(large, 20, Extent(10, 10, 100))
    assert pays(large, 20, Extent(10, 10, 100), jnp.float32)
    assert pays(large, 20, Extent(50, 14, 25))  # a few clients take many steps
    assert not pays(large, 20, Extent(500, 14, 25))  # too many steps
    assert not pays(large, 20, Extent(50, 50, 100))  # all take many steps
    assert not pays(large, 20, Extent(10, 10, 2))  # few clients
    assert not pays((784, 300), 10, Extent(10, 10, 10))  # a small matrix


# --- the kernels -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@settings(deadline=None, max_examples=5)
@given(b=st.integers(1, 40), d=st.integers(1, 300), room=st.integers(0, 60))
def test_kernels_read_the_rows_that_are_there(dtype, b, d, room):
    counts, most = np.array([0, room // 2, room]), room + b
    rng = np.random.default_rng(b + d)
    x, left, h, start = (
        jnp.asarray(rng.standard_normal(s), dtype) for s in ((3, b, d), (3, most, d), (3, b, most), (3, b, d))
    )
    there = np.arange(most)[None, :] < counts[:, None]
    left = jnp.where(there[..., None], left, jnp.nan)
    known = np.where(there[..., None], np.asarray(left, np.float64), 0)
    shares, longer = jax.vmap(rows.inner)(x, left, jnp.asarray(counts))
    tolerance = {"rtol": 1e-5, "atol": 1e-4}
    meets = np.asarray(x, np.float64) @ known.transpose(0, 2, 1)
    np.testing.assert_allclose(np.where(there[:, None], shares.sum(1), 0), meets, **tolerance)
    short = jax.vmap(partial(rows.meets, dtype=jnp.float32))(x, left, jnp.asarray(counts))
    np.testing.assert_allclose(short, meets, **tolerance)
    total = np.asarray(start, np.float64) + np.where(there[:, None], np.asarray(h, np.float64), 0) @ known
    close = {"rtol": 1e-2, "atol": 2e-2} if dtype == jnp.bfloat16 else tolerance
    np.testing.assert_allclose(
        np.asarray(jax.vmap(rows.outer)(start, h, left, jnp.asarray(counts)), float), total, **close
    )
    parts = jnp.stack([h.astype(jnp.float32) - 1, jnp.ones_like(h, jnp.float32)], 1)
    spread = jax.vmap(rows.spread)(parts, left, jnp.asarray(counts))
    np.testing.assert_allclose(spread, total - np.asarray(start, np.float64), **close)
    expected = np.array(left, np.float32)
    for i, count in enumerate(counts):
        expected[i, count : count + b] = np.asarray(x[i], np.float32)
    np.testing.assert_array_equal(np.asarray(longer, np.float32), expected)
    lanes = jnp.array([2, 0])
    right = jnp.asarray(rng.standard_normal((3, most, 7)), jnp.float32)
    right = jnp.where(there[..., None], right, jnp.nan).astype(jnp.bfloat16).astype(jnp.float32)
    sums = jax.vmap(lambda lane, count: rows.total(left, right, lane, count))(lanes, jnp.asarray(counts)[lanes])
    paired = np.where(there[..., None], np.asarray(right, np.float64), 0)
    np.testing.assert_allclose(sums, (known.transpose(0, 2, 1) @ paired)[[2, 0]], **tolerance)
    np.testing.assert_array_equal(np.asarray(jax.vmap(rows.added)(left, x, jnp.asarray(counts)), np.float32), expected)


def test_kernels_write_no_further_than_there_is_room(monkeypatch):
    """A step may multiply a larger batch than the one that it adds. The next rows in memory belong to another client.

    Pallas' interpret mode drops writes past the end, which a GPU would do. Here such writes put NaN into row 0.
    """
    store = rows.gpu.store

    def visibly(ref, value, *, mask):
        *before, row, column = ref.transforms[0].indices
        store(ref, value, mask=mask)
        first = ref.ref.at[(*before, jnp.zeros_like(row), column)]
        store(first, jnp.full_like(value, jnp.nan), mask=mask & (row >= ref.ref.shape[-2]))

    monkeypatch.setattr(rows.gpu, "store", visibly)
    x, left = jnp.ones((3, 5, 40)), jnp.zeros((3, 8, 40))
    counts = jnp.array([6, 8, 0])
    expected = np.zeros((3, 8, 40))
    expected[0, 6:] = expected[2, :5] = 1
    np.testing.assert_array_equal(jax.vmap(rows.inner)(x, left, counts)[1], expected)
    np.testing.assert_array_equal(jax.vmap(rows.added)(left, x, counts), expected)


def larger(w, x, start):
    """A step that also multiplies a batch of twice the size, after the one that it adds."""
    y = outputs(x @ w)
    seen = outputs(jnp.concatenate([x, 2 * x]) @ w)
    return w - 0.1 * x.T @ (y + 0.1 * seen.sum())


@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_step_may_multiply_more_than_it_adds(on_gpu, monkeypatch):
    monkeypatch.setattr(kernels, "available", lambda: on_gpu)
    rng = np.random.default_rng(0)
    w, inputs = rng.standard_normal((7, 4)).astype(np.float32), rng.standard_normal((3, 2, 7)).astype(np.float32)
    found, grew = walk(larger, w, inputs)
    assert grew == {0: 2}
    for x in inputs:
        w = w - 0.1 * x.T @ (np.tanh(x @ w) + 0.1 * np.tanh(np.concatenate([x, 2 * x]) @ w).sum())
    np.testing.assert_allclose(found, w, rtol=1e-5, atol=1e-5)


# --- whole runs ------------------------------------------------------------------------------------------------------

BATCH = 17  # larger than the few rows for which a CPU uses another method


def split(sizes, d=12, classes=5):
    rng = np.random.default_rng(0)
    arrays = {
        "x": rng.standard_normal((sum(sizes), d)).astype(np.float32),
        "y": rng.integers(0, classes, sum(sizes)).astype(np.int32),
    }
    return fb.Split(arrays, np.concatenate([[0], np.cumsum(sizes)]))


MODEL = models.mlp(12, 5, hidden=(20,))
PARAMS = MODEL.init(jax.random.key(0))
ALIKE, RAGGED = [34] * 7, [25, 9, 40, 51, 17, 12, 3]


def both(alg, data, **options):
    options = {"rounds": 2, "cohort": 6, "plan": "lanes", "chunk": 3} | options
    return [fb.simulate(alg, PARAMS, data, matrices=how, **options) for how in ("grown", "whole")]


def check_same(a, b, rtol=1e-5):
    def check(x, y, start):
        moved = np.abs(np.asarray(y - start)).max()
        assert moved > 0
        np.testing.assert_allclose(x, y, rtol=0, atol=rtol * moved)

    jax.tree.map(check, a, b, PARAMS)


@pytest.mark.parametrize("sizes", [ALIKE, RAGGED], ids=["alike", "ragged"])
@pytest.mark.parametrize(
    ("make", "notice"),
    [
        (lambda: fb.fedavg(MODEL.loss, client_lr=0.3, batch_size=BATCH, epochs=2), None),
        (lambda: fb.fedprox(MODEL.loss, client_lr=0.3, alpha=0.5, batch_size=BATCH, epochs=2), None),
        (
            lambda: fb.scaffold(MODEL.loss, client_lr=0.3, batch_size=BATCH, epochs=2),
            "matrices='grown' has no effect.*(12, 20).*: whole, a step does more than multiply it",
        ),
        (
            lambda: fb.fomaml(MODEL.loss, client_lr=0.3, batch_size=BATCH, epochs=2),
            "matrices='grown' has no effect.*(12, 20).*: whole, a step uses its gradient elsewhere too",
        ),
    ],
    ids=["fedavg", "fedprox", "scaffold", "fomaml"],
)
def test_a_run_is_the_same(make, notice, sizes):
    with told(notice) if notice else nullcontext():
        grown, whole = both(make(), split(sizes))
    check_same(grown.params, whole.params)


def test_a_choice_that_changes_nothing_is_said():
    alg = fb.fedavg(MODEL.loss, client_lr=0.3, batch_size=BATCH)
    with told("matrices='grown' has no effect: it needs the plan 'lanes'"):
        fb.simulate(alg, PARAMS, split(ALIKE), rounds=1, plan="sequential", matrices="grown")


@pytest.mark.parametrize(
    ("plan", "why"), [("sequential", "another plan"), ("lanes", r"\['w'\] .* and 1 more: whole, a step")]
)
def test_so_it_is_without_training(plan, why):
    words = ["model.hidden=[8]", "algorithm.name=fedavg", "algorithm.client_opt=adamw"]
    words += [f"engine.plan={plan}", "engine.matrices=grown"]
    with told(f"matrices='grown' has no effect.*{why}"):
        explain_config(load_config(settings=words))


def grew(alg, sizes, params=PARAMS, how="grown"):
    lanes = Lanes(3, sizes[0] if len(set(sizes)) == 1 else 0)
    return explain(alg, params, data_shapes(split(sizes)), LoweringOptions(matrices=how), lanes).grown()


def test_who_grows():
    lines = grew(fb.fedavg(MODEL.loss, batch_size=BATCH, epochs=2), ALIKE)
    assert lines == [
        "carry.params[0]['w'] (12, 20): the shared matrix plus 17 rows a step, 68 at most",
        "carry.params[1]['w'] (20, 5): the shared matrix plus 17 rows a step, 68 at most",
    ]
    assert "102 at most" in grew(fb.fedprox(MODEL.loss, alpha=0.5, batch_size=BATCH, epochs=2), RAGGED)[0]
    assert not grew(fb.scaffold(MODEL.loss, batch_size=BATCH), ALIKE)
    assert not grew(fb.fomaml(MODEL.loss, batch_size=BATCH), ALIKE)
    assert not grew(fb.fedavg(MODEL.loss, batch_size=BATCH), ALIKE, how="auto")  # not on a CPU
    assert not grew(fb.fedavg(MODEL.loss, batch_size=BATCH), ALIKE, how="whole")


def test_anyones_network_grows():
    net = eqx.nn.MLP(12, 5, 20, 1, key=jax.random.key(0))
    params, static = eqx.partition(net, eqx.is_array)

    def loss(params, batch, key):
        logits = jax.vmap(eqx.combine(params, static))(batch["x"])
        return masked_mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]), batch["mask"])

    alg = fb.fedavg(loss, client_lr=0.3, batch_size=BATCH)
    assert [line.split(":")[0].split(" ", 1)[1] for line in grew(alg, ALIKE, params)] == ["(20, 12)", "(5, 20)"]
    options = {"rounds": 2, "cohort": 6, "plan": "lanes", "chunk": 4}
    a, b = (fb.simulate(alg, params, split(RAGGED), matrices=how, **options).params for how in ("grown", "whole"))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), a, b)


def test_own_local_steps_grow():
    def start(down, state, key):
        return down.params

    def step(params, batch, key, down):
        return jax.tree.map(lambda w, g: w - 0.2 * g, params, jax.grad(MODEL.loss)(params, batch, key))

    def finish(params, down, state, n):
        return fb.Report(fb.Up(jax.tree.map(jnp.subtract, down.params, params)), 1.0)

    alg = fb.fedavg(MODEL.loss)
    work = local_work(start, step, finish, batches_of(batch_size=BATCH, steps=3))
    alg = alg._replace(exchanges=(alg.exchanges[0]._replace(client=work),))
    assert len(grew(alg, RAGGED)) == 2
    grown, whole = both(alg, split(RAGGED))
    check_same(grown.params, whole.params)


def test_rates_as_a_sweep():
    def run(how):
        def one(lr):
            alg = fb.fedprox(MODEL.loss, client_lr=lr, alpha=lr, batch_size=BATCH, epochs=2)
            return fb.simulate(
                alg, PARAMS, split(ALIKE), rounds=2, cohort=4, plan="lanes", chunk=2, matrices=how
            ).params

        return jax.vmap(one)(jnp.array([0.1, 0.4]))

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), run("grown"), run("whole"))


def test_on_several_devices():
    alg = fb.fedavg(MODEL.loss, client_lr=0.3, batch_size=BATCH, epochs=2)
    grown, whole = both(alg, split(RAGGED), devices=2, chunk=2)
    check_same(grown.params, whole.params)


def test_rows_of_a_client_that_went_astray_reach_nobody_else():
    data = split([34] * 6)
    data.arrays["x"][:34] = 1e25  # the loss is NaN after one step
    alg = fb.fedavg(MODEL.loss, client_lr=0.3, batch_size=BATCH, epochs=2)
    for sizes in (None, np.array([0, 34, 68, 110, 136, 170, 204])):
        data = data if sizes is None else fb.Split(data.arrays, sizes)
        grown, whole = both(alg, data, cohort=6, chunk=2, rounds=1, devices=1)
        assert grown.history["train/refused"].tolist() == whole.history["train/refused"].tolist() == [1]
        check_same(grown.params, whole.params)


@pytest.mark.parametrize("sizes", [ALIKE, RAGGED], ids=["alike", "ragged"])
def test_a_run_is_the_same_with_kernels(sizes, monkeypatch):
    alg = fb.fedprox(MODEL.loss, client_lr=0.3, alpha=0.5, batch_size=BATCH)
    options = {"rounds": 2, "cohort": 4, "plan": "lanes", "chunk": 2}
    whole = fb.simulate(alg, PARAMS, split(sizes), matrices="whole", **options)
    monkeypatch.setattr(kernels, "available", lambda: True)  # the kernels still run in interpret mode
    grown = fb.simulate(alg, PARAMS, split(sizes), matrices="grown", **options)
    check_same(grown.params, whole.params)


def test_bfloat16_rounds_as_whole_matrices_do(monkeypatch):
    """On a GPU the rows are kept in bfloat16. A start rounded to bfloat16 shows the effect of that on a round."""
    alg = fb.fedavg(MODEL.loss, client_lr=0.1, batch_size=BATCH)
    options = {"rounds": 1, "cohort": 7, "plan": "lanes", "chunk": 7}
    exact = fb.simulate(alg, PARAMS, split(ALIKE), matrices="whole", **options).params
    monkeypatch.setattr(kernels, "available", lambda: True)
    with told("bfloat16.* has no effect on a CPU"):
        half = fb.simulate(alg, PARAMS, split(ALIKE), matrices="grown", precision="bfloat16", **options).params
    off = jax.tree.map(lambda a, b, p: float(jnp.linalg.norm(a - b) / jnp.linalg.norm(a - p)), half, exact, PARAMS)
    assert 0 < max(jax.tree.leaves(off)) < 0.05


def test_a_choice_is_checked():
    with pytest.raises(ValueError, match="matrices must be one of 'auto', 'grown', 'whole', got 'thin'"):
        fb.simulate(fb.fedavg(MODEL.loss), PARAMS, split(ALIKE), rounds=1, matrices="thin")


def test_explain_names_the_matrices():
    words = ["algorithm.name=fedavg", "engine.plan=lanes", "engine.matrices=grown"]
    made = CliRunner().invoke(make_app(), ["run", "--explain", "--json", *(x for w in words for x in ("--set", w))])
    assert made.exit_code == 0, made.output
    assert any("the shared matrix plus" in line for line in json.loads(made.output)["matrices"]["train"])
