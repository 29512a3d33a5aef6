"""Stand-in for torch: its version, and the GPUs that the driver shows."""

import subprocess

__version__ = "@VERSION@"


def _gpus() -> list[str]:
    """One line each. Raises RuntimeError with what the driver says when there are none."""
    try:
        asked = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        why = "Found no NVIDIA driver on your system."
        raise RuntimeError(why) from None
    if asked.returncode:
        raise RuntimeError(asked.stdout.strip() or "No CUDA GPUs are available")
    return asked.stdout.splitlines()


class cuda:
    @staticmethod
    def init() -> None:
        _gpus()

    @staticmethod
    def device_count() -> int:
        try:
            return len(_gpus())
        except RuntimeError:
            return 0

    @staticmethod
    def is_available() -> bool:
        return cuda.device_count() > 0
