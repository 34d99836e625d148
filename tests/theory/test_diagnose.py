"""Each rule of the advice is tested with constants made for it; then one small run from end to end."""

import json
import math

import pytest
from typer.testing import CliRunner

from drawn import record
from fedbraid.experiment.assembly import build
from fedbraid.experiment.config import load_config, parse
from fedbraid.experiment.diagnosis import Probe, Settings, advise, diagnose, diagnosis_figure, goal_of, verify
from fedbraid.experiment.diagnosis.measurement import settings_of
from fedbraid.theory.constants import Constants, Estimate

BASE = {
    "L": 4.0,
    "mu": 0.5,
    "L_client_max": 8.0,
    "L_client_mean": 5.0,
    "mu_client_min": 0.2,
    "sigma2": 0.1,
    "G2": 2.0,
    "B2": 5.0,
    "zeta": 3.0,
    "delta": 0.5,
    "delta_mean": 0.4,
    "grad_norm2": 0.5,
    "loss": 1.0,
}
SETTINGS = Settings("fedavg", 0.1, 5.0, 10, 100, 200)


def constants(**changes):
    return Constants(
        **{k: Estimate(v) for k, v in {**BASE, **changes}.items()}, clients=10, population=100, batch_size=20
    )


def text(advice):
    return "\n".join(map(str, advice.sentences))


def test_the_safe_step_is_lemma_1_at_the_worst_point():
    advice = advise([constants(), constants(L_client_max=20.0)], SETTINGS)
    assert advice.safe_client_lr == pytest.approx(1 / 20)
    assert "1 / max L_i = 0.05" in text(advice)
    pulled = advise([constants()], SETTINGS._replace(alpha=2.0))
    assert pulled.safe_client_lr == pytest.approx(1 / 10)
    assert pulled.typical_client_lr == pytest.approx(1 / 7)


def test_the_step_follows_the_mean_curvature_at_the_last_point():
    """Curvature often falls in the first rounds: that of round 0 must not decide."""
    fallen = advise([constants(L_client_mean=65.0, L_client_max=90.0), constants(L_client_mean=5.0)], SETTINGS)
    assert fallen.settings["client_lr"] == 0.2
    assert "yours, 0.1, is 2.0 times smaller" in text(fallen)
    assert "yours, 0.4, is 2.0 times that" in text(advise([constants()], SETTINGS._replace(client_lr=0.4)))


def test_the_step_to_try_is_never_above_one_over_the_curvature():
    for L in (0.13, 1.0, 3.0, 7.7, 99.0, 1234.5):
        advice = advise([constants(L_client_mean=L)], SETTINGS)
        assert 0.9 / L < advice.settings["client_lr"] <= 1 / L


def test_what_dominates_follows_the_settings():
    drift = advise([constants()], SETTINGS)
    assert drift.dominant == "drift"
    assert "few rounds" in text(drift)
    sampling = advise([constants()], SETTINGS._replace(steps=1.0))
    assert sampling.dominant == "client sampling"
    assert sampling.terms["client sampling"] == pytest.approx(2.0 / 10 * 0.9)
    assert sampling.terms["drift"] == 0.0  # a single local step uses the gradient at the server's model
    assert "Theorem 3" in text(sampling)
    noise = advise([constants(sigma2=50.0)], SETTINGS._replace(steps=1.0))
    assert noise.dominant == "batch noise"
    assert noise.terms["batch noise"] == pytest.approx(5.0)
    everyone = advise([constants()], SETTINGS._replace(cohort=100, steps=1.0))
    assert everyone.terms["client sampling"] == 0.0


def test_local_steps_of_mime_are_l_over_delta():
    assert advise([constants()], SETTINGS).mime_steps == 8
    different = advise([constants(delta=5.0)], SETTINGS)
    assert different.mime_steps == 1
    assert "helps little" in text(different)


def test_prediction_only_where_the_quadratic_model_holds():
    found = advise([constants()], SETTINGS).predicted
    phi = lambda lam: 1 - (1 - 0.1 * lam) ** 5  # noqa: E731
    assert found.kappa == pytest.approx(phi(8.0) / phi(0.2), rel=1e-9)
    bent = advise([constants(mu_client_min=-1.0)], SETTINGS)
    assert bent.predicted is None
    assert any("no quadratic model holds" in line for line in bent.unknown)
    outside = advise([constants()], SETTINGS._replace(client_lr=0.5, steps=4.0))
    assert outside.predicted is None
    assert any("Lemma 1 needs" in line for line in outside.unknown)
    assert advise([constants()], SETTINGS._replace(client_lr=None)).settings == {}


