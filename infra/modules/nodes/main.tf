locals {
  prefix = "kvdeploy-${var.name}"

  engine_roles = [for role in keys(var.roles) : role if role != "router"]

  reserved = contains(["odcr", "capacity-block"], var.capacity.kind)

  # An ODCR may be tied to a placement group of its own, and a Capacity Block is one place already.
  placement = coalesce(var.capacity.placement_group, local.reserved ? "none" : "create")

  placement_group_name = (
    local.placement == "none" || length(local.engine_roles) == 0 ? null :
    local.placement == "create" ? aws_placement_group.this[0].name : local.placement
  )

  # Everything whose change must replace a node, and nothing else. The shape counts: a field added here replaces every
  # node of every cluster at its next apply. Images count as given, because a pinned one changes for no running node.
  replace_on = {
    for name, node in var.nodes : name => {
      generation      = node.generation
      role            = node.role
      instance_type   = var.roles[node.role].instance_type
      root_volume_gib = var.roles[node.role].root_volume_gib
      image           = node.role == "router" ? var.images.router_ami : var.images.node_ami
      key             = var.key_identity
      subnet          = var.subnet_id
      security_group  = var.fabric_security_group_id
      capacity        = node.role == "router" ? null : var.capacity.kind
      reservation     = node.role == "router" ? null : var.capacity.reservation_id
      placement_group = node.role == "router" ? null : local.placement_group_name
    }
  }

  # What a node started as, as one word for its tag: the number for people, the digest for all the rest.
  generations = {
    for name, on in local.replace_on : name => "${on.generation}-${substr(sha1(jsonencode(on)), 0, 8)}"
  }
}

data "aws_ec2_instance_type_offerings" "this" {
  for_each = toset(values(var.roles)[*].instance_type)

  location_type = "availability-zone"

  filter {
    name   = "instance-type"
    values = [each.key]
  }
}

# cluster: the nodes as close to each other as EC2 can, which EFA needs for its full rate.
resource "aws_placement_group" "this" {
  count = local.placement == "create" && length(local.engine_roles) > 0 ? 1 : 0

  name     = local.prefix
  strategy = "cluster"

  tags = {
    Name               = local.prefix
    "kvdeploy:address" = "${var.address}.aws_placement_group.this/0"
  }
}

resource "aws_launch_template" "this" {
  #checkov:skip=CKV_AWS_341:Containers on a node are one hop further from the metadata service; with a limit of 1 they get no credentials for the model bucket. Tokens are required all the same.
  for_each = var.roles

  name        = "${local.prefix}-${each.key}"
  description = "kvdeploy: ${each.key} nodes of ${var.name}"

  # Whoever starts a node from this template by hand gets what the last apply meant.
  update_default_version = true

  image_id      = terraform_data.image[local.kinds[each.key]].output
  instance_type = each.value.instance_type
  key_name      = var.key_name
  ebs_optimized = true

  iam_instance_profile {
    name = var.instance_profile
  }

  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 2
    instance_metadata_tags      = "enabled"
  }

  # Nodes are watched by metrics of their own; CloudWatch's would be paid for and read by nobody.
  monitoring {
    enabled = false
  }

  block_device_mappings {
    device_name = data.aws_ami.this[local.kinds[each.key]].root_device_name

    ebs {
      volume_type           = "gp3"
      volume_size           = each.value.root_volume_gib
      encrypted             = true
      delete_on_termination = true

      # An engine's environment is gigabytes of small files. Double the free rate costs a thousandth of the node.
      iops       = each.key == "router" ? null : 6000
      throughput = each.key == "router" ? null : 500
    }
  }

  dynamic "network_interfaces" {
    for_each = local.interfaces[each.key]

    content {
      network_card_index    = network_interfaces.value.card
      device_index          = network_interfaces.value.device
      interface_type        = network_interfaces.value.type
      subnet_id             = var.subnet_id
      security_groups       = concat([var.fabric_security_group_id], each.key == "router" ? [var.router_security_group_id] : [])
      delete_on_termination = true

      # EC2 refuses to hear of public addresses when there are several interfaces, and gives none then.
      associate_public_ip_address = length(local.interfaces[each.key]) == 1 ? false : null
    }
  }

  dynamic "placement" {
    for_each = each.key == "router" || local.placement_group_name == null ? [] : [local.placement_group_name]

    content {
      group_name = placement.value
    }
  }

  dynamic "capacity_reservation_specification" {
    for_each = each.key != "router" && local.reserved ? [var.capacity.reservation_id] : []

    content {
      capacity_reservation_target {
        capacity_reservation_id = capacity_reservation_specification.value
      }
    }
  }

  dynamic "instance_market_options" {
    for_each = each.key != "router" && contains(["capacity-block", "spot"], var.capacity.kind) ? [var.capacity.kind] : []

    content {
      market_type = instance_market_options.value

      dynamic "spot_options" {
        for_each = instance_market_options.value == "spot" ? [var.capacity.spot_max_price] : []

        content {
          spot_instance_type             = "one-time"
          instance_interruption_behavior = "terminate"
          max_price                      = spot_options.value
        }
      }
    }
  }

  # The provider's default tags do not reach what EC2 makes of a template.
  dynamic "tag_specifications" {
    for_each = toset(["instance", "network-interface", "volume"])

    content {
      resource_type = tag_specifications.value
      tags          = merge(var.tags, { "kvdeploy:role" = each.key })
    }
  }

  tags = {
    Name               = "${local.prefix}-${each.key}"
    "kvdeploy:address" = "${var.address}.aws_launch_template.this/${each.key}"
    "kvdeploy:role"    = each.key
  }

  lifecycle {
    precondition {
      condition     = each.key == "router" || contains(keys(local.efa_devices), each.value.instance_type)
      error_message = "${each.key}: no EFA interfaces are known for ${each.value.instance_type}. Types that can be used: ${join(", ", sort(keys(local.efa_devices)))}."
    }
    precondition {
      condition = contains(data.aws_ec2_instance_type_offerings.this[each.value.instance_type].locations, var.zone)
      error_message = "${each.key}: ${each.value.instance_type} is not offered in ${var.zone}. It is offered in: ${
        coalesce(join(", ", sort(data.aws_ec2_instance_type_offerings.this[each.value.instance_type].locations)), "no zone of this region")
      }."
    }
  }
}

