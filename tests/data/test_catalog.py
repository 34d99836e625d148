"""Data sets by name, plain arrays from Python, summaries, pictures, the command line."""

import json
import sys

import numpy as np
import pyarrow as pa
import pytest
import typer

from fedbraid.cli.data import app
from fedbraid.data import (
    FederatedData,
    Pipeline,
    Split,
    from_arrays,
    from_dataset,
    from_table,
    load,
    open_store,
    plot_data,
    repartition,
    summarize_data,
    write_store,
)
from fedbraid.data.catalog import CATALOG
from fedbraid.data.published import PUBLISHED, differences
from told import told

RNG = np.random.default_rng(0)
X, Y = np.arange(240, dtype=np.float32).reshape(120, 2), (np.arange(120) % 6).astype(np.int32)


def rows(data):
    return np.concatenate([s.arrays["x"][:, 0] for s in data.splits.values()]).tolist()


# ---------------------------------------------------------------- digits


def test_digits_are_all_there_and_each_client_trains():
    data = load("digits", partition="dirichlet", alpha=0.3, clients=50, test_fraction=0.2, seed=0)
    data.check()
    assert data.train.num_clients == data.test.num_clients == 50
    assert data.train.num_examples + data.test.num_examples == 1797
    assert data.train.sizes.min() >= 1
    assert data.test.num_examples == pytest.approx(0.2 * 1797, rel=0.05)
    assert data.aligned
    assert data.train.arrays["x"].dtype == np.uint8
    assert data.train.arrays["y"].dtype == np.int32
    assert data.info["classes"] == 10
    batch = data.preprocess({"x": data.train.arrays["x"][:5]}, None, False)
    assert np.allclose(batch["x"], data.train.arrays["x"][:5] / 16)
    same, other = load("digits"), load("digits", seed=1)
    assert np.array_equal(same.train.arrays["x"], data.train.arrays["x"])
    assert not np.array_equal(other.train.arrays["x"], data.train.arrays["x"])


def test_digits_are_those_of_scikit_learn():
    datasets = pytest.importorskip("sklearn.datasets")
    original = datasets.load_digits()
    data = load("digits", partition="iid", clients=3)
    ours = np.concatenate([s.arrays["x"] for s in data.splits.values()]).astype(float)
    labels = np.concatenate([s.arrays["y"] for s in data.splits.values()])
    ours_sorted = sorted((*x, y) for x, y in zip(ours.tolist(), labels.tolist(), strict=True))
    assert ours_sorted == sorted((*x, y) for x, y in zip(original.data.tolist(), original.target.tolist(), strict=True))


def test_another_partition_drops_the_defaults_it_does_not_know():
    assert load("digits", partition="iid").train.num_clients == 50
    assert load("digits", partition="shards", per_client=3, clients=20).train.num_clients == 20
    assert load("digits", per="client", sigma=1.0).train.num_clients == 50
    with pytest.raises(ValueError, match="partition 'iid' has no option 'alpha'"):
        load("digits", partition="iid", alpha=1.0)
    with pytest.raises(ValueError, match=r"partition 'even' does not exist .*there are: dirichlet, iid"):
        load("digits", partition="even")
    with pytest.raises(ValueError, match="no option 'colour'"):
        load("digits", colour=1)
    with pytest.raises(ValueError, match="needs the field 'coarse'"):
        load("digits", partition="pachinko", clients=3)


def test_options_that_every_set_understands():
    data = load("digits", validation_fraction=0.25, max_clients=7, preprocess=[{"name": "flatten"}])
    assert data.train.num_clients == data.test.num_clients == data.validation.num_clients == 7
    whole = load("digits", max_clients=7)
    assert data.train.num_examples + data.validation.num_examples == whole.train.num_examples
    assert np.all(data.train.sizes >= 1)
    assert data.preprocess == Pipeline.of({"name": "flatten"})
    assert load("digits", preprocess=[]).preprocess is None
    assert load("digits").shapes == {"x": (64,), "y": ()}
    with pytest.raises(ValueError, match="max_clients"):
        load("digits", max_clients=51)


# ---------------------------------------------------------------- from Python


