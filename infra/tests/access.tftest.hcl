# The access module alone: what nodes may do, and whose key they carry.

mock_provider "aws" {
  mock_data "aws_partition" {
    defaults = { partition = "aws" }
  }
}

variables {
  name   = "demo"
  region = "us-west-2"
}

run "ssm_without_models" {
  command = plan

  module {
    source = "./modules/access"
  }

  assert {
    condition     = aws_iam_role.this.name == "kvdeploy-demo-us-west-2" && aws_iam_instance_profile.this.name == "kvdeploy-demo-us-west-2"
    error_message = "Names are fixed and hold the region."
  }
  assert {
    condition     = one(aws_iam_role_policy_attachment.ssm).policy_arn == "arn:aws:iam::aws:policy/AmazonSSMManagedInstanceCore"
    error_message = "The SSM agent may register."
  }
  assert {
    condition     = length(aws_iam_role_policy.models) + length(aws_key_pair.this) == 0 && output.key_name == null && output.key_identity == null
    error_message = "Nothing that was not asked for."
  }
}

run "models_under_a_prefix" {
  command = plan

  module {
    source = "./modules/access"
  }

  variables {
    method       = "ssh"
    public_key   = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ0n7q0p1mY2eIuKZ2J4q2v4y1Yp7mO3hXwJ7s8s9d0a jo@example.org\n"
    model_bucket = { bucket = "models", prefix = "qwen/" }
  }

  assert {
    condition = {
      for statement in jsondecode(aws_iam_role_policy.models[0].policy).Statement :
      statement.Action => "${statement.Resource} ${try(statement.Condition.StringLike["s3:prefix"], "-")}"
      } == {
      "s3:GetBucketLocation" = "arn:aws:s3:::models -"
      "s3:ListBucket"        = "arn:aws:s3:::models qwen/*"
      "s3:GetObject"         = "arn:aws:s3:::models/qwen/* -"
    }
    error_message = "Only what is under the prefix can be listed and read."
  }
  assert {
    condition     = length(aws_iam_role_policy_attachment.ssm) == 0
    error_message = "With SSH nodes have no business with SSM."
  }
  assert {
    condition     = output.key_name == "kvdeploy-demo" && startswith(output.key_identity, "kvdeploy-demo:")
    error_message = "A key pair is made of the key."
  }
}

# The comment of a key is not the key: another comment must replace no node.
run "whole_bucket_and_another_comment" {
  command = plan

  module {
    source = "./modules/access"
  }

  variables {
    public_key   = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ0n7q0p1mY2eIuKZ2J4q2v4y1Yp7mO3hXwJ7s8s9d0a"
    model_bucket = { bucket = "models" }
  }

  assert {
    condition     = output.key_identity == run.models_under_a_prefix.key_identity
    error_message = "The same key, the same identity."
  }
  assert {
    condition = [
      for statement in jsondecode(aws_iam_role_policy.models[0].policy).Statement :
      [statement.Resource, can(statement.Condition)]
    ] == [["arn:aws:s3:::models", false], ["arn:aws:s3:::models", false], ["arn:aws:s3:::models/*", false]]
    error_message = "Without a prefix the whole bucket."
  }
}

run "existing_key" {
  command = plan

  module {
    source = "./modules/access"
  }

  variables {
    key_name = "mine"
  }

  assert {
    condition     = output.key_name == "mine" && output.key_identity == "mine" && length(aws_key_pair.this) == 0
    error_message = "An existing key pair is used as it is."
  }
}
