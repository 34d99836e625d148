"""Settings of all deployment tests: Flower without telemetry."""

import os
import warnings

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ["FLWR_DISABLE_UPDATE_CHECK"] = "1"

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # from click, when the pinned typer imports it
    import flwr  # noqa: F401