def test_plain_arrays_with_their_own_test_set():
    data = from_arrays({"x": X, "y": Y}, {"x": -X[:30], "y": Y[:30]}, partition="shards", clients=6, per_client=1)
    assert sorted(rows(data)) == sorted([*X[:, 0].tolist(), *(-X[:30, 0]).tolist()])
    for i in range(6):  # the test rows have the labels that the client trains on
        assert set(data.test.client(i)["y"].tolist()) == set(data.train.client(i)["y"].tolist())
    assert data.info["partition"] == {"name": "shards", "seed": 0, "clients": 6, "per_client": 1}


def test_natural_ids_and_hold_out():
    data = from_arrays({"x": X, "y": Y}, partition="natural", ids=[f"u{i % 4}" for i in range(120)], test_fraction=0.5)
    assert list(data.train.ids) == ["u0", "u1", "u2", "u3"]
    assert data.train.sizes.tolist() == data.test.sizes.tolist() == [15] * 4
    assert sorted(rows(data)) == X[:, 0].tolist()
    assert {int(v) // 2 % 4 for v in data.test.client(3)["x"][:, 0]} == {3}


def test_torch_style_sets_and_tables():
    class Items:  # the interface of torch.utils.data.Dataset
        def __len__(self):
            return 120

        def __getitem__(self, i):
            return X[i], int(Y[i])

    data = from_dataset(Items(), partition="dirichlet", alpha=1.0, clients=4)
    assert sorted(rows(data)) == X[:, 0].tolist()
    table = pa.table({"who": [f"u{i % 3}" for i in range(120)], "x": X.tolist(), "target": Y})
    natural = from_table(table, table.slice(0, 1), client="who", label="target", features=["x"])
    assert list(natural.train.ids) == ["u0", "u1", "u2"]
    assert natural.test.sizes.tolist() == [1, 0, 0]
    assert natural.aligned

    class Face:  # a Hugging Face data set returns its rows as a table
        def with_format(self, kind):
            assert kind == "arrow"
            return self

        def __getitem__(self, rows):
            assert rows == slice(None)
            return table

    with told("no test split"):
        again = from_table(Face(), label="target", features=["x"], partition="iid", clients=5)
    assert sorted(rows(again)) == X[:, 0].tolist()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: from_arrays({"x": X, "y": Y[:-1]}, clients=2), "equal length"),
        (lambda: from_arrays({}, clients=2), "non-empty"),
        (lambda: from_arrays({"x": X}, {"y": Y}, clients=2), "must agree"),
        (lambda: from_arrays({"x": X}, {"x": X}, clients=2, test_fraction=0.1), "not both"),
        (lambda: from_arrays({"x": X}, partition="natural"), "one id per row"),
        (lambda: from_arrays({"x": X}, partition="natural", ids=["a"]), "1 ids for 120 rows"),
        (lambda: from_arrays({"x": X}, partition="dirichlet", alpha=1.0, clients=2), "needs the field 'y'"),
        (lambda: from_arrays({"x": X, "y": Y}, partition="dirichlet", clients=2), "needs the option 'alpha'"),
        (lambda: from_arrays({"x": X, "y": Y}, partition="dirichlet"), "needs the options 'clients' and 'alpha'"),
        (lambda: from_dataset([(1, 2, 3)], clients=1), "tuple of 2 values"),
        (lambda: from_dataset([], clients=1), "empty"),
        (lambda: from_dataset([(np.zeros(2), 0), (np.zeros(3), 0)], clients=1), "differ in shape"),
    ],
)
def test_bad_plain_data_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()


# ---------------------------------------------------------------- stores by name


@pytest.fixture
def mnist(tmp_path):
    plain = FederatedData(
        Split(
            {"x": RNG.integers(0, 256, (60, 28, 28), np.uint8), "y": (np.arange(60) % 10).astype(np.int32)},
            np.array([0, 60]),
        ),
        Split(
            {"x": RNG.integers(0, 256, (20, 28, 28), np.uint8), "y": (np.arange(20) % 10).astype(np.int32)},
            np.array([0, 20]),
        ),
        "mnist",
        {"classes": 10, "plain": True},
    )
    write_store(tmp_path / "mnist", plain)
    return tmp_path / "mnist"


