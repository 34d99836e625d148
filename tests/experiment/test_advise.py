"""Advice: curves are ranked by rounds to a level, grids move, a stopped pilot ends the same, and doubts are said."""

import json
import math
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

import fedbraid as fb
from drawn import check_figure, legend, record
from fedbraid import algorithms
from fedbraid.cli.app import make_app
from fedbraid.experiment import ConfigError, build, load_config
from fedbraid.experiment.advice import advising, averaging, candidates, doubts, federation, pilot
from fedbraid.experiment.advice.advising import AdviceSettings, load_advice, run_advice
from fedbraid.experiment.advice.candidates import METHODS, Setting, methods_of, program_of, with_setting
from fedbraid.experiment.advice.doubts import constant_baseline
from fedbraid.experiment.advice.pilot import grid, run_pilot
from fedbraid.experiment.advice.race import MORE_SEEDS, Budget, Race, Track, beyond, horizons_of
from fedbraid.experiment.advice.ranking import Curves, kept, rank, rounds_to
from fedbraid.experiment.config import parse
from fedbraid.experiment.lab import SweepSettings, hold_out_validation
from fedbraid.experiment.trials import Trials, read_trials, write_trials

AT = np.arange(1.0, 101.0)

MODULE = '''
"""Small federations for the tests of advice."""
import numpy as np
import fedbraid as fb


@fb.factory("dataset")
def small(*, kind: str = "learnable", clients: int = 6, examples: int = 60) -> fb.FederatedData:
    rng, weights = np.random.default_rng(0), np.random.default_rng(1).normal(size=(5, 3))
    made = []
    for _ in range(clients):
        x = rng.normal(size=(examples, 5)).astype(np.float32)
        y = np.argmax(x @ weights + rng.gumbel(size=(examples, 3)) * 0.3, 1).astype(np.int32)
        if kind == "noise":
            y = rng.integers(0, 3, examples).astype(np.int32)
        if kind == "huge":
            x = x * np.float32(1e30)
        made.append({"x": x, "y": y})
    return fb.FederatedData(fb.Split.from_clients(made), fb.Split.from_clients(made), "small", {"classes": 3})
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("advice")
    (place / "small_federations.py").write_text(MODULE)
    return place


def config(folder, *, rounds=24, algorithm=None, **data):
    return parse(
        {
            "rounds": rounds,
            "cohort": min(3, data.get("clients", 6)),
            "data": {"name": "small_federations:small", **data},
            "model": {"name": "softmax_regression"},
            "algorithm": {"name": "fedavg", "client_lr": 0.01, **(algorithm or {})},
            "modules": str(folder),
        }
    )


def written(place, config):
    place.mkdir(parents=True, exist_ok=True)
    path = place / "config.toml"
    from fedbraid.experiment.config import dump

    path.write_text(dump(config))
    return path


def curves(*lines):
    return Curves(AT, np.stack([np.broadcast_to(line, AT.shape) for line in lines]))


# --- ranking ---------------------------------------------------------------------------------------------------------


def test_rounds_to_a_level_are_the_first_from_which_the_mean_keeps_it():
    """Against a search from the definition."""
    rng = np.random.default_rng(3)
    for _ in range(20):
        values = np.cumsum(rng.normal(0.1, 1.0, 60))
        means = [np.mean(values[i : i + max(20, i // 5)]) for i in range(60)]
        level = float(np.quantile(means, 0.6))
        first = next(i for i, mean in enumerate(means) if mean >= level)
        found = rounds_to(np.arange(1, 61), kept(values), [level])[0]
        assert first <= found <= first + 1  # between the evaluation before and this one


def test_a_curve_that_starts_slowly_and_ends_better_wins():
    """Early losses favour small rates: at round 20 the quick starter is ahead, and it ends lower."""
    quick, late = 0.6 * (1 - np.exp(-AT / 4)), 1 - np.exp(-AT / 30)
    assert quick[19] > late[19]
    found = rank({"quick": curves(quick, quick), "late": curves(late, late)}, 0.0)
    assert found.order == ["late", "quick"]
    assert found.regret["quick"] > math.log(1.5)
    same = rank({"quick": curves(5 + 3 * quick), "late": curves(5 + 3 * late)}, 5.0)
    assert same.order == found.order  # units of the metric do not matter
    assert same.regret["quick"] == pytest.approx(found.regret["quick"])


def test_a_short_peak_is_not_a_level_that_was_reached():
    """A curve that passes the level for a few rounds and settles below it loses against one that keeps it."""
    passing = np.where((AT > 6) & (AT < 13), 1.0, 0.9 * (1 - np.exp(-AT / 3)))
    keeping = 1 - np.exp(-AT / 8)
    found = rank({"passing": curves(passing), "keeping": curves(keeping)}, 0.0)
    assert found.order[0] == "keeping"


def test_a_few_rounds_at_the_beginning_count_little():
    quick, late = 1 - np.exp(-AT / 2), 1 - np.exp(-AT / 4)
    apart = [rank({"q": curves(quick), "l": curves(late)}, 0.0, early=early).regret["l"] for early in (0.0, 20.0)]
    assert apart[0] > math.log(1.8)
    assert apart[1] < math.log(1.4)


def test_levels_do_not_depend_on_how_often_a_curve_is_evaluated():
    speed = {"a": 0.05, "b": 0.03}
    every = {one: Curves(AT, 1 - np.exp(-AT * v)[None]) for one, v in speed.items()}
    fourth = {one: Curves(curve.rounds[3::4], curve.values[:, 3::4]) for one, curve in every.items()}
    assert fourth["a"].window == 5
    assert rank(fourth, 0.0).regret["b"] == pytest.approx(rank(every, 0.0).regret["b"], abs=0.1)


def test_a_fall_from_a_huge_loss_is_no_trend():
    falling, steady = -1e6 / AT**2, 1 - np.exp(-AT / 60)
    assert rank({"falling": curves(falling), "steady": curves(steady)}, 0.0).order[0] == "steady"


def test_a_huge_loss_hides_neither_later_values_nor_other_curves():
    """In floating point, 1e20 + 3 - 1e20 is 0: with sums of whole curves a loss of 3 would look like a perfect 0."""
    wild, good = np.where(AT < 4, -1e20, -3.0), -2 + 1.5 * (1 - np.exp(-AT / 20))
    assert kept(wild)[-1] == pytest.approx(-3.0)
    found = rank({"wild": curves(wild, wild), "good": curves(good, good)}, -2.0)
    assert found.order == ["good", "wild"]
    # seeds of a curve that diverges differ by more than all others improve; the noise of the good ones counts
    diverging = [np.where(AT < 50, -2.0, -(10.0 ** (AT / power))) for power in (5, 9)]
    slow = -2 + 1.5 * (1 - np.exp(-AT / 60))
    found = rank({"slow": curves(slow, slow), "d": curves(*diverging), "good": curves(good, good)}, -2.0)
    assert found.order == ["good", "slow", "d"]
    assert found.regret["slow"] > math.log(1.5)
    assert min(found.levels) > -1.0  # shares of the improvement of the good one


def test_a_seed_that_fails_does_not_make_all_levels_easy():
    """The noise of one setting is no reason to compare all others by the first steps of their curves."""
    good, slow, quick = (np.exp(-AT / length) for length in (12, 40, 6))
    lines = {"good": curves(-good, -good), "slow": curves(-slow, -slow), "fails": curves(-quick, -np.ones(100))}
    found = rank(lines, -1.0)
    assert found.order[0] == "good"
    assert min(found.levels) > -0.3
    assert found.ends["fails"] == pytest.approx(-1)  # the worst seed


def test_settings_within_the_noise_of_the_seeds_are_runners_up():
    rng = np.random.default_rng(0)

    def noisy(speed, spread):
        return Curves(AT, np.stack([1 - np.exp(-AT * speed * math.exp(spread * s)) for s in rng.normal(size=4)]))

    near = rank({"a": noisy(0.05, 0.3), "b": noisy(0.047, 0.3)}, 0.0)
    assert len(near.close_to_best()) == 1
    apart = rank({"a": noisy(0.06, 0.01), "b": noisy(0.02, 0.01)}, 0.0)
    assert apart.close_to_best() == []


def test_a_known_target_is_the_only_level():
    early, late = np.minimum(AT / 10, 0.5), np.maximum(0, (AT - 30) / 70)
    both = {"early": curves(early), "late": curves(late)}
    assert rank(both, 0.0, target=0.4).order[0] == "early"
    assert rank(both, 0.0, target=0.9).order[0] == "late"


def test_horizons_grow_to_the_last_one():
    for last in (1, 5, 17, 18, 100, 1000):
        found = horizons_of(last)
        assert found[-1] == last
        assert list(found) == sorted(set(found))
        assert found[0] >= min(last, 6)


# --- candidates ------------------------------------------------------------------------------------------------------


def test_the_methods_are_known_and_have_the_rates_of_the_table(folder):
    names = [method.name for method in METHODS]
    assert {"fedavg", "fedavgm", "fedadam", "fedprox", "scaffold", "mimelite"} <= set(names)
    assert set(names) <= set(algorithms.__all__)
    own = config(folder, algorithm={"epochs": 2, "batch_size": 7})
    for method in METHODS:
        made = candidates.base_of(own, method)
        assert made.algorithm.name == method.name
        assert made.algorithm.options["epochs"] == 2  # the local work is the configured one
        assert ("client_lr" in candidates.rate_names(made)) == (method.name != "fedauto_ahead")  # it tunes itself
    with pytest.raises(ConfigError, match="'fedsplit' is not in the list of methods"):
        methods_of(own, ["fedsplit"])
    other = parse({**own.model_dump(), "algorithm": {"name": "fedyogi"}})
    assert methods_of(other)[-1].name == "fedyogi"  # the configured method always takes part


def test_the_family_of_averaging_methods_equals_its_members():
    """One program runs four methods: each must be the algorithm of its name."""
    rates = {"fedavg": 1.0, "fedavgm": 0.7, "fedprox": 1.3, "fedadam": 0.05, "fedacg": 0.6, "fedcm": 1.2}
    rates |= {"scaffold": 1.4}
    ramp = np.arange(12, dtype=np.float32).reshape(4, 3)
    data = fb.Split.from_clients([{"x": ramp[:n] + c} for c, n in ((1.0, 4), (3.0, 2), (-2.0, 3))])
    params = np.array([0.5, -1.0, 2.0], np.float32)

    def loss(params, batch, key):
        return 0.5 * jnp.mean(jnp.arange(1.0, 4.0) * (params - batch["x"]) ** 2 * batch["mask"][:, None])

    def ends(*made):
        return [fb.simulate(one, params, data, rounds=3, cohort=2, seed=0).params for one in made]

    assert set(rates) == set(averaging.MEMBERS)
    for name, numbers in averaging.MEMBERS.items():
        local = {"client_lr": 0.3, "server_lr": rates[name], "epochs": 2, "batch_size": 2}
        named, member = algorithms.ALGORITHMS[name](loss, **local), averaging.averaging(loss, **local, **numbers)
        both = ends(named, member)
        np.testing.assert_allclose(*both, rtol=2e-5)
        assert np.abs(both[0] - params).max() > 0.01
        if name in ("fedacg", "fedcm"):
            np.testing.assert_allclose(ends(averaging.averaging(loss, **local, **numbers, stateful=False))[0], both[0])
    averaged = algorithms.fedavgm(loss, kind="average", client_lr=0.3, server_lr=0.7, steps=3, batch_size=2)
    numbers = {**averaging.MEMBERS["fedavgm"], "fresh": 0.1}
    member = averaging.averaging(loss, client_lr=0.3, server_lr=0.7, steps=3, batch_size=2, **numbers)
    np.testing.assert_allclose(*ends(averaged, member), rtol=2e-5)


def test_a_member_with_other_options_runs_as_itself(folder):
    own = config(folder, algorithm={"name": "fedavgm", "kind": "nesterov"})
    setting = Setting("fedavgm", 1, (("client_lr", 0.1), ("server_lr", 1.0)))
    assert program_of(own, methods_of(own), setting)[0] == "fedavgm"
    plain = config(folder, algorithm={"name": "fedavgm", "momentum": 0.5})
    name, made, point = program_of(plain, methods_of(plain), setting)
    assert name == "averaging"
    assert (point["algorithm.beta"], point["algorithm.fresh"]) == (0.5, 1.0)
    averaged = config(folder, algorithm={"name": "fedavgm", "momentum": 0.5, "kind": "average"})
    assert program_of(averaged, methods_of(averaged), setting)[2]["algorithm.fresh"] == 0.5
    assert made.algorithm.name == averaging.NAME
    assert program_of(own, METHODS, Setting("scaffold", 1, setting.rates), stateful=False)[0] == "scaffold"
    acg = config(folder, algorithm={"name": "fedacg", "lam": 0.7, "beta": 0.02})
    point = program_of(acg, methods_of(acg), Setting("fedacg", 1, setting.rates))[2]
    assert (point["algorithm.beta"], point["algorithm.alpha"]) == (0.7, 0.02)


def test_methods_that_another_one_replaces_run_only_if_they_are_named(folder):
    usual = [method.name for method in methods_of(config(folder))]
    assert set(usual) == {"fedauto_ahead", "fedacg", "fedcm", "fedadam", "scaffold", "fedavg"}
    assert [method.name for method in methods_of(config(folder), ["fedprox"])] == ["fedprox", "fedavg"]


def test_neighbours_are_those_that_were_not_tried():
    def at(client, server):
        return Setting("fedavg", 1, (("client_lr", client), ("server_lr", server)))

    inside = [at(0.1, 1.0), at(0.3162, 1.0), at(1.0, 1.0), at(0.3162, 0.3162), at(0.3162, 3.162)]
    assert beyond(at(0.3162, 1.0), inside) == []
    assert beyond(at(1.0, 1.0), inside) == [at(3.162, 1.0), at(1.0, 3.162), at(1.0, 0.3162)]


# --- races -----------------------------------------------------------------------------------------------------------


def race_on(config, *, last=24, budget=None, trials=None, methods=("fedavg",)):
    data = advising.load_named(config)
    settings = SweepSettings(seeds=2 + MORE_SEEDS, metric="loss")
    often = config.model_copy(update={"evaluation": config.evaluation.model_copy(update={"every": 1})})
    track = Track(often, methods_of(config, methods), settings, data, hold_out_validation(data, None, settings.seed))
    return Race(track, trials or Trials(None), last=last, budget=budget)


@pytest.fixture(scope="module")
def moved(folder):
    """A race whose search starts a thousand times too low."""
    race = race_on(config(folder))
    return race, run_pilot(race, centre=1e-4)


def test_the_grid_moves_when_the_best_rate_is_at_its_edge(moved):
    race, found = moved
    start = grid(race, next(method for method in METHODS if method.name == "fedacg"), 1e-4)
    assert max(dict(one.rates)["client_lr"] for one in start) < 0.05
    assert found.best not in start
    assert math.prod(value for _, value in found.best.rates) > 0.2  # the server rate may grow instead
    assert beyond(found.best, [one for one in found.tried if one != found.configured]) == []
    at = found.ranking
    assert at.regret[found.configured] - at.regret[found.best] > math.log(2)
    with_all_seeds = [seed for one, seed in race.used if one == found.best]
    assert len(with_all_seeds) >= 2


def test_a_race_uses_the_validation_split_and_the_tuning_seeds_only(moved):
    race, _ = moved
    assert race.held[0].test is None
    assert {row["seed"] for row in race.rows.values()} <= set(range(1000, 1006))
    assert all(row["metric"] == "validation_loss" for row in race.rows.values())


def test_a_program_compiles_its_start_once(moved):
    """It ran many chunks and seeds; before, each of them compiled the first states again."""
    race, _ = moved
    assert len(race.rows) > 20
    assert [program._starting.compilations for _, program in race.programs.values()] == [1]


def test_a_budget_of_rounds_is_kept(folder):
    race = race_on(config(folder), budget=Budget(rounds=400))
    found = run_pilot(race, centre=1.0)
    assert found.best is not None
    assert sum(race.used.values()) <= 400


def test_a_budget_of_seconds_ends_the_race_early_and_still_answers(folder):
    race = race_on(config(folder), budget=Budget(seconds=1e-6))
    found = run_pilot(race, centre=1.0)
    assert race.reached == race.horizons[0]
    assert found.best is not None


class DrawnRace:
    """A race whose curves are given; it has run to round 50 of 100."""

    def __init__(self, lines, affordable=True):
        self.lines, self.affordable = lines, affordable
        self.reached, self.whole, self.seeds, self.settings = 50, 100, [0, 1], SimpleNamespace(seed_list=[0, 1, 2, 3])

    def alive(self, settings, rounds):
        return [one for one in settings if np.isfinite(self.lines[one][:rounds]).all()]

    def affords(self, settings, rounds, seeds=None):
        return self.affordable

    def run(self, settings, rounds, seeds=None):
        self.reached = rounds

    def ranking(self, settings, rounds, seeds=None):
        here = {one: Curves(AT[:rounds], self.lines[one][None, :rounds]) for one in self.alive(settings, rounds)}
        return rank(here, 0.0) if here else None


def test_a_setting_that_is_ahead_in_the_race_and_settles_lower_is_not_advised():
    own, quick = (Setting("fedacg", 1, (("client_lr", rate),)) for rate in (0.1, 0.3162))
    lines = {own: 1 - np.exp(-AT / 60), quick: 0.6 * (1 - np.exp(-AT / 8))}
    race = DrawnRace(lines)
    half = race.ranking(lines, 50)
    assert half.order == [quick, own]
    final, seeds = pilot._to_the_end(race, half, [0, 1, 2, 3], half, own)
    assert (final.order[0], seeds) == (own, [0, 1])
    assert pilot._choose(final, half, own, 0.0) == own
    short = DrawnRace(lines, affordable=False)
    assert pilot._to_the_end(short, half, [0, 1, 2, 3], half, own) == (half, [0, 1, 2, 3])
    assert short.reached == 50


def test_of_settings_that_are_as_good_the_one_that_settles_best_is_taken():
    """The configured one is kept if it settles about as well; not if it overfits."""
    own, other = (Setting("fedacg", 1, (("client_lr", rate),)) for rate in (0.1, 0.3162))
    rise = 1 - np.exp(-AT / 10)
    for loss, expected in ((0.02, own), (0.4, other)):
        overfits = rise - loss * np.maximum(0, AT - 60) / 40
        final = rank({own: curves(overfits), other: curves(0.999 * rise)}, 0.0)
        assert final.regret[own] <= pilot.TIE
        assert pilot._choose(final, final, own, 0.0) == expected
    third = Setting("fedavg", 1, (("client_lr", 1.0),))
    assert pilot._choose(final, final, third, 0.0) == other


def test_the_best_setting_is_given_up_only_for_one_that_settles_clearly_better():
    best, other = (Setting("fedavg", 1, (("client_lr", rate),)) for rate in (0.1, 0.3162))
    elsewhere = Setting("fedacg", 1, (("client_lr", 1.0),))  # the configured one did not run to the end
    quick, slow = 1 - np.exp(-AT / 10), 1 - np.exp(-AT / 10.5)
    for loss, expected in ((0.03, best), (0.2, other)):
        final = rank({best: curves(quick - loss * np.maximum(0, AT - 80) / 20), other: curves(slow)}, 0.0)
        assert final.order == [best, other]
        assert final.regret[other] <= pilot.TIE
        assert final.ends[other] > final.ends[best]
        assert pilot._choose(final, final, elsewhere, 0.0) == expected


def test_the_configured_setting_is_changed_only_if_that_saves_a_fifth_of_the_rounds():
    own, other = (Setting("fedacg", 1, (("client_lr", rate),)) for rate in (0.1, 0.3162))
    for time, expected in ((9.0, own), (14.0, other)):
        final = rank({own: curves(1 - np.exp(-AT / time)), other: curves(1 - np.exp(-AT / 8.0))}, 0.0)
        assert final.order == [other, own]
        assert final.regret[own] > pilot.TIE
        assert (final.regret[own] <= pilot.CHANGE) == (expected == own)
        assert pilot._choose(final, final, own, 0.0) == expected


def test_settings_that_diverge_late_are_not_advised():
    rates = [Setting("fedavg", 1, (("client_lr", rate),)) for rate in (0.1, 0.3162, 1.0, 3.162, 10.0)]
    late = [np.where(AT < 70, 1 - np.exp(-AT / (10 + i)), np.nan) for i in range(4)]
    lines = dict(zip(rates, [*late, 1 - np.exp(-AT / 40)], strict=True))
    race = DrawnRace(lines)
    half = race.ranking(lines, 50)
    final, _ = pilot._to_the_end(race, half, [0, 1], half, rates[0])
    assert final.order == [rates[4]]  # the four that were checked diverged
    assert race.reached == 50
    race = DrawnRace({one: lines[one] for one in rates[:4]})
    half = race.ranking(race.lines, 50)
    assert pilot._to_the_end(race, half, [0, 1], half, rates[0])[0] is None


def test_the_best_and_the_configured_setting_run_to_the_end_also_after_a_stop(folder):
    out, again = folder / "whole", folder / "whole-again"
    few = AdviceSettings(methods=("fedavg",))
    summary = run_advice(config(folder, rounds=36), few, out)
    assert (summary["horizons"], summary["rounds"]) == ([9, 18], 36)
    rows = read_trials(out / "trials.parquet")
    ends = {row["rates"] for row in rows if row["rounds"] == 36}
    own = json.dumps([["client_lr", 0.01], ["server_lr", 1.0]])
    assert own in ends
    assert len(ends) == pilot.CHECKED
    assert not any("later is not known" in doubt for doubt in summary["doubts"])
    again.mkdir()
    (again / "advise.toml").write_text((out / "advise.toml").read_text())
    kept_rows = [row for row in rows if row["rounds"] < 36]
    write_trials(again / "trials.parquet", kept_rows, {"version": summary["version"], "kind": "advise"})
    repeated = run_advice(*advising.reopen_advice(again), again, resume=True)
    assert repeated["advised"] == summary["advised"]
    assert repeated["levels"] == summary["levels"]


def test_budgets_are_read_as_written():
    assert advising.budget_of("300 rounds") == Budget(rounds=300)
    assert advising.budget_of("1h") == Budget(seconds=3600)
    for wrong in ("ten", "-5", "5 days", "0", "1.2.3"):
        with pytest.raises(ConfigError, match="budget"):
            load_advice(None, [], {"budget": wrong})


# --- the folder ------------------------------------------------------------------------------------------------------

FEW = AdviceSettings(methods=("fedavg", "scaffold"), budget="1200")


@pytest.fixture(scope="module")
def advised(folder):
    out = folder / "advised"
    return out, run_advice(config(folder), FEW, out)


def test_a_pilot_writes_a_whole_configuration_and_its_costs(advised, folder):
    out, summary = advised
    made = load_config(out / "advised.toml")
    assert made.algorithm.name == summary["advised"]["method"]
    assert made.algorithm.options["client_lr"] == summary["advised"]["client_lr"]
    assert made.rounds == 24
    assert build(made).algorithm is not None  # it can run as it is
    assert json.loads((out / "summary.json").read_text())["advised"] == summary["advised"]
    rows = read_trials(out / "trials.parquet")
    longest = {}
    for row in rows:
        key = row["method"], row["rates"], row["seed"]
        longest[key] = max(longest.get(key, 0), row["rounds"])
    assert summary["pilot"]["rounds"] == sum(longest.values()) <= 1200
    model = 4 * (5 * 3 + 3)
    per_round = {"fedavg": 2, "scaffold": 4}  # models a client sends and receives
    sent = sum(rounds * 3 * per_round[method] * model for (method, _, _), rounds in longest.items())
    assert summary["pilot"]["bytes"] == sent
    level = summary["levels"][-1]
    assert level["advised"]["rounds"] < level["configured"]["rounds"]
    assert level["advised"]["local_steps"] == pytest.approx(level["advised"]["rounds"] * 3 * 3)  # 48 examples in 20s
    assert any("1 / L" in reason for reason in summary["reasons"])


def test_a_pilot_that_was_killed_gives_the_same_answer(advised, folder):
    """Only the rows of the first programs are left; the race decides again from them and runs the rest."""
    out, summary = advised
    again = folder / "killed"
    again.mkdir()
    (again / "advise.toml").write_text((out / "advise.toml").read_text())
    rows = read_trials(out / "trials.parquet")
    about = {"version": summary["version"], "kind": "advise"}
    write_trials(again / "trials.parquet", rows[: len(rows) // 2], about)
    repeated = run_advice(*advising.reopen_advice(again), again, resume=True)
    varying = ("pilot", "out", "advised_toml")
    assert {k: v for k, v in repeated.items() if k not in varying} == {
        k: v for k, v in summary.items() if k not in varying
    }
    assert (again / "advised.toml").read_text() == (out / "advised.toml").read_text()
    assert len(read_trials(again / "trials.parquet")) == len(rows)


def test_a_pilot_that_is_interrupted_keeps_its_trials(folder, tmp_path):
    seen = []

    def stop(news):
        seen.append(news.doing)
        if len(seen) == 30:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_advice(config(folder), AdviceSettings(methods=("fedavg",)), tmp_path / "out", on_news=stop)
    assert read_trials(tmp_path / "out" / "trials.parquet")


def test_a_folder_of_something_else_is_not_overwritten_or_resumed(advised, tmp_path):
    with pytest.raises(ConfigError, match="not empty"):
        run_advice(load_config(), AdviceSettings(), advised[0])
    with pytest.raises(ConfigError, match=r"no advise\.toml"):
        advising.reopen_advice(tmp_path)


def test_the_picture_shows_every_method_and_rate(folder, monkeypatch):
    figures = record(monkeypatch)
    run_advice(config(folder), AdviceSettings(methods=("fedavg",), budget="300"), folder / "picture")
    check_figure(figures[-1])
    left, right = figures[-1].axes
    assert left.get_ylabel() == "validation_loss"
    assert right.get_xscale() == "log"
    assert "advised: fedavg" in figures[-1].get_suptitle()
    assert legend(right) == ["fedavg", "advised"]  # no entry without a mark: nothing diverged


def test_a_method_without_a_client_rate_is_a_line_in_the_picture(folder, monkeypatch):
    figures = record(monkeypatch)
    run_advice(
        config(folder), AdviceSettings(methods=("fedavg", "fedauto_ahead"), budget="300"), folder / "picture-of-two"
    )
    right = figures[-1].axes[1]
    labels = legend(right)
    assert {"fedavg", "fedauto_ahead\n(has no client rate)"} <= set(labels)
    colour = right.get_legend().legend_handles[labels.index("fedauto_ahead\n(has no client rate)")].get_color()
    flat = [line for line in right.get_lines() if len(line.get_xdata()) == 2 and line.get_color() == colour]
    assert len(flat) == 1
    assert flat[0].get_ydata()[0] == flat[0].get_ydata()[1] >= 1


def test_more_local_work_is_tried_and_counted(folder):
    settings = AdviceSettings(methods=("fedavg",), local_work=(1, 4), budget="1500")
    summary = run_advice(config(folder), settings, folder / "work")
    rows = read_trials(folder / "work" / "trials.parquet")
    assert {row["work"] for row in rows} == {1, 4}
    made = with_setting(config(folder), METHODS, Setting("fedavg", 4, (("client_lr", 0.1), ("server_lr", 1.0))))
    assert made.algorithm.options["epochs"] == 4
    per = 3 * 3  # three clients with three local steps each
    longest = {}
    for row in rows:
        key = row["work"], row["rates"], row["seed"]
        longest[key] = max(longest.get(key, 0), row["rounds"])
    assert summary["pilot"]["local_steps"] == sum(n * per * k[0] for k, n in longest.items())


def test_advise_from_python(folder):
    found = fb.advise(config(folder), folder / "inline", methods=("fedavg",), budget="300")
    assert found.config.algorithm.name == "fedavg"
    assert found.problem == ""
    assert "advice: fedavg" in repr(found)
    assert "<img" in found._repr_html_()


# --- wrong answers are said ------------------------------------------------------------------------------------------


def invoke(*words):
    return CliRunner().invoke(make_app(), ["advise", *map(str, words)])


def quick(folder, place, config):
    return invoke(written(place, config), "--methods", "fedavg", "--budget", "300", "--out", place / "out")


def test_labels_that_are_noise_get_no_advice(folder, tmp_path):
    result = quick(folder, tmp_path, config(folder, kind="noise"))
    assert result.exit_code == 3
    assert "targets look like noise" in " ".join(result.output.split())
    assert not (tmp_path / "out" / "advised.toml").exists()
    assert "noise" in json.loads((tmp_path / "out" / "summary.json").read_text())["problem"]


def test_a_loss_that_diverges_at_every_rate_gets_no_advice(folder, tmp_path):
    result = quick(folder, tmp_path, config(folder, kind="huge"))
    assert result.exit_code == 3
    words = " ".join(result.output.split())
    assert "no advice" in words
    assert not (tmp_path / "out" / "advised.toml").exists()


def test_a_single_client_is_said(folder, tmp_path):
    place = written(tmp_path, config(folder, clients=1, examples=200))
    result = invoke(place, "--methods", "fedavg,scaffold,fedprox", "--budget", "300", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    words = " ".join(result.output.split())
    assert "nothing to federate" in words
    assert "scaffold is left out: there is one client" in words
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["methods"] == ["fedavg"]


def test_data_without_a_validation_split_is_split_or_refused(folder, tmp_path):
    result = quick(folder, tmp_path, config(folder))
    assert result.exit_code == 0, result.output
    assert "20% of every client's training examples" in " ".join(result.output.split())
    with pytest.raises(ConfigError, match="no client has enough training examples to hold any out"):
        run_advice(config(folder, examples=1), AdviceSettings(), tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_the_constant_baseline_is_the_best_constant():
    rng = np.random.default_rng(0)
    y = rng.choice(3, 500, p=[0.5, 0.3, 0.2]).astype(np.int32)
    split = fb.Split.from_clients([{"y": y}])
    found = constant_baseline(fb.FederatedData(split, validation=split), "classes")
    shares = np.bincount(y) / 500
    assert found.accuracy == pytest.approx(shares.max())
    assert found.loss == pytest.approx(-(shares * np.log(shares)).sum())
    values = fb.Split.from_clients([{"y": y.astype(np.float32)}])
    assert constant_baseline(fb.FederatedData(values, validation=values), "values").loss == pytest.approx(np.var(y))
    assert constant_baseline(fb.FederatedData(split), "classes") is None


def test_a_weak_signal_is_not_called_noise():
    """A regression that explains a tenth of the variance is worth advice; a hundredth may be chance."""
    rng = np.random.default_rng(0)
    split = fb.Split.from_clients([{"y": rng.normal(size=300).astype(np.float32)}])
    base = constant_baseline(fb.FederatedData(split, validation=split), "values")

    def beats(**levels):
        row = {f"curve/validation_{name}": [value] * 6 for name, value in levels.items()}
        return doubts._beats(SimpleNamespace(rows_of=lambda *_: [row], reached=6), None, base)

    assert beats(r2=0.1, loss=0.9)
    assert not beats(r2=0.01, loss=0.99)
    y = fb.Split.from_clients([{"y": rng.integers(0, 2, 300).astype(np.int32)}])
    base = constant_baseline(fb.FederatedData(y, validation=y), "classes")
    assert beats(accuracy=base.accuracy, loss=base.loss - 0.1)
    assert beats(accuracy=0.7, loss=9.0)
    assert not beats(accuracy=base.accuracy + 0.03, loss=base.loss - 0.01)


def test_wrong_options_are_refused_by_name(tmp_path):
    for words, match in (
        (("--methods", "fedsplit"), "not in the list"),
        (("--budget", "soon"), "budget"),
        (("--local-work", "2.5"), "--local-work"),
        (("--seeds", "1"), "seeds"),
        (("--resume", tmp_path, "--seeds", "2"), "--resume takes everything"),
    ):
        result = invoke(*words, "--out", tmp_path / "x") if "--resume" not in words else invoke(*words)
        assert isinstance(result.exception, ValueError), (words, result.output)
        assert match in str(result.exception)


# --- a federation that cannot be simulated ---------------------------------------------------------------------------


def test_a_plan_keeps_to_its_bytes_and_finished_runs_decide(folder, tmp_path):
    own = config(folder)
    result = invoke(
        written(tmp_path, own), "--plan", tmp_path / "plan", "--bytes", "40kB", "--methods", "fedavg,fedadam"
    )
    assert result.exit_code == 0, result.output
    plan = json.loads((tmp_path / "plan" / "plan.json").read_text())
    assert [one["file"] for one in plan["runs"]][-1] == "05-fedadam.toml"
    assert plan["bytes"] <= 40_000 < plan["bytes"] * (plan["rounds"] + 1) / plan["rounds"]
    sent = []
    for one in plan["runs"]:
        made = load_config(tmp_path / "plan" / one["file"])
        run = fb.run(made, tmp_path / "runs" / one["file"], progress=False)
        sent.append(sum(run.summary.bytes.values()))
        assert sent[-1] == one["bytes"]  # what the plan says is what the run sends
    result = invoke("--from-runs", tmp_path / "runs", "--out", tmp_path / "decided", "--json")
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    assert summary["pilot"]["bytes"] == sum(sent) == plan["bytes"]
    assert (summary["advised"]["method"], summary["advised"]["client_lr"]) != ("fedavg", 0.01)  # as configured
    assert not summary["sure"]
    assert any("one seed" in doubt for doubt in summary["doubts"])
    assert load_config(tmp_path / "decided" / "advised.toml").algorithm.name == summary["advised"]["method"]


def test_plans_and_decisions_refuse_what_cannot_work(folder, tmp_path):
    own = config(folder)
    with pytest.raises(ConfigError, match="needs at least 5 rounds: allow"):
        federation.write_plan(own, AdviceSettings(), tmp_path / "plan", most="1kB")
    with pytest.raises(ValueError, match="--bytes must be a number"):
        federation.write_plan(own, AdviceSettings(), tmp_path / "plan", most="a lot")
    short = ["data.clients=4", "cohort=2", "rounds=2", "model.name=softmax_regression", "evaluation.every=1"]
    fb.run(None, tmp_path / "a", settings=short, progress=False)
    with pytest.raises(ConfigError, match="at least two finished runs"):
        federation.decide([tmp_path / "a"], tmp_path / "out")
    fb.run(None, tmp_path / "b", settings=[*short, "cohort=3"], progress=False)
    with pytest.raises(ConfigError, match="differ in cohort"):
        federation.decide([tmp_path / "a", tmp_path / "b"], tmp_path / "out")
