"""Readers of the published formats. Each writes a store and is independent of the others."""

from fedbraid.data.formats.csv import read_csv
from fedbraid.data.formats.leaf import read_leaf
from fedbraid.data.formats.npz import read_npz
from fedbraid.data.formats.plain_sets import read_cifar, read_folder, read_idx
from fedbraid.data.formats.svmlight import read_svmlight
from fedbraid.data.formats.table import read_table
from fedbraid.data.formats.text import read_text
from fedbraid.data.formats.tff import read_tff

__all__ = [
    "read_cifar",
    "read_csv",
    "read_folder",
    "read_idx",
    "read_leaf",
    "read_npz",
    "read_svmlight",
    "read_table",
    "read_text",
    "read_tff",
]
