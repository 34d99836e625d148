"""Parts of others in configurations: module:attribute, modules beside the configuration, packages with entry points."""

import json
import shutil
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from fedbraid import algorithms, names
from fedbraid.cli.app import make_app
from fedbraid.experiment import ConfigError, build, load_config
from fedbraid.experiment.assembly import from_elsewhere
from fedbraid.experiment.config import Config
from fedbraid.experiment.run import run_config

EXAMPLE = Path(__file__).parents[2] / "examples" / "fedexp.py"
SMALL = """
rounds = 3
cohort = 2
[data]
name = "digits"
clients = 4
[model]
name = "softmax_regression"
[algorithm]
name = "NAME"
client_lr = 0.1
[evaluation]
every = 3
"""


@pytest.fixture
def forget():
    """Modules that a test imports are forgotten after it."""
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if "." not in name and name.startswith(("mine", "fedexp", "other")):
            del sys.modules[name]


def invoke(*words):
    done = CliRunner().invoke(make_app(), [str(word) for word in words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done


def config(folder, text, **files):
    for name, code in files.items():
        (folder / f"{name}.py").write_text(code)
    (folder / "config.toml").write_text(text)
    return folder / "config.toml"


# --- what is called ---------------------------------------------------------------------------------------------------

MINE = '''
import numpy as np
import fedbraid as fb
from fedbraid import models, transforms
from fedbraid.data import from_arrays

CALLED = []

def method(loss, *, client_lr=0.1) -> fb.Algorithm:
    """My method."""
    return fb.fedavg(loss, client_lr=client_lr)

@fb.factory("transform")
def smaller(alg, *, bound=1.0):
    return transforms.clip(alg, bound=bound)

@fb.factory("model")
def net(example_shapes, num_classes, *, width=4):
    return models.mlp(example_shapes["x"][0], num_classes, hidden=(width,))

def rows(*, count=40) -> fb.FederatedData:
    rng = np.random.default_rng(0)
    arrays = {"x": rng.normal(size=(count, 5)).astype(np.float32), "y": np.arange(count) % 2}
    return from_arrays(arrays, partition="iid", clients=4, info={"classes": 2})

@fb.factory("partition")
def blocks(n, *, clients, seed=0):
    return np.array_split(np.arange(n), clients)

@fb.factory("partition")
def loses_rows(n, *, clients):
    return [np.arange(3) for _ in range(clients)]

def undeclared(loss, client_lr=0.1, **anything):
    CALLED.append("undeclared")

@fb.factory("algorithm")
def wrong(loss, client_lr=0.1):
    return "text"
'''


@pytest.mark.usefixtures("forget")
def test_all_five_kinds_from_a_module_beside_the_configuration(tmp_path, monkeypatch):
    monkeypatch.chdir("/")
    text = """
cohort = 2
modules = "."
[data]
name = "mine_all:rows"
count = 60
partition = "mine_all:blocks"
clients = 3
[model]
name = "mine_all:net"
width = 7
[algorithm]
name = "mine_all:method"
[[transforms]]
name = "mine_all:smaller"
bound = 2.0
"""
    loaded = load_config(config(tmp_path, text, mine_all=MINE))
    made = build(loaded)
    assert made.data.train.num_clients == 3
    assert made.data.train.num_examples == 60
    assert made.shapes[0]["w"].shape == (5, 7)
    assert [line.split(" from ")[0] for line in from_elsewhere(loaded)] == [
        "data mine_all:rows",
        "model mine_all:net",
        "algorithm mine_all:method",
        "partition mine_all:blocks",
        "transforms[0] mine_all:smaller",
    ]
    assert str(tmp_path / "mine_all.py") in from_elsewhere(loaded)[0]
    assert str(tmp_path) not in sys.path


@pytest.mark.usefixtures("forget")
@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("model.name=os:system", "model.name = 'os:system': os:system is not declared as a factory of a model"),
        ("model.name=subprocess:run", "not declared as a factory of a model"),
        ("algorithm.name=builtins:eval", "not declared as a factory of an algorithm"),
        ("algorithm.name=mine_bad:undeclared", "mark it with @fedbraid.factory"),
        ("algorithm.name=mine_bad:wrong", "mine_bad:wrong returned a str; an algorithm must be a"),
        ("algorithm.name=mine_bad:smaller", "marked as a factory of a transform, but it is used as an algorithm"),
        ("algorithm.name=fedbraid.transforms:clip", "it is a transform, not an algorithm"),
        ("transforms=[{name='mine_bad:method'}]", "has no parameter 'alg'"),
        ("algorithm.name=mine_bad:absent", "mine_bad has no 'absent'"),
        ("algorithm.name=mine_bad:methd", "mine_bad has no 'methd' (did you mean 'method'?"),
        ("algorithm.name=no_such:thing", "cannot import the module 'no_such'"),
        ("data.partition=mine_bad:loses_rows", "row"),
        ("data.name=mine_bad:method", "not declared as a factory of a dataset"),
        ("algorithm.name=mine_bad:", "does not exist"),
    ],
)
def test_what_is_not_a_factory_of_the_kind_is_not_called(tmp_path, setting, message):
    place = config(tmp_path, SMALL.replace("NAME", "mine_bad:method"), mine_bad=MINE)
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")) as caught:
        build(load_config(place, [setting]))
    assert "\n" not in str(caught.value)
    assert "mine_bad" not in sys.modules or not sys.modules["mine_bad"].CALLED


