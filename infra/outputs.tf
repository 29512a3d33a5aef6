output "cluster" {
  description = "Which cluster this state is of, whose, since when, and where it is."
  value = {
    name       = var.name
    id         = var.cluster_id
    owner      = var.owner
    created_at = var.created_at
    region     = var.region
    zone       = var.zone
  }
}

output "inventory" {
  description = "Every node by name: id, role, private address, type, zone and the generation that it was made for."
  value       = module.nodes.inventory
}

output "generations" {
  description = "The generation that each node should be of: what its tag kvdeploy:generation says if it is."
  value       = module.nodes.generations
}

output "network" {
  description = "Where the nodes are; security_group_id is the group that EFA traffic passes."
  value = {
    vpc_id            = module.network.vpc_id
    subnet_id         = module.network.subnet_id
    security_group_id = module.network.fabric_security_group_id
  }
}

output "images" {
  description = "The image that new nodes start from, for engines (node) and for the router; null where there is no such role."
  value       = module.nodes.images
}

output "placement_group" {
  description = "Placement group of the prefill and decode nodes, or null."
  value       = module.nodes.placement_group
}

output "launch_templates" {
  description = "Launch template of each role: id and latest version."
  value       = module.nodes.launch_templates
}
