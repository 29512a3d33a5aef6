variable "name" {
  description = "Name of the cluster; names in AWS are kvdeploy-<name>..."
  type        = string
}

variable "zone" {
  description = "Availability zone of subnet_id, to see whether it offers the instance types."
  type        = string
}

variable "roles" {
  description = "What the nodes of each role are: prefill, decode, router. Types of prefill and decode must be in interfaces.tf."
  type = map(object({
    instance_type   = string
    root_volume_gib = optional(number, 200)
  }))
  nullable = false

  validation {
    condition     = alltrue([for role in keys(var.roles) : contains(["prefill", "decode", "router"], role)])
    error_message = "roles may have the keys prefill, decode and router only."
  }
}

variable "nodes" {
  description = "The nodes by name. Raising the generation of one replaces that one."
  type = map(object({
    role       = string
    generation = optional(number, 1)
  }))
  nullable = false

  validation {
    condition     = alltrue([for node in values(var.nodes) : contains(keys(var.roles), node.role)])
    error_message = "nodes: the role of every node must be a key of roles."
  }
}

variable "images" {
  description = "Images of the engine nodes (node) and the router's; where no AMI is given, what the SSM parameter says at the first apply is kept."
  type = object({
    node_ami         = optional(string)
    node_parameter   = optional(string)
    router_ami       = optional(string)
    router_parameter = optional(string)
  })
  nullable = false

  validation {
    condition = (
      (length(setsubtract(keys(var.roles), ["router"])) == 0 || var.images.node_ami != null || var.images.node_parameter != null) &&
      (!contains(keys(var.roles), "router") || var.images.router_ami != null || var.images.router_parameter != null)
    )
    error_message = "images needs an AMI or an SSM parameter for every kind of node in roles."
  }
}

variable "capacity" {
  description = "Where prefill and decode nodes come from: kind (on-demand, odcr, capacity-block, spot), the reservation, the highest spot price, and placement_group (create, none, or the name of one)."
  type = object({
    kind            = optional(string, "on-demand")
    reservation_id  = optional(string)
    spot_max_price  = optional(string)
    placement_group = optional(string)
  })
  default  = {}
  nullable = false

  validation {
    condition     = contains(["on-demand", "odcr", "capacity-block", "spot"], var.capacity.kind)
    error_message = "capacity.kind must be on-demand, odcr, capacity-block or spot."
  }

  validation {
    condition     = contains(["odcr", "capacity-block"], var.capacity.kind) == (var.capacity.reservation_id != null)
    error_message = "capacity.reservation_id is required with the kinds odcr and capacity-block, and goes with no other."
  }
}

variable "subnet_id" {
  description = "The one subnet of all nodes."
  type        = string
}

variable "fabric_security_group_id" {
  description = "Group of every interface; must allow everything from and to itself."
  type        = string
}

variable "router_security_group_id" {
  description = "Further group of router nodes."
  type        = string
}

variable "instance_profile" {
  description = "Name of the instance profile of every node."
  type        = string
}

variable "key_name" {
  description = "Key pair of every node; null: none."
  type        = string
  default     = null
}

variable "key_identity" {
  description = "Any text that changes when another key must get onto the nodes, which replaces them; null: no key."
  type        = string
  default     = null
}

variable "tags" {
  description = "Tags of instances, volumes and interfaces, which the provider's default tags do not reach through a launch template. Give those here as well."
  type        = map(string)
  default     = {}
  nullable    = false
}

variable "after" {
  description = "Ids of what must be there before a node starts and until it has ended."
  type        = list(string)
  default     = []
  nullable    = false
}

variable "address" {
  description = "Terraform address of this module in the whole configuration, for the tag kvdeploy:address."
  type        = string
  default     = "module.nodes"
  nullable    = false
}