def test_a_plain_store_is_partitioned_by_its_entrys_default(mnist):
    data = load("mnist", path=str(mnist), clients=5, alpha=2.0)
    assert data.train.num_clients == 5
    assert (data.train.num_examples, data.test.num_examples) == (60, 20)
    assert "plain" not in data.info
    assert load("mnist", path=str(mnist), partition="iid", clients=6).train.sizes.tolist() == [10] * 6
    with pytest.raises(ValueError, match=r"no clients of its own: choose a partition .* such as partition = "):
        load(str(mnist))
    assert load(str(mnist), partition="iid", clients=6).train.num_clients == 6


def test_a_natural_store_keeps_its_clients(tmp_path):
    split = Split.from_clients([{"x": X[:3], "y": Y[:3]}, {"x": X[3:9], "y": Y[3:9]}], ["a", "b"])
    write_store(tmp_path / "s", FederatedData(split, name="femnist"))
    data = load("femnist", path=tmp_path / "s")
    assert list(data.train.ids) == ["a", "b"]
    assert isinstance(data.train.arrays["x"], np.memmap)
    held = load("femnist", path=tmp_path / "s", test_fraction=1 / 3)
    assert held.test.sizes.tolist() == [1, 2]
    assert list(held.test.ids) == ["a", "b"]
    with pytest.raises(ValueError, match="take no option 'clients'"):
        load("femnist", path=tmp_path / "s", clients=3)
    pooled = repartition(open_store(tmp_path / "s"), partition="iid", clients=3)
    assert pooled.train.sizes.tolist() == [3, 3, 3]


def test_missing_files_say_what_to_do():
    for name, entry in CATALOG.items():
        if entry.get and "path" not in entry.defaults:
            with pytest.raises(ValueError, match="needs path") as error:
                load(name)
            assert entry.get in str(error.value)
    with pytest.raises(ValueError, match=r"unknown data set 'digit' \(did you mean 'digits'"):
        load("digit")
    with pytest.raises(ValueError, match="unknown data set 'imagenet'"):
        load("imagenet")
    with pytest.raises(ValueError, match=r"unknown data set 'stores/mine'; there is no such folder in .*data import"):
        load("stores/mine")


@pytest.mark.parametrize("options", [{}, {"client": "school"}, {"partition": "iid", "clients": 2}])
def test_a_table_as_the_name_of_data_is_refused_with_the_command_that_imports_it(tmp_path, options):
    place = tmp_path / "school.csv"
    place.write_text("school,age\na,1\nb,2\n")
    with pytest.raises(ValueError, match=r"is a table.*`fedbraid data import csv .*--out stores/school`.*name = "):
        load(str(place), **options)


def test_files_that_do_not_exist_are_refused():
    with pytest.raises(ValueError, match="no such file"):
        load("femnist", path="/nowhere")


def test_an_optional_reader_names_its_extra(tmp_path, monkeypatch):
    (tmp_path / "a_train.h5").write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(100))
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(ValueError, match=r"pip install 'fedbraid\[data\]'"):
        load("shakespeare", path=tmp_path)


def test_every_promised_name_is_there():
    promised = ["digits", "femnist", "emnist62", "shakespeare", "stackoverflow"]
    promised += ["cifar10", "cifar100", "cinic10", "mnist", "fashion-mnist"]
    assert set(promised) <= set(CATALOG)
    assert any(name.startswith("synthetic-") for name in CATALOG)
    assert set(promised) <= set(PUBLISHED)


def test_published_counts_of_the_papers():
    shakespeare = FederatedData(Split({"t": np.zeros(16_068)}, np.linspace(0, 16_068, 716).astype(int)))
    short = differences("shakespeare", shakespeare)
    assert short == ["test examples: 0 here, 2,356 published (Charles & Konecny, Table 3)"]
    whole = FederatedData(shakespeare.train, Split({"t": np.zeros(2_356)}, np.array([0, 2_356])))
    assert differences("shakespeare", whole) == []
    assert differences("my own", whole) == []


