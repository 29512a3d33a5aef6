"""What the commands do for `target: aws`."""