BROKEN = """
import jax.numpy as jnp
import fedbraid as fb

@fb.factory("algorithm")
def misspelt(loss, client_lr=0.1):
    alg = fb.fedavg(loss, client_lr=client_lr)
    one = alg.exchanges[0]
    return alg._replace(exchanges=(one._replace(receive=lambda server, up, key: up.nothing),))


@fb.factory("algorithm")
def branches(loss, client_lr=0.1):
    alg = fb.fedavg(loss, client_lr=client_lr)
    one = alg.exchanges[0]

    def receive(server, aggregate, key):
        if aggregate.count > 1:
            return server
        return server

    return alg._replace(exchanges=(one._replace(receive=receive),))


@fb.factory("model")
def unloved(example_shapes, num_classes):
    return fb.models.from_functions(lambda key: jnp.zeros(3), lambda params, batch, key: batch["z"].sum())


@fb.factory("model")
def unborn(example_shapes, num_classes):
    return fb.models.from_functions(lambda key: jnp.zeros(3) @ jnp.zeros(4), lambda params, batch, key: params.sum())
"""


@pytest.mark.usefixtures("forget")
@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            "algorithm.name=mine_broken:misspelt",
            r"receive failed at mine_broken.py, line \d+, in <lambda>: Attr",
        ),
        ("algorithm.name=mine_broken:branches", r"line \d+, in receive: .*Python's if, .* use jnp.where"),
        (
            "model.name=mine_broken:unloved",
            r"the metrics failed at mine_broken.py, line \d+.*KeyError: 'z'",
        ),
        ("model.name=mine_broken:unborn", r"mine_broken:unborn': its init failed at mine_broken.py, line \d+, in"),
    ],
)
def test_an_error_in_code_of_ones_own_names_its_line_and_the_folder_can_be_used_again(tmp_path, setting, message):
    place = config(tmp_path, SMALL.replace("NAME", "fedavg"), mine_broken=BROKEN)
    out = tmp_path / "run"
    for _ in range(2):  # the second time, too: nothing is left in the folder
        with pytest.raises(ValueError, match=message) as caught:
            run_config(load_config(place, [setting]), out)
        assert "\n" not in str(caught.value)
    assert not out.exists() or not list(out.iterdir())


@pytest.mark.usefixtures("forget")
def test_options_that_a_factory_does_not_declare_are_refused(tmp_path):
    code = MINE + '\n@fb.factory("algorithm")\ndef open_door(loss, client_lr=0.1, **anything):\n    CALLED.append(1)\n'
    place = config(tmp_path, SMALL.replace("NAME", "mine_open:open_door"), mine_open=code)
    with pytest.raises(ConfigError, match="option of algorithm 'mine_open:open_door': 'command' does not exist"):
        build(load_config(place, ["algorithm.command=ls"]))
    assert not sys.modules["mine_open"].CALLED


