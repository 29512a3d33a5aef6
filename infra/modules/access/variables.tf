variable "name" {
  description = "Name of the cluster; names in AWS are kvdeploy-<name>..."
  type        = string
}

variable "region" {
  description = "AWS region; part of the role's name."
  type        = string
}

variable "method" {
  description = "How nodes are reached: ssm lets their agent register with Systems Manager, ssh does not."
  type        = string
  default     = "ssm"
  nullable    = false

  validation {
    condition     = contains(["ssm", "ssh"], var.method)
    error_message = "method must be ssm or ssh."
  }
}

variable "key_name" {
  description = "Existing EC2 key pair; null: none."
  type        = string
  default     = null
}

variable "public_key" {
  description = "OpenSSH public key to make a key pair of; null: none is made."
  type        = string
  default     = null

  validation {
    condition     = var.key_name == null || var.public_key == null
    error_message = "key_name names an existing key pair and public_key makes one: give one of them at most."
  }
}

variable "model_bucket" {
  description = "Bucket that nodes may read models from, and the prefix under which; null: none."
  type = object({
    bucket = string
    prefix = optional(string, "")
  })
  default = null
}

variable "address" {
  description = "Terraform address of this module in the whole configuration, for the tag kvdeploy:address."
  type        = string
  default     = "module.access"
  nullable    = false
}
