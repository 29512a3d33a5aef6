variable "name" {
  description = "Name of the cluster. Part of every name in AWS, where most must be unique: two clusters of one name stop each other."
  type        = string

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{1,30}$", var.name))
    error_message = "name must be 2 to 31 lower case letters, digits and dashes, and begin with a letter."
  }
}

variable "cluster_id" {
  description = "Tells two clusters of one name apart; value of the tag kvdeploy:id."
  type        = string

  validation {
    condition     = can(regex("^[0-9a-f]{8,32}$", var.cluster_id))
    error_message = "cluster_id must be 8 to 32 hexadecimal digits in lower case."
  }
}

variable "owner" {
  description = "Who made the cluster; value of the tag kvdeploy:owner."
  type        = string

  validation {
    condition     = can(regex("^[\\p{L}\\p{N} _.:/=+@-]{1,256}$", var.owner))
    error_message = "owner becomes a tag: 1 to 256 letters, digits, spaces and _ . : / = + - @."
  }
}

variable "region" {
  description = "AWS region."
  type        = string

  validation {
    condition     = can(regex("^[a-z]{2}(-[a-z]+)+-[0-9]$", var.region))
    error_message = "region must look like us-west-2."
  }
}

variable "zone" {
  description = "The one availability zone of every node: EFA does not cross zones."
  type        = string

  validation {
    condition     = startswith(var.zone, var.region) && var.zone != var.region
    error_message = "zone must be an availability zone of the region ${var.region}, such as ${var.region}a."
  }
}

variable "tags" {
  description = "More tags for everything that is made."
  type        = map(string)
  default     = {}
  nullable    = false

  validation {
    condition = alltrue([
      for key in keys(var.tags) : !startswith(lower(key), "kvdeploy:") && !startswith(lower(key), "aws:")
    ])
    error_message = "tags must not have keys that begin with kvdeploy: or aws:, which are taken."
  }

  # The narrowest rule of all services that get the tags, which is IAM's.
  validation {
    condition = alltrue([
      for key, value in var.tags :
      can(regex("^[\\p{L}\\p{N} _.:/=+@-]{1,128}$", key)) && can(regex("^[\\p{L}\\p{N} _.:/=+@-]{0,256}$", value))
    ])
    error_message = "tags may hold letters, digits, spaces and _ . : / = + - @ only; keys up to 128 and values up to 256 of them."
  }

  validation {
    condition     = length(var.tags) <= 40
    error_message = "tags may be 40 at most: AWS allows 50 on a resource, and kvdeploy needs some of them."
  }
}

variable "created_at" {
  description = "When the cluster was first made, as in 2030-01-31T12:00:00Z; an output only."
  type        = string
  default     = null

  validation {
    condition     = var.created_at == null || can(timeadd(var.created_at, "0s"))
    error_message = "created_at must be a time such as 2030-01-31T12:00:00Z."
  }
}

variable "expires_at" {
  description = "When the cluster is due to end (RFC 3339); value of the tag kvdeploy:expires. Nothing here acts on it. Null: no such tag."
  type        = string
  default     = null

  validation {
    condition     = var.expires_at == null || can(timeadd(var.expires_at, "0s"))
    error_message = "expires_at must be a time such as 2030-01-31T18:00:00Z."
  }
}

variable "network" {
  description = <<-EOT
    vpc_id, subnet_id: an existing private subnet in the zone; default: a new VPC.
    security_group_id: an existing EFA group of that VPC, which is left as it is; default: a new one.
    cidr: addresses of a new VPC, /16 to /24.
    egress: nat lets nodes reach the internet over HTTP and HTTPS, none does not.
    endpoints: make private endpoints for SSM in a new VPC.
  EOT
  type = object({
    vpc_id            = optional(string)
    subnet_id         = optional(string)
    security_group_id = optional(string)
    cidr              = optional(string, "10.42.0.0/16")
    egress            = optional(string, "nat")
    endpoints         = optional(bool, true)
  })
  default  = {}
  nullable = false

  validation {
    condition     = (var.network.vpc_id == null) == (var.network.subnet_id == null)
    error_message = "network.vpc_id and network.subnet_id go together: give both, or neither for a new VPC."
  }

  validation {
    condition     = var.network.security_group_id == null || var.network.vpc_id != null
    error_message = "network.security_group_id is of an existing VPC: give network.vpc_id and network.subnet_id too."
  }

  validation {
    condition = (
      (var.network.vpc_id == null || can(regex("^vpc-[0-9a-f]+$", var.network.vpc_id))) &&
      (var.network.subnet_id == null || can(regex("^subnet-[0-9a-f]+$", var.network.subnet_id))) &&
      (var.network.security_group_id == null || can(regex("^sg-[0-9a-f]+$", var.network.security_group_id)))
    )
    error_message = "network.vpc_id, subnet_id and security_group_id must look like vpc-0abc, subnet-0abc and sg-0abc."
  }

  validation {
    condition = (
      try(cidrsubnet(var.network.cidr, 0, 0), "") == var.network.cidr && !strcontains(var.network.cidr, ":") &&
      try(tonumber(split("/", var.network.cidr)[1]) >= 16 && tonumber(split("/", var.network.cidr)[1]) <= 24, false)
    )
    error_message = "network.cidr must be an IPv4 network of /16 to /24 with no host bits set, such as 10.42.0.0/16."
  }

  validation {
    condition     = contains(["nat", "none"], var.network.egress)
    error_message = "network.egress must be nat or none."
  }
}

