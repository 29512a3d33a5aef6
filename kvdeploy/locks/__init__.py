"""The lock files of the engines' runtimes, one a device. Data, no code."""
