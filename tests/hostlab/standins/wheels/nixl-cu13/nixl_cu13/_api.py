import ctypes
import os
import sys
from pathlib import Path

PLUGINS = Path(__file__).parent.parent / "nixl_cu13.libs/nixl"


class nixlNotFoundError(Exception):
    pass


class nixl_agent:
    def __init__(self, name: str) -> None:
        self.name = name

    def create_backend(self, backend: str) -> None:
        if backend == "UCX":
            return
        plugin = PLUGINS / f"libplugin_{backend}.so"
        try:
            ctypes.CDLL(str(plugin))
        except OSError as e:
            # As the real one: why it did not load is told at log level DEBUG alone.
            if os.environ.get("NIXL_LOG_LEVEL") == "DEBUG":
                print(f"Failed to load plugin from {plugin}: {e}", file=sys.stderr)
            print(f"unsupported backend '{backend}'", file=sys.stderr)
            code = "NIXL_ERR_NOT_FOUND"
            raise nixlNotFoundError(code) from None
        print(f"Backend {backend} was instantiated", file=sys.stderr)
