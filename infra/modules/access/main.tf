locals {
  prefix = "kvdeploy-${var.name}"

  # IAM has no regions: without this, clusters of one name in two regions would want one role.
  role_name = "${local.prefix}-${var.region}"

  arn = "arn:${data.aws_partition.current.partition}"
}

data "aws_partition" "current" {}

resource "aws_iam_role" "this" {
  name        = local.role_name
  description = "Nodes of the kvdeploy cluster ${var.name} in ${var.region}"

  assume_role_policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect    = "Allow"
      Action    = "sts:AssumeRole"
      Principal = { Service = "ec2.amazonaws.com" }
    }]
  })

  tags = {
    Name               = local.role_name
    "kvdeploy:address" = "${var.address}.aws_iam_role.this"
  }
}

resource "aws_iam_instance_profile" "this" {
  name = local.role_name
  role = aws_iam_role.this.name

  tags = {
    Name               = local.role_name
    "kvdeploy:address" = "${var.address}.aws_iam_instance_profile.this"
  }
}

resource "aws_iam_role_policy_attachment" "ssm" {
  count = var.method == "ssm" ? 1 : 0

  role       = aws_iam_role.this.name
  policy_arn = "${local.arn}:iam::aws:policy/AmazonSSMManagedInstanceCore"
}

resource "aws_iam_role_policy" "models" {
  count = var.model_bucket == null ? 0 : 1

  name = "read-models"
  role = aws_iam_role.this.name

  policy = jsonencode({
    Version = "2012-10-17"
    Statement = [
      {
        Sid      = "Locate"
        Effect   = "Allow"
        Action   = "s3:GetBucketLocation"
        Resource = "${local.arn}:s3:::${var.model_bucket.bucket}"
      },
      merge(
        {
          Sid      = "List"
          Effect   = "Allow"
          Action   = "s3:ListBucket"
          Resource = "${local.arn}:s3:::${var.model_bucket.bucket}"
        },
        var.model_bucket.prefix == "" ? {} : {
          Condition = { StringLike = { "s3:prefix" = "${var.model_bucket.prefix}*" } }
        },
      ),
      {
        Sid      = "Read"
        Effect   = "Allow"
        Action   = "s3:GetObject"
        Resource = "${local.arn}:s3:::${var.model_bucket.bucket}/${var.model_bucket.prefix}*"
      },
    ]
  })
}

resource "aws_key_pair" "this" {
  count = var.public_key == null ? 0 : 1

  key_name   = local.prefix
  public_key = trimspace(var.public_key)

  tags = {
    Name               = local.prefix
    "kvdeploy:address" = "${var.address}.aws_key_pair.this/0"
  }
}
