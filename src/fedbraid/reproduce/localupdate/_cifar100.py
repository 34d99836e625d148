"""CIFAR-100: TFF's clients with the paper's network, and generated images in their form for the quick forms."""

from __future__ import annotations

import numpy as np

from fedbraid.data.federated import FederatedData, Split
from fedbraid.data.preprocess import Pipeline
from fedbraid.reproduce.localupdate._training import EQUAL_WEIGHTS, Task

CIFAR = Task(
    "cifar100",
    {"name": "resnet18_gn"},
    {"batch_size": 20, **EQUAL_WEIGHTS},
    "CIFAR-100 of TFF: 500 clients of 100 images; ResNet-18 with group normalisation, 11,220,132 weights; random crops "
    "of 24 x 24 and flips, every image normalised by its own mean and deviation; batches of 20, 10 clients per round "
    "with equal weights",
)
SMALL = Task("colours", {"name": "mlp", "hidden": [8]}, {"batch_size": 4, **EQUAL_WEIGHTS})
FILES = (
    "The files are TFF's fed_cifar100.tar.bz2 (fed_cifar100_train.h5 and fed_cifar100_test.h5), as a folder or as a "
    "store made by `fedbraid data import tff`. They cannot be had on the machines that made these pages."
)
DEVIATIONS = (
    "The text does not say the paper's number of rounds.",
    "The loss on the training images is that of their centre crops, without flips.",
)
CLASSES = 4


def colours(*, clients: int = 4, size: int = 6) -> FederatedData:
    """Images of 32 x 32 with a bright quarter that is the class, preprocessed as federated CIFAR-100 is.

    >>> data = colours(clients=2, size=3)
    >>> data.train.arrays["x"].shape, data.train.sizes.tolist()
    ((6, 32, 32, 3), [3, 3])
    """
    rng = np.random.default_rng(0)

    def rows(favourite: int) -> dict[str, np.ndarray]:
        y = np.where(rng.random(size) < 0.5, favourite, rng.integers(0, CLASSES, size)).astype(np.int32)
        x = rng.integers(0, 80, (size, 32, 32, 3))
        for image, label in zip(x, y, strict=True):
            top, left = 16 * (label // 2), 16 * (label % 2)
            image[top : top + 16, left : left + 16, label % 3] += 150
        return {"x": x.astype(np.uint8), "y": y}

    train = Split.from_clients([rows(i % CLASSES) for i in range(clients)])
    recipe = Pipeline.of({"name": "scale"}, {"name": "crop-flip"}, {"name": "standardize"})
    return FederatedData(train, train, "colours", {"classes": CLASSES}, preprocess=recipe)
