"""Tables of users: CSV, svmlight, frames, data sets per client; labels, categories, gaps; and the docs' commands."""

import gzip
import json
import re
import shlex
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from fedbraid.cli.app import make_app
from fedbraid.data import Columns, from_arrays, from_clients, from_table, load, open_store
from fedbraid.data.formats.svmlight import svmlight_rows
from fedbraid.data.importing import NO_TEST, import_data, sniff
from told import told

DOCS = Path(__file__).parents[2] / "docs" / "data.md"


def school(rows=60, schools=4, seed=0):
    """Pupils: a school, an age, a gender, a score that depends on both, and whether they passed."""
    rng = np.random.default_rng(seed)
    age, gender = rng.normal(12, 2, rows), rng.choice(["f", "m"], rows)
    score = (3 * age + 5 * (gender == "f") + rng.normal(0, 1, rows)).round(2)
    names = np.array([f"school {i % schools}" for i in range(rows)])
    return {
        "school": names,
        "age": age.round(3),
        "gender": gender,
        "score": score,
        "passed": np.where(score > 38, "yes", "no"),
    }


def write_csv(path, columns, delimiter=","):
    lines = [delimiter.join(columns), *(delimiter.join(map(str, row)) for row in zip(*columns.values(), strict=True))]
    blob = ("\n".join(lines) + "\n").encode()
    path.write_bytes(gzip.compress(blob) if path.suffix == ".gz" else blob)
    return path


CHOSEN = {"client": "school", "label": "passed", "features": ["age", "score"], "categories": ["gender"]}


def imported(kind, path, out, **options):
    report = import_data(kind, [path], out, **options)
    return open_store(out), report


# ---------------------------------------------------------------- columns


def test_csv_to_a_store_keeps_ids_label_names_and_columns(tmp_path):
    columns = school()
    data, report = imported("csv", write_csv(tmp_path / "s.csv", columns), tmp_path / "s", **CHOSEN, test_fraction=0.25)
    assert list(data.train.ids) == [f"school {i}" for i in range(4)]
    assert data.info["labels"] == ["no", "yes"]
    assert data.info["classes"] == 2
    assert data.info["features"] == ["age", "score", "gender=f", "gender=m"]
    assert data.aligned
    assert (data.train.num_examples, data.test.num_examples) == (44, 16)
    assert NO_TEST not in report.notes
    # every row is there once, under its own school
    for i, name in enumerate(data.train.ids):
        mine = columns["school"] == name
        expected = np.stack([columns["age"], columns["score"], columns["gender"] == "f", columns["gender"] == "m"], 1)[
            mine
        ]
        found = np.concatenate([data.train.client(i)["x"], data.test.client(i)["x"]])
        assert np.allclose(np.sort(found, 0), np.sort(expected.astype(np.float32), 0))
        labels = np.concatenate([data.train.client(i)["y"], data.test.client(i)["y"]])
        assert labels.sum() == (columns["passed"][mine] == "yes").sum()
    for name, delimiter in (("semi.csv", ";"), ("tab.tsv", "\t"), ("packed.csv.gz", ",")):
        again, report = imported("csv", write_csv(tmp_path / name, columns, delimiter), tmp_path / name[:3], **CHOSEN)
        assert again.train.num_examples == 60
        assert NO_TEST in report.notes
    assert sniff(tmp_path / "packed.csv.gz") == "csv"


@pytest.mark.parametrize("scope", ["federation", "client"])
def test_standardise_is_fitted_on_training_rows_only(scope):
    columns = school(200)
    options = {**CHOSEN, "test_fraction": 0.3, "seed": 1}
    raw = from_table(columns, **options)
    data = from_table(columns, **options, standardise=scope)
    for i in range(4):
        rows = slice(None) if scope == "federation" else slice(*raw.train.offsets[i : i + 2])
        fitted = raw.train.arrays["x"][rows]
        for split, plain in ((data.train, raw.train), (data.test, raw.test)):
            expected = (plain.client(i)["x"][:, :2] - fitted[:, :2].mean(0)) / fitted[:, :2].std(0)
            assert np.allclose(split.client(i)["x"][:, :2], expected, atol=1e-4)
            assert np.array_equal(split.client(i)["x"][:, 2:], plain.client(i)["x"][:, 2:])  # categories stay 0 and 1
    assert data.info["standardise"]["scope"] == scope


