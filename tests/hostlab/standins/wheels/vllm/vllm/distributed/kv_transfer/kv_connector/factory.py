from typing import ClassVar


class KVConnectorFactory:
    _registry: ClassVar[dict[str, None]] = {
        "NixlConnector": None,
        "NixlPullConnector": None,
        "NixlPushConnector": None,
        "OffloadingConnector": None,
    }
