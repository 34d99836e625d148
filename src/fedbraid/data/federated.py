"""Federated data as the engine reads it: flat arrays sorted by client, with offsets.

All examples of all clients are in one array per field. Client ``i`` has rows ``offsets[i]`` to ``offsets[i + 1]``.
Nothing is padded. A field may be a memory map, which is used like any NumPy array.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np

from fedbraid.data.description import DataDescription, Preprocess, fields_of

MASK = "mask"  # the field that is added to batches


@dataclass(frozen=True, repr=False)
class Split:
    """Examples grouped by client.

    preprocess: from a batch of stored rows to the batch that a model reads (see ``FederatedData``). The simulator and
        the evaluation apply it; the methods here return rows as they are stored.

    >>> split = Split.from_clients([{"x": np.zeros((3, 2))}, {"x": np.ones((1, 2))}])
    >>> split.num_clients, split.num_examples, split.sizes.tolist()
    (2, 4, [3, 1])
    """

    arrays: Mapping[str, np.ndarray]
    offsets: np.ndarray
    ids: Sequence[str] = ()
    preprocess: Preprocess | None = None

    @classmethod
    def from_clients(cls, clients: Sequence[Mapping[str, Any]], ids: Sequence[str] = ()) -> Split:
        """One mapping of arrays per client, all with the same fields."""
        if not clients:
            raise ValueError("a split needs at least one client, got none")
        names = sorted(clients[0])
        for i, client in enumerate(clients):
            if sorted(client) != names:
                raise ValueError(f"client {i} has fields {sorted(client)}, client 0 has {names}")
            lengths = {name: len(client[name]) for name in names}
            if len(set(lengths.values())) > 1:
                raise ValueError(f"client {i}: fields differ in length: {lengths}")
        sizes = [len(client[names[0]]) for client in clients]
        arrays = {name: np.concatenate([np.asarray(client[name]) for client in clients]) for name in names}
        return cls(arrays, np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64), tuple(ids))

    @classmethod
    def from_assignment(
        cls, arrays: Mapping[str, np.ndarray], parts: Sequence[np.ndarray], ids: Sequence[str] = ()
    ) -> Split:
        """Rows ``parts[i]`` of plain arrays go to client ``i``. ``parts`` is the result of a partitioner."""
        order = np.concatenate(parts) if len(parts) else np.zeros(0, np.int64)
        offsets = np.concatenate([[0], np.cumsum([len(p) for p in parts])]).astype(np.int64)
        return cls({name: np.asarray(a)[order] for name, a in arrays.items()}, offsets, tuple(ids))

    @property
    def num_clients(self) -> int:
        """The number of clients."""
        return len(self.offsets) - 1

    @property
    def num_examples(self) -> int:
        """The number of examples of all clients together."""
        return int(self.offsets[-1])

    @property
    def sizes(self) -> np.ndarray:
        """Every client's number of examples."""
        return np.diff(self.offsets)

    @property
    def nbytes(self) -> int:
        """The bytes of all arrays."""
        return sum(a.nbytes for a in self.arrays.values())

    def __repr__(self) -> str:
        """One line: clients, examples, sizes and fields."""
        sizes = self.sizes
        spread = f"{sizes.min():,} to {sizes.max():,} each" if len(sizes) else "no clients"
        fields = ", ".join(f"{name} {a.dtype}{list(a.shape[1:])}" for name, a in self.arrays.items())
        return f"Split: {self.num_clients:,} clients, {self.num_examples:,} examples ({spread}), {fields}"

    def _repr_html_(self) -> str:
        return FederatedData(self, name="split")._repr_html_()

    def client(self, i: int) -> dict[str, np.ndarray]:
        """Client ``i``'s own rows (views, not copies)."""
        rows = slice(int(self.offsets[i]), int(self.offsets[i + 1]))
        return {name: a[rows] for name, a in self.arrays.items()}

    def name_of(self, i: int) -> str:
        """Client ``i`` in words, with its id if there is one."""
        return f"client {i} ({self.ids[i]})" if len(self.ids) else f"client {i}"

    def check(self, *, empty_ok: bool = False, finite: bool = True) -> None:
        """Refuse bad offsets, empty clients and NaN, with an error that names the client and the field."""
        if not self.arrays:
            raise ValueError("the data has no fields")
        if MASK in self.arrays:
            raise ValueError(f"the field name {MASK!r} is reserved for the mask of batches; rename that field")
        if self.offsets[0] != 0 or np.any(self.sizes < 0):
            raise ValueError("offsets must start at 0 and never decrease")
        if len(self.ids) and len(self.ids) != self.num_clients:
            raise ValueError(f"{len(self.ids)} client ids for {self.num_clients} clients")
        for name, array in self.arrays.items():
            if len(array) != self.num_examples:
                raise ValueError(f"field {name!r} has {len(array)} rows, the offsets end at {self.num_examples}")
        if not empty_ok and np.any(self.sizes == 0):
            i = int(np.argmin(self.sizes))
            raise ValueError(f"{self.name_of(i)} has no examples; drop empty clients before training")
        if finite:
            for name, array in self.arrays.items():
                if np.issubdtype(array.dtype, np.floating):
                    self._check_finite(name, array)

    def _check_finite(self, name: str, array: np.ndarray, rows: int = 1 << 16) -> None:
        for start in range(0, len(array), rows):
            bad = ~np.isfinite(array[start : start + rows]).reshape(min(rows, len(array) - start), -1).all(1)
            if bad.any():
                row = start + int(np.argmax(bad))
                i = int(np.searchsorted(self.offsets, row, side="right")) - 1
                raise ValueError(
                    f"field {name!r} of {self.name_of(i)} is not finite in its row {row - int(self.offsets[i])}; "
                    "clean the data before training"
                )