variable "router_port" {
  description = "TCP port of the router."
  type        = number
  default     = 8000
  nullable    = false

  validation {
    condition     = var.router_port >= 1 && var.router_port <= 65535 && floor(var.router_port) == var.router_port && var.router_port != 22
    error_message = "router_port must be a whole number from 1 to 65535, and not 22."
  }
}

variable "router_allowed_cidrs" {
  description = "Networks that may reach router_port on router nodes. None: only through SSM or from the nodes themselves."
  type        = list(string)
  default     = []
  nullable    = false

  # Written another way EC2 would store another text, and every later plan would differ.
  validation {
    condition     = alltrue([for cidr in var.router_allowed_cidrs : try(cidrsubnet(cidr, 0, 0), "") == cidr])
    error_message = "router_allowed_cidrs must be networks with no host bits set, such as 203.0.113.0/24 or 2001:db8::/32."
  }

  # Shorter than /8 is no private network: 0.0.0.0/1 with 128.0.0.0/1 would be the whole internet as well.
  validation {
    condition = var.open_to_internet || alltrue([
      for cidr in var.router_allowed_cidrs : try(tonumber(split("/", cidr)[1]) >= 8, true)
    ])
    error_message = "router_allowed_cidrs must not hold 0.0.0.0/0, ::/0 or any prefix shorter than /8 unless open_to_internet is true."
  }
}

variable "open_to_internet" {
  description = "Let router_allowed_cidrs hold the whole internet. The router asks nobody for a password."
  type        = bool
  default     = false
  nullable    = false
}

variable "access" {
  description = <<-EOT
    method: how nodes are reached, ssm or ssh. Port 22 is open with ssh only.
    key_name: an existing EC2 key pair. public_key: text of an OpenSSH public key to make a key pair of.
    ssh_allowed_cidrs: networks that may reach port 22, with ssh.
  EOT
  type = object({
    method            = optional(string, "ssm")
    key_name          = optional(string)
    public_key        = optional(string)
    ssh_allowed_cidrs = optional(list(string), [])
  })
  default  = {}
  nullable = false

  validation {
    condition     = contains(["ssm", "ssh"], var.access.method)
    error_message = "access.method must be ssm or ssh."
  }

  validation {
    condition     = var.access.key_name == null || var.access.public_key == null
    error_message = "access.key_name names an existing key pair and access.public_key makes one: give one of them at most."
  }

  validation {
    condition     = var.access.method != "ssh" || var.access.key_name != null || var.access.public_key != null
    error_message = "access.method ssh needs a key on the nodes: give access.key_name or access.public_key."
  }

  # The two kinds that EC2 takes.
  validation {
    condition = (
      var.access.public_key == null ||
      can(regex("^(ssh-ed25519|ssh-rsa) [A-Za-z0-9+/]+=*( [^\\n]*)?$", trimspace(var.access.public_key)))
    )
    error_message = "access.public_key must be one OpenSSH public key that begins with ssh-ed25519 or ssh-rsa."
  }

  validation {
    condition = alltrue([
      for cidr in var.access.ssh_allowed_cidrs :
      try(cidrsubnet(cidr, 0, 0) == cidr && tonumber(split("/", cidr)[1]) >= 8, false)
    ])
    error_message = "access.ssh_allowed_cidrs must be networks with no host bits set and a prefix of /8 or longer: SSH is never open to the internet."
  }

  validation {
    condition     = length(var.access.ssh_allowed_cidrs) == 0 || var.network.security_group_id == null
    error_message = "access.ssh_allowed_cidrs does not go with network.security_group_id: who may reach port 22 is for the rules of that group, which is left as it is."
  }
}

variable "model_bucket" {
  description = "Bucket that nodes may read models from, and the prefix under which; null: none."
  type = object({
    bucket = string
    prefix = optional(string, "")
  })
  default = null

  validation {
    condition     = var.model_bucket == null || can(regex("^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$", var.model_bucket.bucket))
    error_message = "model_bucket.bucket must be the name of an S3 bucket, with no s3:// in front."
  }

  # A star or a question mark would widen what the policy allows.
  validation {
    condition     = var.model_bucket == null || can(regex("^([^/*?$][^*?$]*)?$", var.model_bucket.prefix))
    error_message = "model_bucket.prefix must not begin with / and must not hold *, ? or $."
  }
}

