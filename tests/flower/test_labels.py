"""A site whose labels the model cannot have is refused before it trains."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

import fedbraid as fb
from fedbraid.flower.federation import with_labels_checked
from fedbraid.models import least_squares, softmax_regression


def loads(model, y):
    split = fb.Split.from_clients([{"x": np.zeros((2, 3), np.float32), "y": np.zeros(2, np.int32)}])
    made = SimpleNamespace(model=model, description=fb.FederatedData(split).description)
    arrays = {"x": np.zeros((len(y), 3), np.float32), "y": np.asarray(y)}
    return with_labels_checked(lambda context: arrays, made)(None)


def test_labels_of_a_site_are_checked():
    assert loads(softmax_regression(3, 4), [0, 3])["y"].tolist() == [0, 3]
    with pytest.raises(ValueError, match="the site's split has the label 4, and this model has 4 classes"):
        loads(softmax_regression(3, 4), [0, 4])
    assert loads(least_squares(3), [0.5, 9.0])["y"].tolist() == [0.5, 9.0]
