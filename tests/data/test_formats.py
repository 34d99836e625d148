"""LEAF, tables, NumPy archives, and what holds for all formats: archives, limits, names, what an error leaves."""

import gzip
import io
import json
import tarfile
import zipfile

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from data.imported import RNG, read, refused, rows_of, tff
from fedbraid.data import Pipeline, text
from fedbraid.data.formats.archive import unpacked
from fedbraid.data.importing import import_data, open_source, sniff

# ---------------------------------------------------------------- LEAF


def leaf(path, users, counts=None, packed=False):
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"users": list(users), "num_samples": counts or [len(u["y"]) for u in users.values()], "user_data": users}
    blob = json.dumps(content).encode()
    path.write_bytes(gzip.compress(blob) if packed else blob)
    return path


def writer_(n, label=3):
    return {"x": (RNG.integers(0, 256, (n, 784)) / 255).tolist(), "y": [label] * n}


def test_leaf_femnist(tmp_path):
    root = tmp_path / "data"
    users = {"f1": writer_(3), "f2": writer_(2, 61)}
    leaf(root / "train" / "all_0.json", users)
    leaf(root / "train" / "all_1.json.gz", {"f3": writer_(4)}, packed=True)
    leaf(root / "test" / "all_0.json.gz", {"f3": writer_(1), "f9": writer_(5)}, packed=True)
    data, report = read("leaf", root, tmp_path / "s")
    assert (data.name, data.train.num_clients, data.train.num_examples) == ("femnist", 3, 9)
    assert data.test.sizes.tolist() == [0, 0, 1]
    assert data.unseen.num_examples == 5
    assert (report.summary["clients"], report.summary["test_examples"]) == (4, 6)
    pixels = np.rint(np.array(users["f2"]["x"]) * 255).reshape(2, 28, 28)
    assert np.array_equal(np.sort(rows_of(data.train, "f2", "x"), axis=0), np.sort(pixels, axis=0))
    assert sniff(root) == "leaf"


def test_leaf_characters_numbers_and_text(tmp_path):
    leaf(tmp_path / "c" / "train" / "a.json", {"ANN": {"x": ["ab" * 40, "cd" * 40], "y": ["a", "}"]}})
    data, _ = read("leaf", tmp_path / "c", tmp_path / "sc")
    assert data.train.arrays["x"].shape == (2, 80)
    assert sorted(data.train.arrays["y"].tolist()) == sorted([int(text.character_ids("a")[0]), text.UNKNOWN])
    leaf(tmp_path / "n" / "train" / "a.json", {"u": {"x": [[0.5, 1.5]], "y": [0.25]}})
    data, _ = read("leaf", tmp_path / "n", tmp_path / "sn")
    assert data.train.arrays["x"].tolist() == [[0.5, 1.5]]
    assert data.train.arrays["y"].tolist() == [0.25]
    leaf(tmp_path / "t" / "train" / "a.json", {"u": {"x": ["a tweet", "more"], "y": [0, 4]}})
    data, _ = read("leaf", tmp_path / "t", tmp_path / "st")
    assert list(data.train.client(0)["x"]) == ["a tweet", "more"]


def test_leaf_bad_files(tmp_path):
    out = tmp_path / "out" / "s"
    out.parent.mkdir()

    def case(name, users, **options):
        return leaf(tmp_path / name / "train" / "a.json", users, **options).parent.parent

    good = {"f1": writer_(2)}
    cut = case("cut", good) / "train" / "a.json"
    cut.write_bytes(cut.read_bytes()[:-200])
    refused("a.json: not valid JSON, maybe cut short", "leaf", tmp_path / "cut", out)
    packed = case("gz", good) / "train" / "a.json"
    (packed.parent / "a.json.gz").write_bytes(gzip.compress(packed.read_bytes())[:-30])
    packed.unlink()
    refused("a.json.gz: cannot be read, damaged or cut short", "leaf", tmp_path / "gz", out)
    refused(
        r"a\.json: client f1: field x: 2 examples where num_samples says 3", "leaf", case("n", good, counts=[3]), out
    )
    refused("client f1: field y: label 62 in row 0", "leaf", case("label", {"f1": writer_(2, 62)}), out)
    refused("client f1: field y: missing", "leaf", case("y", {"f1": {"x": []}}, counts=[0]), out)
    ragged = {"f1": {"x": [[0.0] * 784, [0.0] * 783], "y": [1, 1]}}
    refused("client f1: field x: images differ in shape", "leaf", case("ragged", ragged), out)
    refused("client f1: field x: no examples", "leaf", case("empty", {"f0": writer_(1), "f1": {"x": [], "y": []}}), out)
    leaf(tmp_path / "twice" / "train" / "a.json", good)
    leaf(tmp_path / "twice" / "train" / "b.json", good)
    refused(r"b\.json: client f1: appears twice", "leaf", tmp_path / "twice", out)
    (tmp_path / "list" / "train").mkdir(parents=True)
    (tmp_path / "list" / "train" / "a.json").write_text("[1, 2]")
    refused("not a LEAF file", "leaf", tmp_path / "list", out)
    refused("folder named train", "leaf", tmp_path / "out", out)