# ---------------------------------------------------------------- synthetic


def test_synthetic_least_squares_has_its_noise():
    data = load("synthetic-least-squares", clients=5, d=10, size=2_000, variance=0.25, seed=3)
    a, b = data.train.arrays["x"].astype(float), data.train.arrays["y"].astype(float)
    x0 = np.array(data.info["x0"])
    assert np.var(b - a @ x0) == pytest.approx(0.25, rel=0.05)
    assert a.std() == pytest.approx(1, abs=0.02)
    drift = load("synthetic-least-squares", clients=40, d=10, size=50, variance=0.0, drift=0.5, seed=3)
    own = [np.linalg.lstsq(*(drift.train.client(i)[f].astype(float) for f in "xy"), rcond=None)[0] for i in range(40)]
    assert np.std(own - np.array(drift.info["x0"])) == pytest.approx(0.5, rel=0.15)


def test_synthetic_conditioned_has_its_condition_number():
    data = load("synthetic-conditioned", kappa=50.0, clients=3, d=6, size=10)
    for i in range(3):
        a = data.train.client(i)["x"].astype(float)
        assert np.linalg.eigvalsh(a.T @ a) == pytest.approx([1, 1, 1, 1, 1, 50], rel=1e-3)
    with pytest.raises(ValueError, match="size >= d"):
        load("synthetic-conditioned", d=10, size=5)


def test_synthetic_logistic_follows_its_model():
    data = load("synthetic-logistic", clients=4, d=5, size=5_000)
    chance = 1 / (1 + np.exp(-(data.train.arrays["x"] @ np.array(data.info["x0"], np.float32))))
    for low, high in ((0.1, 0.3), (0.4, 0.6), (0.8, 0.9)):
        chosen = (chance > low) & (chance < high)
        assert data.train.arrays["y"][chosen].mean() == pytest.approx(chance[chosen].mean(), abs=0.05)


def test_synthetic_heterogeneity_grows_with_beta():
    def spread(beta):
        data = load("synthetic-heterogeneous", alpha=0.0, beta=beta, clients=60, mean_size=50, seed=0)
        means = [data.train.client(i)["x"].mean() for i in range(60)]
        return float(np.var(means))

    # the mean input of client k has variance beta + 1 / d (B_k, and the mean of d values of N(B_k, 1))
    assert spread(0.0) == pytest.approx(1 / 60, rel=0.6)
    assert spread(4.0) == pytest.approx(4 + 1 / 60, rel=0.5)


def test_synthetic_sentences_have_the_shape_of_the_real_ones():
    data = load("synthetic-sentences", clients=50, examples=4_000, words=100)
    x, y = data.train.arrays["x"], data.train.arrays["y"]
    assert (data.train.num_clients, data.train.num_examples, x.dtype) == (50, 4_000, np.uint16)
    assert np.all(x[:, 0] == 102)
    assert np.array_equal(x[:, 1:], y[:, :-1])
    after_end = np.cumsum(y == 103, axis=1) - (y == 103)
    assert np.all((y == 0) == (after_end > 0))  # padding after the end, and only there
    counts = np.bincount(x.reshape(-1), minlength=104)[1:101]
    assert counts[0] / counts[9] == pytest.approx(10, rel=0.3)  # Zipf
    with pytest.raises(ValueError, match="no option 'size'"):
        load("synthetic-sentences", size=3)


# ---------------------------------------------------------------- summaries and pictures


def test_a_summary_counts_as_documented():
    def some(n, label):
        return {"x": X[:n], "y": np.full(n, label, np.int32)}

    data = FederatedData(
        Split.from_clients([some(4, 0), some(2, 1)], ["a", "b"]),
        Split.from_clients([some(1, 0), some(0, 0)], ["a", "b"]),
        "d",
        unseen=Split.from_clients([some(3, 2)], ["z"]),
    )
    summary = summarize_data(data)
    assert (summary["clients"], summary["train_examples"], summary["test_examples"]) == (3, 6, 4)
    assert summary["sizes"] == {"min": 2, "median": 3.0, "max": 4}
    assert summary["shapes"] == {"x": [2], "y": []}
    assert summary["label_counts"] == [4, 2]
    # pool (2/3, 1/3); the clients' distances are 1/3 and 2/3
    assert summary["label_divergence"] == pytest.approx(0.5)
    json.dumps(summary)


