from nixl_cu13._api import nixl_agent, nixlNotFoundError

__all__ = ["nixlNotFoundError", "nixl_agent"]
