"""Files of parameters: the format of safetensors, NumPy archives, and damage."""

import json

import jax
import numpy as np
import pytest

from fedbraid.experiment import ConfigError
from fedbraid.experiment.params import read_params, write_params
from fedbraid.experiment.tensors import named_arrays, read_tensors, tree_of, write_npz, write_tensors
from fedbraid.sealed import Damaged


def test_the_file_is_what_the_safetensors_package_reads(tmp_path):
    package = pytest.importorskip("safetensors.numpy", reason="needs safetensors: pip install safetensors")
    arrays = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.array(True), "c": np.zeros((0, 2), np.int64)}
    write_tensors(tmp_path / "x.safetensors", arrays)
    found = package.load_file(tmp_path / "x.safetensors")
    assert {name: (a.dtype, a.shape, a.tobytes()) for name, a in found.items()} == {
        name: (a.dtype, a.shape, a.tobytes()) for name, a in arrays.items()
    }
    package.save_file(arrays, tmp_path / "theirs.safetensors")
    np.testing.assert_array_equal(read_tensors(tmp_path / "theirs.safetensors").arrays["a"], arrays["a"])


def test_the_bytes_follow_the_specification_of_safetensors(tmp_path):
    """Read by hand: 8 bytes of length, a JSON header, the arrays in little endian."""
    bfloat16 = jax.numpy.ones(3, jax.numpy.bfloat16)
    tree = {"w": np.arange(4, dtype=np.float32).reshape(2, 2), "file": np.array(7, np.int8), "h": bfloat16}
    write_tensors(tmp_path / "x.safetensors", named_arrays(tree), {"round": "3"})
    content = (tmp_path / "x.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    assert length % 8 == 0
    assert header["w"]["dtype"] == "F32"
    assert header["h"] == {"dtype": "BF16", "shape": [3], "data_offsets": header["h"]["data_offsets"]}
    begin, end = header["w"]["data_offsets"]
    np.testing.assert_array_equal(np.frombuffer(content[8 + length :][begin:end], "<f4").reshape(2, 2), tree["w"])
    read = read_tensors(tmp_path / "x.safetensors")
    assert read.metadata == {"round": "3"}
    back = tree_of(read.arrays, jax.eval_shape(lambda: tree))
    assert jax.tree.map(lambda a, b: a.tobytes() == np.asarray(b).tobytes(), back, tree) == dict.fromkeys(tree, True)
    write_npz(tmp_path / "x.npz", read.arrays)
    with np.load(tmp_path / "x.npz") as archive:
        assert (archive["file"], archive["h"].dtype) == (7, np.float32)


def test_no_damaged_byte_of_parameters_is_read(tmp_path):
    path = tmp_path / "x.safetensors"
    write_params(path, [{"w": np.arange(5, dtype=np.float32)}], round=3)
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        with pytest.raises(ConfigError, match=r"x\.safetensors is damaged"):
            read_params(path)
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        with pytest.raises(Damaged):
            read_tensors(path)