def test_missing_values_need_a_rule():
    columns = school()
    columns["age"] = columns["age"].copy()
    columns["age"][[3, 7, 20]] = np.nan
    with pytest.raises(
        ValueError, match=r"column 'age' lacks 3 of 60 values, first in row 3 .*--missing.*\"mean\" or a number"
    ):
        from_table(columns, **CHOSEN)
    options = {**CHOSEN, "test_fraction": 0.3}
    with told("of 60 rows, column 'age' lacks 3, filled with the mean of the training rows"):
        data = from_table(columns, **options, missing="mean")
    assert data.train.num_examples + data.test.num_examples == 60
    with told("column 'age' lacks 3, filled with 0"):
        zero = from_table(columns, **options, missing=0)
    assert sorted(np.concatenate([zero.train.arrays["x"][:, 0], zero.test.arrays["x"][:, 0]]))[:3] == [0, 0, 0]
    known = np.concatenate([[v for v in zero.train.arrays["x"][:, 0] if v]])
    filled = data.train.arrays["x"][:, 0][zero.train.arrays["x"][:, 0] == 0]
    assert np.allclose(filled, known.mean(), rtol=1e-5)
    with told("3 of 60 rows lack a value and were dropped"):
        assert sum(s.num_examples for s in from_table(columns, **options, missing="drop").splits.values()) == 57
    absent = {**columns, "gender": np.where(np.arange(60) < 2, None, columns["gender"])}
    with told("column 'gender' lacks 2, its 0/1 columns are all 0 there"):
        whole = from_table(absent, **CHOSEN, missing="mean")
    assert sum((split.arrays["x"][:, 2:].sum(1) == 0).sum() for split in whole.splits.values()) == 2
    columns["passed"] = np.where(np.arange(60) == 5, None, columns["passed"])
    with pytest.raises(ValueError, match=r"column 'passed' lacks 1 of 60 values.*\"drop\"$"):
        from_table(columns, **options, missing="mean")


@pytest.mark.parametrize(
    ("change", "options", "words"),
    [
        (
            {},
            {"client": "school", "label": "score"},
            r"column 'gender' holds text \(such as '[fm]'\), but features must be numb",
        ),
        ({"age": np.r_[np.inf, np.ones(59)]}, CHOSEN, r"column 'age': 1 values are infinite, first in row 0"),
        ({"age": np.r_[1e300, np.ones(59)]}, CHOSEN, r"column 'age': 1 values are not finite in float32"),
        ({}, {**CHOSEN, "client": "who"}, "no column 'who'; it has school, age"),
        ({}, {**CHOSEN, "client": "shcool"}, r"no column 'shcool' \(did you mean 'school'\?\); it has"),
        ({}, {**CHOSEN, "features": ["age", "age"]}, "column 'age' is named twice in features"),
        ({}, {**CHOSEN, "task": "values"}, r"column 'passed': holds .*needs one number per row"),
        ({}, {**CHOSEN, "missing": "guess"}, "missing must be"),
        ({}, {**CHOSEN, "standardise": "all"}, "standardise must be"),
        ({}, {**CHOSEN, "partition": "iid"}, "names the clients, so there is no option 'partition'"),
        ({"school": np.array(["a\nb"] * 60)}, CHOSEN, "control characters"),
    ],
)
def test_bad_tables_are_refused_with_the_column(change, options, words):
    with pytest.raises(ValueError, match=words) as error:
        from_table({**school(), **change}, **options)
    assert "\n" not in str(error.value)


def test_labels_by_task(tmp_path):
    columns = {**school(), "level": np.arange(60) % 3 - 1, "count": np.arange(60) % 5}
    options = {"client": "school", "features": ["age"], "test_fraction": 0.2}
    values = from_table(columns, label="count", task="values", **options)
    assert values.train.arrays["y"].dtype == np.float32
    assert "classes" not in values.info
    assert from_table(columns, label="score", **options).train.arrays["y"].dtype == np.float32
    counted = from_table(columns, label="count", **options)
    assert (counted.info["classes"], counted.train.arrays["y"].dtype) == (5, np.int32)
    signed = from_table(columns, label="level", task="classes", **options)
    assert signed.info["labels"] == ["-1", "0", "1"]
    assert set(signed.train.arrays["y"].tolist()) == {0, 1, 2}
    table = pa.table({k: v for k, v in columns.items() if k in ("school", "age", "passed")})
    pq.write_table(table, tmp_path / "t.parquet")  # labels of text in Parquet are encoded, too
    data, _ = imported(
        "parquet", tmp_path / "t.parquet", tmp_path / "s", client="school", label="passed", features=["age"]
    )
    assert data.info["labels"] == ["no", "yes"]


