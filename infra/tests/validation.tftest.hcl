# Every rule of every variable of the root. A run breaks one rule of several variables at once, and each of them has to
# be refused: a rule that no longer holds shows up as a missing failure. A rule that asks for another variable is not
# looked at while that one is wrong, so access and network are never wrong together, nor nodes and roles.

# What does not hang on a wrong variable is still planned, so the mocks must please the rest of the configuration.
mock_provider "aws" {
  mock_data "aws_partition" {
    defaults = { partition = "aws" }
  }
  mock_data "aws_ec2_instance_type_offerings" {
    defaults = { locations = ["us-west-2a"] }
  }
  mock_data "aws_ssm_parameter" {
    defaults = { insecure_value = "ami-0123456789abcdef0" }
  }
  mock_data "aws_ami" {
    defaults = { id = "ami-0123456789abcdef0", root_device_name = "/dev/sda1" }
  }
  mock_data "aws_subnet" {
    defaults = { vpc_id = "vpc-0abc", availability_zone = "us-west-2a" }
  }
  mock_data "aws_security_group" {
    defaults = { vpc_id = "vpc-0abc" }
  }
}

variables {
  name       = "demo"
  cluster_id = "0123456789abcdef"
  owner      = "jo@example.org"
  region     = "us-west-2"
  zone       = "us-west-2a"
  roles      = { decode = { instance_type = "p5en.48xlarge" } }
}

run "wrong_kinds" {
  command = plan

  variables {
    name                 = "Demo"
    cluster_id           = "0123"
    owner                = "jo; rm"
    tags                 = { "kvdeploy:id" = "x" }
    expires_at           = "tomorrow"
    network              = { vpc_id = "vpc-0abc" }
    router_port          = 22
    router_allowed_cidrs = ["0.0.0.0/0"]
    model_bucket         = { bucket = "s3://models" }
    capacity             = { kind = "reserved" }
    roles                = { encode = { instance_type = "p5en.48xlarge" } }
    images               = { node_ami = "ubuntu" }
    max_retries          = 0
  }

  expect_failures = [
    var.name, var.cluster_id, var.owner, var.tags, var.expires_at, var.network, var.router_port,
    var.router_allowed_cidrs, var.model_bucket, var.capacity, var.roles, var.images, var.max_retries,
  ]
}

run "names_and_bounds" {
  command = plan

  variables {
    name                 = "a-name-that-is-far-too-long-for-us"
    zone                 = "us-east-1a"
    tags                 = { "AWS:thing" = "x" }
    network              = { security_group_id = "sg-0abc" }
    router_port          = 70000
    router_allowed_cidrs = ["::/0"]
    model_bucket         = { bucket = "models", prefix = "/qwen" }
    capacity             = { kind = "odcr" }
    roles                = { decode = { instance_type = "p5en" } }
    images               = { router_ami = "ubuntu" }
    max_retries          = 26
  }

  expect_failures = [
    var.name, var.zone, var.tags, var.network, var.router_port, var.router_allowed_cidrs, var.model_bucket,
    var.capacity, var.roles, var.images, var.max_retries,
  ]
}

run "shapes" {
  command = plan

  variables {
    zone                 = "us-west-2"
    tags                 = { team = "search <b>" }
    network              = { vpc_id = "10.0.0.0/16", subnet_id = "subnet-0abc" }
    router_port          = 80.5
    router_allowed_cidrs = ["203.0.113.7/24"]
    model_bucket         = { bucket = "models", prefix = "*" }
    capacity             = { kind = "on-demand", reservation_id = "cr-0abc" }
    roles                = { decode = { instance_type = "p5en.48xlarge", root_volume_gib = 4 } }
    images               = { node_parameter = "ami-0abc" }
    max_retries          = 2.5
  }

  expect_failures = [
    var.zone, var.tags, var.network, var.router_port, var.router_allowed_cidrs, var.model_bucket, var.capacity,
    var.roles, var.images, var.max_retries,
  ]
}

