output "vpc_id" {
  description = "The VPC, new or existing."
  value       = local.vpc_id
}

output "subnet_id" {
  description = "The one subnet of all nodes."
  value       = local.subnet_id
}

output "fabric_security_group_id" {
  description = "Group of every interface of every node."
  value       = local.fabric_security_group_id
}

output "router_security_group_id" {
  description = "Further group of router nodes."
  value       = aws_security_group.router.id
}

output "ssh_allowed_cidrs" {
  description = "Networks that the fabric group lets reach port 22."
  value       = keys(aws_vpc_security_group_ingress_rule.ssh)
}

output "ready" {
  description = "Ids of what must be there before a node starts and until it has ended."
  value = concat(
    aws_route_table_association.fabric[*].id,
    aws_route_table_association.nat[*].id,
    aws_route.fabric_nat[*].id,
    aws_route.nat_internet[*].id,
    aws_vpc_endpoint.s3[*].id,
    values(aws_vpc_endpoint.interface)[*].id,
    aws_vpc_security_group_ingress_rule.endpoints[*].id,
    aws_vpc_security_group_ingress_rule.fabric_self[*].id,
    aws_vpc_security_group_egress_rule.fabric_self[*].id,
    aws_vpc_security_group_egress_rule.fabric_endpoints[*].id,
    aws_vpc_security_group_egress_rule.fabric_s3[*].id,
    values(aws_vpc_security_group_egress_rule.fabric_vpc)[*].id,
    values(aws_vpc_security_group_egress_rule.fabric_internet)[*].id,
    values(aws_vpc_security_group_ingress_rule.ssh)[*].id,
    values(aws_vpc_security_group_ingress_rule.router)[*].id,
  )
}