def test_a_test_table_uses_the_coding_of_the_training_rows():
    columns, more = school(), school(20, schools=6, seed=2)
    data = from_table(columns, more, **CHOSEN)
    assert data.train.num_clients == data.test.num_clients == 4
    assert list(data.unseen.ids) == ["school 4", "school 5"]
    with pytest.raises(ValueError, match=r"column 'gender': the value 'x' in row 2 is not in the training rows"):
        from_table(columns, {**more, "gender": np.array(["f", "m", "x", *"f" * 17])}, **CHOSEN)


def test_rows_without_clients_are_partitioned():
    columns = school()
    data = from_table(
        columns,
        label="passed",
        features=["age", "score"],
        partition="dirichlet",
        alpha=1.0,
        clients=3,
        test_fraction=0.2,
    )
    assert data.train.num_clients == 3
    assert data.train.num_examples + data.test.num_examples == 60
    assert data.info["labels"] == ["no", "yes"]
    with told("no test split"):
        from_table(columns, label="passed", features=["age"], clients=3)


# ---------------------------------------------------------------- frames of other libraries


def expected():
    return from_table(school(), **CHOSEN, test_fraction=0.2)


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_frames(library):
    frames = pytest.importorskip(library)
    data = from_table(frames.DataFrame(school()), **CHOSEN, test_fraction=0.2)
    assert np.array_equal(data.train.arrays["x"], expected().train.arrays["x"])
    assert data.info == expected().info


def test_hugging_face():
    datasets = pytest.importorskip("datasets")
    whole = datasets.Dataset.from_dict({k: v.tolist() for k, v in school().items()})
    data = from_table(whole, **CHOSEN, test_fraction=0.2)
    assert np.array_equal(data.train.arrays["x"], expected().train.arrays["x"])
    both = from_table(whole.train_test_split(0.3, seed=0), **CHOSEN)
    assert sum(s.num_examples for s in both.splits.values()) == 60


def test_an_arrow_stream_is_enough():
    """Any frame library that exports the Arrow C stream, without its package here."""

    class Frame:
        def __arrow_c_stream__(self, requested_schema=None):
            return pa.table(school()).__arrow_c_stream__(requested_schema)

    data = from_table(Frame(), **CHOSEN, test_fraction=0.2)
    assert np.array_equal(data.train.arrays["x"], expected().train.arrays["x"])
    with pytest.raises(ValueError, match="int is not a table"):
        from_table(3)


def test_dicts_of_splits_like_a_dataset_dict():
    columns = school()
    parts = {
        "train": pa.table(columns).slice(0, 40),
        "validation": pa.table(columns).slice(40),
        "extra": pa.table(columns),
    }
    with told("the splits extra are not used"):
        data = from_table(parts, **CHOSEN)
    assert (data.train.num_examples, data.test.num_examples) == (40, 20)


def test_one_torch_style_set_per_client():
    class Items:
        def __init__(self, n):
            self.n = n

        def __len__(self):
            return self.n

        def __getitem__(self, i):
            return np.full(2, i, np.float32), i % 2

    data = from_clients([Items(4), Items(2)], [Items(1), Items(1)])
    assert data.train.sizes.tolist() == [4, 2]
    assert data.aligned
    assert data.info["classes"] == 2
    held = from_clients({"ann": Items(4), "bob": {"x": np.ones((6, 2)), "y": np.arange(6) % 2}}, test_fraction=0.5)
    assert (held.train.sizes.tolist(), held.test.sizes.tolist()) == ([2, 3], [2, 3])
    with told("no test split"):
        from_clients([Items(2)])
    bad = {"x": np.array([[1.0], [np.nan]]), "y": np.arange(2)}
    with pytest.raises(ValueError, match=r"'x' is not finite \(NaN or infinity\) in 1 of 2 rows"):
        from_clients([bad])
    with pytest.raises(ValueError, match="1 test sets for 2 clients"):
        from_clients([Items(1), Items(1)], [Items(1)])


def test_arrays_that_are_not_finite_are_refused_when_they_come_in():
    with pytest.raises(
        ValueError, match=r"train field 'x' is not finite \(NaN or infinity\) in 2 of 4 rows, first in row 1"
    ):
        from_arrays({"x": np.array([0, np.nan, 1, np.inf]), "y": np.arange(4)}, clients=2)


# ---------------------------------------------------------------- svmlight