# 0.0.0.0/1 and 128.0.0.0/1 are 0.0.0.0/0 by another name.
run "two_halves_of_the_internet" {
  command = plan

  variables {
    network              = { cidr = "10.42.0.0/25" }
    router_allowed_cidrs = ["0.0.0.0/1", "128.0.0.0/1"]
    capacity             = { kind = "capacity-block" }
    tags                 = { for n in range(41) : "tag-${n}" => "x" }
    roles                = { decode = { instance_type = "p5en.48xlarge", root_volume_gib = 20000 } }
  }

  expect_failures = [
    var.network, var.router_allowed_cidrs, var.capacity, var.tags, var.roles,
  ]
}

run "host_bits" {
  command = plan

  variables {
    network              = { cidr = "10.42.7.0/16" }
    router_allowed_cidrs = ["2001:DB8::/32"]
    capacity             = { kind = "odcr", reservation_id = "r-1" }
  }

  expect_failures = [
    var.network, var.router_allowed_cidrs, var.capacity,
  ]
}

run "no_proxy" {
  command = plan

  variables {
    network  = { egress = "proxy" }
    capacity = { kind = "on-demand", spot_max_price = "20" }
  }

  expect_failures = [
    var.network, var.capacity,
  ]
}

run "ipv6_network" {
  command = plan

  variables {
    network  = { cidr = "fd00::/16" }
    capacity = { kind = "spot", spot_max_price = "cheap" }
    region   = "oregon"
  }

  expect_failures = [
    var.network, var.capacity, var.region,
  ]
}

run "no_telnet" {
  command = plan

  variables {
    access   = { method = "telnet" }
    nodes    = { router-0 = { role = "router" } }
    capacity = { kind = "capacity-block", reservation_id = "cr-0abc", placement_group = "create" }
  }

  expect_failures = [
    var.access, var.nodes, var.capacity,
  ]
}

run "one_key_at_most" {
  command = plan

  variables {
    access   = { key_name = "mine", public_key = "ssh-ed25519 AAAA" }
    nodes    = { "Decode_0" = { role = "decode" } }
    capacity = { kind = "capacity-block", reservation_id = "cr-0abc", placement_group = "mine" }
  }

  expect_failures = [
    var.access, var.nodes, var.capacity,
  ]
}

run "ssh_needs_a_key" {
  command = plan

  variables {
    access   = { method = "ssh" }
    nodes    = { decode-0 = { role = "decode", generation = 0 } }
    capacity = { placement_group = "" }
  }

  expect_failures = [
    var.access, var.nodes, var.capacity,
  ]
}

run "a_private_key" {
  command = plan

  variables {
    access = { public_key = "-----BEGIN PRIVATE KEY-----" }
  }

  expect_failures = [
    var.access,
  ]
}

run "ssh_from_everywhere" {
  command = plan

  variables {
    access = { method = "ssh", key_name = "mine", ssh_allowed_cidrs = ["0.0.0.0/0"] }
  }

  expect_failures = [
    var.access,
  ]
}

# The router may be open to the internet, SSH never.
run "ssh_from_everywhere_with_an_open_router" {
  command = plan

  variables {
    access               = { method = "ssh", key_name = "mine", ssh_allowed_cidrs = ["::/0"] }
    open_to_internet     = true
    router_allowed_cidrs = ["0.0.0.0/0", "::/0"]
  }

  expect_failures = [
    var.access,
  ]
}

run "ssh_host_bits" {
  command = plan

  variables {
    access = { method = "ssh", key_name = "mine", ssh_allowed_cidrs = ["203.0.113.7/24"] }
  }

  expect_failures = [
    var.access,
  ]
}

run "ssh_rules_of_a_group_that_is_not_ours" {
  command = plan

  variables {
    access  = { method = "ssh", key_name = "mine", ssh_allowed_cidrs = ["203.0.113.0/24"] }
    network = { vpc_id = "vpc-0abc", subnet_id = "subnet-0abc", security_group_id = "sg-0abc" }
  }

  expect_failures = [
    var.access,
  ]
}
