"""The lock files of the engines' runtimes, one a device, and of the router. Data, no code."""