def test_svmlight_agrees_with_scikit_learn(tmp_path):
    sklearn = pytest.importorskip("sklearn.datasets")
    rng = np.random.default_rng(0)
    x = np.where(rng.random((30, 7)) < 0.4, rng.normal(size=(30, 7)), 0)
    y = rng.choice([-1, 1], 30)
    for zero_based in (True, False):
        path = tmp_path / f"{zero_based}.svm"
        sklearn.dump_svmlight_file(x, y, str(path), zero_based=zero_based, comment="made here")
        found, labels = svmlight_rows(path, dimension=7)
        assert np.allclose(found, x.astype(np.float32))
        assert np.array_equal(labels, y)
    data, _ = imported("svmlight", tmp_path / "False.svm", tmp_path / "s")
    assert data.info["plain"]
    assert data.info["labels"] == ["-1", "1"]
    assert np.allclose(data.train.arrays["x"], x.astype(np.float32))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1 1:2 1:3\n", "line 1: '1:3' is not index:value with a growing index"),
        ("\n# only a comment\n", "holds no examples"),
        ("1 1:nan\n", "'nan' is not finite"),
        ("x 1:1\n", "'x' is not a number"),
        ("1 1\n", "'1' is not index:value"),
        ("1 -1:2\n", "growing index"),
        ("1 1:1\n1 999999999:1\n", "bytes declare"),
        ("1 1:\u00e9\n", "not ASCII"),
    ],
)
def test_bad_svmlight_files(tmp_path, text, words):
    path = tmp_path / "a.svm"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(words)):
        import_data("svmlight", [path], tmp_path / "new" / "s")
    assert [p.name for p in tmp_path.iterdir()] == ["a.svm"]


def test_svmlight_queries_as_clients(tmp_path):
    path = tmp_path / "rank.svm"
    path.write_text("2 qid:7 1:1\n0 qid:7 2:1\n1 qid:9 1:3\n")
    data, _ = imported("svmlight", path, tmp_path / "s", client="qid")
    assert (list(data.train.ids), data.train.sizes.tolist()) == (["7", "9"], [2, 1])


# ---------------------------------------------------------------- configurations and the docs


def test_a_store_is_named_by_its_path(tmp_path):
    imported("csv", write_csv(tmp_path / "s.csv", school()), tmp_path / "store", **CHOSEN)
    data = load(str(tmp_path / "store"), test_fraction=0.5)
    assert data.test is not None
    with pytest.raises(ValueError, match=r"takes no path; .* write the path .* as the name: name = '.*store'"):
        load("digits", path=str(tmp_path / "store"))
    with pytest.raises(ValueError, match="unknown data set 'nowhere'"):
        load("nowhere")


def commands(title):
    """The lines of the first shell block below a heading of docs/data.md."""
    section = DOCS.read_text().partition(f"## {title}\n")[2]
    [block] = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)[:1]
    return [line for line in block.replace("\\\n", " ").splitlines() if line.strip()]


def follow(title):
    """Run the five commands; the report's pictures, which other tests draw, are left out."""
    lines = commands(title)
    assert len(lines) == 5
    for line in lines:
        program, *arguments = shlex.split(line)
        assert program == "fedbraid"
        arguments += ["--no-plots"] if arguments[0] == "report" else []
        done = CliRunner().invoke(make_app(), arguments)
        assert done.exit_code == 0, (line, done.output, done.exception)


def test_the_docs_commands_for_a_csv_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_csv(tmp_path / "school.csv", school(400, schools=10))
    follow("From a CSV file to a report")
    summary = json.loads((tmp_path / "runs" / "school" / "summary.json").read_text())
    assert summary["finished"]
    clients = pq.read_table(tmp_path / "runs" / "school" / "clients.parquet").to_pydict()
    assert clients["id"] == [f"school {i}" for i in range(10)]
    assert clients["examples"] == [8] * 10
    # the noise has variance 1, a constant guess has the variance of the score
    assert np.mean(clients["test_squared_error"]) < 3
    assert (tmp_path / "runs" / "school" / "report.html").is_file()


def test_the_docs_commands_for_svmlight(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    weights = rng.normal(size=123)
    for name, n in (("a9a", 600), ("a9a.t", 200)):
        lines = []
        for _ in range(n):
            on = np.sort(rng.choice(123, 14, replace=False))
            lines.append(f"{'+1' if weights[on].sum() > 0 else '-1'} " + " ".join(f"{i + 1}:1" for i in on))
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    follow("From an svmlight file to a report")
    summary = json.loads((tmp_path / "runs" / "a9a" / "summary.json").read_text())
    assert summary["finished"]
    clients = pq.read_table(tmp_path / "runs" / "a9a" / "clients.parquet").to_pydict()
    assert np.nanmean(clients["test_accuracy"]) > 0.75


def test_columns_have_defaults_that_change_nothing():
    assert Columns(client="a", label="b", features=("c",)).plain
    assert not Columns(missing="mean").plain
