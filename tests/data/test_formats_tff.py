"""TFF's files, HDF5 and SQLite: imports keep the data; damage is a one-line error with file, client and field."""

import lzma
import sqlite3

import h5py
import numpy as np
import pytest

from data.imported import RNG, read, refused, rows_of, tff
from fedbraid.data import text
from fedbraid.data.formats.tff import parse_example
from fedbraid.data.importing import sniff

# ---------------------------------------------------------------- TFF, HDF5


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
    assert (windows.info["classes"], windows.info["tokenizer"]) == (90, "characters")
    assert windows.info["snippets"] == {"train": 3, "test": 1}
    assert text.decode(windows.train.client(1)["x"][0]) == "Or not"
    batch = windows.preprocess(windows.train.client(0), None, False)
    assert batch["x"].dtype == np.int32


def test_tff_shakespeare_as_the_tokens_of_a_language_model(tmp_path, monkeypatch):
    from fedbraid.data import tokens
    from fedbraid.data.catalog import load
    from fedbraid.data.store import write_store

    codes = tokens.Tokenizer(
        "smollm2", 49_152, lambda text: np.array([1000 + ord(c) for c in text]), str, (1010,), tokens.CHAT
    )
    monkeypatch.setitem(tokens.TOKENIZERS, "smollm2", lambda: codes)
    tff(tmp_path / "shakespeare_train.h5", {"PLAY_ANN": {"snippets": np.array([b"To be", b"or not\nto be"])}})
    tff(tmp_path / "shakespeare_test.h5", {"PLAY_ANN": {"snippets": np.array([b"is the question"])}})
    read("tff", tmp_path, tmp_path / "s")
    chosen = {"path": tmp_path / "s", "tokenizer": "smollm2", "length": 8}
    assert load("shakespeare", **chosen).train.sizes.tolist() == [
        3
    ]  # 19 symbols with ends, of which the last is only in y
    assert load("shakespeare", **chosen).description.classes == 49_152
    asked = load("shakespeare", **chosen | {"form": "instructions", "length": 200})
    assert asked.train.sizes.tolist() == [2]
    with pytest.raises(ValueError, match="needs the tokens of a language model: set tokenizer = "):
        load("shakespeare", path=tmp_path / "s", form="instructions")
    write_store(tmp_path / "windows", load("shakespeare", path=tmp_path / "s"))
    assert load("shakespeare", path=tmp_path / "windows").train.arrays["x"].shape[1] == 80
    with pytest.raises(ValueError, match="has windows of characters, which tokenizer = 'smollm2' cannot read"):
        load("shakespeare", **chosen | {"path": tmp_path / "windows"})


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
