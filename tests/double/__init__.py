"""A double of the AWS that kvdeploy meets: moto's server and what an EFA fleet needs beyond it.

It runs as a process of its own (``python -m tests.double``) and speaks the AWS APIs over HTTP, so
that boto3, Terraform and the AWS provider run against it unchanged. Tests and benchmarks start it
with :class:`tests.double.client.Double`, tell it what the account holds (capacity, quotas, prices,
reservations, faults) and read back every call it got.

It refuses what it was not told: an action or a filter that it does not know is answered with
``DoubleNotImplemented`` and recorded, never with a made-up success.

| module | owns |
|---|---|
| client | starting the process, telling it things; imports neither moto nor boto3 |
| __main__ | the process: where it listens, when it ends |
| gateway | one request: what is called, faults, records, who answers |
| control | what ``POST /_double`` can do |
| world | everything told and everything seen |
| errors | an AWS error in each protocol's own form |
| catalog | facts of instance types, quotas and zones |
| filters | EC2's filters, and which kinds have which |
| describe, launch, network | the EC2 actions that moto gets wrong |
| imaging | images taken of instances |
| allowance, interfaces, lifecycle | what a launch may have, and its steps |
| placement, reservations, spot | the EC2 actions that moto lacks |
| services | Service Quotas and the Price List |
| repairs | moto's own models, put right |
| images | machine images and the parameters that name them |
"""
