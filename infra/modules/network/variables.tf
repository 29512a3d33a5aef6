variable "name" {
  description = "Name of the cluster; names in AWS are kvdeploy-<name>-..."
  type        = string
}

variable "region" {
  description = "AWS region; the provider's."
  type        = string
}

variable "zone" {
  description = "Availability zone of the subnets."
  type        = string
}

variable "vpc_id" {
  description = "Existing VPC; null: a new one."
  type        = string
  default     = null
}

variable "subnet_id" {
  description = "Existing private subnet of vpc_id, in the zone; null: a new one."
  type        = string
  default     = null

  validation {
    condition     = (var.vpc_id == null) == (var.subnet_id == null)
    error_message = "vpc_id and subnet_id go together: give both, or neither for a new VPC."
  }
}

variable "security_group_id" {
  description = "Existing group of vpc_id for the nodes, which must allow everything from and to itself; null: a new one."
  type        = string
  default     = null

  validation {
    condition     = var.security_group_id == null || var.vpc_id != null
    error_message = "security_group_id is of an existing VPC: give vpc_id and subnet_id too."
  }
}

variable "cidr" {
  description = "Addresses of a new VPC, /16 to /24."
  type        = string
  default     = "10.42.0.0/16"
  nullable    = false
}

variable "egress" {
  description = "nat: nodes reach the internet over HTTP and HTTPS, in a new VPC through a NAT gateway; none: they do not."
  type        = string
  default     = "nat"
  nullable    = false

  validation {
    condition     = contains(["nat", "none"], var.egress)
    error_message = "egress must be nat or none."
  }
}

variable "endpoints" {
  description = "Make private endpoints for SSM in a new VPC."
  type        = bool
  default     = true
  nullable    = false
}

variable "router_port" {
  description = "TCP port of the router."
  type        = number
  default     = 8000
  nullable    = false
}

variable "router_allowed_cidrs" {
  description = "Networks that may reach router_port on router nodes."
  type        = list(string)
  default     = []
  nullable    = false

  validation {
    condition = var.open_to_internet || alltrue([
      for cidr in var.router_allowed_cidrs : try(tonumber(split("/", cidr)[1]) >= 8, false)
    ])
    error_message = "router_allowed_cidrs must be networks of /8 or longer unless open_to_internet is true."
  }
}

variable "open_to_internet" {
  description = "Let router_allowed_cidrs hold the whole internet."
  type        = bool
  default     = false
  nullable    = false
}

variable "ssh_allowed_cidrs" {
  description = "Networks that may reach port 22 on every node; has no effect on an existing security group."
  type        = list(string)
  default     = []
  nullable    = false

  validation {
    condition     = alltrue([for cidr in var.ssh_allowed_cidrs : try(tonumber(split("/", cidr)[1]) >= 8, false)])
    error_message = "ssh_allowed_cidrs must be networks of /8 or longer: SSH is never open to the internet."
  }
}

variable "address" {
  description = "Terraform address of this module in the whole configuration, for the tag kvdeploy:address."
  type        = string
  default     = "module.network"
  nullable    = false
}
