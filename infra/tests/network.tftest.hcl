# The network module alone: what is made, what may come in, what may go out.

mock_provider "aws" {
  mock_data "aws_subnet" {
    defaults = { vpc_id = "vpc-0abc", availability_zone = "us-west-2a" }
  }
  mock_data "aws_security_group" {
    defaults = { vpc_id = "vpc-0abc" }
  }
  mock_data "aws_vpc" {
    defaults = { cidr_block_associations = [{ cidr_block = "10.0.0.0/16" }, { cidr_block = "10.1.0.0/16" }] }
  }
  mock_data "aws_ec2_managed_prefix_list" {
    defaults = { id = "pl-0abc" }
  }
}

variables {
  name                 = "demo"
  region               = "us-west-2"
  zone                 = "us-west-2a"
  router_allowed_cidrs = ["203.0.113.0/24", "203.0.113.0/24", "2001:db8::/32"]
}

run "new_network_with_nat" {
  command = plan

  module {
    source = "./modules/network"
  }

  assert {
    condition     = aws_subnet.fabric[0].cidr_block == "10.42.0.0/17" && aws_subnet.nat[0].cidr_block == "10.42.255.240/28"
    error_message = "The nodes get the lower half, the NAT gateway the last 16 addresses."
  }
  assert {
    condition     = !aws_subnet.fabric[0].map_public_ip_on_launch && !aws_subnet.nat[0].map_public_ip_on_launch
    error_message = "No subnet may give public addresses."
  }
  assert {
    condition     = length(aws_nat_gateway.this) == 1 && length(aws_route.fabric_nat) == 1 && length(aws_vpc_endpoint.s3) == 1
    error_message = "The way out is a NAT gateway, and S3 has a gateway of its own."
  }
  assert {
    condition     = toset(keys(aws_vpc_endpoint.interface)) == toset(["ssm", "ssmmessages", "ec2messages"])
    error_message = "SSM needs three endpoints."
  }
  assert {
    condition     = alltrue([for endpoint in aws_vpc_endpoint.interface : endpoint.private_dns_enabled])
    error_message = "Without private names the agent would still go to the public addresses."
  }
  assert {
    condition = (
      aws_vpc_security_group_ingress_rule.fabric_self[0].ip_protocol == "-1" &&
      aws_vpc_security_group_egress_rule.fabric_self[0].ip_protocol == "-1"
    )
    error_message = "EFA needs everything, both ways."
  }
  assert {
    condition = {
      for rule in aws_vpc_security_group_egress_rule.fabric_internet : rule.from_port => "${rule.to_port} ${rule.cidr_ipv4}"
    } == { 80 = "80 0.0.0.0/0", 443 = "443 0.0.0.0/0" }
    error_message = "Out go HTTP and HTTPS only."
  }
  assert {
    condition     = length(aws_vpc_security_group_egress_rule.fabric_s3) + length(aws_vpc_security_group_egress_rule.fabric_endpoints) == 0
    error_message = "With a way out, rules for S3 and the endpoints say nothing new."
  }
  assert {
    condition = {
      for key, rule in aws_vpc_security_group_ingress_rule.router : key =>
      "${rule.from_port}-${rule.to_port} ${coalesce(rule.cidr_ipv4, rule.cidr_ipv6)}"
      } == {
      "203.0.113.0/24" = "8000-8000 203.0.113.0/24"
      "2001:db8::/32"  = "8000-8000 2001:db8::/32"
    }
    error_message = "The router's port is open to the networks given, each once, and to nobody else."
  }
  assert {
    condition     = length(aws_vpc_security_group_ingress_rule.ssh) == 0
    error_message = "Port 22 is closed unless asked for."
  }
  assert {
    condition     = toset([aws_security_group.fabric[0].name, aws_security_group.router.name, aws_security_group.endpoints[0].name]) == toset(["kvdeploy-demo-fabric", "kvdeploy-demo-router", "kvdeploy-demo-endpoints"])
    error_message = "Names are fixed."
  }
  assert {
    condition = (
      aws_subnet.fabric[0].tags["kvdeploy:address"] == "module.network.aws_subnet.fabric/0" &&
      aws_vpc_endpoint.interface["ssm"].tags["kvdeploy:address"] == "module.network.aws_vpc_endpoint.interface/ssm" &&
      aws_security_group.router.tags["kvdeploy:address"] == "module.network.aws_security_group.router"
    )
    error_message = "Every resource tells its address."
  }
}

