# Rules are resources of their own: one can change without a look at the others, and a rule that somebody adds by hand
# is not silently removed in the middle of an incident.
#
# A group needs no rules for what AWS itself answers at 169.254.169.x: addresses, names, time and instance metadata.

locals {
  fabric_security_group_id = local.own_fabric ? aws_security_group.fabric[0].id : var.security_group_id

  # Without a way out, what is left to reach: S3, and whatever endpoints the network has.
  closed = local.own_fabric && var.egress == "none"
}

# ---- fabric: on every node ------------------------------------------------------------------------------------------

# On every interface of every node. No create_before_destroy: the name is fixed and EC2 takes it only once in a VPC.
resource "aws_security_group" "fabric" {
  #checkov:skip=CKV2_AWS_5:The launch templates attach it, in another module.
  count = local.own_fabric ? 1 : 0

  name        = "${local.prefix}-fabric"
  description = "Nodes: everything among themselves, as EFA needs it"
  vpc_id      = local.vpc_id

  tags = {
    Name               = "${local.prefix}-fabric"
    "kvdeploy:address" = "${var.address}.aws_security_group.fabric/0"
  }
}

# EFA traffic is let through only by rules that allow everything and name the group itself, one for each direction.
resource "aws_vpc_security_group_ingress_rule" "fabric_self" {
  count = local.own_fabric ? 1 : 0

  security_group_id            = aws_security_group.fabric[0].id
  description                  = "EFA: everything from this group"
  ip_protocol                  = "-1"
  referenced_security_group_id = aws_security_group.fabric[0].id

  tags = {
    Name               = "${local.prefix}-fabric-self"
    "kvdeploy:address" = "${var.address}.aws_vpc_security_group_ingress_rule.fabric_self/0"
  }
}

resource "aws_vpc_security_group_egress_rule" "fabric_self" {
  count = local.own_fabric ? 1 : 0

  security_group_id            = aws_security_group.fabric[0].id
  description                  = "EFA: everything to this group"
  ip_protocol                  = "-1"
  referenced_security_group_id = aws_security_group.fabric[0].id

  tags = {
    Name               = "${local.prefix}-fabric-self"
    "kvdeploy:address" = "${var.address}.aws_vpc_security_group_egress_rule.fabric_self/0"
  }
}

# 443 for packages, images, models and AWS itself; 80 because the package mirrors of Ubuntu speak nothing else.
resource "aws_vpc_security_group_egress_rule" "fabric_internet" {
  for_each = local.own_fabric && var.egress == "nat" ? { http = 80, https = 443 } : {}

  security_group_id = aws_security_group.fabric[0].id
  description       = "${upper(each.key)} to the internet"
  ip_protocol       = "tcp"
  from_port         = each.value
  to_port           = each.value
  cidr_ipv4         = "0.0.0.0/0"

  tags = {
    Name               = "${local.prefix}-fabric-${each.key}"
    "kvdeploy:address" = "${var.address}.aws_vpc_security_group_egress_rule.fabric_internet/${each.key}"
  }
}

resource "aws_vpc_security_group_egress_rule" "fabric_endpoints" {
  count = local.closed && length(local.interface_endpoints) > 0 ? 1 : 0

  security_group_id            = aws_security_group.fabric[0].id
  description                  = "HTTPS to the private endpoints"
  ip_protocol                  = "tcp"
  from_port                    = 443
  to_port                      = 443
  referenced_security_group_id = aws_security_group.endpoints[0].id

  tags = {
    Name               = "${local.prefix}-fabric-endpoints"
    "kvdeploy:address" = "${var.address}.aws_vpc_security_group_egress_rule.fabric_endpoints/0"
  }
}

# Which group the endpoints of an existing VPC are in is not known, only that they are in it.
data "aws_vpc" "existing" {
  count = local.closed && !local.new ? 1 : 0
  id    = var.vpc_id
}

resource "aws_vpc_security_group_egress_rule" "fabric_vpc" {
  for_each = toset(flatten([for vpc in data.aws_vpc.existing : vpc.cidr_block_associations[*].cidr_block]))

  security_group_id = aws_security_group.fabric[0].id
  description       = "HTTPS to endpoints of the VPC"
  ip_protocol       = "tcp"
  from_port         = 443
  to_port           = 443
  cidr_ipv4         = each.key

  tags = {
    Name               = "${local.prefix}-fabric-vpc"
    "kvdeploy:address" = "${var.address}.aws_vpc_security_group_egress_rule.fabric_vpc/${each.key}"
  }
}

data "aws_ec2_managed_prefix_list" "s3" {
  count = local.closed ? 1 : 0
  name  = "com.amazonaws.${var.region}.s3"
}

resource "aws_vpc_security_group_egress_rule" "fabric_s3" {
  count = local.closed ? 1 : 0

  security_group_id = aws_security_group.fabric[0].id
  description       = "HTTPS to S3"
  ip_protocol       = "tcp"
  from_port         = 443
  to_port           = 443
  prefix_list_id    = data.aws_ec2_managed_prefix_list.s3[0].id

  tags = {
    Name               = "${local.prefix}-fabric-s3"
    "kvdeploy:address" = "${var.address}.aws_vpc_security_group_egress_rule.fabric_s3/0"
  }
}

# On the fabric group and not on one of its own: nodes keep the groups that they started with, so only a rule of a group
# that they already have can open or close port 22 on a node that runs.
resource "aws_vpc_security_group_ingress_rule" "ssh" {
  for_each = local.own_fabric ? toset(var.ssh_allowed_cidrs) : toset([])

  security_group_id = aws_security_group.fabric[0].id
  description       = "SSH"
  ip_protocol       = "tcp"
  from_port         = 22
  to_port           = 22
  cidr_ipv4         = strcontains(each.key, ":") ? null : each.key
  cidr_ipv6         = strcontains(each.key, ":") ? each.key : null

  tags = {
    Name               = "${local.prefix}-ssh"
    "kvdeploy:address" = "${var.address}.aws_vpc_security_group_ingress_rule.ssh/${each.key}"
  }
}

# ---- router: on router nodes, beside the fabric group ---------------------------------------------------------------

resource "aws_security_group" "router" {
  #checkov:skip=CKV2_AWS_5:The launch template of the router attaches it, in another module.
  name        = "${local.prefix}-router"
  description = "Router nodes: the API from the networks that may use it"
  vpc_id      = local.vpc_id

  tags = {
    Name               = "${local.prefix}-router"
    "kvdeploy:address" = "${var.address}.aws_security_group.router"
  }
}

resource "aws_vpc_security_group_ingress_rule" "router" {
  for_each = toset(var.router_allowed_cidrs)

  security_group_id = aws_security_group.router.id
  description       = "Router API"
  ip_protocol       = "tcp"
  from_port         = var.router_port
  to_port           = var.router_port
  cidr_ipv4         = strcontains(each.key, ":") ? null : each.key
  cidr_ipv6         = strcontains(each.key, ":") ? each.key : null

  tags = {
    Name               = "${local.prefix}-router"
    "kvdeploy:address" = "${var.address}.aws_vpc_security_group_ingress_rule.router/${each.key}"
  }
}