def test_pictures_have_labelled_axes(tmp_path):
    figure = plot_data(load("digits"))
    left, right, bar = figure.axes
    assert (left.get_ylabel(), right.get_ylabel()) == ("label", "train examples")
    assert left.images[0].get_array().shape == (10, 50)
    assert "share" in bar.get_ylabel()
    assert np.allclose(left.images[0].get_array().sum(0), 1)  # each client's shares
    assert len(plot_data(load("synthetic-sentences", clients=20, examples=100)).axes) == 1
    figure.savefig(tmp_path / "p.svg")


# ---------------------------------------------------------------- command line


@pytest.fixture
def call(capsys):
    command = typer.main.get_command(app)

    def run(*arguments):
        command([str(a) for a in arguments], standalone_mode=False)
        printed = capsys.readouterr().out
        return json.loads(printed) if "--json" in arguments else printed

    return run


def test_command_line_from_files_to_a_picture(tmp_path, call):
    np.savez(
        tmp_path / "w.npz",
        x=RNG.integers(0, 256, (40, 4, 4), np.uint8),
        y=np.arange(40) % 4,
        client=np.repeat(range(8), 5),
    )
    out = call("import", "npz", tmp_path / "w.npz", "--out", tmp_path / "s", "--name", "mine", "--json")
    assert (out["clients"], out["train_examples"], out["store"]) == (8, 40, str(tmp_path / "s"))
    seen = call("inspect", tmp_path / "s", "--verify", "--json")
    assert {"clients", "train_examples", "test_examples", "shapes", "labels", "sizes", "verified_bytes"} <= set(seen)
    assert seen["sizes"] == {"min": 5, "median": 5.0, "max": 5}
    made = call(
        "partition", tmp_path / "s", "--by", "dirichlet", "--alpha", 1, "--clients", 3, "--per", "client",
        "--test-fraction", 0.25, "--out", tmp_path / "p", "--plot", tmp_path / "p.png", "--json",
    )  # fmt: skip
    assert (made["clients"], made["train_examples"] + made["test_examples"]) == (3, 40)
    assert (tmp_path / "p.png").read_bytes()[:4] == b"\x89PNG"
    assert "3 clients" in call("inspect", tmp_path / "p")
    assert "preprocessing: scale\n" in call("inspect", tmp_path / "p")
    assert "preprocessing: scale, factor = 0.0625\n" in call("inspect", "digits")
    assert "preprocessing: none" in call("inspect", "digits", "--set", "preprocess=[]")
    assert call("plot", tmp_path / "p", "--out", tmp_path / "q.svg", "--json")["clients"] == 3
    assert call("inspect", "digits", "--set", "clients=20", "--set", "partition=iid", "--json")["clients"] == 20
    assert call("partition", "digits", "--by", "iid", "--clients", 5, "--out", tmp_path / "d", "--json")["clients"] == 5


def test_command_line_lists_every_set(call):
    listed = call("list", "--json")
    assert set(listed["sets"]) == set(CATALOG)
    assert listed["sets"]["femnist"]["needs_path"]
    assert not listed["sets"]["digits"]["needs_path"]
    plain = call("list")
    assert all(name in plain for name in CATALOG)


def test_command_line_mistakes_reach_the_user_as_errors(tmp_path, call):
    for arguments, words in [
        (["inspect", "nothing"], "unknown data set"),
        (["inspect", "digits", "--verify"], "--verify checks a store"),
        (["inspect", "digits", "--set", "alpha"], "KEY=VALUE"),
        (["plot", "digits", "--out", "p.txt"], r"\.png, \.pdf or \.svg"),
        (["import", "leaf", str(tmp_path / "none"), "--out", str(tmp_path / "s")], "no such file"),
    ]:
        with pytest.raises(ValueError, match=words):
            call(*arguments)
