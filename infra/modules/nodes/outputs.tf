output "inventory" {
  description = "Every node by name: id, role, private address, type, zone and the generation that it was made for."
  value = {
    for name, node in aws_instance.this : name => {
      id            = node.id
      role          = var.nodes[name].role
      private_ip    = node.private_ip
      instance_type = node.instance_type
      zone          = node.availability_zone
      generation    = try(tonumber(split("-", node.tags["kvdeploy:generation"])[0]), var.nodes[name].generation)
    }
  }
}

output "generations" {
  description = "The generation that each node should be of: its tag kvdeploy:generation says which one it is of."
  value       = local.generations
}

output "images" {
  description = "The image that new nodes start from, by kind: node (prefill and decode) and router; null where there is no such role."
  value = {
    for kind in ["node", "router"] : kind => try(
      { id = data.aws_ami.this[kind].id, name = data.aws_ami.this[kind].name }, null
    )
  }
}

output "placement_group" {
  description = "Placement group of the prefill and decode nodes, made or existing; null: none."
  value       = local.placement_group_name
}

output "launch_templates" {
  description = "Launch template of each role: id and latest version."
  value = {
    for role, template in aws_launch_template.this : role => {
      id      = template.id
      version = template.latest_version
    }
  }
}

output "efa_devices" {
  description = "EFA devices of a node of each role."
  value = {
    for role, interfaces in local.interfaces : role => length([for i in interfaces : i if i.type != null])
  }
}