@pytest.mark.usefixtures("forget")
def test_a_module_beside_the_configuration_replaces_nothing(tmp_path):
    """A file with the name of a module of Python, of a package, or of another module beside a configuration."""
    for module in ("json", "numpy", "email"):
        place = config(tmp_path, SMALL.replace("NAME", f"{module}:method"), **{module: MINE})
        with pytest.raises(ConfigError, match=f"two modules '{module}'.*rename yours"):
            build(load_config(place))
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    build(load_config(config(tmp_path / "a", SMALL.replace("NAME", "mine_two:method"), mine_two=MINE)))
    same = config(tmp_path / "b", SMALL.replace("NAME", "mine_two:method"), mine_two=MINE)
    build(load_config(same))  # a copy of the file is the same module
    (tmp_path / "b" / "mine_two.py").write_text(MINE + "# changed\n")
    with pytest.raises(ConfigError, match="two modules 'mine_two'"):
        build(load_config(same))


# --- a package with entry points --------------------------------------------------------------------------------------


def package(folder, name, points, code=None, module=None):
    """A package as pip installs it: its module, and a dist-info folder with entry points."""
    about = folder / f"{name}-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [f"[{group}]\n{point}\n" for group, point in points]
    (about / "entry_points.txt").write_text("\n".join(lines))
    module = module or name
    (about / "top_level.txt").write_text(f"{module}\n")
    (about / "RECORD").write_text(f"{module}.py,,\n")
    (folder / f"{module}.py").write_text(EXAMPLE.read_text() if code is None else code)


@pytest.fixture
def fedexp_package(tmp_path, monkeypatch, forget):
    package(tmp_path / "site", "fedexp_method", [("fedbraid.algorithms", "my_fedexp = fedexp_method:fedexp")])
    monkeypatch.syspath_prepend(tmp_path / "site")
    return tmp_path / "site"


