terraform {
  # 1.9 lets a validation look at another variable; 1.10 is the first S3 backend that locks without DynamoDB.
  required_version = ">= 1.10.0, < 2.0.0"

  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = "~> 5.100"
    }
  }
}
