"""The command line: one JSON object, the documented numbers, pictures, and errors that name the argument."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from drawn import check_figure, lines, record
from fedbraid.cli.theory import app


def call(*arguments):
    """Run the command with separate arguments, or with one string that is split."""
    words = arguments[0].split() if len(arguments) == 1 else [str(a) for a in arguments]
    result = CliRunner().invoke(app, words)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def test_point_prints_the_documented_numbers():
    command = "point --mu 1 --smoothness 10 --theta 1:K --steps 10 --gamma 0.05 --json"
    out = json.loads(call(command))
    expected = {"kappa": 2.489697, "kappa0": 10.0, "delta": 0.334251}
    assert {k: out[k] for k in expected} == pytest.approx(expected, abs=1e-6)
    assert out["rho"] == pytest.approx({"none": 0.426884, "nesterov": 0.312755, "heavy_ball": 0.224168}, abs=1e-6)


def test_point_takes_maml_style_and_proximal_strength():
    out = json.loads(call("point --mu 1 -L 10 --theta K -K 3 --gamma 0.02 --alpha 0.5 --json"))
    assert out["kappa"] == pytest.approx(10 * ((1 - 0.02 * 10.5) / (1 - 0.02 * 1.5)) ** 2, rel=1e-9)
    assert out["method"] == "Lemma 4"
    far = json.loads(call("point --mu 1 -L 10 --theta K -K 30 --gamma 0.05 --json"))
    assert far["method"].startswith("worst case")
    assert far["notes"]
    given = json.loads(call("point --mu 1 -L 10 --theta K -K 3 --gamma 0.05 --spectrum 1,5,10 --json"))
    assert given["method"] == "eigenvalues"
    text = call("point --mu 1 -L 10 --theta K -K 30 --gamma 0.05")
    assert "note: Lemma 4 needs" in text


def test_frontier_reports_curves_and_pictures(tmp_path, monkeypatch):
    picture, figures = tmp_path / "f.png", record(monkeypatch)
    out = json.loads(call("frontier", "--gamma", 0.01, "--points", 6, "--out", picture, "--json"))
    assert out["picture"] == str(picture)
    hb = out["curves"]["heavy_ball"]
    drawn = lines(figures[0].axes[0])
    assert sorted(drawn) == ["Nesterov", "heavy ball", "no momentum"]
    # the picture has more points than the report, on the same curve
    np.testing.assert_allclose(np.arctanh(drawn["heavy ball"]).sum(1), np.log(10) / 4, rtol=1e-9)
    np.testing.assert_allclose(np.arctanh(hb["rho"]) + np.arctanh(hb["delta"]), np.log(10) / 4, rtol=1e-9)
    over_gamma = json.loads(call("frontier", "--over", "gamma", "--momentum", "none", "--points", 5, "--json"))
    assert over_gamma["values"][0] == 0.0
    assert list(over_gamma["curves"]) == ["none"]
    assert "Delta" in call("frontier", "--points", 4)


@pytest.mark.parametrize("figure", [1, 2, 3, 4, 5, 7, 8, 9, 10])
def test_every_figure_is_one_call(figure, tmp_path, monkeypatch):
    picture, figures = tmp_path / "figure.png", record(monkeypatch)
    out = json.loads(call("frontier", "--figure", figure, "--out", picture, "--json"))
    assert out == {"figure": figure, "picture": str(picture)}
    check_figure(figures[0])
    for axis in figures[0].axes:
        for label, points in lines(axis).items():
            assert np.isfinite(points).all(), label


def test_fixed_points(tmp_path):
    picture, file = tmp_path / "gap.svg", tmp_path / "data.npz"
    rng = np.random.default_rng(0)
    A, b = rng.standard_normal((3, 6, 2)), rng.standard_normal((3, 6))
    np.savez(file, A=A, b=b)
    out = json.loads(call("fixed-point", "--problem", file, "--rounds", 300, "--out", picture, "--json"))
    best = np.linalg.lstsq(A.reshape(18, 2), b.ravel(), rcond=None)[0]
    np.testing.assert_allclose(out["minimizer"], best, rtol=1e-9)
    np.testing.assert_allclose(out["methods"]["FedSplit"]["fixed_point"], best, rtol=1e-9)
    assert out["methods"]["FedGD(e = 10)"]["distance"] > 1e-3
    assert out["methods"]["FedSplit"]["rounds_to_epsilon"] < 300
    assert picture.exists()
    text = call("fixed-point --clients 3 --dim 4 --examples 8 --rounds 50")
    assert "FedSplit" in text
    assert "never" in text


def test_bound_prints_its_terms_and_what_it_assumed(tmp_path):
    settings = {"eta": 0.01, "tau": 10, "rounds": 100, "clients": 10, "distance": 1, "smoothness": 5, "zeta": 2}
    arguments = [v for name, value in {**settings, "sigma2": 1}.items() for v in ("--set", f"{name}={value}")]
    out = json.loads(call("bound", "fedavg", *arguments, "--out", tmp_path / "b.png", "--json"))
    assert out["terms"]["drift by heterogeneity"] == pytest.approx(18 * 100 * 1e-4 * 5 * 4)
    assert out["proven"] is False
    assert {a["status"] for a in out["assumptions"]} == {"checked", "assumed"}
    text = call("bound", "fedavg", *arguments)
    assert "NOT PROVEN HERE" in text
    assert "drift by noise" in text
    local = "bound suboptimality -s radius=1 -s mu=1 -s smoothness=10 -s gamma=0.05 -s theta=1:K -s steps=10 --json"
    distance = json.loads(call(local))
    assert distance["value"] == pytest.approx(8 * 0.334251, abs=1e-5)
    names = json.loads(call("bound", "--json"))["bounds"]
    assert {"fedavg", "mime", "lower-bound"} <= set(names)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("point --mu 20 -L 10 --theta 1:K -K 2 --gamma 0.01", r"mu \(20.0\) must not exceed smoothness"),
        ("point --mu 1 -L 10 --theta 1:K -K 0 --gamma 0.01", "steps .* got 0"),
        ("point --mu 1 -L 10 --theta 1:K --gamma 0.01", "--steps"),
        ("point --mu 1 -L 10 --theta 0,0 --gamma 0.01", "theta is empty"),
        ("point --mu 1 -L 10 --theta K -K 2 --gamma 0.2", r"gamma < 1 / \(L \+ alpha\) = 0.1"),
        ("point --mu 1 -L 10 -K 2 --gamma 0.01 --spectrum 1,b", "not a list of numbers"),
        ("point --mu 1 -L 10 -K 2 --gamma 0.01 --out nowhere/p.png", "does not exist"),
        ("point --mu 1 -L 10 -K 2 --gamma 0.01 --out picture", "no file extension"),
        ("point --mu 1 -L 10 -K 2 --gamma 0.01 --out picture.docx", "not a supported format"),
        ("frontier --figure 6", "--figure must be one of"),
        ("frontier --theta 1,2", "--theta must be"),
        ("frontier --momentum adam", "momentum must be one of"),
        ("frontier --over alpha", "over must be"),
        ("fixed-point --problem mine", "--problem must be"),
        ("fixed-point --problem mine.npz", "no such file"),
        ("fixed-point --clients 2 --dim 5 --examples 3", "singular"),
        ("fixed-point --clients 2 --dim 2 --examples 5 --step 9", "diverge"),
        ("bound nonsense", "no bound is called"),
        ("bound drift --set eta", "name=value"),
        ("bound drift --set speed=1 --set eta=0.1 --set tau=2", "no setting 'speed'"),
        ("bound drift --set eta=0.1", "drift needs tau"),
        ("bound drift -s eta=0.5 -s tau=2 -s smoothness=1 -s zeta=1 -s sigma2=0", r"eta <= 1 / \(4 L\)"),
    ],
)
def test_bad_input_is_refused_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        call(arguments)
