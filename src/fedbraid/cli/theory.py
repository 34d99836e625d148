"""``fedbraid theory``: operating points, frontiers, fixed points and bounds from the command line."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedbraid.cli.finite_json import print_json

if TYPE_CHECKING:
    from fedbraid.theory import QuadraticFederation

app: typer.Typer = typer.Typer(
    help="Compute what a method converges to, and how fast, without training.", no_args_is_help=True
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Out = Annotated[Path | None, typer.Option("--out", help="Write a figure (.png, .pdf or .svg).")]
Mu = Annotated[float, typer.Option(help="Smallest eigenvalue of any client, mu.")]
Smoothness = Annotated[float, typer.Option("--smoothness", "-L", help="Largest eigenvalue of any client, L.")]
ThetaText = Annotated[str, typer.Option("--theta", help="1:K (FedAvg), K (FOMAML), maml, or weights such as 0,0.5,1.")]
Steps = Annotated[int | None, typer.Option("--steps", "-K", help="Local steps K.")]
Alpha = Annotated[float, typer.Option(help="Proximal strength (FedProx).")]


@app.command("point")
def point_command(
    mu: Mu,
    smoothness: Smoothness,
    gamma: Annotated[float, typer.Option(help="Client learning rate.")],
    theta: ThetaText = "1:K",
    steps: Steps = None,
    alpha: Alpha = 0.0,
    spectrum: Annotated[
        str, typer.Option(help="Eigenvalues of the client, such as 1,3,10; kappa is computed from them.")
    ] = "",
    out: Out = None,
    as_json: Json = False,
) -> None:
    """kappa, Delta and rho of one operating point, and the server settings that reach rho."""
    from fedbraid.theory import MOMENTA, parse_theta, point, server_optimizer

    chosen = parse_theta(theta, steps)
    p = point(
        mu=mu, smoothness=smoothness, gamma=gamma, theta=chosen, alpha=alpha, eigenvalues=_numbers(spectrum) or None
    )
    servers = {}
    if p.log_strong_convexity > -300 and p.log_smoothness < 300:
        servers = {m: server_optimizer(p.smoothness, p.strong_convexity, m)._asdict() for m in MOMENTA}
    result = {
        "kappa": p.kappa,
        "kappa0": p.kappa0,
        "delta": p.delta,
        "rho": p.rho,
        "method": p.method,
        "notes": list(p.notes),
        "server": servers,
    }
    if out is not None:
        from fedbraid.theory.figures import frontier_figure, save
        from fedbraid.theory.frontier import pareto_frontier

        gamma_half = 0.5 / (smoothness + alpha)
        curves = {
            f"FedAvg, {m}": pareto_frontier(mu=mu, smoothness=smoothness, gamma=gamma_half, momentum=m) for m in MOMENTA
        }
        title = f"{chosen}, $\\mu$ = {mu:g}, L = {smoothness:g}"
        result["picture"] = str(save(frontier_figure(curves, title=title, mark=p), out))
    if as_json:
        return print_json(result)
    print(f"kappa   {p.kappa:.6f}   (of kappa0 = {p.kappa0:g}; {p.method})")
    print(f"Delta   {p.delta:.6f}")
    for m in MOMENTA:
        tuned = servers.get(m)
        how = f"   server step {tuned['step']:.6g}, momentum {tuned['momentum']:.6g}" if tuned else ""
        print(f"rho     {p.rho[m]:.6f}   {m}{how}")
    _print_notes(p.notes, out)


@app.command("frontier")
def frontier_command(
    figure: Annotated[int | None, typer.Option(help="Draw this figure of the paper: 1 to 5, 7 to 10.")] = None,
    mu: Mu = 1.0,
    smoothness: Smoothness = 10.0,
    gamma: Annotated[float | None, typer.Option(help="Client learning rate, fixed while K varies.")] = None,
    theta: ThetaText = "1:K",
    steps: Steps = None,
    alpha: Alpha = 0.0,
    over: Annotated[str, typer.Option(help="Vary steps or gamma.")] = "steps",
    momentum: Annotated[str, typer.Option(help="none, nesterov, heavy_ball, or all.")] = "all",
    points: Annotated[int, typer.Option(help="Number of points of each curve to report.")] = 25,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """The convergence-accuracy frontier over K or gamma, or one of the paper's figures."""
    from fedbraid.theory import MOMENTA, pareto_frontier

    if figure is not None:
        from fedbraid.theory.figures import FIGURES, save

        if figure not in FIGURES:
            raise ValueError(f"--figure must be one of {', '.join(map(str, FIGURES))}, got {figure}")
        path = save(FIGURES[figure](), out or Path(f"figure{figure}.png"))
        return print_json({"figure": figure, "picture": str(path)}) if as_json else print(f"wrote {path}")
    if points < 2:
        raise ValueError(f"--points must be at least 2, got {points}")
    wanted: tuple[Any, ...] = MOMENTA if momentum == "all" else (momentum,)
    common, values = _frontier_axis(
        theta, over, {"mu": mu, "smoothness": smoothness, "alpha": alpha}, gamma, steps, points
    )
    curves = {m: pareto_frontier(**common, momentum=m, values=values) for m in wanted}
    result: dict[str, Any] = {
        **common,
        "values": values.tolist(),
        "curves": {m: {"rho": f.rho.tolist(), "delta": f.delta.tolist()} for m, f in curves.items()},
    }
    if out is not None:
        from fedbraid.theory.figures import NAMES, frontier_figure, save

        smooth = {NAMES[m]: pareto_frontier(**common, momentum=m) for m in wanted}
        title = f"$\\mu$ = {mu:g}, L = {smoothness:g}, $\\alpha$ = {alpha:g}, $\\Theta$ = {theta}"
        result["picture"] = str(save(frontier_figure(smooth, title=title), out))
    if as_json:
        return print_json(result)
    first = next(iter(curves.values()))
    print(f"{'K' if over == 'steps' else 'gamma':>10} {'Delta':>10} " + " ".join(f"rho {m:>12}" for m in wanted))
    for i, v in enumerate(values):
        rates = " ".join(f"{f.rho[i]:16.6f}" for f in curves.values())
        print(f"{v:>10.6g} {first.delta[i]:10.6f} {rates}")
    _print_notes((), out)


