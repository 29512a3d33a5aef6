locals {
  # Prefill and decode start from one image, the router from another.
  kinds = { for role in keys(var.roles) : role => role == "router" ? "router" : "node" }

  wanted_images = {
    for kind in toset(values(local.kinds)) : kind => {
      node   = { ami = var.images.node_ami, parameter = var.images.node_parameter }
      router = { ami = var.images.router_ami, parameter = var.images.router_parameter }
    }[kind]
  }
}

data "aws_ssm_parameter" "image" {
  for_each = { for kind, image in local.wanted_images : kind => image.parameter if image.ami == null }

  name = each.value
}

# Keeps what a "latest" parameter said when it was first asked, so that a release of a new image changes nothing here.
# Another image or parameter in the variables is a wish for a new one, and so is -replace on this resource.
resource "terraform_data" "image" {
  for_each = local.wanted_images

  # insecure_value: an image id is no secret, and `value` would hide it from plan and outputs.
  input            = each.value.ami != null ? each.value.ami : data.aws_ssm_parameter.image[each.key].insecure_value
  triggers_replace = each.value.ami != null ? each.value.ami : each.value.parameter

  lifecycle {
    ignore_changes = [input]
  }
}

data "aws_ami" "this" {
  for_each = local.wanted_images

  # Images are deprecated after two years at most; a cluster that has pinned one must still be able to plan.
  include_deprecated = true

  filter {
    name   = "image-id"
    values = [terraform_data.image[each.key].output]
  }
}
