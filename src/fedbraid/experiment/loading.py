"""A run folder as a Python object: parameters, model, history, predictions, exports and pictures."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedbraid.data.description import DataDescription
from fedbraid.experiment import runfolder
from fedbraid.experiment.assembly import Experiment, build, find_parts
from fedbraid.experiment.config import Config, ConfigError
from fedbraid.experiment.figures import draw_run
from fedbraid.experiment.params import BEST, PARAMS, description_in, params_sha256, read_params
from fedbraid.experiment.summary import RunSummary
from fedbraid.experiment.tensors import Tensors, named_arrays, tree_of, write_npz, write_tensors
from fedbraid.lowering import captured
from fedbraid.models import Model
from fedbraid.models import build as build_model
from fedbraid.models.low_rank import LORA_B
from fedbraid.notices import notice
from fedbraid.simulation import checkpoint
from fedbraid.simulation.columns import RunColumns
from fedbraid.version import __version__

__all__ = ["Run", "load_run"]

PyTree = Any


@dataclass(frozen=True, repr=False, eq=False)
class Run:
    """A run that was written to a folder; see `load_run`.

    history: columns with one entry per round, nan in rounds that were not evaluated.
    clients: each test client's own metrics at the end.
    summary: None if the run was killed, or goes on, and has no summary yet.
    """

    folder: Path
    config: Config
    history: dict[str, np.ndarray]
    clients: dict[str, np.ndarray] = field(default_factory=dict)
    summary: RunSummary | None = None

    # -- numbers

    @property
    def rounds(self) -> int:
        return len(self.history["round"])

    @property
    def evaluations(self) -> dict[str, np.ndarray]:
        """The evaluated columns, with one entry per evaluation; ``round`` says after which rounds."""
        prefixes = ("test_", "server_", "adapted_")
        scores = {name: column for name, column in self.history.items() if name.startswith(prefixes)}
        if not scores:
            return RunColumns()
        seen = np.any([np.isfinite(column) for column in scores.values()], axis=0)
        return RunColumns({name: column[seen] for name, column in ({"round": self.history["round"]} | scores).items()})

    @property
    def frame(self) -> Any:
        """The history as a pandas frame if pandas is installed, else as a dict of NumPy columns."""
        return self.to_pandas() if importlib.util.find_spec("pandas") is not None else dict(self.history)

    def to_pandas(self) -> Any:
        """The history as a pandas frame, with the round as its index."""
        try:
            import pandas
        except ImportError:
            raise ConfigError("to_pandas needs pandas: pip install pandas. run.history has plain columns") from None
        return pandas.DataFrame(self.history).set_index("round")

    # -- the model

    @functools.cached_property
    def experiment(self) -> Experiment:
        """The assembled configuration with its data, which is loaded here."""
        return build(self.config)

    @functools.cached_property
    def _stored(self) -> Tensors | None:
        if self.summary is None or self.summary.params_sha256 is None:
            return None
        stored = read_params(self.folder / PARAMS)
        if params_sha256(list(stored.arrays.values())) != self.summary.params_sha256:
            raise ConfigError(
                f"{self.folder / PARAMS} is of another round than the summary: the run was killed while it wrote its "
                f"results; write them again with: fedbraid run --resume {self.folder}"
            )
        return stored

    @functools.cached_property
    def description(self) -> DataDescription:
        """The description of the data: from the stored parameters, or from the data itself."""
        stored = self._stored
        told = None if stored is None else description_in(stored, self.config.data.name)
        return self.experiment.description if told is None else told

    @functools.cached_property
    def model(self) -> Model:
        """The model that was trained. It does not need the data if its preprocessing has a name."""
        find_parts(self.config)
        options = self.config.model.options
        return build_model(self.config.model.name, self.description.shapes, self.description.classes, **options)

    @functools.cached_property
    def params(self) -> PyTree:
        """The parameters after the last round."""
        if self._stored is not None:
            return self._tree(self._stored)
        if self.summary is not None:
            raise ConfigError(
                f"{self.folder} has no parameters: runs of a comparison keep none; repeat this one with: fedbraid run "
                f"{self.folder / runfolder.CONFIG}"
            )
        return _params_of_checkpoint(self.folder, self.experiment)

    @functools.cached_property
    def best(self) -> PyTree:
        """The parameters of the best evaluation, by the metric of [stop]."""
        return self._tree(read_params(self.folder / BEST))

    def _tree(self, stored: Tensors) -> PyTree:
        shapes = jax.eval_shape(self.model.init, jax.random.key(0))
        try:
            return tree_of(stored.arrays, shapes)
        except ValueError as error:
            raise ConfigError(f"{self.folder}: {error}") from None

    def predict(self, x: Any, *, best: bool = False, batch_size: int = 1024) -> np.ndarray:
        """The outputs of the model (logits or values) for examples as the data stores them, ``[n, ...]``.

        x: the field ``x``, or a mapping of fields. The data's preprocessing is applied, without augmentation.
        best: with the parameters of the best evaluation instead of the last ones.
        """
        batch = {name: np.asarray(a) for name, a in (x if isinstance(x, Mapping) else {"x": x}).items()}
        for name, array in batch.items():
            known = self.description.fields.get(name)
            if known is not None and array.shape[1:] != known.shape:
                raise ConfigError(
                    f"predict: the field {name!r} has the shape {array.shape}; the data stores examples of shape "
                    f"{known.shape}, so [n, {', '.join(map(str, known.shape))}] is needed"
                )
        outputs, params = self._outputs, self.best if best else self.params
        count = len(next(iter(batch.values())))
        parts = [
            np.asarray(outputs(params, {name: array[at : at + batch_size] for name, array in batch.items()}))
            for at in range(0, max(count, 1), batch_size)
        ]
        return np.concatenate(parts)

    @functools.cached_property
    def _outputs(self) -> Any:
        prepare, predict = self.description.preprocess, self.model.predict

        def outputs(params: PyTree, batch: dict[str, Any]) -> Any:
            return predict(params, (batch if prepare is None else prepare(batch, None, False))["x"])

        return captured.jit(outputs)

    def export(self, path: str | Path, *, best: bool = False, merged: bool = False) -> Path:
        """Write the parameters as ``.safetensors`` or ``.npz``, with names by their path in the tree.

        merged: all weights of a model with LoRA's adapters, with the adapters added to them.
        """
        path = Path(path)
        params = self.best if best else self.params
        if merged:
            if self.model.merge is None:
                raise ConfigError("only a model with adapters can be merged ([model.lora]): export it without merged")
            factors = [a for name, a in named_arrays(params).items() if name.endswith(LORA_B)]
            if factors and not any(map(np.any, factors)):
                notice(
                    "export: all factors lora_b of the server are zero, so the merged weights are those of the base. "
                    "With a transform that keeps lora_b on the clients (FedSA-LoRA), only they have adapted models"
                )
            params = self.model.merge(params)
        arrays = named_arrays(params)
        if path.suffix == ".safetensors":
            about = {"algorithm": self.config.algorithm.name, "model": self.config.model.name}
            write_tensors(path, arrays, {"fedbraid": __version__, **about})
        elif path.suffix == ".npz":
            write_npz(path, arrays)
        else:
            raise ConfigError(f"cannot export to {path}: the name must end in .safetensors or .npz")
        return path

    # -- pictures

    def plot(self) -> Any:
        """A matplotlib figure of the loss and the accuracy."""
        return draw_run(self.history, self._title)

    @property
    def _title(self) -> str:
        config = self.config
        what = f"{config.algorithm.name} on {config.data.name}"
        return f"{what}: {config.model.name}, cohort {config.cohort}, seed {config.seed}"

    def __repr__(self) -> str:
        """Two or three lines: the folder, the run, and its last scores."""
        head = f"Run in {self.folder}: {self._title}"
        if self.summary is None:
            return f"{head}\n  {self.rounds} rounds, from the last checkpoint: it goes on, or was killed"
        return f"{head}\n  " + repr(self.summary).partition("\n  ")[2]

    def _repr_html_(self) -> str:
        from fedbraid.drawing import figure_html, table_html

        if self.summary is None:
            rows = [("run", self._title), ("rounds", f"{self.rounds}, from the last checkpoint")]
        else:
            rows = self.summary.rows()
        return table_html([*rows, ("folder", str(self.folder))]) + figure_html(self.plot(), self._title)


def load_run(folder: str | Path) -> Run:
    """The run in a folder: finished, stopped, killed (then from its last checkpoint), simulated or deployed.

    The history is read here. The parameters, the model and the data are loaded when they are first used. A run whose
    code is your own (``module:attribute``) imports that code: load only folders that you trust.
    """
    folder = Path(folder)
    config = runfolder.read_config(folder)
    if (folder / runfolder.SUMMARY).is_file():
        summary, table = runfolder.read_summary(folder), runfolder.read_metrics(folder)
        return Run(folder, config, RunColumns(table), RunColumns(runfolder.read_clients(folder)), summary)
    saved = folder / runfolder.CHECKPOINTS
    place = next(checkpoint.good_ones(saved), None)
    if place is None:
        raise ConfigError(
            f"{folder} has neither results nor a good checkpoint yet: continue the run with: fedbraid run --resume "
            f"{folder}"
        )
    rounds, tree = checkpoint.load(place)
    if "log" not in tree:
        raise ConfigError(f"{folder} is of a deployed run that is not finished: load it when it has ended")
    return Run(folder, config, RunColumns(runfolder.columns(tree["log"], tree["evaluations"] or {}, rounds)))


def _params_of_checkpoint(folder: Path, experiment: Experiment) -> PyTree:
    """The parameters in the newest good checkpoint of a simulated run."""
    place = next(checkpoint.good_ones(folder / runfolder.CHECKPOINTS), None)
    if place is None:
        raise ConfigError(f"{folder} has no good checkpoint: continue it with: fedbraid run --resume {folder}")
    _, tree = checkpoint.load(place)
    first = experiment.algorithm.init(experiment.params)
    return experiment.algorithm.params(checkpoint.unpack(first, tree["server"] or {}, "server state"))