resource "terraform_data" "generation" {
  for_each = local.replace_on

  input = each.value
}

# replace_triggered_by sees a change only in the plan that makes it. An apply with -target on the generations would use
# the change up before the instances are planned; this copy is changed in the plan that has the instances.
resource "terraform_data" "replace" {
  for_each = var.nodes

  input = terraform_data.generation[each.key].output
}

resource "aws_instance" "this" {
  #checkov:skip=CKV_AWS_8:The launch template encrypts the root volume.
  #checkov:skip=CKV_AWS_79:The launch template requires metadata tokens.
  #checkov:skip=CKV_AWS_126:Nodes are watched by metrics of their own.
  #checkov:skip=CKV_AWS_135:The launch template sets ebs_optimized.
  #checkov:skip=CKV2_AWS_41:The launch template names the instance profile.
  for_each = var.nodes

  launch_template {
    id      = aws_launch_template.this[each.value.role].id
    version = aws_launch_template.this[each.value.role].latest_version
  }

  tags = {
    Name                  = "${var.name}-${each.key}"
    "kvdeploy:address"    = "${var.address}.aws_instance.this/${each.key}"
    "kvdeploy:role"       = each.value.role
    "kvdeploy:node"       = each.key
    "kvdeploy:generation" = local.generations[each.key]
  }

  timeouts {
    create = "15m"
    delete = "30m"
  }

  depends_on = [var.after]

  lifecycle {
    # A node takes what its template says when it starts, and never again: a new version of the template, or of the
    # image, must not stop or replace a fleet that may not be had a second time. user_data: with a template the provider
    # sees a difference on every plan and stops the node to mend it (terraform-provider-aws issue 30825, open in 5.100).
    # The generation tag stays what it was when the node started: it is the proof that a replacement took place.
    ignore_changes       = [ami, user_data, user_data_base64, launch_template, tags["kvdeploy:generation"]]
    replace_triggered_by = [terraform_data.replace[each.key]]
  }
}

# An apply that ends between the two steps of a replacement leaves the old node and no trace in the next plan.
check "generation" {
  assert {
    condition = alltrue([
      for name, node in aws_instance.this : try(node.tags["kvdeploy:generation"] == local.generations[name], true)
    ])
    error_message = "Some nodes are of an older generation than asked for; apply again with -replace for: ${join(", ", [
      for name, node in aws_instance.this : "${var.address}.aws_instance.this[\"${name}\"]"
      if try(node.tags["kvdeploy:generation"] != local.generations[name], false)
    ])}."
  }
}
