# The whole configuration, applied against mocks: the modules fit together, and the outputs are what they are said to be.

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
    defaults = { id = "ami-0123456789abcdef0", name = "an-image", root_device_name = "/dev/sda1" }
  }
  mock_resource "aws_launch_template" {
    defaults = { id = "lt-0123456789abcdef0", latest_version = 1 }
  }
  mock_resource "aws_instance" {
    defaults = { id = "i-0123456789abcdef0", instance_type = "p5en.48xlarge", private_ip = "10.42.0.5", availability_zone = "us-west-2a" }
  }
}

variables {
  name                 = "demo"
  cluster_id           = "0123456789abcdef"
  owner                = "jo@example.org"
  region               = "us-west-2"
  zone                 = "us-west-2a"
  tags                 = { team = "search" }
  created_at           = "2030-01-31T12:00:00Z"
  expires_at           = "2030-01-31T18:00:00Z"
  router_allowed_cidrs = ["203.0.113.0/24"]
}

run "network_and_access_only" {
  assert {
    condition     = output.inventory == {} && output.launch_templates == {} && output.placement_group == null && output.images == { node = null, router = null }
    error_message = "No roles and no nodes is a cluster too."
  }
}

run "the_fleet" {
  variables {
    roles = {
      prefill = { instance_type = "p5en.48xlarge" }
      decode  = { instance_type = "p5en.48xlarge" }
      router  = { instance_type = "c7i.2xlarge", root_volume_gib = 50 }
    }
    nodes = {
      prefill-0 = { role = "prefill" }
      decode-0  = { role = "decode", generation = 2 }
      router-0  = { role = "router" }
    }
  }

  assert {
    condition     = { for name, node in output.inventory : name => "${node.role} ${node.generation}" } == { prefill-0 = "prefill 1", decode-0 = "decode 2", router-0 = "router 1" }
    error_message = "The inventory has every node with its role and generation."
  }
  assert {
    condition = output.inventory["decode-0"] == {
      id            = "i-0123456789abcdef0"
      role          = "decode"
      private_ip    = "10.42.0.5"
      instance_type = "p5en.48xlarge"
      zone          = "us-west-2a"
      generation    = 2
    }
    error_message = "The inventory has these fields."
  }
  assert {
    condition     = { for name, word in output.generations : name => split("-", word)[0] } == { prefill-0 = "1", decode-0 = "2", router-0 = "1" } && length(distinct([for word in values(output.generations) : split("-", word)[1]])) == 3
    error_message = "Each node has a generation: its number, and a digest of what it was made of."
  }
  assert {
    condition     = output.cluster == { name = "demo", id = "0123456789abcdef", owner = "jo@example.org", created_at = "2030-01-31T12:00:00Z", region = "us-west-2", zone = "us-west-2a" }
    error_message = "The cluster says which it is."
  }
  assert {
    condition     = toset(keys(output.network)) == toset(["vpc_id", "subnet_id", "security_group_id"])
    error_message = "The network has these fields."
  }
  assert {
    condition     = output.images.node == { id = "ami-0123456789abcdef0", name = "an-image" } && output.images.router == output.images.node
    error_message = "Images have an id and a name."
  }
  assert {
    condition     = toset(keys(output.launch_templates)) == toset(["prefill", "decode", "router"]) && output.launch_templates["router"] == { id = "lt-0123456789abcdef0", version = 1 }
    error_message = "Every role has a template."
  }
  assert {
    condition     = output.placement_group == "kvdeploy-demo"
    error_message = "The placement group has the cluster's name."
  }
}

run "what_everything_carries" {
  command = plan

  assert {
    condition = tomap(local.tags) == tomap({
      team               = "search"
      "kvdeploy:cluster" = "demo"
      "kvdeploy:id"      = "0123456789abcdef"
      "kvdeploy:owner"   = "jo@example.org"
      "kvdeploy:managed" = "true"
      "kvdeploy:expires" = "2030-01-31T18:00:00Z"
    })
    error_message = "The user's tags and ours."
  }
}

# Networks for SSH may stay in the variables while nodes are reached through SSM; port 22 is closed all the same.
run "port_22_with_ssm" {
  command = plan

  variables {
    expires_at = null
    access     = { method = "ssm", key_name = "mine", ssh_allowed_cidrs = ["198.51.100.0/24"] }
  }

  assert {
    condition     = length(module.network.ssh_allowed_cidrs) == 0
    error_message = "Port 22 is closed unless the method is ssh."
  }
  assert {
    condition     = !contains(keys(local.tags), "kvdeploy:expires")
    error_message = "No time, no tag."
  }
}

run "port_22_with_ssh" {
  command = plan

  variables {
    access = { method = "ssh", key_name = "mine", ssh_allowed_cidrs = ["198.51.100.0/24"] }
  }

  assert {
    condition     = module.network.ssh_allowed_cidrs == ["198.51.100.0/24"]
    error_message = "Port 22 is open to the networks given."
  }
}
