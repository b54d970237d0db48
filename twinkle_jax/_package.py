"""The installed package: its version, which the build reads too, and its optional packages."""

from importlib.util import find_spec

__version__ = "0.1.0"


def require(package: str, extra: str) -> None:
    """Raise an error that names the extra, unless the package can be imported."""
    if find_spec(package) is None:
        raise ImportError(
            f"{package} must be installed for this: pip install 'twinkle-jax[{extra}]'",
            name=package,
        )
