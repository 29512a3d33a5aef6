"""Ansible: run a playbook on an inventory, follow it host by host, and say what went wrong where.

ansible-runner runs it, in a process of its own; why, and what it is not asked to do, is said in
docs/decisions/0008-ansible-runner.md.
"""