def test_an_installed_algorithm_goes_through_every_command(tmp_path, fedexp_package):
    """Run, report, cost, explain, sweep, compare, deploy: with no edit of the library; it logs its step."""
    place = config(tmp_path, SMALL.replace("NAME", "my_fedexp"))
    shown = invoke("run", place, "--out", tmp_path / "run").output
    assert "code that is not fedbraid's: algorithm my_fedexp from fedexp_method 1.0" in shown.splitlines()[0]
    import pyarrow.parquet as pq

    steps = pq.read_table(tmp_path / "run" / "metrics.parquet")["train/step"].to_numpy()
    assert len(steps) == 3
    assert (steps >= 1).all()
    invoke("report", tmp_path / "run", "--out", tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "Speeding Up Federated Averaging via Extrapolation" in page
    assert "train/step" in page
    cost = json.loads(invoke("cost", place, "--json").stdout)
    assert cost["up"] == cost["model_bytes"] + 4
    assert json.loads(invoke("run", place, "--explain", "--json").stdout)["plan"]
    invoke("sweep", place, "--over", "algorithm.client_lr=[0.05, 0.1]", "--out", tmp_path / "sweep")
    text = SMALL.replace('name = "NAME"\n', "") + '[[methods]]\nname = "my_fedexp"\n'
    both = config(tmp_path, text + "[compare]\nseeds = 1\nbaselines = []\n")
    invoke("compare", both, "--out", tmp_path / "compare")
    listed = json.loads(invoke("list", "algorithms", "--json").stdout)["algorithms"]
    assert {row["name"]: row["from"] for row in listed}["my_fedexp"] == "fedexp_method 1.0"
    config(tmp_path, SMALL.replace("NAME", "my_fedexp"))
    invoke("deploy", "init", tmp_path / "app", place)
    project = tomllib.loads((tmp_path / "app" / "pyproject.toml").read_text())
    assert "fedexp_method==1.0" in project["project"]["dependencies"]


@pytest.mark.usefixtures("forget")
def test_the_app_of_a_deployment_carries_the_module(tmp_path, monkeypatch):
    """The federation of the app, in this process, gives what the simulation gives."""
    from fedbraid.flower import InProcessGrid, Policy, client_app, load_federation, schema_of, serve

    (tmp_path / "here").mkdir()
    shutil.copy(EXAMPLE, tmp_path / "here" / "fedexp.py")
    place = config(tmp_path / "here", SMALL.replace("NAME", "fedexp:fedexp").replace("cohort = 2", 'cohort = "all"'))
    simulated = tmp_path / "run"
    invoke("run", place, "--out", simulated, "--set", "rounds=1")
    invoke("deploy", "init", tmp_path / "app", place)
    assert (tmp_path / "app" / "federation" / "fedexp.py").read_text() == EXAMPLE.read_text()
    (tmp_path / "here" / "fedexp.py").unlink()
    del sys.modules["fedexp"]
    federation = load_federation(tmp_path / "app" / "federation")
    made = federation.experiment
    assert sys.modules["fedexp"].__file__ == str(tmp_path / "app" / "federation" / "fedexp.py")
    app = client_app(
        made.algorithm,
        made.shapes,
        lambda context: federation.rehearsal_rows(context.node_config["partition-id"]),
        preprocess=federation.description.preprocess,
        cache=False,
    )
    grid = InProcessGrid(app, {100 + i: {"partition-id": i} for i in range(4)})
    served = serve(
        made.algorithm,
        made.params,
        grid,
        rounds=1,
        population=4,
        schema=schema_of(federation.data.train.arrays),
        preprocess=federation.description.preprocess,
        policy=Policy(deadline=60.0, join=60.0),
        say=lambda line: None,
    )
    import pyarrow.parquet as pq

    steps = pq.read_table(simulated / "metrics.parquet")["train/step"].to_numpy()
    np.testing.assert_allclose(served.history["train/step"], steps, rtol=1e-3)


@pytest.mark.usefixtures("forget")
def test_a_name_of_two_packages_is_an_error_that_names_both(tmp_path, monkeypatch):
    point = [("fedbraid.algorithms", "twice = other_a:fedexp")]
    package(tmp_path, "other_a", [*point, ("fedbraid.algorithms", "fedavg = other_a:fedexp")][:1])
    package(tmp_path, "other_b", [("fedbraid.algorithms", "twice = other_b:fedexp\nfedavg = other_b:fedexp")])
    package(tmp_path, "other_c", [("fedbraid.algorithms", "broken = other_c:absent")])
    monkeypatch.syspath_prepend(tmp_path)
    for name, both in (("twice", ("other_a 1.0", "other_b 1.0")), ("fedavg", ("fedbraid", "other_b 1.0"))):
        with pytest.raises(ValueError, match="uninstall one") as caught:
            algorithms.NAMES.find(name)
        assert all(one in str(caught.value) for one in both)
    listed = algorithms.NAMES.listed()
    assert sum(isinstance(one, str) for one in listed) == 3  # a package that cannot be used does not hide the others
    assert any("has no 'absent'" in one for one in listed if isinstance(one, str))


def test_names_are_never_cut_in_a_narrow_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    for kind, known in (("algorithms", algorithms.NAMES.all()), ("partitions", ["log-normal", "natural"])):
        words = invoke("list", kind).stdout.split()
        assert set(known) <= set(words)


def test_names_of_figures_and_tables_are_not_cut_either(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    listed = json.loads(invoke("reproduce", "--list", "--json").stdout)
    assert set(listed) <= set(invoke("reproduce", "--list").stdout.split())


def test_a_mark_names_a_kind():
    with pytest.raises(ValueError, match="kind of factory 'modle' does not exist; did you mean 'model'"):
        names.factory("modle")


def test_a_configuration_without_a_method_runs_fedauto_ahead_and_fedavg_is_one_setting_away():
    assert Config().algorithm.name == "fedauto_ahead"
    given = load_config(settings=["algorithm.caution=0.7", "algorithm.epochs=2"])
    assert (given.algorithm.name, given.algorithm.options) == ("fedauto_ahead", {"caution": 0.7, "epochs": 2})
    assert load_config(settings=["algorithm.name=fedavg"]).algorithm.name == "fedavg"
    made = build(load_config(settings=["data.clients=4", "model.hidden=[4]", "cohort=2"]))
    assert type(made.algorithm.init(made.params)).__name__ == "AheadState"


def test_a_rate_without_a_method_is_an_error_that_says_what_to_write():
    with pytest.raises(ConfigError, match=r"algorithm.client_lr: fedauto_ahead, .* such as algorithm.name=fedavg"):
        build(load_config(settings=["algorithm.client_lr=0.05"]))
    assert build(load_config(settings=["algorithm.client_lr=0.05", "algorithm.name=fedavg"])).algorithm


@pytest.mark.parametrize("name", ["clip", "norm_bound", "dp"])
def test_a_bound_on_uploads_with_measured_numbers_is_refused(name):
    """The numbers are larger than the update, which a common bound would shrink to nothing."""
    with pytest.raises(ConfigError, match=f"fedauto_ahead sends measured .* {name} bounds .* algorithm.name=fedavg"):
        build(load_config(settings=[f"transforms=[{{name='{name}'}}]"]))
