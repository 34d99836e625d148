"""Every algorithm and transform, one row each, on small problems: the laws of test_laws.py run over all rows.

``Row.make`` builds a row's algorithm on a problem. The usual problem is heterogeneous least squares: five clients of 3
to 9 examples, each with its own optimum. ``IMAGES`` has a convolution.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import fedbraid as fb
from fedbraid.core import Algorithm, Report, Up
from fedbraid.testing.problem import SQUARES, Problem, clients, loss, outputs, start  # noqa: F401  (for other tests)
from zoo_row import IMAGES, LOCAL, Row, Varied  # noqa: F401  (for other tests)
from zoo_row import gap as _gap
from zoo_row import refuse_rates as _refuse_rates
from zoo_transforms import TRANSFORMS

BATCHES = ("batch_size",)  # value of Row.local
BOTH = {"client_lr": 0.02, "server_lr": 0.7}  # second values of both rates
ADAM = {"base": "adam", "b1": 0.9, "b2": 0.99, "eps": 0.1, "initial": 0.1}
ADAM_RATES = {"b1": 0.5, "b2": 0.9, "eps": 0.2, "initial": 0.2}
# options of the iterative solvers
SOLVER = {"prox": "accelerated", "max_steps": 4, "tolerance": 0.5, "strong_convexity": 0.1, "smoothness": 20.0}
SOLVER_RATES = {"tolerance": 0.1, "strong_convexity": 0.2, "smoothness": 30.0}

ALGORITHMS: dict[str, Row] = {
    "local_update": Row(
        fb.local_update,
        {"gamma": 0.05, "alpha": 0.1, "theta": (1.0, 0.0, 2.0)},
        BATCHES,
        rates={"gamma": 0.02, "alpha": 0.0, "server_lr": 0.05},
        refuses=(
            (lambda: fb.local_update(loss, gamma=-0.1), "gamma"),
            (lambda: fb.local_update(loss, gamma=0.1, alpha=-1.0), "alpha"),
            (lambda: fb.local_update(loss, gamma=float("nan")), "gamma"),
            (lambda: fb.local_update(loss, gamma=0.1, theta=(0.0, 0.0)), "theta"),
            (lambda: fb.local_update(loss, gamma=0.1, theta=(1.0, -1.0)), "theta"),
            (lambda: fb.local_update(loss, gamma=0.1, theta=()), "theta"),
            (lambda: fb.local_update(loss, gamma=0.1, theta="2:K"), "theta"),
            (lambda: fb.local_update(loss, gamma=0.1, theta=(1.0,), epochs=2), "theta"),
            (lambda: fb.local_update(loss, gamma=0.1, theta="K", message="delta"), "delta"),
            (lambda: fb.local_update(loss, gamma=0.1, batch_size=0), "batch_size"),
            (lambda: fb.local_update(loss, gamma=0.1, epochs=1, steps=2), "epochs"),
            (lambda: fb.local_update(loss, gamma=0.1, steps=0), "steps"),
            (lambda: fb.local_update(loss, gamma=0.1, weighting="rows"), "weighting"),
        ),
    ),
    "minibatch_sgd": Row(
        fb.minibatch_sgd, {"lr": 0.1}, BATCHES, rates={"lr": 0.05}, refuses=_refuse_rates(fb.minibatch_sgd, "lr")
    ),
    "fedsgd": Row(
        fb.fedsgd, {"server_lr": 0.05}, rates={"server_lr": 0.02}, refuses=_refuse_rates(fb.fedsgd, "server_lr")
    ),
    "lookahead": Row(fb.lookahead, {"client_lr": 0.05}, rates=BOTH, refuses=_refuse_rates(fb.lookahead, "client_lr")),
    "fedavg": Row(
        fb.fedavg, {"client_lr": 0.05}, rates=BOTH, refuses=_refuse_rates(fb.fedavg, "client_lr", "server_lr")
    ),
    "reptile": Row(fb.reptile, {"client_lr": 0.05}, rates=BOTH, refuses=_refuse_rates(fb.reptile, "client_lr")),
    "fedprox": Row(
        fb.fedprox,
        {"client_lr": 0.05, "alpha": 0.5},
        rates={**BOTH, "alpha": 0.0},
        refuses=_refuse_rates(fb.fedprox, "alpha", "client_lr"),
    ),
    "meta_minibatch_prox": Row(
        fb.meta_minibatch_prox,
        {"client_lr": 0.05},
        rates={**BOTH, "alpha": 0.5},
        refuses=_refuse_rates(fb.meta_minibatch_prox, "alpha"),
    ),
    "fomaml": Row(
        fb.fomaml,
        {"client_lr": 0.02, "server_lr": 0.1},
        rates={"client_lr": 0.01, "server_lr": 0.2},
        refuses=_refuse_rates(fb.fomaml, "client_lr"),
    ),
    "fedavgm": Row(
        fb.fedavgm,
        {"client_lr": 0.05},
        rates={**BOTH, "momentum": 0.5},
        refuses=(
            *_refuse_rates(fb.fedavgm, "momentum"),
            (lambda: fb.fedavgm(loss, momentum=1.0), "momentum"),
            (lambda: fb.fedavgm(loss, kind="polyak"), "kind"),
        ),
    ),
    "fedadam": Row(
        fb.fedadam,
        {"client_lr": 0.05},
        rates={**BOTH, "b1": 0.5, "b2": 0.9, "tau": 0.01},
        refuses=_refuse_rates(fb.fedadam, "tau", "b1"),
    ),
    "fedyogi": Row(
        fb.fedyogi,
        {"client_lr": 0.05},
        rates={**BOTH, "b1": 0.5, "b2": 0.9, "tau": 0.01},
        refuses=_refuse_rates(fb.fedyogi, "tau", "b2"),
    ),
    "fedadagrad": Row(
        fb.fedadagrad,
        {"client_lr": 0.05},
        rates={**BOTH, "b1": 0.5, "tau": 0.01},
        refuses=_refuse_rates(fb.fedadagrad, "tau"),
    ),
    "fedopt": Row(
        fb.fedopt,
        {"client_lr": 0.05, "client_opt": "adam", "server_opt": {"name": "momentum", "momentum": 0.5}},
        rates=BOTH,
        refuses=(
            (lambda: fb.fedopt(loss, client_opt="adamm"), "client_opt"),
            (lambda: fb.fedopt(loss, server_opt={"name": "sgd", "beta": 1}), "server_opt"),
            (lambda: fb.fedopt(loss, client_opt_state="lost"), "client_opt_state"),
        ),
    ),
    "diloco": Row(
        fb.diloco,
        {"client_lr": 0.05},
        rates={**BOTH, "momentum": 0.5, "weight_decay": 0.2},
        refuses=_refuse_rates(fb.diloco, "client_lr", "momentum"),
    ),
    "fedexp": Row(
        fb.fedexp,
        {"client_lr": 0.05, "eps": 1e-3, "limit": 50.0},
        rates={"client_lr": 0.02, "eps": 0.1},
        varied=(Varied({"client_lr": 0.3, "eps": 0.0}, {"limit": 1.0}),),
        refuses=(
            *_refuse_rates(fb.fedexp, "client_lr", "eps", "limit"),
            (lambda: fb.fedexp(loss, average=1), "average"),
        ),
    ),
    "fedhyper": Row(
        fb.fedhyper,
        {"client_lr": 0.05},
        rates={"client_lr": 0.02, "beta": 0.5},
        varied=(Varied({"beta": 1.0}, {"limit": 1.5}),),
        refuses=(
            *_refuse_rates(fb.fedhyper, "client_lr", "beta", "limit"),
            (lambda: fb.fedhyper(loss, rule="subtractive"), "rule"),
        ),
    ),
    "delta_sgd": Row(
        fb.delta_sgd,
        {"client_lr": 0.05},
        rates={**BOTH, "gamma": 0.1, "delta": 0.5},
        refuses=_refuse_rates(fb.delta_sgd, "client_lr", "gamma", "delta", "server_lr"),
    ),
    "feddog": Row(
        fb.feddog,
        {"initial": 1e-2},
        rates={"initial": 1e-3},
        refuses=(*_refuse_rates(fb.feddog, "initial"), (lambda: fb.feddog(loss, weighting="rows"), "weighting")),
    ),
    "fedauto": Row(
        fb.fedauto,
        {"server_lr": 0.5},
        rates={"caution": 0.3, "server_lr": 0.2, "momentum": 0.5, "tau": 0.3, "beta": 0.3},
        refuses=_refuse_rates(fb.fedauto, "caution", "server_lr", "momentum", "tau", "beta"),
    ),
    "fedauto_ahead": Row(
        fb.fedauto_ahead,
        {"server_lr": 0.2},
        rates={"caution": 0.3, "server_lr": 0.1, "momentum": 0.5, "tau": 0.3, "beta": 0.3, "doubt": 0.7},
        refuses=_refuse_rates(fb.fedauto_ahead, "caution", "server_lr", "momentum", "tau", "beta", "doubt"),
    ),
    "fedgd": Row(
        fb.fedgd,
        {"step": 0.05, "local_steps": 2},
        (),
        rates={"step": 0.02},
        refuses=(*_refuse_rates(fb.fedgd, "step"), (lambda: fb.fedgd(loss, objective="total"), "objective")),
    ),
    "fedprox_exact": Row(
        fb.fedprox_exact,
        {"step": 0.5, "prox": "closed-form"},
        (),
        rates={"step": 0.2, "server_lr": 0.7},
        varied=(Varied(SOLVER, SOLVER_RATES),),
        refuses=(*_refuse_rates(fb.fedprox_exact, "step"), (lambda: fb.fedprox_exact(loss, prox="exact"), "prox")),
    ),
    "fedsplit": Row(
        fb.fedsplit,
        {"step": 0.5, "prox": "closed-form", "relaxation": 1.0},
        (),
        rates={"step": 0.2, "relaxation": 0.5},
        # without a step, l and L set it
        varied=(
            Varied({**SOLVER, "step": None, "regularization": 0.2}, {**SOLVER_RATES, "regularization": 0.1}),
            Varied({"prox": "stochastic", "prox_lr": 0.1}, {"prox_lr": 0.05}),
        ),
        invariant=lambda server, states: max(
            jnp.abs(x - z.mean(0)).max()
            for x, z in zip(jax.tree.leaves(server.params), jax.tree.leaves(states.z), strict=True)
        ),
        exact=True,
        refuses=(
            *_refuse_rates(fb.fedsplit, "step", "relaxation", "regularization"),
            (lambda: fb.fedsplit(loss, prox="gradient"), "smoothness"),
            (lambda: fb.fedsplit(loss, estimate="dense"), "data"),
            (lambda: fb.fedsplit(loss, batch_size=4), "batch_size"),
            (lambda: fb.fedsplit(loss, prox="stochastic"), "smoothness"),
            (lambda: fb.fedsplit(loss, prox="stochastic", prox_lr=0.0), "prox_lr"),
        ),
    ),
    "maml": Row(
        fb.maml,
        {"client_lr": 0.02, "steps": 2, "server_lr": 0.1},
        BATCHES,
        rates={"client_lr": 0.01, "alpha": 0.5, "server_lr": 0.2},
        draws=True,  # the split into support and query sets is random
        refuses=(
            *_refuse_rates(fb.maml, "client_lr", "alpha", "server_lr"),
            (lambda: fb.maml(loss, support=0.0), "support"),
            (lambda: fb.maml(loss, order="zeroth"), "order"),
            (lambda: fb.maml(loss, steps=0), "steps"),
        ),
    ),
    "server_only": Row(
        fb.server_only,
        {"base": "momentum", "beta": 0.9, "lr": 0.1, "weighting": "uniform"},
        BATCHES,
        rates={"lr": 0.05, "beta": 0.5},
        varied=(Varied({**ADAM, "beta": None}, ADAM_RATES),),
        exact=True,
        refuses=(*_refuse_rates(fb.server_only, "lr"), (lambda: fb.server_only(loss, base="newton"), "base")),
    ),
    "server_only_mvr": Row(
        fb.server_only_mvr,
        {"a": 0.3, "lr": 0.1, "weighting": "uniform"},
        BATCHES,
        rates={"a": 0.6, "lr": 0.05},
        exact=True,
        refuses=_refuse_rates(fb.server_only_mvr, "a", "lr"),
    ),
    "mime": Row(
        fb.mime,
        {"base": "momentum", "beta": 0.9, "client_lr": 0.05, "weighting": "uniform"},
        rates={**BOTH, "beta": 0.5},
        varied=(Varied({**ADAM, "beta": None}, ADAM_RATES),),
        exact=True,
        refuses=(
            *_refuse_rates(fb.mime, "client_lr", "server_lr", "beta"),
            (lambda: fb.mime(loss, base="adam", beta=0.9), "beta"),
            (lambda: fb.mime(loss, protocol="eager"), "protocol"),
        ),
    ),
    "mimelite": Row(
        fb.mimelite,
        {**ADAM, "eps": 1e-3, "initial": 0.0, "client_lr": 0.01, "protocol": "split-cohort"},
        rates={"client_lr": 0.005, "server_lr": 0.7, **ADAM_RATES},
        varied=(
            Varied(
                {"base": "momentum", "beta": 0.9, "b1": None, "b2": None, "eps": None, "initial": None}, {"beta": 0.5}
            ),
        ),
        refuses=_refuse_rates(fb.mimelite, "client_lr", "server_lr"),
    ),
    "locmime": Row(
        fb.locmime,
        {"base": "momentum", "beta": 0.9, "client_lr": 0.05, "weighting": "uniform"},
        rates={**BOTH, "beta": 0.5},
        varied=(Varied({**ADAM, "beta": None}, ADAM_RATES),),
        exact=True,
        refuses=_refuse_rates(fb.locmime, "client_lr", "server_lr"),
    ),
    "mime_mvr": Row(  # not protocol="lagged": its first round does not change the model, which the sign law needs
        fb.mime_mvr,
        {"a": 0.3, "client_lr": 0.05, "protocol": "two-phase", "weighting": "uniform"},
        rates={**BOTH, "a": 0.6},
        exact=True,
        refuses=_refuse_rates(fb.mime_mvr, "a", "client_lr", "server_lr"),
    ),
    "mimelite_mvr": Row(
        fb.mimelite_mvr,
        {"a": 0.3, "client_lr": 0.05},
        rates={**BOTH, "a": 0.6},
        refuses=_refuse_rates(fb.mimelite_mvr, "a", "client_lr", "server_lr"),
    ),
    "scaffold": Row(
        fb.scaffold,
        {"client_lr": 0.05, "weighting": "examples"},
        rates=BOTH,
        invariant=lambda server, states: _gap(server.c, states),
        exact=True,
        refuses=(
            *_refuse_rates(fb.scaffold, "client_lr", "server_lr"),
            (lambda: fb.scaffold(loss, option="III"), "option"),
        ),
    ),
    "feddyn": Row(
        fb.feddyn,
        {"client_lr": 0.05, "alpha": 1.0},
        rates={"client_lr": 0.02, "alpha": 2.0},
        invariant=lambda server, states: _gap(server.h, states),
        exact=True,
        refuses=_refuse_rates(fb.feddyn, "alpha", "client_lr"),
    ),
    "fedac": Row(
        fb.fedac,
        {"client_lr": 0.05, "alpha": 3.0, "beta": 4.0, "gamma": 0.1},
        rates={"client_lr": 0.02, "alpha": 2.0, "beta": 2.0, "gamma": 0.05},
        varied=(
            Varied(
                {"alpha": None, "beta": None, "gamma": None, "variant": "I"},
                {"client_lr": 0.02, "strong_convexity": 0.5},
            ),
        ),
        refuses=(
            *_refuse_rates(fb.fedac, "client_lr", "strong_convexity"),
            (lambda: fb.fedac(loss, variant="III"), "variant"),
            (lambda: fb.fedac(loss, alpha=2.0, gamma=0.1), "beta"),
            (lambda: fb.fedac(loss, alpha=0.5, beta=2.0, gamma=0.1), "alpha"),
            (lambda: fb.fedac(loss, epochs=2), "steps"),
            (lambda: fb.fedac(loss, client_lr=20.0, strong_convexity=1.0), "client_lr"),
        ),
    ),
    "q_fedavg": Row(
        fb.q_fedavg,
        {"client_lr": 0.05, "q": 1.5},
        rates={"client_lr": 0.02, "q": 0.5},
        varied=(Varied({"smoothness": 20.0}, {"smoothness": 30.0}),),
        refuses=_refuse_rates(fb.q_fedavg, "q", "client_lr", "smoothness"),
    ),
    "afl": Row(
        fb.afl,
        {"lr": 0.05, "lambda_lr": 0.02},
        BATCHES,
        rates={"lr": 0.02, "lambda_lr": 0.1},
        refuses=(*_refuse_rates(fb.afl, "lr", "lambda_lr"), (lambda: fb.afl(loss, output="best"), "output")),
    ),
    "fedper": Row(
        fb.fedper,
        {"client_lr": 0.05, "head": "b"},
        rates={"client_lr": 0.02},
        refuses=((lambda: fb.fedper(loss), "head"), *_refuse_rates(fb.fedper, "client_lr")),
    ),
    "lg_fedavg": Row(
        fb.lg_fedavg,
        {"client_lr": 0.05, "head": "w"},
        rates={"client_lr": 0.02},
        refuses=((lambda: fb.lg_fedavg(loss), "head"), *_refuse_rates(fb.lg_fedavg, "client_lr")),
    ),
    "fedrep": Row(
        fb.fedrep,
        {"client_lr": 0.05, "head_lr": 0.1, "head": "b"},
        rates={"client_lr": 0.02, "head_lr": 0.05},
        refuses=(
            (lambda: fb.fedrep(loss), "head"),
            (lambda: fb.fedrep(loss, head="b", head_lr=-1.0), "head_lr"),
            (lambda: fb.fedrep(loss, head="b", steps=2, head_epochs=2), "head_steps"),
            (lambda: fb.fedrep(loss, head="b", head_epochs=0), "head_epochs"),
            (lambda: fb.fedrep(loss, head="b", client_lr=-1.0), "client_lr"),
        ),
    ),
    "fedbabu": Row(
        fb.fedbabu,
        {"client_lr": 0.05, "tune_lr": 0.1, "head": "b"},
        rates={"client_lr": 0.02, "tune_lr": 0.05},
        refuses=(
            (lambda: fb.fedbabu(loss), "head"),
            (lambda: fb.fedbabu(loss, head="b", tune_lr=-1.0), "tune_lr"),
            (lambda: fb.fedbabu(loss, head="b", tune_epochs=-1), "tune_epochs"),
            (lambda: fb.fedbabu(loss, head="b", client_lr=-1.0), "client_lr"),
        ),
    ),
    "fednova": Row(
        fb.fednova,
        {"client_lr": 0.05, "rho": 0.5, "alpha": 0.1},
        rates={**BOTH, "rho": 0.0, "alpha": 0.0},
        refuses=_refuse_rates(fb.fednova, "client_lr", "server_lr", "rho", "alpha"),
    ),
    "ditto": Row(
        fb.ditto,
        {"client_lr": 0.05, "lam": 0.5},
        rates={**BOTH, "lam": 0.0},
        varied=(Varied({"personal_lr": 0.05}, {"personal_lr": 0.02}),),
        refuses=_refuse_rates(fb.ditto, "lam", "client_lr", "personal_lr"),
    ),
    "apfl": Row(
        fb.apfl,
        {"client_lr": 0.05, "alpha": 0.4, "adapt": True, "alpha_lr": 0.05},
        rates={**BOTH, "alpha": 0.7, "alpha_lr": 0.02},
        refuses=(
            *_refuse_rates(fb.apfl, "alpha", "client_lr", "alpha_lr"),
            (lambda: fb.apfl(loss, alpha=1.5), "alpha"),
            (lambda: fb.apfl(loss, alpha=0.0, adapt=True), "alpha"),
        ),
    ),
    "pfedme": Row(
        fb.pfedme,
        {"client_lr": 0.05, "personal_lr": 0.05, "lam": 4.0, "inner_steps": 2},
        rates={**BOTH, "personal_lr": 0.02, "lam": 2.0},
        refuses=(
            *_refuse_rates(fb.pfedme, "lam", "client_lr", "personal_lr"),
            (lambda: fb.pfedme(loss, inner_steps=0), "inner_steps"),
        ),
    ),
    "fedcm": Row(
        fb.fedcm,
        {"client_lr": 0.05, "alpha": 0.4},
        rates={**BOTH, "alpha": 0.7},
        refuses=(*_refuse_rates(fb.fedcm, "alpha", "client_lr"), (lambda: fb.fedcm(loss, alpha=0.0), "alpha")),
    ),
    "fedsam": Row(
        fb.fedsam,
        {"client_lr": 0.05, "rho": 0.1},
        rates={**BOTH, "rho": 0.3},
        refuses=_refuse_rates(fb.fedsam, "rho", "client_lr"),
    ),
    "mofedsam": Row(
        fb.mofedsam,
        {"client_lr": 0.05, "rho": 0.1, "alpha": 0.4},
        rates={**BOTH, "rho": 0.3, "alpha": 0.7},
        refuses=_refuse_rates(fb.mofedsam, "rho", "alpha"),
    ),
    "fedacg": Row(
        fb.fedacg,
        {"client_lr": 0.05},
        rates={**BOTH, "lam": 0.5, "beta": 0.5},
        refuses=(*_refuse_rates(fb.fedacg, "lam", "beta", "server_lr"), (lambda: fb.fedacg(loss, lam=1.0), "lam")),
    ),
    "feddc": Row(
        fb.feddc,
        {"client_lr": 0.05, "alpha": 1.0},
        rates={"client_lr": 0.02, "alpha": 2.0},
        invariant=lambda server, states: jnp.maximum(_gap(server.h, states.h), _gap(server.c, states.c)),
        exact=True,
        refuses=(*_refuse_rates(fb.feddc, "alpha", "client_lr"), (lambda: fb.feddc(loss, correction=2), "correction")),
    ),
    "fedspeed": Row(
        fb.fedspeed,
        {"client_lr": 0.05, "lam": 1.0},
        rates={"client_lr": 0.02, "lam": 0.5, "rho": 0.05, "alpha": 0.5},
        refuses=(*_refuse_rates(fb.fedspeed, "lam", "rho", "alpha"), (lambda: fb.fedspeed(loss, alpha=1.5), "alpha")),
    ),
    "ifca": Row(
        fb.ifca,
        {"client_lr": 0.05, "spread": 0.01},
        rates=BOTH,
        refuses=(
            *_refuse_rates(fb.ifca, "client_lr", "spread", "server_lr"),
            (lambda: fb.ifca(loss, clusters=0), "clusters"),
        ),
    ),
    "fedala": Row(
        fb.fedala,
        {"client_lr": 0.05},
        rates={**BOTH, "weight_lr": 0.2},
        draws=True,  # the examples on which the weights are learned
        refuses=(
            *_refuse_rates(fb.fedala, "weight_lr", "share"),
            (lambda: fb.fedala(loss, weight_epochs=0), "weight_epochs"),
        ),
    ),
}

ELSEWHERE = {
    "pfnm": "algorithms/test_pfnm.py",
    "flexlora": "algorithms/test_flexlora.py",
    "local_only": "algorithms/test_personal.py",
    "moon": "algorithms/test_features.py",
    "fedproto": "algorithms/test_features.py",
    "fedbn": "algorithms/test_fedbn.py",
    "fedrod": "algorithms/test_features.py",
}
"""Algorithms for one kind of network or without a global model, and the test that runs `fedbraid.testing.check`."""

ROWS: dict[str, Row] = {**ALGORITHMS, **{f"transform:{name}": row for name, row in TRANSFORMS.items()}}


def counting() -> Algorithm:
    """A stateful algorithm with two exchanges: clients count their participations and sum what they received."""

    def client(down, state, data, key):
        batch = data.everything()
        seen = jnp.sum(batch["y"] * batch["mask"])
        count = state["count"] + 1
        return Report(Up(0.1 * seen * down.params / count), 1.0, {"count": count, "seen": state["seen"] + seen})

    alg = fb.fedavg(loss)
    exchange = alg.exchanges[0]
    one = exchange._replace(
        name="one", send=lambda s: fb.Down(s), client=client, receive=lambda s, a, k: s - a.up.pseudograd
    )
    return fb.Algorithm(
        init=lambda params: params,
        init_client=lambda params: {"count": jnp.zeros((), jnp.int32), "seen": jnp.zeros(())},
        exchanges=(one, one._replace(name="two", cohort="same"), one._replace(name="three")),
        params=lambda server: server,
    )


def optimum() -> dict[str, np.ndarray]:
    """The minimizer of the mean over clients of their mean losses (uniform weights), by NumPy."""
    split = clients()
    normal, right = np.zeros((4, 4)), np.zeros(4)
    for i in range(split.num_clients):
        own = split.client(i)
        a = np.column_stack([own["x"], np.ones(len(own["y"]))])
        normal += a.T @ a / len(a)
        right += a.T @ own["y"] / len(a)
    solution = np.linalg.solve(normal, right)
    return {"w": solution[:3], "b": solution[3]}
