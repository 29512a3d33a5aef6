locals {
  # What the SSM agent talks to. ec2messages is for agents older than 3.3.40.
  interface_endpoints = local.new && var.endpoints ? toset(["ssm", "ssmmessages", "ec2messages"]) : toset([])
}

# Free, and keeps model downloads off the NAT gateway, which bills every gigabyte.
resource "aws_vpc_endpoint" "s3" {
  count = local.new ? 1 : 0

  vpc_id            = aws_vpc.this[0].id
  vpc_endpoint_type = "Gateway"
  service_name      = "com.amazonaws.${var.region}.s3"
  route_table_ids   = [aws_route_table.fabric[0].id]

  tags = {
    Name               = "${local.prefix}-s3"
    "kvdeploy:address" = "${var.address}.aws_vpc_endpoint.s3/0"
  }
}

resource "aws_vpc_endpoint" "interface" {
  for_each = local.interface_endpoints

  vpc_id              = aws_vpc.this[0].id
  vpc_endpoint_type   = "Interface"
  service_name        = "com.amazonaws.${var.region}.${each.key}"
  subnet_ids          = [aws_subnet.fabric[0].id]
  security_group_ids  = [aws_security_group.endpoints[0].id]
  private_dns_enabled = true

  tags = {
    Name               = "${local.prefix}-${each.key}"
    "kvdeploy:address" = "${var.address}.aws_vpc_endpoint.interface/${each.key}"
  }
}

resource "aws_security_group" "endpoints" {
  count = length(local.interface_endpoints) > 0 ? 1 : 0

  name        = "${local.prefix}-endpoints"
  description = "Private endpoints: HTTPS from the nodes"
  vpc_id      = local.vpc_id

  tags = {
    Name               = "${local.prefix}-endpoints"
    "kvdeploy:address" = "${var.address}.aws_security_group.endpoints/0"
  }
}

resource "aws_vpc_security_group_ingress_rule" "endpoints" {
  count = length(local.interface_endpoints) > 0 ? 1 : 0

  security_group_id            = aws_security_group.endpoints[0].id
  description                  = "HTTPS from the nodes"
  ip_protocol                  = "tcp"
  from_port                    = 443
  to_port                      = 443
  referenced_security_group_id = local.fabric_security_group_id

  tags = {
    Name               = "${local.prefix}-endpoints"
    "kvdeploy:address" = "${var.address}.aws_vpc_security_group_ingress_rule.endpoints/0"
  }
}
