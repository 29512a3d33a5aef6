output "instance_profile" {
  description = "Name of the instance profile of every node."
  value       = aws_iam_instance_profile.this.name
}

output "role_name" {
  description = "Name of the role in the profile."
  value       = aws_iam_role.this.name
}

output "key_name" {
  description = "Key pair of every node, made or existing; null: none."
  value       = one(concat(aws_key_pair.this[*].key_name, compact([var.key_name])))
}

# Made of what was given, so that it is known at plan time and is the same after the key pair has been made anew.
output "key_identity" {
  description = "Changes when another key must get onto the nodes: name of the existing key pair, or name and digest of the one that is made; null: no key."
  value       = var.public_key == null ? var.key_name : "${local.prefix}:${sha256(join(" ", slice(split(" ", trimspace(var.public_key)), 0, 2)))}"
}

output "ready" {
  description = "Ids of what must be there before a node starts and until it has ended."
  value       = concat(aws_iam_role_policy_attachment.ssm[*].id, aws_iam_role_policy.models[*].id)
}
