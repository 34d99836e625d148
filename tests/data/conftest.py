"""Import typer once without its warning: at import it uses names that newer versions of click deprecate."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    import typer  # noqa: F401
