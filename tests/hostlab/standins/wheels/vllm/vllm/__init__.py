"""Stand-in for vLLM: a server with its flags and paths, and the registry of its connectors."""

__version__ = "@VERSION@"
