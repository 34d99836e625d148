"""Named grids have exactly the values of the papers, under the keys of the algorithm that is swept."""

import pytest

from fedbraid.experiment import ConfigError
from fedbraid.experiment.config import parse
from fedbraid.experiment.grids import GRIDS, grid
from fedbraid.experiment.sweep import load_sweep
from told import told

# Appendix C.4 as printed
CLIENT = [1, 10**-0.5, 1e-1, 10**-1.5, 1e-2, 10**-2.5, 1e-3, 10**-3.5, 1e-4]
SERVER = [1e1, 10**0.5, 1, 10**-0.5, 1e-1, 10**-1.5, 1e-2, 10**-2.5, 1e-3]
EPSILON = [1, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7]


def of(grid_name, /, **algorithm):
    return grid(grid_name, parse({"algorithm": algorithm}))


@pytest.mark.parametrize(
    ("algorithm", "fixed", "epsilon"),
    [
        ({"name": "fedavg"}, {}, None),
        ({"name": "mime", "base": "sgd"}, {}, None),
        ({"name": "mime"}, {"beta": 0.9}, None),
        ({"name": "mimelite", "base": "adam"}, {"b1": 0.9, "b2": 0.99}, "eps"),
        ({"name": "mime", "base": "adagrad"}, {"initial": 0.1}, "eps"),
        ({"name": "fedavgm"}, {"momentum": 0.9}, None),
        ({"name": "fedadam"}, {"b1": 0.9, "b2": 0.99}, "tau"),
    ],
)
def test_the_grids_of_mime(algorithm, fixed, epsilon):
    light, heavy = of("mime-light", **algorithm), of("mime-heavy", **algorithm)
    assert light.over == {"algorithm.client_lr": pytest.approx(CLIENT, rel=1e-12)}
    assert light.fixed == {**fixed, "server_lr": 1.0, **({epsilon: 1e-7} if epsilon else {})}
    searched = {"algorithm.client_lr": CLIENT, "algorithm.server_lr": SERVER}
    if epsilon:
        searched[f"algorithm.{epsilon}"] = EPSILON
    assert heavy.over == {key: pytest.approx(values, rel=1e-12) for key, values in searched.items()}
    assert heavy.fixed == fixed


def test_a_sweep_takes_the_grid_and_what_the_user_sets():
    config, settings = load_sweep(
        None,
        ["algorithm.name=mime", "algorithm.base=adam", "algorithm.b2=0.999"],
        {"grid": "mime-light", "over": {"algorithm.eps": "1e-3,1e-5"}, "seeds": 2},
    )
    assert settings.space["algorithm.client_lr"].values == pytest.approx(CLIENT, rel=1e-12)
    assert settings.space["algorithm.eps"].values == (1e-3, 1e-5)
    assert settings.seeds == 2
    assert config.algorithm.options["b1"] == 0.9
    assert config.algorithm.options["b2"] == 0.999  # set by the user
    assert config.algorithm.options["server_lr"] == 1.0


def test_what_a_grid_cannot_do_is_said():
    with pytest.raises(ConfigError, match="mime-light"):
        of("mime-ligth", name="mime")
    for name in GRIDS:
        with pytest.raises(ConfigError, match="client_lr"):
            of(name, name="server_only")
    with told("0.1"):
        assert of("mime-light", name="fedadagrad").fixed == {"server_lr": 1.0, "tau": 1e-7}
