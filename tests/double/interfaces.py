"""Network interfaces of a launch, and what the network cards of a type can hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from tests.double.errors import refuse

if TYPE_CHECKING:
    from tests.double.catalog import TypeFacts

_INTERFACE_LIMITS: Final = "AttachmentLimitExceeded"


@dataclass(frozen=True)
class Nic:
    """One network interface to be made."""

    card: int
    device: int
    kind: str
    subnet_id: str
    groups: tuple[str, ...]
    delete_on_termination: bool
    description: str | None
    private_ip: str | None
    public: bool | None

    @property
    def primary(self) -> bool:
        return (self.card, self.device) == (0, 0)


def check_nics(nics: list[Nic], facts: TypeFacts) -> None:
    """The limits of the type's network cards; our own words where EC2's are not on record."""
    places = [(nic.card, nic.device) for nic in nics]
    if len(set(places)) < len(places):
        refuse(
            "InvalidParameterValue",
            "Each network interface requires a device index of its own on its network card.",
        )
    if (0, 0) not in places:
        refuse(
            "InvalidParameterCombination",
            "The request must contain a network interface with device index 0 on network card 0.",
        )
    if len(nics) > 1 and any(nic.public for nic in nics):
        refuse(
            "InvalidParameterCombination",
            "The associatePublicIPAddress parameter cannot be specified when launching with "
            "multiple network interfaces.",
        )
    for nic in nics:
        if nic.kind not in {"interface", "efa", "efa-only"}:
            refuse("InvalidParameterValue", f"Invalid interface type '{nic.kind}'.")
        if nic.card >= facts.cards:
            refuse(
                "InvalidParameterValue",
                f"Network card index {nic.card} exceeds the limit for {facts.name}, which has "
                f"{facts.cards} network card(s).",
            )
        if nic.kind != "interface" and not facts.efa_interfaces:
            refuse(
                "InvalidParameterCombination",
                f"Elastic Fabric Adapter interfaces are not supported on {facts.name}.",
            )
        if nic.kind == "efa-only" and nic.primary:
            refuse(
                "InvalidParameterCombination",
                "The primary network interface cannot be of type efa-only.",
            )
    efas = sum(1 for nic in nics if nic.kind != "interface")
    if efas > facts.efa_interfaces:
        refuse(_INTERFACE_LIMITS, f"EFA interface count {efas} exceeds the limit for {facts.name}.")
    for card, most in facts.interfaces_by_card.items():
        count = sum(1 for nic in nics if nic.card == card)
        if count > most:
            refuse(
                _INTERFACE_LIMITS, f"Interface count {count} exceeds the limit for {facts.name}."
            )


def shape(eni: Any, nic: Nic) -> None:
    """What moto's interface has no place for."""
    eni.device_index = nic.device
    eni.network_card_index = nic.card
    eni.interface_type = nic.kind
    if nic.kind == "efa-only":  # carries no IP traffic
        eni.private_ip_address, eni.private_ip_addresses = None, []
        eni.private_dns_name = None
