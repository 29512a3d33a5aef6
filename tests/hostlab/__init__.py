"""Throw-away hosts with a real systemd, and the vendors' software to install on them."""
