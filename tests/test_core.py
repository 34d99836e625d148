"""The abstraction's own checks: arguments, structure, reduction."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbraid as fb
from fedbraid.core import (
    MEAN,
    Down,
    Report,
    StructureError,
    Up,
    check_choice,
    check_count,
    check_number,
    check_structure,
    failure,
    finite,
    place_of,
    reduce_reports,
)
from fedbraid.costs import data_shapes
from fedbraid.transforms import elastic, norm_bound, quantize
from fedbraid.transforms.uploads import change_exchanges
from zoo import clients, loss, start

pytestmark = pytest.mark.core

DATA = data_shapes(clients())


def broken(**changes):
    alg = fb.fedavg(loss)
    return change_exchanges(alg, ["train"], lambda e: e._replace(**changes))


def test_the_place_of_an_error_is_outside_of_installed_packages(tmp_path):
    """Also of packages of another environment, such as the system's."""
    (tmp_path / "dist-packages").mkdir()
    file = tmp_path / "dist-packages" / "library.py"
    exec(compile("def fail(): raise KeyError('a')", str(file), "exec"), library := {})

    def mine():
        library["fail"]()

    with pytest.raises(KeyError) as caught:
        mine()
    assert place_of(caught.value).startswith("test_core.py, line ")
    assert place_of(caught.value).endswith(", in mine")


@pytest.mark.parametrize(
    "use", [lambda x: 1 if x[0] > 0 else 2, np.asarray, lambda x: [1, 2][x[0].astype(int)], lambda x: x[x > 0]]
)
def test_errors_of_tracing_are_one_sentence_and_a_hint(use):
    with pytest.raises((TypeError, IndexError)) as caught:
        jax.eval_shape(use, jnp.ones(3))
    message = failure("the loss", caught.value)
    assert "\n" not in message
    assert message.startswith("the loss failed at test_core.py, line ")
    assert message.endswith("jnp.where (torch.where in a PyTorch module), jax.lax.cond and jax.numpy")


def test_a_sound_algorithm_passes():
    check_structure(fb.fedavg(loss), start(), DATA)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"send": lambda server: server.params}, ["'train'", "Down", "dict"]),
        ({"client": lambda down, state, data, key: down}, ["'train'", "Report"]),
        ({"client": lambda down, state, data, key: Report(Up(down.params), jnp.ones(3))}, ["'train'", "weight", "[3]"]),
        ({"client": lambda d, s, data, k: Report(Up(d.params), 1.0, state=jnp.zeros(2))}, ["'train'", "client state"]),
        (
            {"receive": lambda server, aggregate, key: server._replace(params={"w": jnp.zeros(2), "b": jnp.zeros(())})},
            ["'train'", "server", "['w']", "[3]", "[2]"],
        ),
        ({"cohort": "same"}, ["'train'", "first"]),
        ({"client": lambda down, state, data, key: 1 / 0}, ["'train'", "client", "division"]),
    ],
)
def test_what_does_not_fit_is_refused_by_exchange_and_leaf(changes, words):
    with pytest.raises(StructureError) as error:
        check_structure(broken(**changes), start(), DATA)
    for word in words:
        assert word in str(error.value)


def test_simulate_checks_structure_before_anything_compiles():
    with pytest.raises(StructureError, match="train"):
        fb.simulate(broken(send=lambda server: server.params), start(), clients(), rounds=1)


def test_a_module_that_holds_functions_is_sent_to_its_adapter():
    params = {**start(), "activation": jax.nn.relu}
    with pytest.raises(StructureError, match=r"\['activation'\].*must be arrays.*from_equinox"):
        fb.simulate(fb.fedavg(loss), params, clients(), rounds=1)


def test_mean_is_weighted_and_renormalises():
    rng = np.random.default_rng(0)
    ups, weights = rng.normal(size=(6, 4)), np.array([1.0, 3.0, 0.0, 2.0, 0.0, 5.0])
    up, weight, count = reduce_reports(MEAN, jnp.asarray(ups), jnp.asarray(weights))
    np.testing.assert_allclose(up, np.average(ups, axis=0, weights=weights), rtol=1e-5)
    assert (float(weight), int(count)) == (11.0, 4)


