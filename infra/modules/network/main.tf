locals {
  prefix = "kvdeploy-${var.name}"

  # A count must be known at plan time, so these ask what was given, never what was made.
  new        = var.vpc_id == null
  nat        = local.new && var.egress == "nat"
  own_fabric = var.security_group_id == null

  vpc_id    = local.new ? aws_vpc.this[0].id : var.vpc_id
  subnet_id = local.new ? aws_subnet.fabric[0].id : var.subnet_id

  prefix_length = tonumber(split("/", var.cidr)[1])
}

# ---- an existing network: looked at, never changed ------------------------------------------------------------------

data "aws_subnet" "existing" {
  count = local.new ? 0 : 1
  id    = var.subnet_id

  lifecycle {
    postcondition {
      condition     = self.vpc_id == var.vpc_id
      error_message = "${var.subnet_id} is in ${self.vpc_id}, not in ${var.vpc_id}."
    }
    postcondition {
      condition     = self.availability_zone == var.zone
      error_message = "${var.subnet_id} is in the zone ${self.availability_zone}, not in ${var.zone}."
    }
  }
}

data "aws_security_group" "existing" {
  count = local.own_fabric ? 0 : 1
  id    = var.security_group_id

  lifecycle {
    postcondition {
      condition     = self.vpc_id == var.vpc_id
      error_message = "${var.security_group_id} is in ${self.vpc_id}, not in ${var.vpc_id}."
    }
  }
}

# ---- a new network --------------------------------------------------------------------------------------------------

resource "aws_vpc" "this" {
  #checkov:skip=CKV2_AWS_11:Flow logs of EFA traffic cost more than they tell, OS-bypass packets are not in them, and a log group would outlive the cluster.
  count = local.new ? 1 : 0

  cidr_block = var.cidr

  # Private names of the endpoints need both.
  enable_dns_support   = true
  enable_dns_hostnames = true

  tags = {
    Name               = local.prefix
    "kvdeploy:address" = "${var.address}.aws_vpc.this/0"
  }
}

# Every VPC comes with a group that lets its members talk and go out. Nobody uses it; without rules nobody can by mistake.
resource "aws_default_security_group" "this" {
  count = local.new ? 1 : 0

  vpc_id = aws_vpc.this[0].id

  tags = {
    Name               = "${local.prefix}-unused"
    "kvdeploy:address" = "${var.address}.aws_default_security_group.this/0"
  }
}

# Half of the VPC. EFA needs all nodes in one subnet; interfaces of the kind efa-only take no address.
resource "aws_subnet" "fabric" {
  count = local.new ? 1 : 0

  vpc_id                  = aws_vpc.this[0].id
  availability_zone       = var.zone
  cidr_block              = cidrsubnet(var.cidr, 1, 0)
  map_public_ip_on_launch = false

  tags = {
    Name               = "${local.prefix}-fabric"
    "kvdeploy:address" = "${var.address}.aws_subnet.fabric/0"
  }
}

resource "aws_route_table" "fabric" {
  count = local.new ? 1 : 0

  vpc_id = aws_vpc.this[0].id

  tags = {
    Name               = "${local.prefix}-fabric"
    "kvdeploy:address" = "${var.address}.aws_route_table.fabric/0"
  }
}

resource "aws_route_table_association" "fabric" {
  count = local.new ? 1 : 0

  subnet_id      = aws_subnet.fabric[0].id
  route_table_id = aws_route_table.fabric[0].id
}

# ---- the way out ----------------------------------------------------------------------------------------------------

resource "aws_internet_gateway" "this" {
  count = local.nat ? 1 : 0

  vpc_id = aws_vpc.this[0].id

  tags = {
    Name               = local.prefix
    "kvdeploy:address" = "${var.address}.aws_internet_gateway.this/0"
  }
}

# The last 16 addresses, the smallest subnet there is: only the NAT gateway is in it.
resource "aws_subnet" "nat" {
  count = local.nat ? 1 : 0

  vpc_id                  = aws_vpc.this[0].id
  availability_zone       = var.zone
  cidr_block              = cidrsubnet(var.cidr, 28 - local.prefix_length, pow(2, 28 - local.prefix_length) - 1)
  map_public_ip_on_launch = false

  tags = {
    Name               = "${local.prefix}-nat"
    "kvdeploy:address" = "${var.address}.aws_subnet.nat/0"
  }
}

resource "aws_route_table" "nat" {
  count = local.nat ? 1 : 0

  vpc_id = aws_vpc.this[0].id

  tags = {
    Name               = "${local.prefix}-nat"
    "kvdeploy:address" = "${var.address}.aws_route_table.nat/0"
  }
}

resource "aws_route_table_association" "nat" {
  count = local.nat ? 1 : 0

  subnet_id      = aws_subnet.nat[0].id
  route_table_id = aws_route_table.nat[0].id
}

resource "aws_route" "nat_internet" {
  count = local.nat ? 1 : 0

  route_table_id         = aws_route_table.nat[0].id
  destination_cidr_block = "0.0.0.0/0"
  gateway_id             = aws_internet_gateway.this[0].id
}

resource "aws_eip" "nat" {
  count = local.nat ? 1 : 0

  domain = "vpc"

  tags = {
    Name               = "${local.prefix}-nat"
    "kvdeploy:address" = "${var.address}.aws_eip.nat/0"
  }

  # The gateway must outlive the address, or detaching it fails.
  depends_on = [aws_internet_gateway.this]
}

resource "aws_nat_gateway" "this" {
  count = local.nat ? 1 : 0

  subnet_id     = aws_subnet.nat[0].id
  allocation_id = aws_eip.nat[0].id

  tags = {
    Name               = local.prefix
    "kvdeploy:address" = "${var.address}.aws_nat_gateway.this/0"
  }

  depends_on = [aws_internet_gateway.this]
}

resource "aws_route" "fabric_nat" {
  count = local.nat ? 1 : 0

  route_table_id         = aws_route_table.fabric[0].id
  destination_cidr_block = "0.0.0.0/0"
  nat_gateway_id         = aws_nat_gateway.this[0].id
}
