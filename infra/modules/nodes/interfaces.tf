# Network interfaces of each instance type that prefill and decode may use. A type is added here and nowhere else.
#
# Every network card carries one EFA device. Card 0 has the only interface with an address: `efa` is EFA and ordinary
# networking in one, and an `efa-only` interface cannot be the primary one. The other cards carry device index 1,
# because index 0 is the primary interface's, and take no addresses.
# https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-acc-inst-types.html

locals {
  efa_devices = {
    "p5en.48xlarge" = 16
    "p5e.48xlarge"  = 32
    "p5.48xlarge"   = 32

    # One EFA device each, for cheap trials.
    "p5.4xlarge" = 1
    "g6.8xlarge" = 1
  }

  efa_interfaces = {
    for type, count in local.efa_devices : type => [
      for card in range(count) : {
        card   = card
        device = card == 0 ? 0 : 1
        type   = card == 0 ? "efa" : "efa-only"
      }
    ]
  }

  # The router answers over TCP: one ordinary interface, whatever the type.
  plain_interfaces = [{ card = 0, device = 0, type = null }]

  # An unknown type gets none here; the precondition of the launch template says so in words.
  interfaces = {
    for role, spec in var.roles : role => (
      role == "router" ? local.plain_interfaces : lookup(local.efa_interfaces, spec.instance_type, [])
    )
  }
}
