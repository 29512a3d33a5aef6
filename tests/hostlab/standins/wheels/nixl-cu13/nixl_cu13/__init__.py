"""Stand-in for NIXL's CUDA 13 build: its plugin is a real library that needs a real libfabric."""

__version__ = "@VERSION@"