# ---------------------------------------------------------------- tables


def test_parquet_with_a_client_column(tmp_path):
    table = pa.table(
        {
            "user": ["b", "a", "b", "a", "c"],
            "age": [1, 2, 3, 4, 5],
            "height": [0.5, 1.5, 2.5, 3.5, 4.5],
            "label": [0, 1, 0, 2, 1],
        }
    )
    pq.write_table(table.slice(0, 3), tmp_path / "part-0.parquet")
    pq.write_table(table.slice(3), tmp_path / "part-1.parquet")
    pq.write_table(table.slice(1, 1), tmp_path / "test.parquet")
    files = [tmp_path / "part-0.parquet", tmp_path / "part-1.parquet", tmp_path / "test.parquet"]
    options = {"client": "user", "label": "label", "features": ["age", "height"]}
    data, _ = read("parquet", files, tmp_path / "s", **options)
    assert list(data.train.ids) == ["a", "b", "c"]
    assert sorted(rows_of(data.train, "a", "x").tolist()) == [[2.0, 1.5], [4.0, 3.5]]
    assert data.info["classes"] == 3
    assert data.test.sizes.tolist() == [1, 0, 0]
    # a table too large for memory is read in several scans, to the same store
    again, _ = read("parquet", files, tmp_path / "t", memory=1, **options)
    assert np.array_equal(again.train.arrays["x"], data.train.arrays["x"])
    assert list(again.train.ids) == list(data.train.ids)
    plain, _ = read("parquet", files[:1], tmp_path / "p", label="label")
    assert plain.info["plain"]
    named, _ = read("parquet", files[:1], tmp_path / "n", client="user")
    assert set(named.train.arrays) == {"age", "height", "label"}


def png(pixels):
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "png")
    return {"bytes": buffer.getvalue(), "path": None}


def test_hugging_face_folders_through_arrow(tmp_path):
    images = RNG.integers(0, 256, (3, 5, 5), np.uint8)
    root = tmp_path / "saved"
    for split, rows in (("train", [0, 1, 2]), ("test", [1])):
        table = pa.table(
            {
                "image": pa.array(
                    [png(images[i]) for i in rows], pa.struct([("bytes", pa.binary()), ("path", pa.string())])
                ),
                "label": pa.array(rows).dictionary_encode(),
                "writer": [f"w{i % 2}" for i in rows],
                "box": pa.array([[[1.0, 2.0], [3.0, float(i)]] for i in rows]),
            }
        )
        (root / split).mkdir(parents=True)
        with (
            pa.OSFile(str(root / split / "data-00000-of-00001.arrow"), "wb") as file,
            pa.ipc.new_stream(file, table.schema) as w,
        ):
            w.write_table(table)
    data, _ = read("parquet", root, tmp_path / "s", client="writer", label="label", features=["image"])
    assert np.array_equal(rows_of(data.train, "w1", "x"), images[1:2])
    assert data.test.sizes.tolist() == [0, 1]
    assert data.preprocess == Pipeline.of({"name": "scale"})
    boxes, _ = read("parquet", root, tmp_path / "b", client="writer", features=["box"])
    assert boxes.preprocess is None
    assert rows_of(boxes.train, "w1", "x").tolist() == [[[1.0, 2.0], [3.0, 1.0]]]