_OF_TRAIN = cast(Any, object())  # the default of FederatedData.preprocess: that of the train split


@dataclass(frozen=True, repr=False)
class FederatedData:
    """The data of a run: a train split, and a test split by the same or by other clients.

    If ``test`` (or ``validation``) has the same clients, it lists them in the same order, empty ones included: client
    ``i`` of one is client ``i`` of the other (``aligned`` is then True). ``unseen`` holds clients that never train.

    preprocess: ``(batch, key, train) -> batch``, from a batch of stored fields to the batch that a model reads
        (``fedbraid.data.preprocess``). It does not change the mask. It is pure and runs inside the compiled step,
        because stores keep small integers and each step needs new augmentation. With ``train=False`` it is
        deterministic and ``key`` may be None. All splits carry it, so that ``data.train`` alone is preprocessed in the
        same way. The default is that of the train split; None means no preprocessing.

    >>> from fedbraid.data.preprocess import Pipeline
    >>> split = Split.from_clients([{"x": np.zeros((3, 2), np.uint8)}])
    >>> FederatedData(split, preprocess=Pipeline.of({"name": "scale"})).train.preprocess.spec()
    [{'name': 'scale'}]
    """

    train: Split
    test: Split | None = None
    name: str = "data"
    info: Mapping[str, Any] = field(default_factory=dict)  # source, licence, number of classes ...
    preprocess: Preprocess | None = _OF_TRAIN
    validation: Split | None = None
    unseen: Split | None = None

    def __post_init__(self) -> None:
        if self.preprocess is _OF_TRAIN:
            object.__setattr__(self, "preprocess", self.train.preprocess)
        for name, split in self.splits.items():
            if split.preprocess is not self.preprocess:
                object.__setattr__(self, name, replace(split, preprocess=self.preprocess))

    def __repr__(self) -> str:
        """A line for the data, and one for every split."""
        lines = [f"  {name}: {repr(split).removeprefix('Split: ')}" for name, split in self.splits.items()]
        return "\n".join([f"FederatedData {self.name!r}", *lines])

    def _repr_html_(self) -> str:
        from fedbraid.data.describe import data_html

        return data_html(self)

    @property
    def aligned(self) -> bool:
        """Whether test client ``i`` is train client ``i``."""
        test = self.test
        if test is None or test.num_clients != self.train.num_clients:
            return False
        ids = self.train.ids
        if test.ids is ids:
            return True
        return len(test.ids) == len(ids) and all(a == b for a, b in zip(test.ids, ids, strict=True))

    @property
    def description(self) -> DataDescription:
        """Fields, labels, preprocessing and number of clients, from which a model and an algorithm are built."""
        classes = self.info.get("classes")
        return DataDescription(
            fields=fields_of(self.train.arrays),
            population=self.train.num_clients,
            classes=None if classes is None else int(classes),
            preprocess=self.preprocess,
            name=self.name,
        )

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of one example after preprocessing (which may crop, flatten or add features)."""
        return self.description.shapes

    @property
    def splits(self) -> dict[str, Split]:
        """All splits of the data, by name."""
        named = {"train": self.train, "test": self.test, "validation": self.validation, "unseen": self.unseen}
        return {name: split for name, split in named.items() if split is not None}

    def check(self) -> None:
        """Refuse bad splits (see ``Split.check``), and splits with other fields than train."""
        self.train.check()
        for name, split in self.splits.items():
            if name == "train":
                continue
            split.check(empty_ok=True)
            if set(split.arrays) != set(self.train.arrays):
                raise ValueError(
                    f"train has fields {sorted(self.train.arrays)}, {name} has {sorted(split.arrays)}: they must agree"
                )