variable "capacity" {
  description = <<-EOT
    Where prefill and decode nodes come from; router nodes are always plain on-demand.
    kind: on-demand, odcr, capacity-block or spot.
    reservation_id: the capacity reservation, for odcr and capacity-block.
    spot_max_price: dollars an hour, for spot; default: the on-demand price.
    placement_group: create, none, or the name of an existing cluster group. Default: create for on-demand and spot,
    none for odcr and capacity-block.
  EOT
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

  validation {
    condition     = var.capacity.reservation_id == null || can(regex("^cr-[0-9a-f]+$", var.capacity.reservation_id))
    error_message = "capacity.reservation_id must look like cr-0123456789abcdef0."
  }

  validation {
    condition = var.capacity.spot_max_price == null || (
      var.capacity.kind == "spot" && can(regex("^[0-9]+([.][0-9]+)?$", var.capacity.spot_max_price))
    )
    error_message = "capacity.spot_max_price must be dollars an hour, such as \"30.50\", and goes with the kind spot only."
  }

  validation {
    condition     = var.capacity.kind != "capacity-block" || coalesce(var.capacity.placement_group, "none") == "none"
    error_message = "capacity.placement_group must be none with a capacity-block, which is placed close together already."
  }

  validation {
    condition     = var.capacity.placement_group == null || can(regex("^[ -~]{1,255}$", var.capacity.placement_group))
    error_message = "capacity.placement_group must be create, none or the name of a placement group."
  }
}

variable "roles" {
  description = "What the nodes of each role are: prefill, decode, router."
  type = map(object({
    instance_type   = string
    root_volume_gib = optional(number, 200)
  }))
  default  = {}
  nullable = false

  validation {
    condition     = alltrue([for role in keys(var.roles) : contains(["prefill", "decode", "router"], role)])
    error_message = "roles may have the keys prefill, decode and router only."
  }

  validation {
    condition     = alltrue([for role in values(var.roles) : can(regex("^[a-z0-9-]+[.][a-z0-9-]+$", role.instance_type))])
    error_message = "roles: instance_type must look like p5en.48xlarge."
  }

  validation {
    condition = alltrue([
      for role in values(var.roles) :
      role.root_volume_gib >= 8 && role.root_volume_gib <= 16384 && floor(role.root_volume_gib) == role.root_volume_gib
    ])
    error_message = "roles: root_volume_gib must be a whole number from 8 to 16384."
  }
}

variable "nodes" {
  description = "The nodes by name. Raising the generation of one replaces that one. May be empty: then there is network and access only."
  type = map(object({
    role       = string
    generation = optional(number, 1)
  }))
  default  = {}
  nullable = false

  validation {
    condition     = alltrue([for node in values(var.nodes) : contains(keys(var.roles), node.role)])
    error_message = "nodes: the role of every node must be a key of roles."
  }

  validation {
    condition     = alltrue([for name in keys(var.nodes) : can(regex("^[a-z][a-z0-9-]{0,62}$", name))])
    error_message = "nodes: names must be lower case letters, digits and dashes, begin with a letter, and be 63 long at most."
  }

  validation {
    condition     = alltrue([for node in values(var.nodes) : node.generation >= 1 && floor(node.generation) == node.generation])
    error_message = "nodes: generation must be a whole number from 1."
  }
}

variable "images" {
  description = <<-EOT
    node_ami, router_ami: images of the engine nodes and of the router's.
    node_parameter, router_parameter: public SSM parameters that name an image, used where no image is given; what they
    say at the first apply is kept.
  EOT
  type = object({
    node_ami         = optional(string)
    node_parameter   = optional(string, "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id")
    router_ami       = optional(string)
    router_parameter = optional(string, "/aws/service/canonical/ubuntu/server/24.04/stable/current/amd64/hvm/ebs-gp3/ami-id")
  })
  default  = {}
  nullable = false

  validation {
    condition = alltrue([
      for ami in [var.images.node_ami, var.images.router_ami] : ami == null || can(regex("^ami-[0-9a-f]+$", ami))
    ])
    error_message = "images.node_ami and images.router_ami must look like ami-0123456789abcdef0."
  }

  validation {
    condition     = alltrue([for name in [var.images.node_parameter, var.images.router_parameter] : startswith(name, "/")])
    error_message = "images.node_parameter and images.router_parameter must be names of SSM parameters that begin with /."
  }
}

variable "max_retries" {
  description = "How often the provider repeats a failed call. It repeats calls that failed for want of capacity too, so this bounds how long an apply waits for instances that are not there."
  type        = number
  default     = 6
  nullable    = false

  validation {
    condition     = var.max_retries >= 1 && var.max_retries <= 25 && floor(var.max_retries) == var.max_retries
    error_message = "max_retries must be a whole number from 1 to 25."
  }
}