def test_tables_bad_files(tmp_path):
    out = tmp_path / "out" / "s"
    out.parent.mkdir()

    def case(name, **columns):
        pq.write_table(pa.table(columns), tmp_path / f"{name}.parquet")
        return tmp_path / f"{name}.parquet"

    null = case("null", user=["a", None], x=[1.0, 2.0])
    refused(r"null\.parquet: field user: the client column has a null in row 1", "parquet", null, out, client="user")
    first = case("first", user=["a", "b"], x=[1.0, 2.0])
    refused(r"null\.parquet: field user: .* row 1", "parquet", [first, null], out, client="user")
    hole = case("hole", user=["a", "b"], x=[1.0, None])
    refused(r"hole\.parquet: client b: field x: null in row 1", "parquet", hole, out, client="user")
    ragged = case("ragged", user=["a", "b"], x=[[1.0, 2.0], [3.0]])
    refused(r"ragged\.parquet: client b: field x: examples differ in shape", "parquet", ragged, out, client="user")
    refused(r"no column 'who'; it has user, x", "parquet", first, out, client="who")
    refused(
        "label 5 in row 1", "parquet", case("l", user=["a", "b"], y=[0, 5]), out, client="user", label="y", classes=5
    )
    other = case("other", user=["a"], z=[1.0])
    refused("columns user, z differ from user, x", "parquet", [first, other], out, client="user")
    whole = first.read_bytes()
    first.write_bytes(whole[: len(whole) // 2])
    refused(r"first\.parquet: not readable, damaged or cut short", "parquet", first, out, client="user")
    refused("no such file", "parquet", tmp_path / "missing.parquet", out)
    refused("no .parquet", "parquet", tmp_path / "out", out)


# ---------------------------------------------------------------- NumPy archives


def test_npz_layouts(tmp_path):
    x, y = RNG.integers(0, 256, (6, 28, 28), np.uint8), np.array([0, 1, 2, 3, 4, 61])
    np.savez(
        tmp_path / "writers.npz",
        images=x,
        labels=y,
        writer=np.array([1, 0, 1, 0, 2, 1]),
        writer_ids=np.array(["ann", "bob", "cat"]),
        is_test=np.array([0, 0, 0, 1, 1, 0], bool),
    )
    data, report = read("npz", tmp_path / "writers.npz", tmp_path / "s")
    assert (data.name, report.summary["clients"]) == ("femnist", 3)
    assert sorted(rows_of(data.train, "bob", "y").tolist()) == [0, 2, 61]
    assert data.test.sizes.tolist() == [1, 0]
    assert list(data.unseen.ids) == ["cat"]
    np.savez(tmp_path / "plain.npz", x_train=x, y_train=y, x_test=x[:2], y_test=y[:2])
    plain, _ = read("npz", tmp_path / "plain.npz", tmp_path / "p")
    assert plain.info["plain"]
    assert plain.test.num_examples == 2
    for arrays, steps in (  # uint8 images, flat ones too, get the step scale
        ({"x": x[:, :5].reshape(6, -1), "y": y}, [{"name": "scale"}]),
        ({"x": x[:, :5].reshape(6, -1), "y": x[:, 5:10].reshape(6, -1).astype(np.float32)}, []),  # may be tokens
        ({"x": x[:, 0].astype(np.int32), "y": y}, []),
    ):
        np.savez(tmp_path / "small.npz", **arrays)
        _, report = read("npz", tmp_path / "small.npz", tmp_path / f"s{len(list(tmp_path.iterdir()))}")
        assert report.summary["preprocess"] == steps


@pytest.mark.parametrize(("most", "given", "stored"), [(200, np.uint8, np.uint8), (70_000, np.int64, np.int32)])
def test_npz_with_tokens_is_data_of_a_language_model(tmp_path, most, given, stored):
    """The vocabulary also counts ids that occur in x alone, because the embedding needs a row for them."""
    x = np.array([[most, 1, 2], [4, 5, 6], [7, 8, 9]], given)
    y = np.array([[1, 2, 3], [5, 6, 4], [8, 9, 0]], given)
    np.savez(tmp_path / "t.npz", x=x, y=y, client=["b", "a", "b"])
    data, _ = read("npz", tmp_path / "t.npz", tmp_path / "s")
    assert list(data.train.ids) == ["a", "b"]
    assert sorted(data.train.client(1)["x"].tolist()) == sorted([x[0].tolist(), x[2].tolist()])
    assert (data.train.arrays["x"].dtype, data.train.arrays["y"].dtype) == (stored, stored)
    assert data.description.classes == most + 1
    assert data.preprocess == Pipeline.of({"name": "integers", "fields": "x,y"})
    refused(
        f"field x: token {most} in row 0 is out of range .0 to 9.",
        "npz",
        tmp_path / "t.npz",
        tmp_path / "o",
        classes=10,
    )
    np.savez(tmp_path / "n.npz", x=y.astype(int), y=-y.astype(int))
    refused(r"field y: token -3 in row 0 is out of range \(0 or more\)", "npz", tmp_path / "n.npz", tmp_path / "o")
    np.savez(tmp_path / "short.npz", x=x, y=y[:, :2])
    refused("expected one label per example", "npz", tmp_path / "short.npz", tmp_path / "o")


def test_npz_bad_files(tmp_path):
    out = tmp_path / "out" / "s"
    out.parent.mkdir()

    def case(name, **arrays):
        np.savez(tmp_path / f"{name}.npz", **arrays)
        return tmp_path / f"{name}.npz"

    x, y = np.zeros((2, 3)), np.array([0, 1])
    refused("expected x and y", "npz", case("a", z=x), out)
    refused("field y: 1 labels for 2 examples", "npz", case("b", x=x, y=y[:1]), out)
    refused("label 1 in row 1", "npz", case("c", x=x, y=y), out, classes=1)
    refused("client index 5", "npz", case("d", x=x, y=y, client=[0, 5], client_ids=np.array(["a"])), out)
    refused("client a: appears twice", "npz", case("e", x=x, y=y, client=[0, 1], client_ids=np.array(["a", "a"])), out)
    refused("without pickled objects", "npz", case("f", x=np.array([{}, {}], object), y=y), out)
    cut = case("g", x=x, y=y)
    cut.write_bytes(cut.read_bytes()[:-50])
    refused(r"g\.npz: not a readable", "npz", cut, out)


# ---------------------------------------------------------------- archives and import_data


@pytest.mark.parametrize("name", ["../evil.txt", "/tmp/evil.txt", "a/../../evil.txt", "..\\evil.txt"])
@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_paths_that_leave_the_archive_are_refused(tmp_path, name, kind):
    path = tmp_path / f"bad.{kind}"
    if kind == "tar":
        with tarfile.open(path, "w") as archive:
            member = tarfile.TarInfo(name)
            member.size = 4
            archive.addfile(member, io.BytesIO(b"evil"))
    else:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(zipfile.ZipInfo(name), "evil")
    with pytest.raises(ValueError, match="outside its folder; refused"), unpacked(path):
        pass
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_links_in_archives_are_refused_and_cut_archives_named(tmp_path):
    path = tmp_path / "link.tar"
    with tarfile.open(path, "w") as archive:
        member = tarfile.TarInfo("data")
        member.type, member.linkname = tarfile.SYMTYPE, "/etc"
        archive.addfile(member)
    with pytest.raises(ValueError, match="link"), unpacked(path):
        pass
    cut = tmp_path / "cut.tar.gz"
    with tarfile.open(cut, "w:gz") as archive:
        member = tarfile.TarInfo("x")
        member.size = 100_000
        archive.addfile(member, io.BytesIO(RNG.bytes(100_000)))
    cut.write_bytes(cut.read_bytes()[:-500])
    with pytest.raises(ValueError, match="damaged or cut short"), unpacked(cut):
        pass


def test_the_door_names_what_it_does_not_know(tmp_path):
    out = tmp_path / "s"
    with pytest.raises(ValueError, match="unknown format 'xlsx'; known: tff"):
        import_data("xlsx", [tmp_path], out)
    with pytest.raises(ValueError, match="has no option 'colour'"):
        import_data("leaf", [tmp_path], out, colour=1)
    with pytest.raises(ValueError, match="at least one file"):
        import_data("leaf", [], out)
    with pytest.raises(ValueError, match="one file or folder, got 2"):
        import_data("leaf", [tmp_path, tmp_path], out)
    (tmp_path / "readme.txt").write_text("x")
    with pytest.raises(ValueError, match="no known data format"):
        open_source(tmp_path)
    with pytest.raises(ValueError, match="no such file"):
        open_source(tmp_path / "nothing")
    np.savez(tmp_path / "big.npz", x=np.zeros((100, 10)), y=np.zeros(100, int))
    with pytest.raises(ValueError, match="fedbraid data import npz"):
        open_source(tmp_path / "big.npz", limit=10)


# ---------------------------------------------------------------- limits, names, what an error leaves


def test_hdf5_values_of_other_files_are_refused(tmp_path):
    out, secret = tmp_path / "s", tmp_path / "secret.txt"
    secret.write_bytes(b"the bytes of another file")
    path = tmp_path / "mine_train.h5"
    with h5py.File(path, "w") as file:
        file["examples/a/y"] = np.arange(5)
        file["examples/a"].create_dataset("x", (5,), "S5", external=[(str(secret), 0, 25)])
    refused(r"client a: field x: its values are in other files; refused", "tff", path, out)
    layout = h5py.VirtualLayout((5,), "i8")
    layout[:] = h5py.VirtualSource(str(tff(tmp_path / "other.h5", {"b": {"y": np.arange(5)}})), "examples/b/y", (5,))
    with h5py.File(path, "w") as file:
        file.create_group("examples/a").create_virtual_dataset("x", layout)
    refused(r"client a: field x: its values are in other files; refused", "tff", path, out)
    with h5py.File(path, "w") as file:
        file.create_group("examples")["a"] = h5py.ExternalLink(str(tmp_path / "other.h5"), "/examples/b")
    refused(r"client a: 'a' is a link to .*other.h5.*refused", "tff", path, out)


def test_field_names_in_the_wild_are_made_usable_and_others_refused(tmp_path):
    rows = {"image/decoded": np.zeros((2, 3)), "5_o_Clock_Shadow": np.arange(2), "class": np.arange(2)}
    with h5py.File(tmp_path / "t_train.h5", "w") as file:
        group = file.create_group("examples/c0")
        for name, values in rows.items():
            group.create_dataset(name.replace("/", "\\"), data=values)
    data, _ = read("tff", tmp_path / "t_train.h5", tmp_path / "s")
    assert set(data.train.arrays) == {"image_decoded", "5_o_Clock_Shadow", "class"}
    with pytest.raises(ValueError, match=r"name 'a; import os': not a usable name; use 1 to 64 letters"):
        read("tff", tmp_path / "t_train.h5", tmp_path / "t", name="a; import os")


def test_small_files_with_huge_contents_need_a_flag(tmp_path, monkeypatch):
    monkeypatch.setattr("fedbraid.data.limits.FREE", 1 << 16)
    path = tmp_path / "zeros.npz"
    np.savez_compressed(path, x=np.zeros((2, 1 << 17)), y=np.array([0, 1]), client=np.array(["a", "b"]))
    refused(r"zeros\.npz: [\d,]+ bytes declare [\d,]+ bytes of data, .*--no-limits", "npz", path, tmp_path / "s")
    data, _ = read("npz", path, tmp_path / "s", no_limits=True)
    assert data.train.arrays["x"].shape == (2, 1 << 17)


def test_a_failed_import_leaves_no_new_folders(tmp_path):
    np.savez(tmp_path / "d.npz", x=np.full((2, 1), np.nan), y=np.array([0, 1]))
    with pytest.raises(ValueError, match="not finite"):
        read("npz", tmp_path / "d.npz", tmp_path / "new" / "deeper" / "s")
    assert [p.name for p in tmp_path.iterdir()] == ["d.npz"]


def test_npz_labels_of_text_are_numbered_and_their_names_kept(tmp_path):
    np.savez(
        tmp_path / "d.npz",
        x_train=np.eye(3),
        y_train=np.array(["cat", "ant", "cat"]),
        x_test=np.eye(3)[:1],
        y_test=["ant"],
    )
    data, _ = read("npz", tmp_path / "d.npz", tmp_path / "s")
    assert (data.info["labels"], data.info["classes"]) == (["ant", "cat"], 2)
    assert (data.train.arrays["y"].tolist(), data.test.arrays["y"].tolist()) == ([1, 0, 1], [0])
