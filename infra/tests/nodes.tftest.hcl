# The nodes module alone: interfaces, capacity, placement, images, and what it refuses.

mock_provider "aws" {
  mock_data "aws_ec2_instance_type_offerings" {
    defaults = { locations = ["us-west-2c", "us-west-2a"] }
  }
  mock_data "aws_ssm_parameter" {
    defaults = { insecure_value = "ami-0123456789abcdef0" }
  }
  mock_data "aws_ami" {
    defaults = { root_device_name = "/dev/sda1" }
  }
}

variables {
  name                     = "demo"
  zone                     = "us-west-2a"
  subnet_id                = "subnet-0abc"
  fabric_security_group_id = "sg-0fab"
  router_security_group_id = "sg-0401"
  instance_profile         = "kvdeploy-demo-us-west-2"
  images                   = { node_parameter = "/node", router_parameter = "/router" }
  tags                     = { "kvdeploy:cluster" = "demo" }
  roles = {
    prefill = { instance_type = "p5en.48xlarge" }
    decode  = { instance_type = "p5e.48xlarge" }
    router  = { instance_type = "c7i.2xlarge", root_volume_gib = 50 }
  }
  nodes = {
    prefill-0 = { role = "prefill" }
    decode-0  = { role = "decode", generation = 3 }
    router-0  = { role = "router" }
  }
}

run "on_demand" {
  command = plan

  module {
    source = "./modules/nodes"
  }

  assert {
    condition = [
      for i in aws_launch_template.this["prefill"].network_interfaces : "${i.network_card_index} ${i.device_index} ${i.interface_type}"
    ] == concat(["0 0 efa"], [for card in range(1, 16) : "${card} 1 efa-only"])
    error_message = "p5en: EFA on 16 cards, only the first with an address."
  }
  assert {
    condition = [
      for i in aws_launch_template.this["decode"].network_interfaces : "${i.network_card_index} ${i.device_index} ${i.interface_type}"
    ] == concat(["0 0 efa"], [for card in range(1, 32) : "${card} 1 efa-only"])
    error_message = "p5e: EFA on 32 cards, only the first with an address."
  }
  assert {
    condition     = one(aws_launch_template.this["router"].network_interfaces).interface_type == null
    error_message = "The router has one ordinary interface."
  }
  assert {
    condition     = output.efa_devices == { prefill = 16, decode = 32, router = 0 }
    error_message = "The output counts the EFA devices."
  }
  assert {
    condition = alltrue(flatten([
      for template in aws_launch_template.this : [
        for i in template.network_interfaces : i.delete_on_termination == "true" && i.subnet_id == "subnet-0abc" && i.associate_public_ip_address != "true"
      ]
    ]))
    error_message = "Every interface ends with its node, is in the one subnet and has no public address."
  }
  assert {
    condition = (
      one(aws_launch_template.this["router"].network_interfaces).associate_public_ip_address == "false" &&
      aws_launch_template.this["prefill"].network_interfaces[0].associate_public_ip_address == null
    )
    error_message = "Public addresses are refused where there is one interface, and not spoken of where there are several."
  }
  assert {
    condition = (
      alltrue([for i in aws_launch_template.this["prefill"].network_interfaces : i.security_groups == toset(["sg-0fab"])]) &&
      one(aws_launch_template.this["router"].network_interfaces).security_groups == toset(["sg-0fab", "sg-0401"])
    )
    error_message = "All are in the fabric group, the router in its own too."
  }
  assert {
    condition = (
      one(aws_launch_template.this["prefill"].placement).group_name == "kvdeploy-demo" &&
      one(aws_launch_template.this["decode"].placement).group_name == "kvdeploy-demo" &&
      length(aws_launch_template.this["router"].placement) == 0
    )
    error_message = "Prefill and decode are placed close together, the router is not."
  }
  assert {
    condition     = one(aws_placement_group.this).strategy == "cluster" && output.placement_group == "kvdeploy-demo"
    error_message = "The group is made."
  }
  assert {
    condition = alltrue([
      for template in aws_launch_template.this :
      length(template.instance_market_options) + length(template.capacity_reservation_specification) == 0
    ])
    error_message = "Plain on-demand."
  }
  assert {
    condition = alltrue([
      for template in aws_launch_template.this :
      one(template.metadata_options).http_tokens == "required" && one(template.metadata_options).instance_metadata_tags == "enabled"
    ])
    error_message = "Metadata needs a token and tells tags."
  }
  assert {
    condition = { for role, template in aws_launch_template.this : role =>
      "${one(template.block_device_mappings).ebs[0].volume_size} ${one(template.block_device_mappings).ebs[0].encrypted}"
    } == { prefill = "200 true", decode = "200 true", router = "50 true" }
    error_message = "Root volumes have the size asked for and are encrypted."
  }
  assert {
    condition     = alltrue([for template in aws_launch_template.this : template.user_data == null && template.update_default_version])
    error_message = "No user data; the newest version is the default."
  }
  assert {
    condition = { for s in aws_launch_template.this["decode"].tag_specifications : s.resource_type => tomap(s.tags) } == {
      for kind in ["instance", "network-interface", "volume"] : kind => tomap({ "kvdeploy:cluster" = "demo", "kvdeploy:role" = "decode" })
    }
    error_message = "What EC2 makes of the template is tagged."
  }
  assert {
    condition = aws_instance.this["decode-0"].tags == tomap({
      Name                  = "demo-decode-0"
      "kvdeploy:address"    = "module.nodes.aws_instance.this/decode-0"
      "kvdeploy:role"       = "decode"
      "kvdeploy:node"       = "decode-0"
      "kvdeploy:generation" = output.generations["decode-0"]
    })
    error_message = "A node tells what it is."
  }
  assert {
    condition     = can(regex("^3-[0-9a-f]{8}$", output.generations["decode-0"]))
    error_message = "A generation is a number and a digest."
  }
  assert {
    condition     = toset(keys(terraform_data.image)) == toset(["node", "router"]) && terraform_data.image["node"].input == "ami-0123456789abcdef0"
    error_message = "The parameter is asked, and its answer kept."
  }
}