def _frontier_axis(
    theta: str, over: str, curvature: dict[str, float], gamma: float | None, steps: int | None, points: int
) -> tuple[dict[str, Any], Any]:
    """The arguments of `pareto_frontier`, and the values of K or gamma to report."""
    import numpy as np

    family = {"1:K": "sum", "K": "last", "MAML": "maml"}.get(theta.strip().upper())
    if family is None:
        raise ValueError(f"--theta must be 1:K, K or maml for a frontier, got {theta!r}")
    top = curvature["smoothness"] + curvature["alpha"]
    if over == "steps":
        gamma = 0.5 / top if gamma is None else gamma
        values = np.unique(np.round(np.geomspace(1, 1_000_000, points)).astype(int))
    else:
        steps = 100 if steps is None else steps
        values = np.linspace(0.0, 1.0 / top, points + 1)[:-1]
    return {**curvature, "family": family, "over": over, "gamma": gamma, "steps": steps}, values


@app.command("fixed-point")
def fixed_point_command(
    problem: Annotated[str, typer.Option(help="gaussian, conditioned, random, or a .npz file with A and b.")] = (
        "gaussian"
    ),
    clients: Annotated[int, typer.Option(help="Clients of a generated problem.")] = 25,
    dim: Annotated[int, typer.Option(help="Parameters of a generated problem.")] = 100,
    examples: Annotated[int, typer.Option(help="Examples per client of a generated problem.")] = 500,
    kappa: Annotated[float, typer.Option(help="Condition number (conditioned, random).")] = 100.0,
    seed: Annotated[int, typer.Option(help="Seed of a generated problem.")] = 0,
    step: Annotated[float | None, typer.Option(help="Step s of FedGD and FedProx (default 1 / L).")] = None,
    local_steps: Annotated[str, typer.Option(help="Local steps e of FedGD, several allowed: 1,10,100.")] = "1,10,100",
    epsilon: Annotated[float, typer.Option(help="Count rounds until F - F* is at most this.")] = 1e-3,
    rounds: Annotated[int, typer.Option(help="Number of rounds to compute.")] = 1000,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Fixed points of FedGD(s, e), FedProx and FedSplit on least squares, their errors, and rounds to epsilon."""
    fed = _problem(problem, clients, dim, examples, kappa, seed)
    if rounds < 1:
        raise ValueError(f"--rounds must be at least 1, got {rounds}")
    s = 1.0 / fed.smoothness if step is None else step
    histories, methods = _fixed_points(fed, s, [int(v) for v in _numbers(local_steps)], rounds, epsilon)
    result: dict[str, Any] = {
        "clients": fed.num_clients,
        "dim": fed.dim,
        "mu": fed.mu,
        "smoothness": fed.smoothness,
        "step": s,
        "epsilon": epsilon,
        "minimizer": fed.minimizer.tolist(),
        "methods": methods,
    }
    if out is not None:
        from fedbraid.theory.figures import fixed_point_figure, save

        title = f"{fed.num_clients} clients, d = {fed.dim}, $\\kappa_0$ = {fed.kappa0:.4g}"
        result["picture"] = str(save(fixed_point_figure(histories, title=title), out))
    if as_json:
        return print_json(result)
    print(f"{fed.num_clients} clients, d = {fed.dim}, eigenvalues {fed.mu:.4g} .. {fed.smoothness:.4g}, s = {s:.4g}")
    print(f"{'method':<16} {'||x - x*||':>12} {'F(x) - F*':>12} {'rounds to ' + format(epsilon, 'g'):>18}")
    for name, m in methods.items():
        reached = m["rounds_to_epsilon"]
        count = "never" if reached is None and m["gap"] > epsilon else f"> {rounds}" if reached is None else reached
        print(f"{name:<16} {m['distance']:>12.4e} {m['gap']:>12.4e} {count!s:>18}")
    _print_notes((), out)


def _fixed_points(
    fed: QuadraticFederation, step: float, local_steps: list[int], rounds: int, epsilon: float
) -> tuple[dict[str, Any], dict[str, Any]]:
    """For each method: its gaps over the rounds, and a summary of its fixed point."""
    import numpy as np

    from fedbraid import theory

    t = np.arange(rounds + 1)
    found: dict[str, tuple[Any, Any]] = {}
    for e in local_steps:
        at = theory.fedgd_fixed_point(fed, step=step, local_steps=e)
        found[f"FedGD(e = {e})"] = (at, theory.fedgd_gap(fed, t, step=step, local_steps=e))
    found["FedProx"] = (theory.fedprox_fixed_point(fed, step=step), theory.fedprox_gap(fed, t, step=step))
    if np.allclose(fed.weights, 1.0 / fed.num_clients) and fed.mu > 0:
        found["FedSplit"] = (theory.fedsplit_fixed_point(fed).x, theory.fedsplit_gap(fed, rounds))
    methods = {}
    for name, (at, gaps) in found.items():
        away = at - fed.minimizer
        methods[name] = {
            "distance": float(np.linalg.norm(away)),
            "gap": float(0.5 * fed.num_clients * away @ fed.hessian @ away),
            "rounds_to_epsilon": theory.rounds_until(gaps, epsilon),
            "fixed_point": at.tolist(),
        }
    return {name: (t, gaps) for name, (_, gaps) in found.items()}, methods


@app.command("bound")
def bound_command(
    name: Annotated[str, typer.Argument(help="Name of the bound (default: list all bounds).")] = "",
    settings: Annotated[list[str] | None, typer.Option("--set", "-s", help="name=value; may be repeated.")] = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Evaluate a published bound: its value, its terms, and which of its assumptions were checked."""
    import inspect

    from fedbraid.theory import bounds, mime, parse_theta

    table = {
        "suboptimality": bounds.suboptimality_bound,
        "trajectory": bounds.trajectory_bound,
        "drift": bounds.drift_bound,
        "progress": bounds.round_progress_bound,
        "fedavg": bounds.fedavg_bound,
        "aggregation": bounds.aggregation_bound,
        "aggregation-rate": bounds.aggregation_rate,
        "lower-bound": bounds.aggregation_lower_bound,
        "mime": bounds.mime_rounds,
        "mime-noise": mime.mime_noise_bound,
        "mime-drift": mime.mime_drift_bound,
        "mime-sgd": mime.mime_sgd_bound,
        "mime-adam": mime.mime_adam_bound,
        "mime-mvr": mime.mime_mvr_bound,
    }
    if not name:
        listing = {k: (inspect.getdoc(f) or "").splitlines()[0] for k, f in table.items()}
        if as_json:
            return print_json({"bounds": listing})
        for k, line in listing.items():
            print(f"{k:<18} {line}")
        return None
    if name not in table:
        raise ValueError(f"no bound is called {name!r}; choose one of {', '.join(table)}")
    given: dict[str, Any] = {}
    for item in settings or []:
        key, found, value = item.partition("=")
        if not found:
            raise ValueError(f"--set must be name=value, got {item!r}")
        given[key.strip().replace("-", "_")] = _value(value)
    parameters = inspect.signature(table[name]).parameters
    allowed = [p for p in parameters if p != "evidence"]
    if "theta" in parameters:  # as in the other commands, theta is text and steps is a separate setting
        given["theta"] = parse_theta(str(given.get("theta", "1:K")), given.pop("steps", None))
    for key in given:
        if key not in allowed:
            raise ValueError(f"{name} has no setting {key!r}; it takes {', '.join(allowed)}")
    needed = [k for k, p in parameters.items() if p.default is inspect.Parameter.empty and k not in given]
    if needed:
        raise ValueError(f"{name} needs {', '.join(needed)}; give --set {needed[0]}=...")
    bound = table[name](**given)
    result = bound.as_dict()
    if out is not None:
        from fedbraid.theory.figures import bound_figure, save

        result["picture"] = str(save(bound_figure(bound), out))
    if as_json:
        return print_json(result)
    print(bound)
    return _print_notes((), out)


@app.command("worst-case")
def worst_case_command(
    algorithm: Annotated[str, typer.Option(help="fedavg, fedprox, mime, scaffold or fedsplit.")] = "",
    client_lr: Annotated[
        float | None, typer.Option(help="Client step size; for fedprox and fedsplit the step s of the prox.")
    ] = None,
    steps: Annotated[int, typer.Option("--steps", "-K", help="Local steps K.")] = 1,
    clients: Annotated[int, typer.Option(help="Clients n, all in every round.")] = 2,
    rounds: Annotated[int, typer.Option(help="Rounds R.")] = 1,
    mu: Annotated[float, typer.Option(help="Strong convexity of every client.")] = 0.1,
    smoothness: Smoothness = 1.0,
    zeta: Annotated[
        float, typer.Option(help="How far clients' gradients differ at the minimizer; inf is allowed.")
    ] = 0.0,
    measure: Annotated[str, typer.Option(help="distance, gap, 'mean gap', 'gap factor' or contraction.")] = "distance",
    out: Out = None,
    as_json: Json = False,
) -> None:
    """The exact worst case of a method over all smooth convex clients.

    Without --algorithm: a table of the worst cases of several methods beside the published theorems.
    """
    from fedbraid.theory.published_rates import Comparison, compare, compare_rates

    common = {"mu": mu, "smoothness": smoothness, "clients": clients}
    if algorithm:
        if client_lr is None:
            raise ValueError("--algorithm needs --client-lr, the step size of its clients")
        setting = {**common, "client_lr": client_lr, "steps": steps, "rounds": rounds, "zeta": zeta}
        rows: list[Comparison] = [compare(algorithm, measure, **setting)]
    else:
        rows = compare_rates(**common)
    result: dict[str, Any] = {"rows": [{**dataclasses.asdict(row), "lost": row.lost} for row in rows]}
    if out is not None:
        from fedbraid.theory.figures import rates_figure, save

        result["picture"] = str(save(rates_figure(**common), out))
    if as_json:
        return print_json(result)
    print("algorithm  measure          step  K  R     exact published   lost  theorem")
    for row in rows:
        s = {"steps": 1, "rounds": 1, **row.setting}
        known = f"{row.published:9.6f} {row.lost:5.2f}x" if row.published is not None else f"{'':>9} {'':>6}"
        print(
            f"{row.method:<10} {row.measure:<12} {s['client_lr']:8.5f} {s['steps']:2d} {s['rounds']:2d} "
            f"{row.exact:9.6f} {known}  {row.theorem}"
        )
    return _print_notes((), out)


def _problem(problem: str, clients: int, dim: int, examples: int, kappa: float, seed: int) -> QuadraticFederation:
    import numpy as np

    from fedbraid import theory

    if problem == "gaussian":
        return theory.gaussian_least_squares(clients=clients, dim=dim, examples=examples, seed=seed).federation()
    if problem == "conditioned":
        data = theory.conditioned_least_squares(kappa, clients=clients, dim=dim, examples=examples, seed=seed)
        return data.federation()
    if problem == "random":
        return theory.random_federation(clients, dim, mu=1.0, smoothness=kappa, seed=seed)
    path = Path(problem)
    if path.suffix != ".npz":
        raise ValueError(f"--problem must be gaussian, conditioned, random or a .npz file, got {problem!r}")
    if not path.is_file():
        raise ValueError(f"--problem {problem!r}: there is no such file")
    with np.load(path, allow_pickle=False) as data:
        missing = {"A", "b"} - set(data.files)
        if missing:
            raise ValueError(f"{problem}: needs the arrays A [clients, n, d] and b [clients, n], has {data.files}")
        designs, responses = np.asarray(data["A"], float), np.asarray(data["b"], float)
    if designs.ndim != 3 or responses.shape != designs.shape[:2]:
        raise ValueError(
            f"{problem}: A must be [clients, n, d] and b [clients, n], got {designs.shape}, {responses.shape}"
        )
    return theory.LeastSquares(designs, responses, np.zeros(designs.shape[2])).federation()


def _numbers(text: str) -> list[float]:
    try:
        return [float(v) for v in text.split(",") if v.strip()]
    except ValueError:
        raise ValueError(f"{text!r} is not a list of numbers such as 1,10,100") from None


def _value(text: str) -> Any:
    text = text.strip()
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _print_notes(notes: tuple[str, ...], out: Path | None) -> None:
    for note in notes:
        print(f"note: {note}")
    if out is not None:
        print(f"wrote {out}")