run "no_way_out" {
  command = plan

  module {
    source = "./modules/network"
  }

  variables {
    egress            = "none"
    cidr              = "10.9.0.0/24"
    ssh_allowed_cidrs = ["198.51.100.0/24"]
    address           = "module.cluster.module.network"
  }

  assert {
    condition     = length(aws_nat_gateway.this) + length(aws_internet_gateway.this) + length(aws_eip.nat) + length(aws_subnet.nat) == 0
    error_message = "No gateway, no public address."
  }
  assert {
    condition     = length(aws_vpc_security_group_egress_rule.fabric_internet) + length(aws_vpc_security_group_egress_rule.fabric_vpc) == 0
    error_message = "Nothing goes to the internet."
  }
  assert {
    condition = (
      aws_vpc_security_group_egress_rule.fabric_s3[0].prefix_list_id == "pl-0abc" &&
      aws_vpc_security_group_egress_rule.fabric_s3[0].from_port == 443 &&
      aws_vpc_security_group_egress_rule.fabric_endpoints[0].from_port == 443
    )
    error_message = "S3 and the endpoints stay within reach."
  }
  assert {
    condition     = keys(aws_vpc_security_group_ingress_rule.ssh) == ["198.51.100.0/24"] && aws_vpc_security_group_ingress_rule.ssh["198.51.100.0/24"].to_port == 22
    error_message = "Port 22 is open to the networks given."
  }
  assert {
    condition     = aws_subnet.fabric[0].cidr_block == "10.9.0.0/25"
    error_message = "A small network is halved too."
  }
  assert {
    condition     = aws_vpc.this[0].tags["kvdeploy:address"] == "module.cluster.module.network.aws_vpc.this/0"
    error_message = "The address begins with the module's own."
  }
}

run "no_way_out_and_no_endpoints" {
  command = plan

  module {
    source = "./modules/network"
  }

  variables {
    egress    = "none"
    endpoints = false
  }

  assert {
    condition     = length(aws_vpc_endpoint.interface) + length(aws_security_group.endpoints) + length(aws_vpc_security_group_egress_rule.fabric_endpoints) == 0
    error_message = "No endpoints, no group for them."
  }
  assert {
    condition     = length(aws_vpc_security_group_egress_rule.fabric_s3) == 1
    error_message = "S3 stays within reach."
  }
}

run "existing_network" {
  command = plan

  module {
    source = "./modules/network"
  }

  variables {
    vpc_id            = "vpc-0abc"
    subnet_id         = "subnet-0abc"
    security_group_id = "sg-0abc"
  }

  assert {
    condition = 0 == sum([
      length(aws_vpc.this), length(aws_default_security_group.this), length(aws_subnet.fabric), length(aws_subnet.nat),
      length(aws_route_table.fabric), length(aws_route_table.nat), length(aws_internet_gateway.this), length(aws_eip.nat),
      length(aws_nat_gateway.this), length(aws_route.fabric_nat), length(aws_route.nat_internet),
      length(aws_vpc_endpoint.s3), length(aws_vpc_endpoint.interface), length(aws_security_group.endpoints),
      length(aws_security_group.fabric), length(aws_vpc_security_group_ingress_rule.fabric_self),
      length(aws_vpc_security_group_egress_rule.fabric_self), length(aws_vpc_security_group_egress_rule.fabric_internet),
    ])
    error_message = "Nothing of an existing network is made or changed."
  }
  assert {
    condition     = output.vpc_id == "vpc-0abc" && output.subnet_id == "subnet-0abc" && output.fabric_security_group_id == "sg-0abc"
    error_message = "What was given is used."
  }
  assert {
    condition     = aws_security_group.router.vpc_id == "vpc-0abc" && length(aws_vpc_security_group_ingress_rule.router) == 2
    error_message = "The router's group is made in the existing VPC."
  }
}

run "existing_network_without_a_group_and_without_a_way_out" {
  command = plan

  module {
    source = "./modules/network"
  }

  variables {
    vpc_id    = "vpc-0abc"
    subnet_id = "subnet-0abc"
    egress    = "none"
  }

  assert {
    condition     = aws_security_group.fabric[0].vpc_id == "vpc-0abc" && length(aws_vpc_security_group_egress_rule.fabric_internet) == 0
    error_message = "A group is made, with no way to the internet."
  }
  assert {
    condition     = keys(aws_vpc_security_group_egress_rule.fabric_vpc) == ["10.0.0.0/16", "10.1.0.0/16"]
    error_message = "Endpoints may be anywhere in the VPC."
  }
}

run "subnet_of_another_zone" {
  command = plan

  module {
    source = "./modules/network"
  }

  variables {
    vpc_id    = "vpc-0abc"
    subnet_id = "subnet-0abc"
    zone      = "us-west-2c"
  }

  expect_failures = [data.aws_subnet.existing]
}

# The module refuses the whole internet for itself too, whoever calls it.
run "open_by_mistake" {
  command = plan

  module {
    source = "./modules/network"
  }

  variables {
    router_allowed_cidrs = ["0.0.0.0/0"]
    ssh_allowed_cidrs    = ["0.0.0.0/0"]
  }

  expect_failures = [var.router_allowed_cidrs, var.ssh_allowed_cidrs]
}

run "open_on_purpose" {
  command = plan

  module {
    source = "./modules/network"
  }

  variables {
    router_allowed_cidrs = ["0.0.0.0/0", "::/0"]
    open_to_internet     = true
    router_port          = 443
  }

  assert {
    condition = (
      aws_vpc_security_group_ingress_rule.router["0.0.0.0/0"].from_port == 443 &&
      aws_vpc_security_group_ingress_rule.router["::/0"].cidr_ipv6 == "::/0"
    )
    error_message = "The router's port is open, and that port only."
  }
}