def test_families_are_ranked_by_the_table():
    near = advise([constants(delta=0.05)], SETTINGS)
    assert min(near.rounds_by_family, key=near.rounds_by_family.get) == "mime_mvr"
    assert "try MimeMVR" in text(near)
    crowd = advise([constants(delta=4.0, G2=50.0)], SETTINGS._replace(clients=20))
    assert min(crowd.rounds_by_family, key=crowd.rounds_by_family.get) == "scaffold"
    assert "stay fresh: try it" in text(crowd)
    rare = advise([constants(delta=4.0, G2=500.0)], SETTINGS._replace(clients=1000))
    assert "too rarely" in text(rare)
    # scaling the loss by 10 does not change the numbers of rounds: the table is in units of f(x_0) - f*
    scaled = {"L": 40.0, "delta": 0.5, "G2": 200.0, "sigma2": 10.0, "grad_norm2": 50.0, "loss": 10.0}
    a, b = advise([constants(delta=0.05)], SETTINGS), advise([constants(**scaled)], SETTINGS)
    assert a.rounds_by_family == pytest.approx(b.rounds_by_family)


def test_probes_choose_the_smallest_number_of_steps_that_does_nearly_the_best():
    probes = [Probe(1, {1.0: 0.1, 2.0: 0.1}), Probe(4, {1.0: 0.95, 2.0: 1.5}), Probe(16, {1.0: 1.0, 2.0: 0.2})]
    advice = advise([constants()], SETTINGS, probes)
    assert advice.settings == {"client_lr": 0.2, "steps": 4, "server_lr": 2.0}
    assert "0.8 times the client work" in text(advice)
    hopeless = advise([constants()], SETTINGS, [Probe(1, {1.0: -0.1})])
    assert hopeless.settings == {"client_lr": 0.2}
    assert "lower the client step first" in text(hopeless)


def test_probes_within_the_noise_of_the_cohorts_advise_nothing():
    """On a converged run, decreases of 0.0003 once advised 32 steps."""
    probes = [Probe(1, {1.0: 0.0001}, 0.0004), Probe(32, {1.0: 0.0003}, 0.0004)]
    advice = advise([constants()], SETTINGS, probes)
    assert "steps" not in advice.settings
    assert "within the noise of the cohorts" in text(advice)
    worse = advise([constants()], SETTINGS, [Probe(1, {1.0: -0.0003}, 0.0004)])
    assert "lower the client step first" not in text(worse)
    # a decrease that is smaller than 90% of the best, but only by noise, is as good
    near = advise([constants()], SETTINGS, [Probe(2, {1.0: 0.85}, 0.1), Probe(16, {1.0: 1.0}, 0.1)])
    assert near.settings["steps"] == 2
    # a server step must be better by more than the noise
    unclear = advise([constants()], SETTINGS, [Probe(2, {1.0: 1.0, 2.0: 1.15}, 0.1)])
    assert unclear.settings["server_lr"] == 1.0


def test_values_at_the_edge_of_what_was_tried_are_named():
    inside = [Probe(2, {1.0: 1.0, 2.0: 0.9}), Probe(4, {1.0: 1.0, 2.0: 0.9})]
    assert "that was tried" not in text(advise([constants()], SETTINGS, inside))
    most = [Probe(2, {1.0: 0.1, 2.0: 0.1}), Probe(4, {1.0: 1.0, 2.0: 2.0})]
    words = text(advise([constants()], SETTINGS, most))
    assert "4 is the largest number of steps that was tried" in words
    assert "2 is the largest server step that was tried" in words


@pytest.mark.parametrize("algorithm", ["fedadam", "fedyogi", "fedadagrad", "fedavgm", "mimelite", "scaffold"])
def test_the_server_step_of_fedavg_is_not_advised_to_other_servers(algorithm):
    probes = [Probe(2, {1.0: 0.5, 2.0: 2.0})]
    advice = advise([constants()], SETTINGS._replace(algorithm=algorithm), probes)
    assert advice.settings == {"client_lr": 0.2, "steps": 2}
    assert "server step" not in text(advice)


def test_advice_by_a_pilot_is_pointed_to():
    assert "`fedbraid advise`" in text(advise([constants()], SETTINGS))


def test_every_sentence_names_its_source_and_something_stays_unknown():
    advice = advise([constants()], SETTINGS)
    assert all(s.source for s in advice.sentences)
    assert any("everywhere" in line for line in advice.unknown)
    with pytest.raises(ValueError, match="at least one point"):
        advise([], SETTINGS)


TINY = ["data.clients=5", "model.hidden=[4]", "cohort=2", "rounds=3"]