run "odcr_on_older_types" {
  command = plan

  module {
    source = "./modules/nodes"
  }

  variables {
    roles = {
      prefill = { instance_type = "p5.48xlarge" }
      decode  = { instance_type = "p5.4xlarge" }
      router  = { instance_type = "c7i.2xlarge" }
    }
    capacity = { kind = "odcr", reservation_id = "cr-0abc" }
  }

  assert {
    condition     = output.efa_devices == { prefill = 32, decode = 1, router = 0 }
    error_message = "p5.48xlarge has 32 EFA devices, p5.4xlarge one."
  }
  assert {
    condition = (
      one(aws_launch_template.this["decode"].network_interfaces).interface_type == "efa" &&
      one(aws_launch_template.this["decode"].network_interfaces).associate_public_ip_address == "false"
    )
    error_message = "One interface is EFA with an address, and not a public one."
  }
  assert {
    condition = { for role, template in aws_launch_template.this : role =>
      try(one(one(template.capacity_reservation_specification).capacity_reservation_target).capacity_reservation_id, null)
    } == { prefill = "cr-0abc", decode = "cr-0abc", router = null }
    error_message = "Prefill and decode come from the reservation, the router does not."
  }
  assert {
    condition     = alltrue([for template in aws_launch_template.this : length(template.instance_market_options) == 0])
    error_message = "A reservation is no market."
  }
  assert {
    condition     = length(aws_placement_group.this) == 0 && output.placement_group == null && alltrue([for template in aws_launch_template.this : length(template.placement) == 0])
    error_message = "No group unless asked for: the reservation may be tied to another."
  }
}

