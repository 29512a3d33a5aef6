"""Stand-in for nixl: the package that takes its backend from nixl_cu13."""

from nixl_cu13 import __version__

__all__ = ["__version__"]