def test_a_small_run_from_end_to_end(tmp_path):
    config = load_config(settings=[*TINY, "algorithm.name=fedavg"])
    said: list[str] = []
    found = diagnose(config, rounds=2, points=2, clients=3, probe_steps=(1, 4), tell=said.append)
    constants = [f"estimating the constants after round {done}" for done in (0, 2)]
    probes = ["trying one round with 1 local step", "trying one round with 4 local steps"]
    assert said == ["training for 2 rounds", *constants, *probes]
    assert found.rounds == (0, 2)
    assert found.points[0].loss.value == pytest.approx(math.log(10), rel=0.2)  # ten classes, nothing learnt
    assert [p.steps for p in found.probes] == [1, 4]
    assert found.settings.clients == 5
    assert len(diagnosis_figure(found).axes) == 3
    names = [change.split("=")[0] for change in found.changes]
    assert names == ["algorithm.client_lr", "algorithm.steps", "algorithm.server_lr"]
    json.dumps(found.as_dict())
    outcome = verify(config, found.changes, target=0.0, seeds=1)
    assert outcome == {"configured": [1], "advised": [1]}


def test_the_default_method_gets_no_server_step():
    """Its server has momentum, and single rounds of FedAvg say nothing about its step."""
    found = diagnose(load_config(settings=TINY), rounds=1, points=1, clients=2, probe_steps=(1, 2))
    assert found.settings.algorithm == "fedauto_ahead"
    assert "algorithm.server_lr" not in [change.split("=")[0] for change in found.changes]


def test_mimelite_has_a_rate_too():
    """Its default is written as None, because it depends on the base."""
    for base, rate in (("momentum", 0.1), ("adam", 0.01)):
        config = load_config(settings=[*TINY, "algorithm.name=mimelite", f"algorithm.base={base}"])
        assert settings_of(config, build(config).data.train).client_lr == rate
    found = diagnose(config, rounds=1, points=1, clients=2, probe_steps=())
    assert [change.split("=")[0] for change in found.changes] == ["algorithm.client_lr"]


LINE = """
import numpy as np
import fedbraid as fb

@fb.factory("dataset")
def line() -> fb.FederatedData:
    rng = np.random.default_rng(0)
    made = [{"x": x, "y": x @ np.arange(3.0, dtype=np.float32)} for x in rng.normal(size=(3, 8, 3)).astype(np.float32)]
    return fb.FederatedData(fb.Split.from_clients(made), fb.Split.from_clients(made), "line")
"""


def test_a_regression_is_verified_by_its_loss(tmp_path):
    """It has no accuracy. The target is what the configured run reaches at its end."""
    (tmp_path / "lines.py").write_text(LINE)
    data, model = {"name": "lines:line"}, {"name": "least_squares"}
    method = {"name": "fedavg"}
    config = parse(
        {"rounds": 3, "cohort": 2, "data": data, "model": model, "algorithm": method, "modules": str(tmp_path)}
    )
    assert goal_of(config, None, 2.0) == ("test_loss", 2.0)
    outcome = verify(config, (), seeds=1)
    assert outcome == {"configured": [3], "advised": [3]}  # the loss falls in every round


def test_verification_knows_that_a_loss_falls_to_its_target():
    """A loss reaches a target far above it at once and a negative target never; for an accuracy it is the reverse."""
    config, never = load_config(settings=[*TINY, "rounds=2"]), {"configured": [None], "advised": [None]}
    at_once = {"configured": [1], "advised": [1]}
    assert verify(config, (), target=100.0, seeds=1, metric="test_loss") == at_once
    assert verify(config, (), target=-1.0, seeds=1, metric="test_loss") == never
    assert verify(config, (), target=2.0, seeds=1, metric="test_accuracy") == never
    with pytest.raises(ValueError, match="'test_f1' is not evaluated; choose one of test_"):
        verify(config, (), seeds=1, metric="test_f1")


def test_the_command_prints_one_json_object_or_sentences(tmp_path, monkeypatch):
    figures = record(monkeypatch)
    import typer

    from fedbraid.cli.diagnose import command

    app = typer.Typer()
    app.command()(command)
    words = [w for setting in (*TINY, "algorithm.name=fedavg") for w in ("--set", setting)]
    few = ["--rounds", "1", "--points", "1", "--clients", "2", "--no-probe"]
    result = CliRunner().invoke(app, [*words, *few, "--json", "--out", str(tmp_path / "d.png")])
    assert result.exit_code == 0, result.output
    out = json.loads(result.stdout)
    assert set(out["advice"]) >= {"safe_client_lr", "dominant", "sentences", "unknown"}
    constants, terms, _ = figures[0].axes
    assert constants.get_xlabel() == "round"
    assert [bar.get_height() for bar in terms.patches[:3]] == pytest.approx(list(out["advice"]["terms"].values()))
    result = CliRunner().invoke(app, [*words, *few])
    order = [
        result.stdout.index(words) for words in ("advice", "settings to try", "not known", "constants after round")
    ]
    assert order == sorted(order)


@pytest.mark.parametrize(("options", "message"), [({"rounds": 0}, "rounds"), ({"points": 0}, "points")])
def test_bad_input_is_refused_by_name(options, message):
    with pytest.raises(ValueError, match=f"{message} must be at least 1"):
        diagnose(load_config(settings=TINY), **options)