run "odcr_in_its_own_group" {
  command = plan

  module {
    source = "./modules/nodes"
  }

  variables {
    roles    = { prefill = { instance_type = "g6.8xlarge" }, router = { instance_type = "c7i.2xlarge" } }
    nodes    = {}
    capacity = { kind = "odcr", reservation_id = "cr-0abc", placement_group = "mine" }
    images   = { node_ami = "ami-0aaa", router_ami = "ami-0bbb" }
  }

  assert {
    condition = (
      length(aws_placement_group.this) == 0 && output.placement_group == "mine" &&
      one(aws_launch_template.this["prefill"].placement).group_name == "mine" && length(aws_launch_template.this["router"].placement) == 0
    )
    error_message = "An existing group is used, and not by the router."
  }
  assert {
    condition     = output.efa_devices == { prefill = 1, router = 0 } && output.inventory == {}
    error_message = "g6.8xlarge has one EFA device; no nodes, no inventory."
  }
  assert {
    condition     = length(data.aws_ssm_parameter.image) == 0 && terraform_data.image["node"].input == "ami-0aaa" && terraform_data.image["router"].input == "ami-0bbb"
    error_message = "Given images are used and nobody is asked."
  }
}

run "capacity_block" {
  command = plan

  module {
    source = "./modules/nodes"
  }

  variables {
    capacity = { kind = "capacity-block", reservation_id = "cr-0abc" }
  }

  assert {
    condition = { for role, template in aws_launch_template.this : role => [
      try(one(template.instance_market_options).market_type, null),
      try(one(one(template.capacity_reservation_specification).capacity_reservation_target).capacity_reservation_id, null),
      length(template.placement),
      ] } == {
      prefill = ["capacity-block", "cr-0abc", 0]
      decode  = ["capacity-block", "cr-0abc", 0]
      router  = [null, null, 0]
    }
    error_message = "Prefill and decode come from the block with no placement group, the router does not."
  }
}

run "spot" {
  command = plan

  module {
    source = "./modules/nodes"
  }

  variables {
    capacity = { kind = "spot", spot_max_price = "30.5" }
  }

  assert {
    condition = { for role, template in aws_launch_template.this : role => [
      for market in template.instance_market_options : [
        market.market_type, one(market.spot_options).spot_instance_type,
        one(market.spot_options).instance_interruption_behavior, one(market.spot_options).max_price,
      ]
      ] } == {
      prefill = [["spot", "one-time", "terminate", "30.5"]]
      decode  = [["spot", "one-time", "terminate", "30.5"]]
      router  = []
    }
    error_message = "Prefill and decode are spot, the router is not."
  }
  assert {
    condition     = length(aws_placement_group.this) == 1
    error_message = "Spot nodes are placed close together."
  }
}

run "router_only" {
  command = plan

  module {
    source = "./modules/nodes"
  }

  variables {
    roles    = { router = { instance_type = "m7i.large" } }
    nodes    = { router-0 = { role = "router" } }
    capacity = { placement_group = "create" }
  }

  assert {
    condition     = length(aws_placement_group.this) == 0 && output.placement_group == null && keys(data.aws_ssm_parameter.image) == ["router"]
    error_message = "Without prefill and decode there is no group, and no image of theirs is asked for."
  }
}

run "on_demand_without_a_group" {
  command = plan

  module {
    source = "./modules/nodes"
  }

  variables {
    capacity = { placement_group = "none" }
  }

  assert {
    condition     = length(aws_placement_group.this) == 0 && alltrue([for template in aws_launch_template.this : length(template.placement) == 0])
    error_message = "None means none."
  }
}

run "a_type_that_nobody_knows" {
  command = plan

  module {
    source = "./modules/nodes"
  }

  variables {
    roles = { prefill = { instance_type = "p4d.24xlarge" }, decode = { instance_type = "p5en.48xlarge" }, router = { instance_type = "c7i.2xlarge" } }
  }

  expect_failures = [aws_launch_template.this["prefill"]]
}

run "a_zone_that_has_none" {
  command = plan

  module {
    source = "./modules/nodes"
  }

  variables {
    zone = "us-west-2b"
  }

  expect_failures = [aws_launch_template.this]
}
