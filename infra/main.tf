locals {
  # What everything of this cluster carries. kvdeploy finds and adopts resources by these tags, so the user's own
  # tags come first and cannot replace one.
  tags = merge(
    var.tags,
    {
      "kvdeploy:cluster" = var.name
      "kvdeploy:id"      = var.cluster_id
      "kvdeploy:owner"   = var.owner
      "kvdeploy:managed" = "true"
    },
    var.expires_at == null ? {} : { "kvdeploy:expires" = var.expires_at },
  )
}

provider "aws" {
  region = var.region

  # The provider takes "EC2 has no such instance left" for a passing fault. With its own default of 25 tries an apply
  # hangs for most of an hour before it says so.
  max_retries = var.max_retries

  default_tags {
    tags = local.tags
  }
}

module "network" {
  source = "./modules/network"

  name   = var.name
  region = var.region
  zone   = var.zone

  vpc_id            = var.network.vpc_id
  subnet_id         = var.network.subnet_id
  security_group_id = var.network.security_group_id
  cidr              = var.network.cidr
  egress            = var.network.egress
  endpoints         = var.network.endpoints

  router_port          = var.router_port
  router_allowed_cidrs = var.router_allowed_cidrs
  open_to_internet     = var.open_to_internet
  ssh_allowed_cidrs    = var.access.method == "ssh" ? var.access.ssh_allowed_cidrs : []
}

module "access" {
  source = "./modules/access"

  name         = var.name
  region       = var.region
  method       = var.access.method
  key_name     = var.access.key_name
  public_key   = var.access.public_key
  model_bucket = var.model_bucket
}

module "nodes" {
  source = "./modules/nodes"

  name = var.name
  zone = var.zone

  roles    = var.roles
  nodes    = var.nodes
  images   = var.images
  capacity = var.capacity
  tags     = local.tags

  subnet_id                = module.network.subnet_id
  fabric_security_group_id = module.network.fabric_security_group_id
  router_security_group_id = module.network.router_security_group_id
  instance_profile         = module.access.instance_profile
  key_name                 = module.access.key_name
  key_identity             = module.access.key_identity

  # A list of ids and not depends_on on the modules: that would put off every data source of the nodes until the
  # apply, and with it the checks that can refuse a plan.
  after = concat(module.network.ready, module.access.ready)
}
