"""What the deployment tests share: Flower without telemetry, and a small stateful algorithm of their own."""

import os
import warnings

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ["FLWR_DISABLE_UPDATE_CHECK"] = "1"

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # of click, as the pinned typer imports it
    import flwr  # noqa: F401
