"""What a model expects of the field ``y``, and the check of the data against it before training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np

from fedbraid.notices import notice

__all__ = ["Kind", "Targets", "check_labels", "check_targets"]

Kind = Literal["classes", "two classes", "tokens", "values"]
FEW = 30  # up to this many different whole numbers look like classes


@dataclass(frozen=True)
class Targets:
    """The kind of task of a model, and its number of classes or tokens.

    kind: ``classes`` are whole numbers from 0, ``two classes`` are 0 and 1 or -1 and 1, ``tokens`` are sequences of
        classes, ``values`` are real numbers.
    count: number of classes or tokens; None means the size of the last axis of the model's outputs.
    tokenizer: the only tokenizer whose ids a pretrained language model knows; None: any.
    ids: number of token ids that the model reads in ``x``; None if ``x`` holds other things.
    """

    kind: Kind
    count: int | None = None
    tokenizer: str | None = None
    ids: int | None = None


def check_targets(model: Any, data: Any) -> None:
    """Refuse data whose field ``y`` does not fit the model: wrong kind of number, or a label that it cannot have.

    model: a `fedbraid.models.Model`; one without ``targets`` is not checked. data: a `fedbraid.FederatedData`.

    >>> import fedbraid as fb, numpy as np
    >>> from fedbraid.models import logistic
    >>> split = fb.Split.from_clients([{"x": np.zeros((3, 2), np.float32), "y": np.array([0, 1, 25])}])
    >>> check_targets(logistic(2), fb.FederatedData(split))
    Traceback (most recent call last):
    ...
    ValueError: this model is for two classes, labelled 0 and 1 or -1 and 1; the train split has labels from 0 to 25: \
use softmax_regression or another model with several classes
    """
    targets = model.targets
    if targets is None:
        return
    _check_tokenizer(targets.tokenizer, data)
    _check_ids(targets.ids, data)
    if "y" not in data.train.arrays:
        if targets.kind == "tokens":  # a model of language may learn from x alone
            return
        have = ", ".join(sorted(data.train.arrays))
        raise ValueError(
            f"this model predicts the field 'y', and the data has none (it has {have}): name the label when you import "
            "the data (--label), or as the argument label of from_table"
        )
    if targets.count is None and targets.kind in ("classes", "tokens"):
        targets = Targets(targets.kind, _outputs(model, data))
    _check_axes(targets, data.description.prepared["y"].shape[1:])
    for name, split in data.splits.items():
        prepared = np.dtype(split.arrays["y"].dtype)
        if data.preprocess is not None:
            prepared = np.dtype(data.description.prepared["y"].dtype)
        check_labels(targets, split.arrays["y"], prepared, name, split)


def check_labels(targets: Targets, y: Any, dtype: np.dtype, where: str, split: Any = None) -> None:
    """Check one array of targets. ``dtype`` is the one after preprocessing, ``where`` names the array in errors."""
    if not len(y):
        return
    whole = np.issubdtype(dtype, np.integer) or dtype == np.bool_
    if targets.kind == "values":
        return _notice_classes(y, where) if whole else None
    if not whole and not (targets.kind == "two classes" or _all_whole(y)):
        raise ValueError(
            f"this model is for classes, and 'y' of the {where} split holds {dtype} values that are not whole numbers, "
            f"such as {float(np.asarray(y).reshape(-1)[0]):g}: for a regression use least_squares, or "
            'score = "values" with the other models'
        )
    low, high = int(np.min(y)), int(np.max(y))
    if targets.kind == "two classes":
        found = {float(v) for v in np.unique(np.asarray(y))[:4]}
        if not (found <= {0.0, 1.0} or found <= {-1.0, 1.0}):
            raise ValueError(
                f"this model is for two classes, labelled 0 and 1 or -1 and 1; the {where} split has labels from "
                f"{low} to {high}: use softmax_regression or another model with several classes"
            )
        return
    count = targets.count
    if count is not None and (low < 0 or high >= count):
        bad = high if high >= count else low
        raise ValueError(
            f"the {where} split has the label {bad}{_place(y, bad, split)}, and this model has {count} "
            f"{targets.kind}, labelled 0 to {count - 1}: set its number of {targets.kind}, or number the labels from 0"
        )


def _check_tokenizer(wanted: str | None, data: Any) -> None:
    """Refuse ids of another tokenizer than the one that a pretrained model knows: they mean other text."""
    given = data.info.get("tokenizer")
    if wanted is None or given == wanted:
        return
    if given is None:
        return notice(
            f"this model was trained with the tokenizer {wanted!r}, and the data does not say which tokenizer made its "
            "ids; ids of another one mean other text"
        )
    raise ValueError(
        f"this model was trained with the tokenizer {wanted!r}, and the data has ids of {given!r}, which mean other "
        f"text: import or load the data with tokenizer = {wanted!r}"
    )


def _check_ids(ids: int | None, data: Any) -> None:
    """Refuse tokens that the embedding of a model does not have: they would give NaN."""
    for name, split in data.splits.items():
        x = split.arrays.get("x")
        if ids is None or x is None or not len(x) or not np.issubdtype(x.dtype, np.integer):
            continue
        low, high = int(np.min(x)), int(np.max(x))
        if low < 0 or high >= ids:
            bad = high if high >= ids else low
            raise ValueError(
                f"the {name} split has the token {bad} in 'x'{_place(x, bad, split)}, and this model reads {ids} "
                f"tokens, numbered 0 to {ids - 1}: set vocab = {max(high + 1, ids)}, or number the tokens from 0"
            )


def _check_axes(targets: Targets, each: tuple[int, ...]) -> None:
    """Refuse sequences of labels for a model of one label per example, and the reverse. each: shape of one label."""
    if targets.kind == "tokens" and not each:
        raise ValueError(
            "this model predicts a token at every position, and 'y' has one label for each "
            "example: use a model that classifies sequences, such as encoder"
        )
    if targets.kind in ("classes", "two classes") and each:
        raise ValueError(
            f"this model predicts one class for each example, and 'y' has the shape {list(each)} "
            "for each: predict the next token with a model such as gpt or char_lstm, or store one "
            "number (the argmax of one-hot labels)"
        )


def _outputs(model: Any, data: Any) -> int | None:
    """The size of the last axis of the model's outputs; None if it has no outputs to look at."""
    x = data.description.prepared.get("x")
    if x is None:
        return None
    params = jax.eval_shape(model.init, jax.random.key(0))
    try:
        return int(jax.eval_shape(model.predict, params, x).shape[-1])
    except (ValueError, TypeError, IndexError, AttributeError):
        return None  # the first training step reports what is wrong with the model


def _all_whole(y: Any) -> bool:
    return bool(np.all(np.asarray(y) == np.floor(np.asarray(y))))


def _place(y: Any, label: int, split: Any) -> str:
    if split is None:
        return ""
    row = int(np.argmax((np.asarray(y) == label).reshape(len(y), -1).any(1)))
    client = int(np.searchsorted(split.offsets, row, side="right")) - 1
    return f" ({split.name_of(client)}, row {row - int(split.offsets[client])})"


def _notice_classes(y: Any, where: str) -> None:
    different = np.unique(np.asarray(y))
    if where == "train" and 2 < len(different) <= FEW and different[0] == 0 and different[-1] == len(different) - 1:
        notice(
            f"the labels of the train split are the whole numbers 0 to {int(different[-1])}, and this model predicts "
            "real numbers: if they are classes, use softmax_regression or another model for classes"
        )