def test_mean_of_nothing_is_zero_not_nan():
    up, weight, count = reduce_reports(MEAN, jnp.ones((2, 3)), jnp.zeros(2))
    assert np.array_equal(up, np.zeros(3))
    assert (float(weight), int(count)) == (0.0, 0)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.complex64])
@pytest.mark.parametrize("shape", [(), (3,), (3, 4), (2, 3, 4)])
@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
def test_finite_sees_one_bad_number_anywhere(dtype, shape, bad):
    good = jnp.full(shape, 3e38 if dtype == jnp.float32 else 2.0, dtype)
    assert finite({"a": good, "none": jnp.zeros((*shape, 0), dtype), "whole": jnp.arange(3)})
    for place in np.ndindex(shape):
        assert not finite({"a": good.at[place].set(bad)})


def test_finite_sees_every_leaf():
    tree = {"a": jnp.zeros(3), "n": jnp.arange(2)}
    assert finite(tree)
    assert not finite(tree | {"b": jnp.array([1.0, jnp.inf])})
    assert not finite(tree | {"b": jnp.array(jnp.nan)})


def test_change_exchanges_names_what_there_is():
    with pytest.raises(ValueError, match=r"'prox'.*'train'"):
        change_exchanges(fb.fedavg(loss), ["prox"], lambda e: e)


@pytest.mark.parametrize("bad", [-1, float("nan"), float("inf"), "fast", None, [1.0]])
def test_numbers(bad):
    with pytest.raises(ValueError, match="rate"):
        check_number("rate", bad, low=0)


def test_bounds_may_be_open():
    assert check_number("beta", 0.0, low=0, high=1, open_high=True) == 0.0
    with pytest.raises(ValueError, match="of at least 0 and below 1, got 1"):
        check_number("beta", 1.0, low=0, high=1, open_high=True)
    jax.vmap(lambda x: check_number("x", x, low=5))(jnp.arange(2.0))  # traced values are not checked


@pytest.mark.parametrize("bad", [0, -2, 1.5, True, "3"])
def test_counts(bad):
    with pytest.raises(ValueError, match="rounds"):
        check_count("rounds", bad)


def test_choices_are_listed():
    with pytest.raises(ValueError, match=r"kind.*'a'.*'b'.*'c'"):
        check_choice("kind", "c", ("a", "b"))


def test_cost_reads_the_messages():
    def wide(alg):
        return change_exchanges(
            alg, ["train"], lambda e: e._replace(send=lambda server: Down(server.params, {"extra": jnp.zeros(5)}))
        )

    plain, more = (fb.cost(a, start(), clients()) for a in (fb.fedavg(loss), wide(fb.fedavg(loss))))
    assert (plain.model, plain.down, plain.up, plain.multiple) == (16, 16, 16, 2.0)
    assert (more.down, more.up) == (16 + 20, 16)


def test_what_a_client_keeps_is_said_in_the_exchange():
    """``keeps`` names every part of the decoded upload that ``reconcile`` reads; transforms rely on it."""
    assert [e.keeps for e in fb.scaffold(loss).exchanges] == [("aux",)]
    assert [e.keeps for e in fb.feddyn(loss).exchanges] == [("pseudograd",)]
    assert [e.keeps for e in fb.fedavg(loss).exchanges] == [()]
    for alg, part in ((fb.scaffold(loss), "aux"), (fb.feddyn(loss), "pseudograd")):
        silent = change_exchanges(alg, ["train"], lambda e: e._replace(keeps=()))
        with pytest.raises(StructureError, match=rf"'train': reconcile reads the {part}, so keeps must name it"):
            check_structure(silent, start(), DATA)
    wrong = change_exchanges(fb.scaffold(loss), ["train"], lambda e: e._replace(reconcile=lambda c, meant, got: meant))
    with pytest.raises(StructureError, match="reconciled client state"):
        check_structure(wrong, start(), DATA)


@pytest.mark.parametrize("transform", [norm_bound, quantize, lambda alg: elastic(quantize(alg), lambda p, b: b["x"])])
def test_what_is_kept_stays_said_under_transforms(transform):
    """Decoding entry by entry keeps the parts separate; a bound on the norm of the whole upload couples them."""
    alg = transform(fb.scaffold(loss))
    check_structure(alg, start(), DATA)
    assert alg.exchanges[0].keeps == (("pseudograd", "aux") if transform is norm_bound else ("aux",))
