"""Terraform: plan to a file, read the plan, apply that same file. Never parses text for people.

python-terraform builds every argv; what it cannot do, and how that is gone round, is said in
docs/decisions/0006-python-terraform-for-argv-only.md.
"""
